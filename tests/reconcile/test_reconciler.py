"""The reconciler on an in-memory kernel: changes of Services, tracked flows, and changes of the operator's policy.

Other modules test drains, drift and failures (``test_reconciler_…``), reads of the kernel (``test_observer``), and the operations
that wait for other operations (``test_preconditions``). ``test_cost`` tests the cost, and ``test_properties`` tests random
combinations of all events.
"""

from collections.abc import Mapping

import pytest

from ipvsproxy.model.kernel import FlowCleaning, Sysctl
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, WeightChange
from ipvsproxy.model.rules import ChainKey, ObservedSkeleton, Rule, Skeleton, Verdict
from ipvsproxy.model.sets import SET_COPY, SetKind
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer, VirtualServerSettings
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from tests.reconcile import examples, simulation
from tests.reconcile.serving import KEY, ONE, TWO, dns, draining, kinds, running, web, weights
from tests.support import builders


def test_an_empty_kernel_is_programmed_in_a_fixed_order() -> None:
    node = running("10.244.0.1")
    assert weights(node) == {ONE: 1}
    assert node.kernel.device
    assert node.kernel.addresses == {KEY.address}
    assert node.kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert node.kernel.timeouts == simulation.TIMEOUTS
    assert node.kernel.sets["KUBE-CLUSTER-IP"].entries == {examples.entry(SetKind.CLUSTER_IP, KEY)}
    assert [kind.__name__ for _, kind in kinds(node.applied)] == [
        "Sysctl",
        "Timeouts",
        "Device",
        "IpSet",
        "SetEntries",
        "Skeleton",
        "VirtualServer",
        "RealServers",
        "BoundAddresses",
    ]


def test_a_restart_without_changes_only_repeats_operations_whose_result_cannot_be_read() -> None:
    node = running("10.244.0.1")
    node.restart()
    assert [str(operation) for operation in node.sync()] == ["set timeouts timeouts 900 120 300"]


def test_one_operation_removes_the_set_copy_of_a_killed_process_each_time_the_copy_appears() -> None:
    node = running("10.244.0.1")
    for _ in range(2):
        node.kernel.set_copy = True
        node.observe()
        assert node.sync() == [Operation(Verb.REMOVE, SET_COPY)]
        assert not node.kernel.set_copy
        assert not node.plan()


@pytest.mark.checklist(72, 74)
def test_a_deleted_service_loses_its_virtual_server_first_and_its_rules_last() -> None:
    node = running("10.244.0.1")
    before = dict(node.kernel.chains[Family.IPV4])
    node.remove("web")
    done = node.sync()
    gone = [operation for operation in done if operation.verb is Verb.REMOVE]
    assert [kind.__name__ for _, kind in kinds(gone)] == ["VirtualServer", "SetEntries", "BoundAddresses"]
    assert (type(done[0].item), type(done[-1].item)) == (VirtualServer, Skeleton)
    assert (node.kernel.virtual_servers, node.kernel.addresses) == ({}, set())
    assert not any(ip_set.entries for ip_set in node.kernel.sets.values())
    assert node.kernel.chains[Family.IPV4] != before


def test_a_plan_limited_to_additions_removes_nothing() -> None:
    node = running("10.244.0.1")
    at_once(node.reconciler.putting(builders.service("web").name, None))
    node.put_state(examples.state(examples.OLD, builders.frontend("10.96.0.99", 80), real_servers=[TWO]))
    only_additions = at_once(node.reconciler.planning(node.now, only_additions=True))
    assert {operation.verb for operation in only_additions} == {Verb.ADD}
    assert any(operation.verb is Verb.REMOVE for operation in node.plan())


def test_a_plan_limited_to_additions_drains_nothing() -> None:
    node = running("10.244.0.1", "10.244.0.2", drain_deadline_s=900)
    node.put(*web("10.244.0.1"))
    assert not at_once(node.reconciler.planning(node.now, only_additions=True))
    assert Operation(Verb.SET, RealServers.of(KEY, TWO, 0)) in node.plan()


def test_a_report_shows_each_weight_before_and_after_the_plan() -> None:
    node = running("10.244.0.1")
    assert [one for report in node.reports for one in report.weights] == [WeightChange(KEY, ONE, None, 1)]
    node.reports.clear()
    node.put(*web())
    node.sync()
    changes = [one for report in node.reports for one in report.weights]
    assert (changes[0].before, changes[-1].after) == (1, None)


DROP, RETURN = Rule(target=Verdict.DROP), Rule(target=Verdict.RETURN)
CHAIN, OTHER_CHAIN = ChainKey("filter", "KUBE-FORWARD"), ChainKey("filter", "KUBE-NODE-PORT")


@pytest.mark.parametrize(
    ("observed", "is_planned"),
    [
        (None, False),
        ({}, True),
        ({CHAIN: (DROP,), OTHER_CHAIN: (DROP,)}, True),
        ({CHAIN: (DROP, Rule(target=Verdict.ACCEPT)), OTHER_CHAIN: (DROP,)}, False),
        ({CHAIN: (DROP,), ChainKey("nat", "KUBE-MARK-MASQ"): (DROP,)}, False),
    ],
)
def test_a_plan_limited_to_additions_writes_rules_only_if_no_rule_is_removed(
    observed: Mapping[ChainKey, tuple[Rule, ...]] | None, *, is_planned: bool
) -> None:
    reconciler = Reconciler(Policy())
    desired_state = Skeleton(family=Family.IPV4, chains={CHAIN: (DROP, RETURN), OTHER_CHAIN: (DROP,)}, jumps=())
    reconciler.put_skeleton(desired_state)
    if observed is not None:
        image = Skeleton(family=Family.IPV4, chains=observed, jumps=()).in_force
        reconciler._tables.skeletons.notice(Family.IPV4, image)
    planned = at_once(reconciler.planning(0, only_additions=True))
    assert planned == ([Operation(Verb.SET, desired_state)] if is_planned else [])
    assert at_once(reconciler.planning(0)) == [Operation(Verb.SET, desired_state)]


def test_a_plan_limited_to_additions_writes_no_rules_to_an_unread_table() -> None:
    reconciler = Reconciler(Policy())
    desired = Skeleton(family=Family.IPV4, chains={CHAIN: (DROP,)}, jumps=())
    reconciler.put_skeleton(desired)
    hidden = ObservedSkeleton(family=Family.IPV4, chains={}, jumps=frozenset(), hidden=frozenset({"filter"}))
    reconciler._tables.skeletons.notice(Family.IPV4, hidden)
    assert at_once(reconciler.planning(0, only_additions=True)) == []
    assert at_once(reconciler.planning(0)) == [Operation(Verb.SET, desired)]


def test_settings_are_written_even_while_services_lack_desired_states() -> None:
    node = running("10.244.0.1")
    node.kernel.sysctls[simulation.SYSCTL.path] = "0"
    node.kernel.virtual_servers[KEY] = examples.observed({ONE: 1}, settings=VirtualServerSettings("wlc"))
    node.observe()
    early = at_once(node.reconciler.planning(node.now, only_additions=True))
    assert [(one.verb, type(one.item)) for one in early] == [(Verb.SET, Sysctl), (Verb.SET, VirtualServer)]


def test_desired_and_observed_weights_are_one_object_while_they_are_equal() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    table = node.reconciler._tables.virtual_servers
    desired_state = table.desired[KEY]
    assert table.observed[KEY].real_servers is desired_state.weights
    node.put(*web("10.244.0.1"))
    node.sync()
    assert set(desired_state.weights) == {builders.backend("10.244.0.1"), builders.backend("10.244.0.2")}
    assert set(table.observed[KEY].real_servers) == {builders.backend("10.244.0.1")}
    node.put(*web("10.244.0.1", "10.244.0.3"))
    node.sync()
    assert table.observed[KEY].real_servers is table.desired[KEY].weights


def test_desired_weights_stay_unchanged_when_one_batch_adds_and_then_removes_a_real_server() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1"))
    outcomes = [Outcome(one) for one in node.plan()]
    gone = Outcome(Operation(Verb.REMOVE, RealServers.of(KEY, builders.backend("10.244.0.1"))))
    at_once(node.reconciler.settling([*outcomes, gone], node.now))
    assert node.reconciler._tables.virtual_servers.desired[KEY].weights == {builders.backend("10.244.0.1"): 1}
    assert node.reconciler._tables.virtual_servers.observed[KEY].real_servers == {}


def test_a_draining_real_server_stays_observed_after_one_operation_adds_all_desired_ones() -> None:
    node = draining()
    table = node.reconciler._tables.virtual_servers
    added = Outcome(Operation(Verb.ADD, RealServers(KEY, table.desired[KEY].weights)))
    at_once(node.reconciler.settling([added], node.now))
    assert table.observed[KEY].real_servers == {builders.backend("10.244.0.1"): 0, builders.backend("10.244.0.2"): 1}


# Flows.


@pytest.mark.checklist(102)
def test_flows_are_cleaned_after_a_restart_and_for_the_first_endpoint_but_not_for_the_second() -> None:
    node = simulation.SimulatedNode()
    cleanings = []
    for change in (dns(), dns("10.244.0.1"), dns("10.244.0.1", "10.244.0.2"), dns()):
        node.put(*change)
        cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    node.put(*dns("10.244.0.1"))
    node.restart()
    cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    node.remove("dns")
    cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    assert cleanings == [0, 1, 0, 0, 1, 0]


# A change of the operator's policy.


def test_undesired_virtual_servers_are_removed_when_their_range_is_no_longer_excluded() -> None:
    node = simulation.SimulatedNode(excluded=["10.96.0.0/16"])
    node.put(*web("10.244.0.1"))
    node.sync()
    node.remove("web")
    node.sync()
    assert KEY in node.kernel.virtual_servers
    node.reconciler.adopt(Policy())
    node.sync()
    assert node.kernel.virtual_servers == {}
