"""The reconciler on an in-memory kernel: removed endpoints keep their connections."""

import pytest

from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import RealServers
from ipvsproxy.reconcile.reconciler import Policy
from tests.reconcile.serving import BUSY, KEY, ONE, TWO, draining, removal, running, set_weight, web, weights
from tests.support import builders


@pytest.mark.checklist(89)
def test_a_real_server_without_connections_is_removed_in_the_same_sync() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.put(*web("10.244.0.2"))
    node.sync()
    assert weights(node) == {TWO: 1}
    assert node.applied[0] == set_weight(ONE, 0)


@pytest.mark.checklist(90)
def test_an_undesired_real_server_stays_at_weight_zero_until_its_connections_end() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.kernel.connection_counts[KEY, ONE] = BUSY
    node.put(*web("10.244.0.2"))
    node.sync()
    assert weights(node) == {ONE: 0, TWO: 1}
    assert node.reconciler.pending == 0
    assert node.reconciler.next_s() == node.now + 1
    node.sync(after_s=1)
    assert weights(node) == {ONE: 0, TWO: 1}
    del node.kernel.connection_counts[KEY, ONE]
    assert node.sync(after_s=1) == [removal(ONE)]
    assert node.reconciler.next_s() is None


def test_a_real_server_that_returns_while_draining_gets_its_weight_back_and_is_not_removed() -> None:
    node = draining(drain_deadline_s=60)
    node.put(*web("10.244.0.1", "10.244.0.2"))
    assert set_weight(ONE, 1) in node.sync()
    assert removal(ONE) not in node.sync(after_s=1000)
    assert weights(node) == {ONE: 1, TWO: 1}
    assert len(node.reconciler._drains) == 0


def test_a_changed_drain_deadline_of_the_node_applies_at_once_to_drains_that_have_already_begun() -> None:
    node = draining(drain_deadline_s=600)
    node.sync(after_s=100)
    node.reconciler.adopt(Policy(drain_deadline_s=101))
    assert node.sync() == []
    assert node.reconciler.next_s() == node.now + 1
    assert node.sync(after_s=1) == [removal(ONE)]


def test_a_drain_continues_after_a_restart() -> None:
    node = draining(drain_deadline_s=60)
    node.restart()
    assert [operation for operation in node.sync() if isinstance(operation.item, RealServers)] == [set_weight(ONE, 0)]
    assert node.sync(after_s=59) == []
    assert node.sync(after_s=1) == [removal(ONE)]


def test_a_real_server_is_not_draining_if_it_is_desired_or_its_weight_is_not_zero() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    weights(node).update({ONE: 0, builders.backend("10.244.0.9"): 1})
    node.observe()
    assert len(node.reconciler._drains) == 0
    node.sync()
    assert weights(node) == {ONE: 1, TWO: 1}


def test_removing_a_virtual_server_ends_its_drains() -> None:
    node = draining()
    node.remove("web")
    node.sync()
    assert KEY not in node.kernel.virtual_servers
    assert len(node.reconciler._drains) == 0
    assert node.reconciler.next_s() is None


def test_a_draining_real_server_that_another_program_removed_is_forgotten() -> None:
    node = draining()
    del weights(node)[ONE]
    node.observe()
    assert node.sync() == []
    assert len(node.reconciler._drains) == 0


def test_drains_are_forgotten_as_soon_as_an_operation_shows_that_their_virtual_server_is_gone() -> None:
    node = draining()
    del node.kernel.virtual_servers[KEY]
    node.put(*web("10.244.0.2", "10.244.0.3"))
    node.sync()
    assert len(node.reconciler._drains) == 0


@pytest.mark.checklist(92)
def test_a_removal_is_reported_as_a_surprise_if_the_real_server_is_already_missing() -> None:
    node = draining()
    del weights(node)[ONE]
    assert node.sync(after_s=1) == [removal(ONE)]
    assert node.has_failed
    assert node.reports[-1].surprises == 1
    assert node.reports[-1].pending == 0


def test_the_connections_of_a_new_drain_are_read_at_once_if_removals_are_allowed() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.put(*web("10.244.0.2"))
    at_once(node.reconciler.settling(node.apply(node.plan()), node.now))
    assert list(node.reconciler.drains_due(node.now)) == [KEY]
