"""Slow start: the weight over time, the endpoints that have a slow start, and restarts.

The kernel is changed only when the weight rises by a step, and not between two steps.
"""

import msgspec
import pytest

from ipvsproxy.model.annotations import Annotation, ServiceAnnotations, WeightRules
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.service import EndpointSlice, Service
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers
from ipvsproxy.reconcile.tables import slow_start
from tests.reconcile.simulation import SimulatedNode
from tests.support import builders

KEY = builders.frontend(builders.CLUSTER_IP, 80)
DURATION_S = 80
OWN = 100


def web(slow_start_s: int = DURATION_S, weight: int | None = None) -> Service:
    rules = WeightRules({}, {}, weight) if weight is not None else None
    given = frozenset({Annotation.SCHEDULER, Annotation.SLOW_START, Annotation.WEIGHTS})
    chosen = ServiceAnnotations(given=given, scheduler="wlc", slow_start_s=slow_start_s, weights=rules)
    return builders.with_options(builders.service(), annotations=chosen)


def pods(*numbers: int) -> EndpointSlice:
    return builders.endpoint_slice(*(builders.endpoint(f"10.244.0.{number}") for number in numbers))


def weights(node: SimulatedNode) -> dict[int, int]:
    """The weights in the kernel; the key is the last octet of the endpoint's address."""
    return {key.address[-1]: weight for key, weight in node.kernel.virtual_servers[KEY].real_servers.items()}


def running(*numbers: int) -> SimulatedNode:
    """A node that serves these endpoints with their full weight."""
    node = SimulatedNode()
    node.put(web(), pods(*numbers))
    node.sync()
    return node


def starting() -> SimulatedNode:
    """A node that serves one endpoint with its full weight, and a second endpoint in slow start."""
    node = running(1)
    node.put(web(), pods(1, 2))
    node.sync()
    return node


@pytest.mark.parametrize(("own", "steps"), [(2, 1), (3, 2), (5, 4), (9, 8), (100, 8), (65535, 8)])
def test_in_slow_start_the_weight_rises_in_a_few_steps_from_one_to_the_full_weight(own: int, steps: int) -> None:
    seen = [slow_start.weight_at(0.1 * tenth, own, 60) for tenth in range(601)]
    assert (seen[0], seen[-1], sorted(seen)) == (1, own, seen)
    assert len(set(seen)) == steps + 1 <= 10
    elapsed_s, times = 0.0, []
    while elapsed_s < 60:
        elapsed_s = slow_start.next_step_s(elapsed_s, own, 60)
        times.append(elapsed_s)
    assert len(times) == steps
    assert [slow_start.weight_at(at_s, own, 60) for at_s in times] == sorted(set(seen))[1:]


@pytest.mark.parametrize("own", [2, 3, 10, 100])
def test_the_weight_of_an_endpoint_shows_how_long_its_slow_start_has_lasted(own: int) -> None:
    for weight in range(1, own + 1):
        elapsed_s = slow_start.elapsed_at(weight, own, 60)
        assert slow_start.weight_at(elapsed_s, own, 60) >= weight
        assert weight == 1 or slow_start.weight_at(elapsed_s - 0.01, own, 60) < weight


def test_the_first_endpoints_of_a_service_have_their_full_weight_at_once() -> None:
    node = running(1, 2)
    assert weights(node) == {1: OWN, 2: OWN}
    assert node.reconciler.next_s() is None


def test_the_slow_start_of_an_endpoint_needs_only_a_few_operations() -> None:
    node = running(1, 2)
    node.put(web(), pods(1, 2, 3))
    node.sync()
    assert weights(node) == {1: OWN, 2: OWN, 3: 1}
    edits, seen = [], []
    while (due_s := node.reconciler.next_s()) is not None:
        node.now = due_s
        edits += node.sync()
        seen.append(weights(node)[3])
    assert seen == [13, 25, 38, 50, 62, 75, 87, 100]
    assert len(edits) == slow_start.STEPS
    assert {(one.verb, type(one.item)) for one in edits} == {(Verb.SET, RealServers)}
    assert node.now == 1000 + DURATION_S


def test_an_added_endpoint_does_not_restart_the_slow_start_of_another_endpoint() -> None:
    node = starting()
    node.sync(after_s=DURATION_S / 2)
    assert weights(node) == {1: OWN, 2: 50}
    node.put(web(), pods(1, 2, 3))
    node.sync()
    assert weights(node) == {1: OWN, 2: 50, 3: 1}
    node.sync(after_s=DURATION_S / 2)
    assert weights(node) == {1: OWN, 2: OWN, 3: 50}


def test_an_endpoint_that_returns_while_draining_gets_another_slow_start() -> None:
    node = running(1, 2)
    node.put(web(), pods(1))
    node.kernel.connection_counts[KEY, builders.backend("10.244.0.2")] = ConnectionCounts(1, 0)
    node.sync()
    assert weights(node) == {1: OWN, 2: 0}
    node.put(web(), pods(1, 2))
    node.sync()
    assert weights(node) == {1: OWN, 2: 1}


def test_a_new_process_continues_slow_start_from_the_weights_in_the_kernel() -> None:
    node = starting()
    node.sync(after_s=DURATION_S / 2)
    node.restart()
    assert not [one for one in node.sync() if isinstance(one.item, RealServers)]
    node.sync(after_s=DURATION_S / 4)
    assert weights(node) == {1: OWN, 2: 75}
    node.sync(after_s=DURATION_S / 4)
    assert weights(node) == {1: OWN, 2: OWN}


def test_an_endpoint_added_while_the_process_was_down_has_a_slow_start() -> None:
    node = running(1)
    node.reconciler = node._new_reconciler()
    node.put(web(), pods(1, 2))
    node.sync()
    assert weights(node) == {1: OWN, 2: 1}


def test_turning_slow_start_on_for_a_service_affects_only_new_endpoints() -> None:
    node = SimulatedNode()
    node.put(web(slow_start_s=0), pods(1, 2))
    node.sync()
    assert weights(node) == {1: 1, 2: 1}
    node.put(web(), pods(1, 2))
    node.sync()
    assert weights(node) == {1: OWN, 2: OWN}
    node.put(web(), pods(1, 2, 3))
    node.sync()
    assert weights(node)[3] == 1


def test_turning_slow_start_off_gives_an_endpoint_its_full_weight_at_once() -> None:
    node = starting()
    node.put(web(slow_start_s=0, weight=OWN), pods(1, 2))
    node.sync()
    assert weights(node) == {1: OWN, 2: OWN}
    assert node.reconciler.next_s() is None
    node.remove("web")
    node.sync()
    assert KEY not in node.kernel.virtual_servers


def test_an_endpoint_of_weight_one_or_zero_has_no_slow_start() -> None:
    for weight in (0, 1):
        node = SimulatedNode()
        node.put(web(weight=weight), pods(1))
        node.sync()
        node.put(web(weight=weight), pods(1, 2))
        node.sync()
        assert weights(node) == {1: weight, 2: weight}
        assert node.reconciler.next_s() is None


def test_a_new_endpoint_gets_its_full_weight_at_once_if_all_other_endpoints_are_draining() -> None:
    node = running(1)
    node.kernel.connection_counts[KEY, builders.backend("10.244.0.1")] = ConnectionCounts(1, 0)
    node.put(web(), pods())
    node.sync()
    assert weights(node) == {1: 0}
    node.put(web(), pods(2))
    node.sync()
    assert weights(node) == {1: 0, 2: OWN}


def test_new_endpoints_have_a_slow_start_even_if_older_endpoints_have_only_weight_1() -> None:
    service = web()
    rules = WeightRules({builders.OTHER_NODE: 1}, {}, OWN)
    service = builders.with_options(service, annotations=msgspec.structs.replace(service.options.annotations, weights=rules))
    light = [builders.endpoint(f"10.244.1.{number}", builders.OTHER_NODE) for number in range(11, 15)]
    node = SimulatedNode()
    node.put(service, builders.endpoint_slice(*light))
    node.sync()
    node.put(service, builders.endpoint_slice(*light, *(builders.endpoint(f"10.244.0.{number}") for number in range(1, 5))))
    node.sync()
    assert set(weights(node).values()) == {1}
    node.sync(after_s=DURATION_S)
    assert sorted(weights(node).values()) == [1] * 4 + [OWN] * 4


def test_a_comparison_expects_the_slow_start_weights_that_are_due_when_the_kernel_is_read() -> None:
    node = running(1)
    node.put(web(), pods(1, 2))
    reader = node._new_reconciler()
    for name, state in node.states.items():
        at_once(reader.putting(name, state))
    reader.tend(node.now)
    node.now += DURATION_S / 4
    node.sync()
    node.sync(after_s=DURATION_S / 2)
    at_once(reader.observer.observing(node.kernel.observe(), node.now))
    reader.tend(node.now)
    assert not [one for one in reader.survey.differences() if "weight" in one.desired]


def test_slow_start_works_on_each_address_of_a_service_with_very_many_addresses() -> None:
    many = [f"192.0.{number >> 8}.{number & 255}" for number in range(2, 2 + 2 * ITEMS_AT_ONCE)]
    large = builders.with_options(builders.service(external=many), annotations=web().options.annotations)
    node = SimulatedNode()
    node.put(large, pods(1))
    node.sync()
    node.put(large, pods(1, 2))
    node.sync()
    found = {tuple(sorted(item.real_servers.values())) for item in node.kernel.virtual_servers.values()}
    assert len(node.kernel.virtual_servers) == 1 + len(many)
    assert found == {(1, OWN)}
