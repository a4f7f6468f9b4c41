"""The difference of one virtual server, as operations."""

import itertools
from collections.abc import Callable, Iterator, Mapping

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NO_THRESHOLDS, PORT_SIZE, EvenWeights, RealServerKey, Thresholds, plain
from ipvsproxy.model.virtual_servers import (
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
)

MayRemove = Callable[[VirtualServerKey, RealServerKey], bool | None]
"""Whether the drain of a real server is over; None if it has not begun."""


def differs(desired: VirtualServer, observed: ObservedVirtualServer, may_remove: MayRemove) -> bool:
    """Whether any operation is needed now. A draining real server needs none."""
    if desired.settings != observed.settings or _any_threshold_differs(desired, observed):
        return True
    if observed.real_servers is desired.weights or observed.real_servers == desired.weights:
        return any(_still_drains(desired, may_remove))
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    if not desired_weights.items() <= weights.items() or any(_still_drains(desired, may_remove)):
        return True
    parting = weights.keys() - desired_weights.keys()
    return any(_parting(desired, RealServerKey(key), weights[key], may_remove) for key in parting)


def _any_threshold_differs(desired: VirtualServer, observed: ObservedVirtualServer) -> bool:
    """Whether a desired real server that is there has other thresholds."""
    thresholds, observed_thresholds = desired.thresholds, observed.thresholds
    if thresholds is NO_THRESHOLDS and not observed_thresholds:
        return False
    weights = plain(observed.real_servers)
    return any(_thresholds_of(observed_thresholds, key) != thresholds for key in desired.weights.plain() if key in weights)


def _thresholds_of(observed: Mapping[RealServerKey, Thresholds] | None, key: bytes) -> Thresholds:
    return observed.get(RealServerKey(key), NO_THRESHOLDS) if observed else NO_THRESHOLDS


def _still_drains(desired: VirtualServer, may_remove: MayRemove) -> Iterator[bool]:
    """For each real server whose desired weight is 0, whether it drains, as before it was desired."""
    if isinstance(desired.weights, EvenWeights):
        return
    for key, weight in desired.weights.plain().items():
        if weight == 0:
            yield may_remove(desired.key, RealServerKey(key)) is not None


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
        if isinstance(desired.weights, EvenWeights) and desired.thresholds is NO_THRESHOLDS:  # nearly always
            if desired.weights:
                yield Operation(Verb.ADD, RealServers(key, desired.weights))
        else:
            yield from _by_weight(desired)
        return
    if desired.settings != observed.settings:
        yield Operation(Verb.SET, desired)
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    thresholds, observed_thresholds = desired.thresholds, observed.thresholds
    has_equal_thresholds = thresholds == NO_THRESHOLDS and not observed_thresholds
    for packed, desired_weight in desired_weights.items():
        weight, real_server = weights.get(packed), RealServerKey(packed)
        if (
            weight != desired_weight
            or not (has_equal_thresholds or _thresholds_of(observed_thresholds, packed) == thresholds)
            or (weight == 0 and may_remove(key, real_server) is not None)
        ):
            item = RealServers(key, (real_server,), desired_weight, thresholds, stays=desired_weight == 0)
            yield Operation(Verb.ADD if weight is None else Verb.SET, item)
    for packed, weight in weights.items():
        if packed not in desired_weights:
            real_server = RealServerKey(packed)
            if parting := _parting(desired, real_server, weight, may_remove):
                yield Operation(parting, RealServers.of(key, real_server, 0))


def _by_weight(desired: VirtualServer) -> Iterator[Operation]:
    """The additions of all real servers, one for each run of equal weights, which keeps their order."""
    for weight, run in itertools.groupby(desired.weights.plain().items(), key=lambda item: item[1]):
        keys = tuple(RealServerKey(key) for key, _ in run)
        yield Operation(Verb.ADD, RealServers(desired.key, keys, weight, desired.thresholds, stays=weight == 0))
