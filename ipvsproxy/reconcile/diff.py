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
"""The three flag bits of the scheduler, which ``/proc/net/ip_vs`` does not show."""

MayRemove = Callable[[VirtualServerKey, RealServerKey], bool | None]
"""Whether the drain of a real server is over; None if it has not begun."""


def settings_differ(desired: VirtualServerSettings, observed: ObservedVirtualServer) -> bool:
    """Whether a virtual server must be set. Flags that the reading does not show count as equal."""
    if desired == observed.settings:
        return False
    if observed.flags_known:
        return True
    return (desired.scheduler, desired.timeout_s, desired.flags & ~_SCHEDULER_FLAGS) != (
        observed.settings.scheduler,
        observed.settings.timeout_s,
        observed.settings.flags & ~_SCHEDULER_FLAGS,
    )


def equals_known(observed: ObservedVirtualServer, known: ObservedVirtualServer) -> bool:
    """Whether a virtual server, read without scheduler flags, equals the known one, which has them."""
    return (
        known.flags_known
        and not observed.flags_known
        and not settings_differ(known.settings, observed)
        and observed.real_servers == known.real_servers
    )


def differs(desired: VirtualServer, observed: ObservedVirtualServer, may_remove: MayRemove) -> bool:
    """Whether any operation is needed now. A draining real server needs none."""
    if settings_differ(desired.settings, observed):
        return True
    if observed.real_servers is desired.weights or observed.real_servers == desired.weights:
        return False
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    if not desired_weights.items() <= weights.items():
        return True
    parting = weights.keys() - desired_weights.keys()
    return any(_parting(desired, RealServerKey(key), weights[key], may_remove) for key in parting)


def _parting(
    desired: VirtualServer,
    key: RealServerKey,
    weight: int,
    may_remove: MayRemove,
) -> Verb | None:
    """The operation for an undesired real server now: weight 0, removal, or nothing yet."""
    if desired.protocol is not Protocol.TCP:
        return Verb.REMOVE
    if len(key) != len(desired.key.address) + PORT_SIZE:
        return (
            Verb.REMOVE
        )  # a real server of the other family is tunnelled, and the kernel refuses weight 0 for it as a masqueraded one
    over = may_remove(desired.key, key)
    if weight != 0 or over is None:
        return Verb.SET
    return Verb.REMOVE if over else None


def virtual_server_operations(
    key: VirtualServerKey,
    desired: VirtualServer | None,
    observed: ObservedVirtualServer | None,
    may_remove: MayRemove,
) -> Iterator[Operation]:
    """The operations for one virtual server: it comes before its real servers, and these are added in their order.

    ``may_remove`` says whether a draining real server may be removed; None if it does not drain.
    """
    if desired is None:
        if observed is not None:
            yield Operation(Verb.REMOVE, VirtualServer(key, observed.settings))
        return
    if observed is None:
        yield Operation(Verb.ADD, desired)
        if desired.weights:
            yield Operation(Verb.ADD, RealServers(key, desired.weights))
        return
    if settings_differ(desired.settings, observed):
        yield Operation(Verb.SET, desired)
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    for packed in desired_weights:
        if (weight := weights.get(packed)) != 1:
            yield Operation(Verb.ADD if weight is None else Verb.SET, RealServers.of(key, RealServerKey(packed)))
    for packed, weight in weights.items():
        if packed not in desired_weights:
            real_server = RealServerKey(packed)
            if parting := _parting(desired, real_server, weight, may_remove):
                yield Operation(parting, RealServers.of(key, real_server, 0))
