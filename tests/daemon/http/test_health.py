"""Covers what affects health: late changes, a missing device, missing rules, eligibility of the node, and the end of the process.

Time is virtual.
"""

from collections.abc import Collection

import pytest

from ipvsproxy.daemon.http import paths, server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.model import service
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from tests.support import builders
from tests.support.summaries import Clock, summary

BOTH = (Family.IPV4, Family.IPV6)
PERIOD_S = 30.0
LATE_S = 60.0
WALL_S = 1_800_000_000.0


class Node:
    """A health status and the clock that it uses."""

    def __init__(self, families: Collection[Family] = BOTH) -> None:
        self.clock = Clock(1000.0)
        self.missing: Collection[ObjectKind] = ()
        self.status = Status(
            families=families,
            sync_period_s=PERIOD_S,
            clock=self.clock,
            wall_clock=lambda: WALL_S + self.clock.now,
            missing=lambda: self.missing,
        )
        self.status.node = builders.node()

    def sync(self, *, lacking: Collection[Family] = ()) -> None:
        self.status.syncing(self.clock.now)
        self.status.synced(summary(lacking=lacking))

    def is_healthy(self) -> bool:
        return self.status.is_healthy


@pytest.fixture
def node() -> Node:
    """A node after its first sync."""
    node = Node()
    node.sync()
    return node


def test_a_starting_node_is_healthy_but_not_eligible_until_the_first_complete_sync() -> None:
    node = Node()
    assert node.is_healthy()
    assert (node.status.updated, node.status.updated_s) == ({}, None)
    eligible = [node.status.is_eligible]
    node.sync(lacking=[Family.IPV6])
    assert node.status.updated.keys() == {Family.IPV4}
    eligible.append(node.status.is_eligible)
    node.sync()
    assert [*eligible, node.status.is_eligible] == [False, False, True]
    assert node.status.updated == dict.fromkeys(BOTH, WALL_S + 1000)


def test_a_process_whose_first_sync_is_late_is_unhealthy() -> None:
    node = Node()
    node.clock.now += LATE_S
    assert not node.is_healthy()


def test_a_process_is_unhealthy_if_a_change_has_waited_for_more_than_two_sync_periods(node: Node) -> None:
    node.clock.now += 500
    assert node.is_healthy()
    assert node.status.oldest_change_age_s == 0
    node.status.queued(node.clock.now)
    node.clock.now += LATE_S - 0.001
    node.status.queued(node.clock.now)
    assert node.is_healthy()
    node.clock.now += 0.001
    assert node.status.oldest_change_age_s == LATE_S
    assert not node.is_healthy()
    assert all(map(node.status.is_late, BOTH))
    node.sync()
    assert node.is_healthy()


def test_the_age_of_a_change_that_arrives_during_a_sync_counts_from_its_arrival(node: Node) -> None:
    node.status.syncing(node.clock.now)
    node.clock.now += 10
    node.status.queued(node.clock.now)
    node.clock.now += 10
    node.status.synced(summary())
    assert node.status.oldest_change_age_s == 10
    node.clock.now += LATE_S - 10
    assert not node.is_healthy()


def test_a_sync_that_never_ends_makes_the_node_unhealthy_even_without_changes(node: Node) -> None:
    node.status.syncing(node.clock.now)
    node.clock.now += LATE_S
    assert not node.is_healthy()


def test_rules_that_stay_unwritten_for_a_long_time_make_only_their_family_unhealthy(node: Node) -> None:
    node.sync(lacking=[Family.IPV6])
    node.clock.now += LATE_S - 1
    node.sync(lacking=[Family.IPV6])
    assert node.is_healthy()
    node.clock.now += 1
    assert not node.is_healthy()
    assert [node.status.is_late(family) for family in BOTH] == [False, True]
    assert node.status.updated_s == node.status.updated[Family.IPV4] > node.status.updated[Family.IPV6]
    node.sync()
    node.clock.now += LATE_S
    assert node.is_healthy()


def test_health_reports_a_required_kernel_setting_as_long_as_its_value_is_wrong() -> None:
    node = Node()
    for unmet in ({"net/ipv4/ip_forward": "0"}, {}):
        node.status.syncing(node.clock.now)
        node.status.synced(summary(unmet_settings=unmet))
        assert node.status.unmet_settings == unmet


def test_a_family_that_is_not_served_does_not_affect_health() -> None:
    node = Node([Family.IPV4])
    node.sync(lacking=[Family.IPV6])
    assert node.status.is_eligible
    assert node.status.updated.keys() == {Family.IPV4}


@pytest.mark.parametrize("node_object", [None, builders.node(leaving=True)])
def test_a_node_whose_object_is_unknown_or_about_to_be_deleted_is_healthy_but_not_eligible(
    node: Node, node_object: service.Node | None
) -> None:
    node.status.node = node_object
    assert node.is_healthy()
    assert not node.status.is_eligible
    assert ("--hostname-override" in node.status.node_trouble) == (node_object is None)


def test_a_process_that_is_about_to_stop_is_neither_healthy_nor_eligible(node: Node) -> None:
    node.status.stop()
    assert not node.is_healthy()
    assert not node.status.is_eligible


def test_livez_but_not_healthz_answers_ok_while_the_process_waits_for_its_first_lists() -> None:
    node = Node()
    node.missing = [ObjectKind.SERVICE, ObjectKind.NODE]
    node.clock.now += 3600
    assert paths.livez(node.status).status == server.OK
    answer = paths.healthz(node.status)
    assert answer.status == server.UNAVAILABLE
    assert b'"waitingForFirstLists":["Node","Service"]' in answer.body
    node.missing = ()
    node.status.listed(node.clock.now)
    assert node.is_healthy()
    node.clock.now += LATE_S
    assert not node.is_healthy()
