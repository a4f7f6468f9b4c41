"""The times at which the reconciler wants the loop to wake up.

An operation must be possible at each wake-up time, because the loop would otherwise never sleep. ``simulation`` checks this rule
after each sync of every test.
"""

import errno

from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import VirtualServer
from ipvsproxy.reconcile import observation
from tests.reconcile import simulation
from tests.support import builders

KEY = builders.frontend(builders.CLUSTER_IP, 80)
ADDRESSES = ("10.244.0.1", "10.244.0.2")
WEB = builders.service("web")


def running(*addresses: str) -> simulation.SimulatedNode:
    node = simulation.SimulatedNode()
    node.put(WEB, builders.endpoint_slice(*map(builders.endpoint, addresses)))
    node.sync()
    return node


def adds_it(operation: Operation) -> bool:
    return operation.verb is Verb.ADD and isinstance(operation.item, VirtualServer)


def test_a_real_server_that_failed_does_not_wake_the_loop_while_its_virtual_server_waits() -> None:
    node = running(*ADDRESSES[:1])
    del node.kernel.virtual_servers[KEY]
    node.kernel.fail(adds_it, times=5, number=errno.ENOMEM)
    node.put(WEB, builders.endpoint_slice(*map(builders.endpoint, ADDRESSES)))
    for wait_s in (0, 1, 2, 4, 8, 16):
        node.sync(after_s=wait_s)
    assert set(node.kernel.virtual_servers[KEY].real_servers) == {builders.backend(address) for address in ADDRESSES}


def test_delayed_drift_does_not_wake_the_loop_if_the_object_is_no_longer_desired() -> None:
    node = running(*ADDRESSES)
    for _ in range(observation.FREE_HEALS + 1):
        node.now += 10
        del node.kernel.virtual_servers[KEY]
        node.observe()
        node.sync()
    assert KEY not in node.kernel.virtual_servers
    assert node.reconciler.next_s() == node.now + observation.FIRST_PATIENCE_S
    node.remove("web")
    node.sync(after_s=observation.FIRST_PATIENCE_S + 1)
    assert node.reconciler.next_s() is None


def test_rules_that_are_flushed_once_a_minute_exist_most_of_the_time() -> None:
    node = running(*ADDRESSES)
    rules = dict(node.kernel.chains[Family.IPV4])
    away_s = 0
    for second in range(0, 3600, 3):
        node.now += 3
        if second % 60 == 0:
            node.kernel.chains[Family.IPV4].clear()
        node.observe()
        node.sync()
        away_s += 3 * (node.kernel.chains[Family.IPV4] != rules)
    assert away_s < 3600 / 4
