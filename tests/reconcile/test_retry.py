"""Covers the time from which a failed operation may be tried again.

No test waits, because the tests pass the current time as a number.
"""

from ipvsproxy.model.kernel import Device
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import EvenWeights
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer, VirtualServerSettings
from ipvsproxy.reconcile.attempts import FIRST_DELAY_S, LONGEST_DELAY_S, Retries
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from tests.support import builders

IDENTITY = Reconciler(Policy())._identity


def test_a_failure_delays_only_the_operations_on_its_own_key() -> None:
    retries = Retries()
    retries.fail("key", "add", 100)
    assert not retries.may_try("key", "add", 100 + FIRST_DELAY_S - 0.01)
    assert retries.may_try("key", "add", 100 + FIRST_DELAY_S)
    assert retries.may_try("other", "add", 100)
    assert retries.next_s() == 100 + FIRST_DELAY_S
    assert len(retries) == 1


def test_a_failure_after_a_success_counts_as_a_first_failure() -> None:
    retries = Retries()
    retries.fail("key", "add", 0)
    retries.fail("key", "add", 0)
    retries.forget("key")
    retries.forget("never failed")
    retries.fail("key", "add", 0)
    assert retries.next_s() == FIRST_DELAY_S


def test_earlier_failures_do_not_count_after_the_desired_value_changes() -> None:
    retries = Retries()
    retries.fail("key", "add", 0)
    retries.fail("key", "add", 0)
    assert retries.may_try("key", "remove", 0)
    retries.fail("key", "remove", 0)
    assert retries.next_s() == FIRST_DELAY_S


def test_a_failed_object_that_no_longer_needs_an_operation_does_not_wake_the_loop() -> None:
    retries = Retries()
    retries.fail(("device", "gone"), "add", 0)
    retries.fail(("device", "other"), "add", 5)
    retries.due([Operation(Verb.ADD, Device("other"))], lambda operation: ("device", str(operation.item)), 0)
    assert retries.next_s() == 5 + FIRST_DELAY_S
    assert len(retries) == 1


def test_a_running_operation_does_not_count_as_failed_and_is_retried_only_after_it_has_ended() -> None:
    retries = Retries()
    retries.fail(("rules", 4), "wish", 0)
    retries.fail(("rules", 4), "wish", 1, is_running=True)
    retries.fail(("set", "name"), "wish", 1, is_running=True)
    assert not retries.may_try(("rules", 4), "wish", LONGEST_DELAY_S)
    retries.hasten("rules")
    assert retries.may_try(("rules", 4), "wish", 1)
    assert not retries.may_try(("set", "name"), "wish", 1)
    retries.fail(("rules", 4), "wish", 2)
    assert retries.next_s() == 2 + 2 * FIRST_DELAY_S, "the second failure"
    retries.fail(("rules", 4), "another wish", 3, is_running=True)
    retries.fail(("rules", 4), "another wish", 4)
    assert retries.next_s() == 4 + FIRST_DELAY_S, "the first failure of this wish"


def test_real_servers_are_tried_again_only_when_their_missing_virtual_server_is_tried_again() -> None:
    key = builders.frontend("10.96.0.1", 80)
    server = VirtualServer(key, VirtualServerSettings("rr"), EvenWeights.of([builders.backend("10.244.0.1")]))
    operations = [Operation(Verb.ADD, server), Operation(Verb.ADD, RealServers(key, server.weights))]
    retries = Retries()
    for seconds, operation in enumerate(reversed(operations)):
        retries.fail(IDENTITY(operation), operation, seconds)
    assert retries.due(operations, IDENTITY, 1 + FIRST_DELAY_S / 2) == []
    assert retries.next_s() == 1 + FIRST_DELAY_S
    assert retries.due(operations, IDENTITY, 1 + FIRST_DELAY_S) == operations


def test_real_servers_do_not_wait_for_virtual_server_settings_that_could_not_be_set() -> None:
    key = builders.frontend("10.96.0.1", 80)
    change = Operation(Verb.SET, VirtualServer(key, VirtualServerSettings("wlc")))
    addition = Operation(Verb.ADD, RealServers.of(key, builders.backend("10.244.0.1")))
    retries = Retries()
    retries.fail(IDENTITY(change), change, 0)
    assert retries.due([change, addition], IDENTITY, 0) == [addition]


def test_all_real_servers_of_a_new_virtual_server_share_one_failure_count() -> None:
    keys = [builders.frontend("10.96.0.1", port) for port in (80, 81)]
    weights = [EvenWeights.of([builders.backend(address)]) for address in ("10.244.0.1", "10.244.0.2")]
    identities = {IDENTITY(Operation(Verb.ADD, RealServers(key, one))) for key in keys for one in weights}
    assert identities == {("real_server", key) for key in keys}
