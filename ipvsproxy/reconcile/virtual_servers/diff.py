"""The operations that bring one virtual server to its desired state."""

import itertools
from collections.abc import Callable, Iterator

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import (
    NO_THRESHOLDS,
    PORT_SIZE,
    TUNNELLED,
    EvenWeights,
    RealServerKey,
    plain,
    without_method,
)
from ipvsproxy.model.virtual_servers import (
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
)

MayRemove = Callable[[VirtualServerKey, RealServerKey], bool | None]
"""Whether the drain of a real server is over; None if it has not begun."""


def differs(desired: VirtualServer, observed: ObservedVirtualServer, may_remove: MayRemove) -> bool:
    """Whether any operation is needed now. A draining real server needs no operation."""
    if (
        observed.real_servers == desired.weights
        and isinstance(desired.weights, EvenWeights)
        and desired.settings == observed.settings
        and desired.thresholds is NO_THRESHOLDS
        and not observed.thresholds
    ):  # nearly always
        return False
    return next(virtual_server_operations(desired.key, desired, observed, may_remove), None) is not None


def _parting(
    desired: VirtualServer,
    key: RealServerKey,
    weight: int,
    may_remove: MayRemove,
) -> Verb | None:
    """The operation that an undesired real server needs now: weight 0 or removal; None if no operation is needed yet."""
    if desired.protocol is not Protocol.TCP:
        return Verb.REMOVE
    if len(key) != len(desired.key.address) + PORT_SIZE:
        # A real server of the other family is reached by a tunnel. Setting weight 0 would also set masquerading, which the kernel
        # refuses.
        return Verb.REMOVE
    over = may_remove(desired.key, key)
    if without_method(weight) != 0 or over is None:
        return Verb.SET
    return Verb.REMOVE if over else None


def virtual_server_operations(
    key: VirtualServerKey,
    desired: VirtualServer | None,
    observed: ObservedVirtualServer | None,
    may_remove: MayRemove,
) -> Iterator[Operation]:
    """The operations for one virtual server. The virtual server comes before its real servers, which are added in their order.

    ``may_remove`` returns whether a draining real server may be removed; None means that the real server does not drain.
    """
    if desired is None:
        if observed is not None:
            yield Operation(Verb.REMOVE, VirtualServer(key, observed.settings))
        return
    if observed is None:
        yield Operation(Verb.ADD, desired)
        yield from _additions(desired)
        return
    if desired.settings != observed.settings:
        yield Operation(Verb.SET, desired)
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    thresholds, observed_thresholds = desired.thresholds, observed.thresholds or {}
    has_equal_thresholds = thresholds == NO_THRESHOLDS and not observed_thresholds
    for packed, desired_weight in desired_weights.items():
        weight = weights.get(packed)
        if not (
            weight == desired_weight
            and (has_equal_thresholds or observed_thresholds.get(RealServerKey(packed), NO_THRESHOLDS) == thresholds)
            and (without_method(weight) or may_remove(key, RealServerKey(packed)) is None)
        ):
            stays = without_method(desired_weight) == 0
            item = RealServers(key, (RealServerKey(packed),), desired_weight, thresholds, stays=stays)
            yield Operation(Verb.ADD if weight is None else Verb.SET, item)
    for packed, weight in weights.items():
        if packed not in desired_weights:
            real_server = RealServerKey(packed)
            if parting := _parting(desired, real_server, weight, may_remove):
                by_tunnel = weight >= TUNNELLED and parting is Verb.SET
                yield Operation(parting, RealServers.of(key, real_server, TUNNELLED if by_tunnel else 0))


def _additions(desired: VirtualServer) -> Iterator[Operation]:
    """The additions of all real servers in their order; each run of real servers with equal weights gets one operation."""
    if isinstance(desired.weights, EvenWeights) and desired.thresholds is NO_THRESHOLDS:  # nearly always
        if desired.weights:
            yield Operation(Verb.ADD, RealServers(desired.key, desired.weights))
        return
    for weight, run in itertools.groupby(desired.weights.plain().items(), key=lambda item: item[1]):
        keys = tuple(RealServerKey(key) for key, _ in run)
        yield Operation(Verb.ADD, RealServers(desired.key, keys, weight, desired.thresholds, stays=without_method(weight) == 0))
