"""The reconciler on an in-memory kernel: drift is repaired, and returning drift is repaired less often."""

from collections.abc import Iterable

import pytest

from ipvsproxy.model.kernel import FlowCleaning
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.virtual_servers import RealServers, VirtualServerSettings
from ipvsproxy.reconcile import observation
from tests.reconcile import examples, simulation
from tests.reconcile.serving import KEY, ONE, TWO, dns, kinds, running, web
from tests.support import builders


@pytest.mark.checklist(70, 93)
def test_removals_and_additions_by_other_programs_are_reverted() -> None:
    node = running("10.244.0.1")
    kernel = node.kernel
    stray = builders.frontend(builders.CLUSTER_IP, 9)
    kernel.virtual_servers[KEY] = examples.observed({TWO: 1}, settings=VirtualServerSettings("wlc"))
    kernel.virtual_servers[stray] = examples.observed({ONE: 1})
    kernel.sets["KUBE-CLUSTER-IP"].entries = {examples.entry(SetKind.CLUSTER_IP, stray)}
    del kernel.sets["KUBE-LOAD-BALANCER"]
    kernel.addresses = {parse_address("10.96.0.77")}
    kernel.chains[Family.IPV4].clear()
    kernel.sysctls[simulation.SYSCTL.path] = "0"
    node.observe()
    node.sync()
    assert kernel.virtual_servers == {KEY: examples.observed({ONE: 1})}
    assert kernel.sets["KUBE-CLUSTER-IP"].entries == {examples.entry(SetKind.CLUSTER_IP, KEY)}
    assert "KUBE-LOAD-BALANCER" in kernel.sets
    assert kernel.addresses == {KEY.address}
    assert kernel.chains[Family.IPV4]
    assert kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert not node.plan()


def test_a_new_desired_value_is_written_at_once_even_while_the_repair_of_repeated_drift_waits() -> None:
    node = running("10.244.0.1")
    for _ in range(observation.FREE_HEALS + 1):
        _break_everything(node)
        node.observe()
        node.sync(after_s=1)
    everything = {"set_entry", "address", "set", "device", "sysctl", "rules", "virtual_server"}
    assert {place.kind for place in node.reconciler._drifts.take_news().left_alone} == everything
    assert node.applied == []
    found_s = node.now - 1
    assert node.reconciler.next_s() == found_s + observation.FIRST_PATIENCE_S
    node.put(*web("10.244.0.1", "10.244.0.2"))
    assert weights_given(node.plan()) == {ONE, TWO}, "the virtual server is wished otherwise"
    node.put(*dns("10.244.0.1"))
    assert (Verb.REMOVE, FlowCleaning) in kinds(node.sync()), "others have nothing to do with it"
    node.sync(after_s=observation.FIRST_PATIENCE_S)
    assert not node.plan()
    node.now += observation.CALM_S
    node.observe()
    assert not node.reconciler._drifts, "what was calm for long is forgotten"


def test_a_delayed_repair_does_not_wake_the_loop_if_the_object_is_no_longer_desired() -> None:
    node = running("10.244.0.1")
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


def _break_everything(node: simulation.SimulatedNode) -> None:
    kernel = node.kernel
    kernel.virtual_servers[KEY].real_servers[ONE] = 0
    kernel.addresses.clear()
    kernel.device = False
    kernel.sets["KUBE-CLUSTER-IP"].entries.clear()
    kernel.sets.pop("KUBE-LOAD-BALANCER", None)
    kernel.chains[Family.IPV4].clear()
    kernel.sysctls[simulation.SYSCTL.path] = "0"


def weights_given(operations: Iterable[Operation]) -> set[RealServerKey]:
    return {one.item.key for one in operations if isinstance(one.item, RealServers) and one.item.weight}
