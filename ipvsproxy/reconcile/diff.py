"""The difference of one virtual server, as operations."""

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator

from ipvsproxy.model.kernel import (
    ObservedVirtualServer,
    RealServer,
    RealServerKey,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb

_SCHEDULER_FLAGS = 0x38
"""The three flag bits that belong to the scheduler; ``/proc/net/ip_vs`` does not show them."""


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


def differs(
    wanted: VirtualServer, seen: ObservedVirtualServer, is_over: Callable[[VirtualServerKey, RealServerKey], bool | None]
) -> bool:
    """Whether any operation is called for now. A real server that is still draining calls for none."""
    if settings_differ(wanted.settings, seen):
        return True
    weights = seen.real_servers
    if weights is wanted.weights or weights == wanted.weights:
        return False
    if not wanted.weights.items() <= weights.items():
        return True
    parting = weights.keys() - wanted.weights.keys()
    return any(_parting(wanted.key, key, weights[key], is_over) for key in parting)


def _parting(
    virtual_server: VirtualServerKey,
    key: RealServerKey,
    weight: int,
    is_over: Callable[[VirtualServerKey, RealServerKey], bool | None],
) -> Verb | None:
    """What is to be done now about a real server that nobody wants: its weight set to 0, its removal, or nothing yet."""
    if virtual_server.protocol is not Protocol.TCP:
        return Verb.REMOVE
    over = is_over(virtual_server, key)
    if weight != 0 or over is None:
        return Verb.SET
    return Verb.REMOVE if over else None


def virtual_server_operations(
    key: VirtualServerKey,
    wanted: VirtualServer | None,
    seen: ObservedVirtualServer | None,
    is_over: Callable[[VirtualServerKey, RealServerKey], bool | None],
    seed: int,
) -> Iterator[Operation]:
    """What has to be done for one virtual server, in no order but that it stands before its real servers.

    ``is_over`` tells of a real server whether its drain is over, None where it has not begun. ``seed`` is this node's: real
    servers are added in an order of its own, or the first connection of every node would go to the same one
    (kubernetes/kubernetes #121591).
    """
    if wanted is None:
        if seen is not None:
            yield Operation(Verb.REMOVE, VirtualServer(key, seen.settings))
        return
    if seen is None:
        yield Operation(Verb.ADD, wanted)
        if wanted.weights:
            yield Operation(Verb.ADD, RealServers(key, tuple(shuffled(wanted.weights, seed))))
        return
    if settings_differ(wanted.settings, seen):
        yield Operation(Verb.SET, wanted)
    weights = seen.real_servers
    missing = [real_server for real_server in wanted.weights if weights.get(real_server) != 1]
    for real_server in shuffled(missing, seed) if len(missing) > 1 else missing:
        verb = Verb.SET if real_server in weights else Verb.ADD
        yield Operation(verb, RealServer(key, real_server, 1))
    for real_server, weight in weights.items():
        if real_server not in wanted.weights and (parting := _parting(key, real_server, weight, is_over)):
            yield Operation(parting, RealServer(key, real_server, 0))


def shuffled(real_servers: Iterable[RealServerKey], seed: int) -> list[RealServerKey]:
    """In an order that depends on the seed, and on nothing else: the same at every start of the same node."""
    return sorted(real_servers, key=_scramble(seed))


@functools.lru_cache(maxsize=1)
def _scramble(seed: int) -> Callable[[RealServerKey], bytes]:
    """Exchanges each byte for another, by a table of the seed's own: for a fifth of what a checksum of each key costs."""
    table = bytes(sorted(range(256), key=lambda byte: hashlib.sha256(f"{seed} {byte}".encode()).digest()))
    return operator.methodcaller("translate", table)
