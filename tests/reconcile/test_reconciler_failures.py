"""The reconciler on an in-memory kernel: failures and surprises are reported, and failed operations are retried."""

import errno

from ipvsproxy.model.kernel import BoundAddresses, FlowCleaning, Sysctl
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import IpSet
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile.attempts import LONGEST_DELAY_S
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from tests.reconcile import simulation
from tests.reconcile.serving import KEY, ONE, TWO, dns, kinds, running, web, weights
from tests.support import builders


def test_a_failure_is_reported_with_its_errno_and_stays_pending() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), errno.ENOMEM)
    node.put(*web("10.244.0.1"))
    node.sync()
    report = node.reports[0]
    assert report.failed["add", "virtual_server"] == 1
    assert not report.done["add", "address"], "the host itself would answer there"
    assert report.pending > 0
    assert report.errors[0].errno == errno.ENOMEM


def test_a_report_describes_a_few_failures_and_counts_all_failures() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, IpSet), times=17)
    node.sync()
    assert node.reports[0].failed["add", "set"] == 17
    assert len(node.reports[0].errors) == 5


def test_a_failing_operation_is_retried_after_growing_delays_and_does_not_delay_other_operations() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: operation.item == BoundAddresses.of(KEY.address), times=1000)
    node.put(*web("10.244.0.1"))
    node.sync()
    assert weights(node) == {ONE: 1}
    began, tries = node.now, []
    for _ in range(9):
        due_s = node.reconciler.next_s()
        assert due_s is not None
        assert node.sync(after_s=(due_s - node.now) / 2) == []
        assert len(node.sync(after_s=due_s - node.now)) == 1
        tries.append(node.now - began)
        began = node.now
    assert tries == [1, 2, 4, 8, 16, 32, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]
    node.put(*web("10.244.0.2"))
    assert Operation(Verb.ADD, RealServers.of(KEY, TWO, 1)) in node.sync()


def test_an_operation_on_rules_is_retried_only_after_its_running_attempt_has_ended() -> None:
    reconciler = Reconciler(Policy())
    for family in Family:
        reconciler.put_skeleton(Skeleton(family=family, chains={}, jumps=()))
    begun = at_once(reconciler.planning(0))
    at_once(reconciler.settling([Outcome(operation, "still at it", errno.EINPROGRESS) for operation in begun], 0))
    assert not at_once(reconciler.planning(30))
    reconciler.rules_ended()
    assert at_once(reconciler.planning(30)) == begun
    at_once(reconciler.settling([Outcome(operation) for operation in begun], 30))
    assert reconciler.pending == 0


def test_a_failed_cleaning_of_one_flow_does_not_delay_the_cleaning_of_another_flow() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, FlowCleaning), times=100)
    _, slices = dns("10.244.0.1")
    node.put(builders.service("dns", builders.service_port(53, Protocol.UDP, node_port=30053)), slices)
    assert sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()) == 2
    assert node.reconciler.pending == 2


def test_only_the_failed_addition_is_delayed_if_one_of_several_real_servers_cannot_be_added() -> None:
    node = simulation.SimulatedNode()
    refused = builders.backend("10.244.0.2")
    node.kernel.fail(lambda operation: isinstance(operation.item, RealServers) and operation.item.key == refused, times=1)
    node.put(*web("10.244.0.1", "10.244.0.2", "10.244.0.3"))
    node.sync()
    assert node.kernel.virtual_servers[KEY].real_servers == {builders.backend(f"10.244.0.{one}"): 1 for one in (1, 3)}
    assert sum(report.failed["add", "real_server"] for report in node.reports) == 1
    assert node.sync(after_s=1) == [Operation(Verb.ADD, RealServers.of(KEY, refused))]


def test_all_additions_of_real_servers_are_retried_together_if_the_kernel_does_not_answer() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1", "10.244.0.2"))
    operations = node.plan()
    report = at_once(node.reconciler.settling([Outcome(one, "no answer") for one in operations], node.now))
    assert report.failed["add", "real_server"] == 2
    assert not node.plan()
    assert node.reconciler.next_s() == node.now + 1
    node.sync(after_s=1)
    assert len(node.kernel.virtual_servers[KEY].real_servers) == 2


def test_a_failed_addition_of_a_real_server_is_retried_at_once_if_its_virtual_server_changes() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1"))
    numbers = {VirtualServer: errno.ENOMEM, RealServers: errno.ESRCH}
    planned = [(one, numbers.get(type(one.item))) for one in node.plan()]
    outcomes = [Outcome(one, "no", number) if number else Outcome(one) for one, number in planned]
    at_once(node.reconciler.settling(outcomes, node.now))
    node.put(builders.service("web", affinity_timeout_s=10800, created_s=5.0), web("10.244.0.1")[1])
    assert (Verb.ADD, RealServers) in kinds(node.plan())


def test_an_operation_that_succeeds_after_a_failure_does_not_wake_the_loop() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1"))
    failing = node.plan()[-1]
    at_once(node.reconciler.settling([Outcome(failing, "out of memory", errno.ENOMEM)], node.now))
    assert node.reconciler.next_s() == node.now + 1
    at_once(node.reconciler.settling([Outcome(failing)], node.now + 1))
    assert node.reconciler.next_s() is None


def test_if_the_third_attempt_adds_a_virtual_server_the_same_sync_adds_its_real_servers() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), times=2)
    node.put(*web("10.244.0.1"))
    node.sync()
    assert node.sync(after_s=0.5) == []
    node.sync(after_s=0.5)
    assert node.sync(after_s=1.9) == []
    node.sync(after_s=0.1)
    assert weights(node) == {ONE: 1}


def test_retry_delays_of_a_real_server_do_not_grow_if_its_virtual_server_vanishes_again_and_again() -> None:
    node = running("10.244.0.1")
    for endpoints in (("10.244.0.1", "10.244.0.2"), ("10.244.0.1",), ("10.244.0.1", "10.244.0.2")):
        del node.kernel.virtual_servers[KEY]
        node.put(*web(*endpoints))
        node.sync()
        node.sync(after_s=1)
    node.observe()
    node.sync()
    assert weights(node) == {ONE: 1, TWO: 1}


def test_a_sync_does_not_add_a_virtual_server_again_if_it_vanishes_during_the_sync() -> None:
    node = simulation.SimulatedNode(after_each=lambda _: node.kernel.virtual_servers.clear())
    node.put(*web("10.244.0.1"))
    added = [one for one in node.sync() if isinstance(one.item, VirtualServer)]
    assert [one.verb for one in added] == [Verb.ADD]


def test_an_unwritable_sysctl_delays_no_real_server_and_is_retried_if_its_kernel_value_changes() -> None:
    kernel = simulation.new_kernel()
    kernel.fail(lambda operation: isinstance(operation.item, Sysctl), errno.EROFS, times=2)
    node = simulation.SimulatedNode(kernel)
    node.put(*web("10.244.0.1"))
    assert (Verb.SET, Sysctl) in kinds(node.sync())
    assert weights(node) == {ONE: 1}
    assert (node.reconciler.pending, set(node.reconciler._tables.of_sysctls.given_up)) == (0, {simulation.SYSCTL.path})
    assert node.reconciler.next_s() is None
    node.observe()
    assert kinds(node.sync()) == []
    kernel.sysctls[simulation.SYSCTL.path] = "2"
    node.observe()
    assert kinds(node.sync()) == [(Verb.SET, Sysctl)]
    assert kinds(node.sync(after_s=600)) == []
    kernel.sysctls[simulation.SYSCTL.path] = "3"
    node.observe()
    node.sync()
    assert kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert (node.reconciler.pending, node.reconciler._tables.of_sysctls.given_up) == (0, {})


def test_a_setting_that_cannot_be_written_is_retried_when_another_value_is_desired() -> None:
    kernel = simulation.new_kernel()
    kernel.fail(lambda operation: isinstance(operation.item, Sysctl), errno.EROFS)
    node = simulation.SimulatedNode(kernel)
    node.sync()
    assert kinds(node.sync()) == []
    node.reconciler.put_node(tuple(Family), [simulation.SYSCTL._replace(value="2")], None)
    node.sync()
    assert kernel.sysctls == {simulation.SYSCTL.path: "2"}


def test_an_outcome_for_a_virtual_server_that_does_not_exist_changes_nothing() -> None:
    node = running()
    elsewhere = RealServers.of(builders.frontend("10.96.0.99", 80), ONE)
    report = at_once(node.reconciler.settling([Outcome(Operation(Verb.ADD, elsewhere))], node.now))
    assert report.done == {("add", "real_server"): 1}
    assert not node.plan()
