"""The difference of one virtual server, as operations."""

from collections.abc import Callable, Iterator

from ipvsproxy.model.kernel import (
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import PORT_SIZE, RealServerKey, plain

_SCHEDULER_FLAGS = 0x38
"""The three flag bits that belong to the scheduler; ``/proc/net/ip_vs`` does not show them."""

IsOver = Callable[[VirtualServerKey, RealServerKey], bool | None]
"""Whether the drain of a real server is over; None if it has not begun."""


def settings_differ(wanted: VirtualServerSettings, seen: ObservedVirtualServer) -> bool:
    """Whether a virtual server must be set; flags that the observation could not show count as equal."""
    if wanted == seen.settings:
        return False
    if seen.flags_known:
        return True
    return (wanted.scheduler, wanted.timeout_s, wanted.flags & ~_SCHEDULER_FLAGS) != (
        seen.settings.scheduler,
        seen.settings.timeout_s,
        seen.settings.flags & ~_SCHEDULER_FLAGS,
    )


def shows_nothing_else(seen: ObservedVirtualServer, believed: ObservedVirtualServer) -> bool:
    """Whether what was seen without its scheduler flags is what is believed, which has them."""
    return (
        believed.flags_known
        and not seen.flags_known
        and not settings_differ(believed.settings, seen)
        and seen.real_servers == believed.real_servers
    )


def differs(wanted: VirtualServer, seen: ObservedVirtualServer, is_over: IsOver) -> bool:
    """Whether any operation is called for now. A real server that is still draining calls for none."""
    if settings_differ(wanted.settings, seen):
        return True
    if seen.real_servers is wanted.weights or seen.real_servers == wanted.weights:
        return False
    weights, wishes = plain(seen.real_servers), wanted.weights.plain()
    if not wishes.items() <= weights.items():
        return True
    parting = weights.keys() - wishes.keys()
    return any(_parting(wanted.key, RealServerKey(key), weights[key], is_over) for key in parting)


def _parting(
    virtual_server: VirtualServerKey,
    key: RealServerKey,
    weight: int,
    is_over: IsOver,
) -> Verb | None:
    """What is to be done now about a real server that nobody wants: its weight set to 0, its removal, or nothing yet."""
    if virtual_server.protocol is not Protocol.TCP:
        return Verb.REMOVE
    if len(key) != len(virtual_server.address) + PORT_SIZE:
        return Verb.REMOVE  # of the other family it can only be tunnelled to: as ours, with weight 0, the kernel does not take it
    over = is_over(virtual_server, key)
    if weight != 0 or over is None:
        return Verb.SET
    return Verb.REMOVE if over else None


def virtual_server_operations(
    key: VirtualServerKey,
    wanted: VirtualServer | None,
    seen: ObservedVirtualServer | None,
    is_over: IsOver,
) -> Iterator[Operation]:
    """What has to be done for one virtual server: it stands before its real servers, and these are added in their order.

    ``is_over`` tells of a real server whether its drain is over, None where it has not begun.
    """
    if wanted is None:
        if seen is not None:
            yield Operation(Verb.REMOVE, VirtualServer(key, seen.settings))
        return
    if seen is None:
        yield Operation(Verb.ADD, wanted)
        if wanted.weights:
            yield Operation(Verb.ADD, RealServers(key, wanted.weights))
        return
    if settings_differ(wanted.settings, seen):
        yield Operation(Verb.SET, wanted)
    weights, wishes = plain(seen.real_servers), wanted.weights.plain()
    for wish in wishes:
        if (weight := weights.get(wish)) != 1:
            yield Operation(Verb.ADD if weight is None else Verb.SET, RealServers.of(key, RealServerKey(wish)))
    for there, weight in weights.items():
        if there not in wishes:
            real_server = RealServerKey(there)
            if parting := _parting(key, real_server, weight, is_over):
                yield Operation(parting, RealServers.of(key, real_server, 0))
