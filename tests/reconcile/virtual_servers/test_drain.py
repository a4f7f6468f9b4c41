"""Tests the class ``Drains``: when connections of a draining real server must be read, and when its drain is over.

``test_reconciler_drains`` tests how drains begin and end.
"""

import math
from collections.abc import Mapping

import pytest

from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers, VirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.reconcile.virtual_servers.drain import LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S, Drains, removals_at_once
from tests.support import builders

KEY, OTHER = builders.frontend("10.96.0.1", 80), builders.frontend("10.96.0.2", 80)
ONE, TWO, THREE = (builders.backend(f"10.244.0.{number}") for number in (1, 2, 3))
BUSY, IDLE = ConnectionCounts(1, 0), ConnectionCounts(0, 0)


class Judged(Drains):
    """Drains of ``KEY`` that have already begun; the method ``see`` returns the real servers whose drains are over."""

    def __init__(self, *real_servers: RealServerKey, now: float = 100) -> None:
        super().__init__()
        for real_server in real_servers:
            self.begin(KEY, real_server, now)

    def see(
        self,
        counts: Mapping[RealServerKey, ConnectionCounts] | None,
        now: float,
        *,
        key: VirtualServerKey = KEY,
        deadline_s: float = math.inf,
        may_wait: int = 0,
    ) -> list[RealServerKey]:
        return list(self.judge(key, counts, now, deadline_s=deadline_s, may_wait=may_wait))


@pytest.mark.checklist(89)
@pytest.mark.parametrize("counts", [{ONE: IDLE}, {}], ids=["has none", "is gone from the kernel"])
def test_a_drain_is_over_if_its_real_server_has_no_connections(counts: dict[RealServerKey, ConnectionCounts]) -> None:
    drains = Judged(ONE)
    assert drains.may_remove(KEY, ONE) is False
    assert drains.see(counts, 100) == [ONE]
    assert drains.may_remove(KEY, ONE) is True
    assert (drains.next_s(), drains.due(1000), drains.over) == (None, [], 1)
    drains.end(KEY, ONE)
    assert drains.over == 0


@pytest.mark.checklist(90)
@pytest.mark.parametrize("counts", [ConnectionCounts(1, 0), ConnectionCounts(0, 1)])
def test_a_draining_real_server_with_active_or_inactive_connections_is_kept(counts: ConnectionCounts) -> None:
    drains = Judged(ONE)
    assert drains.see({ONE: counts}, 1e9) == []
    assert drains.may_remove(KEY, ONE) is False
    assert [drain.connections for drain in drains.with_connections()] == [counts]


def test_a_failed_count_of_connections_ends_no_drain_and_is_repeated_later() -> None:
    drains = Judged(ONE, TWO)
    assert drains.see(None, 100) == []
    assert drains.may_remove(KEY, ONE) is False
    assert drains.due(100) == []
    assert drains.due(100 + SHORTEST_INTERVAL_S) == [KEY]


def test_the_connection_counts_of_a_virtual_server_are_requested_again_if_no_answer_arrives() -> None:
    drains = Judged(ONE, TWO)
    drains.begin(OTHER, ONE, 100)
    assert drains.due(100) == [KEY, OTHER]
    drains.see({}, 100)
    assert drains.due(100) == []
    assert drains.due(100 + SHORTEST_INTERVAL_S) == [OTHER]


def test_connections_of_old_drains_are_read_less_often_but_at_least_twice_a_minute() -> None:
    drains = Judged(ONE)
    intervals = []
    for age_s in (0, 40, 4000):
        drains.see({ONE: BUSY}, 100 + age_s)
        due_s = drains.next_s()
        assert due_s is not None
        intervals.append(due_s - 100 - age_s)
    assert intervals == [SHORTEST_INTERVAL_S, 10, LONGEST_INTERVAL_S]
    drains.begin(KEY, TWO, 4101)
    assert drains.due(4101) == [KEY]
    drains.see({ONE: BUSY, TWO: BUSY}, 4101)
    assert drains.next_s() == 4101 + SHORTEST_INTERVAL_S, "the youngest is in a hurry"


@pytest.mark.parametrize("counts", [{ONE: BUSY}, None], ids=["busy", "unreadable"])
def test_a_drain_ends_at_its_deadline_even_if_connections_remain_or_are_unknown(
    counts: dict[RealServerKey, ConnectionCounts] | None,
) -> None:
    drains = Judged(ONE)
    assert drains.see(counts, 159.5, deadline_s=60) == []
    assert drains.next_s() == 160
    assert drains.due(160) == [KEY]
    assert drains.see(counts, 160, deadline_s=60) == [ONE]
    assert drains.may_remove(KEY, ONE) is True
    assert drains.next_s() is None


def test_connections_of_a_virtual_server_are_read_again_at_the_earliest_deadline_of_its_drains() -> None:
    drains = Judged(ONE)
    drains.begin(KEY, TWO, 150)
    drains.see({ONE: BUSY, TWO: BUSY}, 155, deadline_s=55.5)
    assert drains.next_s() == 155.5


def test_rounding_does_not_delay_a_deadline_beyond_the_announced_time() -> None:
    drains = Judged(ONE, now=2021.07)
    drains.see({ONE: BUSY}, 2200, deadline_s=200)
    due_s = drains.next_s()
    assert due_s is not None
    assert due_s - 2021.07 < 200, "as it happens"
    assert drains.see({ONE: BUSY}, due_s, deadline_s=200) == [ONE]


def test_a_drain_that_begins_again_keeps_its_deadline() -> None:
    drains = Judged(ONE)
    drains.begin(KEY, ONE, 150)
    assert drains.see({ONE: BUSY}, 160, deadline_s=60) == [ONE]


def test_a_request_to_read_connections_can_only_make_the_next_reading_earlier() -> None:
    drains = Judged(ONE)
    drains.see({ONE: BUSY}, 100)
    drains.ask(KEY, 1000)
    assert drains.next_s() == 100 + SHORTEST_INTERVAL_S
    drains.ask(KEY, 0)
    assert drains.due(100) == [KEY]


def test_ending_a_drain_that_never_began_is_not_an_error() -> None:
    drains = Judged(ONE, TWO)
    drains.end(OTHER, ONE)
    drains.keep_only(OTHER)
    drains.end(KEY, ONE)
    drains.end(KEY, ONE)
    assert (list(drains.of(KEY)), len(drains)) == ([TWO], 1)
    drains.end(KEY, TWO)
    assert (list(drains.virtual_servers), len(drains), drains.next_s()) == ([], 0, None)


def test_drains_of_real_servers_that_no_longer_exist_are_ended() -> None:
    drains = Judged(ONE, TWO)
    drains.begin(OTHER, ONE, 100)
    drains.keep_only(KEY, {TWO})
    assert list(drains.of(KEY)) == [TWO]
    drains.keep_only(KEY)
    assert list(drains.virtual_servers) == [OTHER]


def test_waiting_drains_are_released_in_the_order_in_which_they_began_to_wait() -> None:
    drains = Judged(ONE, TWO, THREE)
    assert drains.see({ONE: BUSY, TWO: IDLE}, 100, may_wait=10) == []
    drains.see({}, 101, may_wait=10, deadline_s=0)
    assert (drains.due(1000), drains.next_s(), len(drains)) == ([], None, 3), "there is nothing more to ask, nor a deadline"
    assert drains.release(0) == []
    assert drains.release(2) == [KEY, KEY]
    assert [drains.may_remove(KEY, one) for one in (ONE, TWO, THREE)] == [False, True, True]
    assert (drains.waiting, drains.over) == (1, 2)
    assert drains.release(9) == [KEY]
    drains.keep_only(KEY)
    assert (drains.waiting, drains.over, len(drains)) == (0, 0, 0)


def test_no_more_drains_wait_for_removal_than_the_limit_allows() -> None:
    drains = Judged(ONE, TWO, THREE)
    assert drains.see({ONE: IDLE, TWO: BUSY, THREE: IDLE}, 100, may_wait=1) == [THREE]
    assert drains.see({}, 101, may_wait=1) == [TWO], "the one that waits already is counted"
    assert drains.release(9) == [KEY]


def test_a_drain_ends_when_its_real_server_is_desired_again_or_its_virtual_server_is_removed() -> None:
    drains = Judged(ONE, TWO)
    drains.begin(OTHER, ONE, 100)
    drains.see({}, 100, may_wait=10)
    drains.see({}, 100, key=OTHER, may_wait=10)
    drains.end(KEY, ONE)
    drains.keep_only(OTHER)
    assert drains.release(9) == [KEY]
    assert drains.may_remove(KEY, TWO) is True


def test_the_age_of_the_oldest_drain_ignores_real_servers_without_connections() -> None:
    drains = Judged(ONE, TWO)
    assert Judged().oldest_age_s(500) == 0
    drains.begin(KEY, THREE, 130)
    assert drains.oldest_age_s(150) == 50
    drains.see({TWO: BUSY, THREE: BUSY}, 150, may_wait=10)
    drains.end(KEY, TWO)
    assert drains.oldest_age_s(160) == 30, "one waits for its removal, one has ended"


def test_the_heap_of_due_times_does_not_accumulate_outdated_entries() -> None:
    drains = Judged(ONE)
    for now in range(100, 10_000):
        drains.begin(OTHER, TWO, now)
        drains.see({TWO: BUSY}, now, key=OTHER)
        drains.see({ONE: BUSY}, now)
        drains.end(OTHER, TWO)
        drains.next_s()
    assert len(drains._by_due) < 100


def outcome(verb: Verb, key: RealServerKey, weight: int = 0, error: str = "") -> Outcome:
    return Outcome(Operation(verb, RealServers.of(KEY, key, weight)), error)


def test_a_real_server_without_connections_is_removed_as_soon_as_its_drain_has_begun() -> None:
    done = [outcome(Verb.ADD, THREE, 1), outcome(Verb.SET, ONE), outcome(Verb.SET, TWO)]
    assert removals_at_once(done, {KEY: {ONE: IDLE, TWO: IDLE, THREE: IDLE}}, 9) == [
        Operation(Verb.REMOVE, RealServers.of(KEY, ONE, 0)),
        Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0)),
    ]
    assert removals_at_once(done, {KEY: {ONE: BUSY}}, 9) == [Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0))], (
        "the other is gone already"
    )


def test_idle_real_servers_are_removed_at_once_only_up_to_the_allowed_number() -> None:
    done = [outcome(Verb.SET, ONE), outcome(Verb.SET, TWO), outcome(Verb.SET, THREE)]
    counts = {KEY: {ONE: IDLE, TWO: BUSY, THREE: IDLE}}
    assert [operation.item for operation in removals_at_once(done, counts, 1)] == [RealServers.of(KEY, ONE, 0)]
    assert removals_at_once(done, counts, 0) == []


@pytest.mark.parametrize(
    "done",
    [
        outcome(Verb.SET, ONE, 1),
        outcome(Verb.SET, ONE, error="no memory"),
        outcome(Verb.REMOVE, ONE),
        Outcome(Operation(Verb.SET, VirtualServer(KEY, VirtualServerSettings("rr")))),
    ],
    ids=["is wanted again", "has its weight still", "is gone", "is no real server"],
)
def test_a_real_server_is_not_removed_at_once_if_its_drain_has_not_begun(done: Outcome) -> None:
    assert removals_at_once([done], {KEY: {ONE: IDLE}}, 9) == []


@pytest.mark.parametrize("counts", [{}, {KEY: None}, {OTHER: {ONE: IDLE}}])
def test_a_real_server_is_not_removed_at_once_if_its_number_of_connections_is_unknown(
    counts: dict[VirtualServerKey, dict[RealServerKey, ConnectionCounts] | None],
) -> None:
    assert removals_at_once([outcome(Verb.SET, ONE)], counts, 9) == []
