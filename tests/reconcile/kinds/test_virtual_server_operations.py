"""The operations that bring one virtual server to its desired state.

Other modules test the owner of the virtual server, and the order of operations on several virtual servers.
"""

import itertools

import pytest

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NO_THRESHOLDS, NOT_MASQUERADED, EvenWeights, RealServerKey, Thresholds, UnevenWeights
from ipvsproxy.model.virtual_servers import (
    PERSISTENT,
    SCHEDULER_PORT,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.kinds import virtual_server_kind
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from tests.reconcile import examples
from tests.support import builders

KEY = builders.frontend("10.96.0.1", 80)
DATAGRAMS = builders.frontend("10.96.0.1", 53, Protocol.UDP)
ASSOCIATIONS = builders.frontend("10.96.0.1", 99, Protocol.SCTP)
ONE, TWO, THREE = (builders.backend(f"10.244.0.{number}") for number in (1, 2, 3))


def operations(desired: VirtualServer | None, seen: ObservedVirtualServer | None, *, over: bool | None = None) -> list[Operation]:
    def is_over(_key: VirtualServerKey, _real_server: RealServerKey) -> bool | None:
        return over

    return list(virtual_server_kind.virtual_server_operations(desired.key if desired else KEY, desired, seen, is_over))


@pytest.mark.checklist(50, 67)
@pytest.mark.parametrize("key", [KEY, DATAGRAMS, ASSOCIATIONS])
def test_a_virtual_server_that_equals_its_desired_state_needs_no_operation(key: VirtualServerKey) -> None:
    assert operations(examples.virtual_server(key, ONE, TWO), examples.observed({ONE: 1, TWO: 1})) == []


@pytest.mark.checklist(68)
@pytest.mark.parametrize(
    "settings",
    [VirtualServerSettings("wlc"), VirtualServerSettings("rr", PERSISTENT, 10800), VirtualServerSettings("rr", SCHEDULER_PORT)],
)
def test_wrong_settings_of_a_virtual_server_are_corrected_without_a_removal_of_its_real_servers(
    settings: VirtualServerSettings,
) -> None:
    desired = examples.virtual_server(KEY, ONE)
    assert operations(desired, examples.observed({ONE: 1}, settings=settings)) == [Operation(Verb.SET, desired)]


@pytest.mark.checklist(69)
def test_a_missing_virtual_server_is_added_before_its_real_servers() -> None:
    desired = examples.virtual_server(KEY, ONE)
    assert operations(desired, None) == [
        Operation(Verb.ADD, desired),
        Operation(Verb.ADD, RealServers(KEY, EvenWeights.of([ONE]))),
    ]
    empty = examples.virtual_server(KEY)
    assert operations(empty, None) == [Operation(Verb.ADD, empty)]


@pytest.mark.checklist(72)
def test_an_undesired_virtual_server_is_removed_together_with_its_real_servers() -> None:
    seen = examples.observed({ONE: 1, TWO: 0})
    assert operations(None, seen) == [Operation(Verb.REMOVE, VirtualServer(KEY, seen.settings))]
    assert operations(None, None) == []


ALIEN = builders.backend("fd00::1")


@pytest.mark.checklist(26, 90, 91)
@pytest.mark.parametrize(
    ("key", "desired", "weights", "over", "expected"),
    [
        pytest.param(KEY, [ONE], {ONE: 0}, False, (Verb.SET, ONE, 1), id="desired again"),
        pytest.param(KEY, [ONE], {ONE: 5}, False, (Verb.SET, ONE, 1), id="another weight"),
        pytest.param(KEY, [ONE], {ONE: NOT_MASQUERADED}, False, (Verb.SET, ONE, 1), id="another forwarding method"),
        pytest.param(KEY, [ONE], {ONE: 1, ALIEN: NOT_MASQUERADED}, None, (Verb.REMOVE, ALIEN, 0), id="of the other family"),
        pytest.param(KEY, [TWO], {ONE: 1, TWO: 1}, None, (Verb.SET, ONE, 0), id="undesired"),
        pytest.param(KEY, [], {ONE: 0}, None, (Verb.SET, ONE, 0), id="begins to drain at weight zero"),
        pytest.param(KEY, [], {ONE: 3}, False, (Verb.SET, ONE, 0), id="drains with another program's weight"),
        pytest.param(KEY, [TWO], {ONE: 0, TWO: 1}, False, None, id="drains"),
        pytest.param(KEY, [TWO], {ONE: 0, TWO: 1}, True, (Verb.REMOVE, ONE, 0), id="has drained"),
        *((key, [TWO], {ONE: 1, TWO: 1}, None, (Verb.REMOVE, ONE, 0)) for key in (DATAGRAMS, ASSOCIATIONS)),
        *((key, [TWO], {ONE: 0, TWO: 1}, None, (Verb.REMOVE, ONE, 0)) for key in (DATAGRAMS, ASSOCIATIONS)),
    ],
)
def test_a_real_server_gets_exactly_the_operation_that_it_needs(
    key: VirtualServerKey,
    desired: list[RealServerKey],
    weights: dict[RealServerKey, int],
    expected: tuple[Verb, RealServerKey, int] | None,
    *,
    over: bool | None,
) -> None:
    result = operations(examples.virtual_server(key, *desired), examples.observed(weights), over=over)
    assert result == ([Operation(expected[0], RealServers.of(key, *expected[1:]))] if expected else [])


def test_new_real_servers_are_added_before_old_real_servers_are_removed() -> None:
    result = operations(examples.virtual_server(KEY, TWO), examples.observed({ONE: 1}))
    swap = [Operation(Verb.ADD, RealServers.of(KEY, TWO, 1)), Operation(Verb.SET, RealServers.of(KEY, ONE, 0))]
    assert sorted(result, key=NodeTables(Drains()).stage) == swap


def test_real_servers_are_added_in_the_order_of_the_desired_state() -> None:
    for keys in itertools.permutations((ONE, TWO, THREE)):
        desired = examples.virtual_server(KEY, *keys)
        ((_, _), (_, several)) = operations(desired, None)
        assert isinstance(several, RealServers)
        assert list(several.keys) == list(keys)
        assert [item.key for _, item in operations(desired, examples.observed()) if isinstance(item, RealServers)] == list(keys)


def weighed(weights: dict[RealServerKey, int], thresholds: Thresholds = NO_THRESHOLDS) -> VirtualServer:
    return VirtualServer(KEY, examples.ROUND_ROBIN, UnevenWeights(dict(weights.items())), examples.OLD, thresholds=thresholds)


def limited(weights: dict[RealServerKey, int], thresholds: dict[RealServerKey, Thresholds]) -> ObservedVirtualServer:
    return ObservedVirtualServer(examples.ROUND_ROBIN, weights, thresholds=thresholds)


LIMITS = Thresholds(10, 5)


def test_consecutive_new_real_servers_of_equal_weight_are_added_by_one_operation() -> None:
    wish = weighed({ONE: 5, TWO: 5, THREE: 0})
    assert operations(wish, None)[1:] == [
        Operation(Verb.ADD, RealServers(KEY, (ONE, TWO), 5)),
        Operation(Verb.ADD, RealServers(KEY, (THREE,), 0, stays=True)),
    ]


def test_new_real_servers_are_added_with_their_thresholds() -> None:
    wish = VirtualServer(KEY, examples.ROUND_ROBIN, EvenWeights.of([ONE, TWO]), thresholds=LIMITS)
    assert operations(wish, None)[1:] == [Operation(Verb.ADD, RealServers(KEY, (ONE, TWO), 1, LIMITS))]


def test_a_wrong_weight_of_a_real_server_is_corrected_by_exactly_one_operation() -> None:
    result = operations(weighed({ONE: 5, TWO: 1}), examples.observed({ONE: 1, TWO: 1}))
    assert result == [Operation(Verb.SET, RealServers.of(KEY, ONE, 5))]
    assert operations(weighed({ONE: 5, TWO: 1}), examples.observed({ONE: 5, TWO: 1})) == []


def test_a_desired_weight_of_zero_does_not_count_as_a_drain() -> None:
    (result,) = operations(weighed({ONE: 0, TWO: 1}), examples.observed({ONE: 1, TWO: 1}))
    assert isinstance(result.item, RealServers)
    assert (result.verb, result.item.weight, result.item.drains) == (Verb.SET, 0, False)
    assert operations(weighed({ONE: 0, TWO: 1}), examples.observed({ONE: 0, TWO: 1})) == []


def test_a_drain_ends_if_its_real_server_is_desired_again_with_weight_zero() -> None:
    wish, seen = weighed({ONE: 0, TWO: 1}), examples.observed({ONE: 0, TWO: 1})
    (result,) = operations(wish, seen, over=False)
    assert isinstance(result.item, RealServers)
    assert (result.verb, result.item.keys, result.item.drains) == (Verb.SET, (ONE,), False)
    assert operations(wish, seen) == []


def test_wrong_thresholds_of_a_real_server_are_corrected() -> None:
    wish = weighed({ONE: 1, TWO: 1}, LIMITS)
    result = operations(wish, limited({ONE: 1, TWO: 1}, {ONE: LIMITS, TWO: Thresholds(9)}))
    assert result == [Operation(Verb.SET, RealServers(KEY, (TWO,), 1, LIMITS))]
    without = weighed({ONE: 1})
    assert operations(without, limited({ONE: 1}, {ONE: LIMITS})) == [Operation(Verb.SET, RealServers.of(KEY, ONE))]
    assert operations(without, limited({ONE: 1}, {})) == []


def test_a_draining_real_server_keeps_its_thresholds() -> None:
    result = operations(weighed({TWO: 1}), limited({ONE: 0, TWO: 1}, {ONE: LIMITS}), over=False)
    assert result == []
