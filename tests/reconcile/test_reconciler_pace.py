"""Many removals of real servers at once: some of these real servers wait at weight 0, so that additions stay fast."""

import pytest

from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile import attempts
from tests.reconcile import simulation
from tests.support import builders

KEY = builders.frontend(builders.CLUSTER_IP, 80)
POOL = [f"10.244.0.{number}" for number in range(1, 31)]
ROOM = 3


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_KEPT", ROOM)
    monkeypatch.setattr(attempts, "FEWEST_KEPT", ROOM)


def put(node: simulation.SimulatedNode, addresses: list[str], name: str = "web", **service: object) -> list[Operation]:
    desired = builders.service(name, **service)  # type: ignore[arg-type]  # the keys are names of fields
    node.put(desired, builders.endpoint_slice(*map(builders.endpoint, addresses)))
    return node.sync()


def after_replacement() -> simulation.SimulatedNode:
    """A node on which ten new real servers have just replaced ten old ones; each old one is removed or waits for its removal."""
    node = simulation.SimulatedNode()
    put(node, POOL[:10])
    put(node, POOL[10:20])
    return node


def weights(node: simulation.SimulatedNode) -> list[int]:
    return sorted(node.kernel.virtual_servers[KEY].real_servers.values())


def test_a_few_undesired_real_servers_are_removed_at_a_time_and_the_rest_wait_at_weight_0() -> None:
    node = after_replacement()
    assert weights(node) == [0] * (10 - ROOM) + [1] * 10
    assert node.reconciler.pending == 0, "what waits is done with"
    assert node.reconciler.next_s() == node.now + attempts.ADDED_S, "then there may be more room"
    assert not node.sync(after_s=attempts.KEPT_S / 2)
    node.sync(after_s=attempts.KEPT_S)
    assert weights(node) == [0] * (10 - 2 * ROOM) + [1] * 10
    assert node.reconciler.next_s() == node.now + attempts.KEPT_S
    for _ in range(2):
        node.sync(after_s=attempts.KEPT_S)
    assert weights(node) == [1] * 10
    assert node.reconciler.next_s() is None


def test_only_the_weight_is_restored_if_the_real_server_of_a_waiting_drain_is_desired_again() -> None:
    node = simulation.SimulatedNode()
    put(node, POOL[:6])
    put(node, POOL[6:12])
    waiting = {key for key, weight in node.kernel.virtual_servers[KEY].real_servers.items() if not weight}
    assert len(waiting) == 6 - ROOM
    done = put(node, POOL[6:12] + [str(key.address) for key in waiting])
    assert {operation.verb for operation in done if isinstance(operation.item, RealServers)} == {Verb.SET}
    assert weights(node) == [1] * (12 - ROOM)
    assert len(node.reconciler._drains) == 0


@pytest.mark.parametrize(("scheduler", "affinity_s"), [("sh", 0), ("mh", 0), ("dh", 0), ("twos", 0), ("rr", 60)])
def test_real_servers_are_removed_at_once_if_clients_would_reach_them_even_with_weight_0(scheduler: str, affinity_s: int) -> None:
    node = simulation.SimulatedNode(scheduler=scheduler)
    put(node, POOL[:10], affinity_timeout_s=affinity_s)
    put(node, POOL[10:20], affinity_timeout_s=affinity_s)
    assert weights(node) == [1] * 10


def test_a_plan_with_only_additions_does_not_use_up_the_allowed_removals() -> None:
    node = after_replacement()
    node.now += 2 * attempts.KEPT_S
    for _ in range(5):
        assert not at_once(node.reconciler.planning(node.now, only_additions=True))
        assert node.reconciler._drains.waiting == 10 - ROOM
        wake_s = node.reconciler.next_s()
        assert wake_s is not None
        assert wake_s > node.now, "or the loop would not rest"
    assert len([one for one in node.sync() if isinstance(one.item, RealServers)]) == ROOM


def test_a_pending_removal_reduces_the_number_of_allowed_removals() -> None:
    node = simulation.SimulatedNode()
    put(node, POOL[:10])
    node.kernel.fail(lambda operation: operation.verb is Verb.REMOVE, times=100)
    put(node, POOL[10:20])
    assert node.reconciler._drains.over == ROOM
    assert node.reconciler.room(node.now) == 0
    node.sync(after_s=1)
    assert node.reconciler._drains.over == ROOM


def test_at_most_half_of_the_real_servers_wait_for_their_removal() -> None:
    node = simulation.SimulatedNode()
    put(node, POOL[:20])
    put(node, POOL[20:])
    assert weights(node) == [0] * 10 + [1] * 10, "ten of twenty may wait, and the other ten take more than the room"


def test_removing_a_virtual_server_needs_no_wait_but_uses_up_the_limit_of_removals() -> None:
    node = simulation.SimulatedNode()
    put(node, POOL[:10])
    node.remove("web")
    node.sync()
    assert KEY not in node.kernel.virtual_servers
    assert node.reconciler.room(node.now) == 0


def test_a_new_process_takes_over_the_real_servers_that_wait_for_their_removal() -> None:
    node = after_replacement()
    node.restart()
    node.observe()
    node.sync()
    assert weights(node) == [0] * (10 - 2 * ROOM) + [1] * 10, "it knows nothing of what was removed before"
    assert not any(isinstance(operation.item, VirtualServer) for operation in node.applied)
