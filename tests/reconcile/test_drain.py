"""Drains by themselves: when to look, when one is over.

What begins and ends them: ``test_reconciler_drains``.
"""

import pytest

from ipvsproxy.model.kernel import Connections, RealServers, VirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.reconcile.drain import LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S, Drains, removals
from tests.support import builders

KEY, OTHER = builders.frontend("10.96.0.1", 80), builders.frontend("10.96.0.2", 80)
ONE, TWO, THREE = (builders.backend(f"10.244.0.{number}") for number in (1, 2, 3))
BUSY, IDLE = Connections(1, 0), Connections(0, 0)


def drains(*real_servers: RealServerKey, deadline_s: float = 0, now: float = 100) -> Drains:
    found = Drains(deadline_s)
    for real_server in real_servers:
        found.begin(KEY, real_server, now)
    return found


def test_the_connections_of_a_new_drain_are_due_at_once() -> None:
    found = drains(ONE)
    assert found.due(100) == [KEY]
    assert found.next_s() == 100
    assert len(found) == 1


def test_drains_whose_counts_could_not_be_read_are_all_due_again_later() -> None:
    found = drains(ONE, TWO)
    assert found.note(KEY, None, 100) == []
    assert found.due(100) == []
    assert found.next_s() == 100 + SHORTEST_INTERVAL_S


def test_a_deadline_of_less_than_a_second_counts() -> None:
    found = drains(ONE, deadline_s=0.5)
    found.note(KEY, {ONE: BUSY}, 100)
    assert found.next_s() == 100.5
    assert found.expire(100.4) == []
    assert found.expire(100.5) == [KEY]


def test_a_deadline_is_over_at_the_time_of_next_s_however_it_was_rounded() -> None:
    found = drains(ONE, deadline_s=200, now=2021.07)
    found.note(KEY, {ONE: BUSY}, 2200)
    due_s = found.next_s()
    assert due_s is not None
    assert due_s - 2021.07 < 200, "as it happens"
    assert found.expire(due_s) == [KEY]


def test_without_drains_nothing_is_due() -> None:
    found = drains()
    assert (found.next_s(), found.due(100), found.expire(100)) == (None, [], [])
    assert found.is_over(KEY, ONE) is None


@pytest.mark.checklist(89)
def test_a_real_server_without_connections_is_over() -> None:
    found = drains(ONE)
    assert found.is_over(KEY, ONE) is False
    assert found.note(KEY, {ONE: IDLE}, 100) == [ONE]
    assert found.is_over(KEY, ONE) is True
    assert found.next_s() is None
    assert found.due(1000) == []


@pytest.mark.checklist(90)
@pytest.mark.parametrize("counts", [Connections(1, 0), Connections(0, 1)])
def test_a_real_server_with_active_or_closing_connections_is_kept(counts: Connections) -> None:
    found = drains(ONE)
    assert found.note(KEY, {ONE: counts}, 100) == []
    assert found.is_over(KEY, ONE) is False
    assert [drain.connections for drain in found] == [counts]


def test_a_drain_whose_real_server_is_gone_from_the_kernel_is_over() -> None:
    found = drains(ONE)
    assert found.note(KEY, {}, 100) == [ONE]


def test_unreadable_counts_end_no_drain_and_are_due_again_later() -> None:
    found = drains(ONE)
    assert found.note(KEY, None, 100) == []
    assert found.is_over(KEY, ONE) is False
    assert found.due(100) == []
    assert found.due(100 + SHORTEST_INTERVAL_S) == [KEY]


def test_counts_of_a_virtual_server_without_drains_mean_nothing() -> None:
    assert drains(ONE).note(OTHER, {ONE: IDLE}, 100) == []


def test_old_drains_are_due_less_often_but_at_least_twice_a_minute() -> None:
    found = drains(ONE)
    waits = []
    for age_s in (0, 40, 4000):
        found.note(KEY, {ONE: BUSY}, 100 + age_s)
        due_s = found.next_s()
        assert due_s is not None
        waits.append(due_s - 100 - age_s)
    assert waits == [SHORTEST_INTERVAL_S, 10, LONGEST_INTERVAL_S]


def test_the_deadline_ends_a_drain_whatever_its_connections() -> None:
    found = drains(ONE, deadline_s=60)
    found.note(KEY, {ONE: BUSY}, 159)
    assert found.expire(159.9) == []
    assert found.next_s() == 160
    assert found.expire(160) == [KEY]
    assert found.is_over(KEY, ONE) is True
    assert found.expire(161) == []


def test_without_a_deadline_a_drain_takes_as_long_as_it_takes() -> None:
    found = drains(ONE)
    found.note(KEY, {ONE: BUSY}, 1e6)
    assert found.expire(1e9) == []
    assert found.is_over(KEY, ONE) is False


def test_beginning_again_does_not_move_the_deadline() -> None:
    found = drains(ONE, deadline_s=60)
    found.begin(KEY, ONE, 150)
    assert found.expire(160) == [KEY]


def test_ending_a_drain_that_never_began_is_no_error() -> None:
    found = drains(ONE, TWO)
    found.end(OTHER, ONE)
    found.end_all(OTHER)
    found.end(KEY, ONE)
    found.end(KEY, ONE)
    assert [(drain.virtual_server, drain.key) for drain in found] == [(KEY, TWO)]
    found.end(KEY, TWO)
    assert len(found) == 0


def test_all_drains_end_with_their_virtual_server() -> None:
    found = drains(ONE, TWO)
    found.begin(OTHER, ONE, 100)
    found.end_all(KEY)
    assert [(drain.virtual_server, drain.key) for drain in found] == [(OTHER, ONE)]


def test_only_drains_of_existing_real_servers_are_kept() -> None:
    found = drains(ONE, TWO)
    found.keep_only(KEY, {TWO})
    found.keep_only(OTHER, {TWO})
    assert [drain.key for drain in found] == [TWO]


def test_drains_without_connections_wait_for_room_and_the_oldest_goes_first() -> None:
    found = drains(ONE, TWO, THREE)
    assert found.note(KEY, {ONE: BUSY, TWO: IDLE}, 100, may_wait=10) == []
    found.note(KEY, {}, 101, may_wait=10)
    assert (found.due(1000), len(found)) == ([], 3), "there is nothing more to look at"
    assert found.release(0) == []
    assert found.next_s() is None
    assert found.release(2) == [KEY, KEY]
    assert [found.is_over(KEY, one) for one in (ONE, TWO, THREE)] == [False, True, True]
    assert (found.waiting, found.over) == (1, 2)
    assert found.release(9) == [KEY]
    found.end_all(KEY)
    assert (found.waiting, found.over, len(found)) == (0, 0, 0)


def test_no_more_drains_wait_than_may_wait() -> None:
    found = drains(ONE, TWO, THREE)
    assert found.note(KEY, {ONE: IDLE, TWO: BUSY, THREE: IDLE}, 100, may_wait=1) == [THREE]
    assert found.note(KEY, {TWO: IDLE}, 101, may_wait=1) == [TWO], "those that wait already are counted"
    assert found.release(9) == [KEY]


def test_a_drain_that_is_desired_again_or_loses_its_virtual_server_waits_no_more() -> None:
    found = drains(ONE, TWO)
    found.begin(OTHER, ONE, 100)
    found.note(KEY, {}, 100, may_wait=10)
    found.note(OTHER, {}, 100, may_wait=10)
    found.end(KEY, ONE)
    found.end_all(OTHER)
    assert found.release(9) == [KEY]
    assert found.is_over(KEY, TWO) is True


def waiting_unseen(*real_servers: RealServerKey, deadline_s: float = 0) -> Drains:
    found = Drains(deadline_s)
    for real_server in real_servers:
        found.begin(KEY, real_server, 100, may_wait=10)
    return found


def test_a_drain_that_begins_without_room_is_not_due_before_ask() -> None:
    found = waiting_unseen(ONE, TWO, THREE)
    assert (found.due(1000), found.next_s(), found.waiting) == ([], None, 3)
    assert found.release(9) == [], "it may have connections"
    assert found.any_unread
    found.ask(1, 200)
    assert (found.due(200), found.waiting) == ([KEY], 2)
    assert found.note(KEY, {ONE: BUSY, TWO: IDLE, THREE: BUSY}, 200, may_wait=10) == []
    assert [(drain.key, drain.connections, drain.waits) for drain in found] == [
        (ONE, BUSY, False),
        (TWO, IDLE, True),
        (THREE, BUSY, False),
    ], "one answer tells of all"
    assert found.next_s() == 200 + 0.25 * 100
    assert found.release(9) == [KEY]
    assert found.is_over(KEY, TWO) is True
    found.ask(9, 200)
    assert (found.due(200), found.any_unread) == ([], False), "all have been looked at"


def test_only_as_many_drains_begin_unread_as_may_wait() -> None:
    found = Drains(0)
    assert found.has_place(KEY, 1)
    found.begin(KEY, ONE, 100, may_wait=1)
    assert not found.has_place(KEY, 1)
    assert found.due(100) == []
    found.begin(KEY, TWO, 100, may_wait=1)
    assert found.due(100) == [KEY]
    assert found.note(KEY, {}, 100, may_wait=1) == [TWO]
    assert (found.waiting, found.over) == (1, 1)


def test_unreadable_counts_leave_waiting_drains_as_they_are() -> None:
    found = waiting_unseen(ONE, TWO)
    found.ask(1, 200)
    assert found.note(KEY, None, 200, may_wait=10) == []
    assert (found.due(200), found.waiting) == ([], 1)
    assert found.due(200 + 0.25 * 100) == [KEY]


def test_the_oldest_unread_drains_are_due_first_and_ended_ones_are_not() -> None:
    found = waiting_unseen(ONE)
    found.begin(OTHER, ONE, 101, may_wait=10)
    found.begin(OTHER, TWO, 102, may_wait=10)
    found.end(KEY, ONE)
    found.ask(1, 200)
    assert found.due(200) == [OTHER]
    assert found.waiting == 1
    found.end_all(OTHER)
    found.ask(9, 200)
    assert (found.due(200), found.waiting, len(found)) == ([], 0, 0)


def test_the_deadline_ends_the_waiting_of_unread_drains() -> None:
    found = waiting_unseen(ONE, deadline_s=60)
    assert found.expire(160) == [KEY]
    assert (found.is_over(KEY, ONE), found.waiting) == (True, 0)
    found.ask(9, 160)
    assert found.due(160) == []


def test_the_deadline_ends_the_waiting_for_room() -> None:
    found = drains(ONE, deadline_s=60)
    found.note(KEY, {ONE: IDLE}, 100, may_wait=10)
    assert found.expire(160) == [KEY]
    assert found.release(9) == []


def test_a_shorter_deadline_counts_for_drains_that_have_begun() -> None:
    found = drains(ONE, deadline_s=600)
    found.deadline_s = 50
    assert found.next_s() == 100
    assert found.due(100) == [KEY]
    assert found.expire(150) == [KEY]


def test_a_due_drain_stays_due_until_its_counts_are_noted() -> None:
    found = drains(ONE, TWO)
    found.begin(OTHER, ONE, 100)
    assert list(found.due(100)) == list(found.due(100)) == [KEY, OTHER]
    found.note(KEY, None, 100)
    assert found.due(100) == [OTHER]


def test_the_oldest_is_the_one_that_has_kept_its_connections_longest() -> None:
    found = drains(ONE, TWO)
    assert drains().oldest_age_s(500) == 0
    found.begin(KEY, THREE, 130)
    assert found.oldest_age_s(150) == 50
    found.note(KEY, {TWO: BUSY, THREE: BUSY}, 150, may_wait=10)
    found.end(KEY, TWO)
    assert found.oldest_age_s(160) == 30, "one waits for its removal, one has ended"


def test_ended_drains_do_not_pile_up() -> None:
    found = drains(ONE, TWO)
    found.note(KEY, {ONE: BUSY}, 99, may_wait=10)
    for number in range(10_000):
        found.begin(OTHER, TWO, 100 + number)
        found.note(OTHER, {}, 100 + number, may_wait=10)
        found.end(OTHER, TWO)
        found.begin(OTHER, THREE, 100 + number, may_wait=10)
        found.end(OTHER, THREE)
    assert len(found._empty) < 2_000 > len(found._unread)
    assert len(found._by_due) < 2_000 > len(found._by_age)
    assert found.due(100) == [KEY]


def outcome(verb: Verb, key: RealServerKey, weight: int = 0, error: str = "") -> Outcome:
    return Outcome(Operation(verb, RealServers.of(KEY, key, weight)), error)


def test_a_drain_that_has_just_begun_without_connections_is_removed() -> None:
    done = [outcome(Verb.ADD, THREE, 1), outcome(Verb.SET, ONE), outcome(Verb.SET, TWO)]
    assert removals(done, {KEY: {ONE: IDLE, TWO: IDLE, THREE: IDLE}}, 9) == [
        Operation(Verb.REMOVE, RealServers.of(KEY, ONE, 0)),
        Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0)),
    ]
    assert removals(done, {KEY: {ONE: BUSY}}, 9) == [Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0))], (
        "the other is gone already"
    )


def test_no_more_are_removed_than_there_is_room_for() -> None:
    done = [outcome(Verb.SET, ONE), outcome(Verb.SET, TWO), outcome(Verb.SET, THREE)]
    counts = {KEY: {ONE: IDLE, TWO: BUSY, THREE: IDLE}}
    assert [operation.item for operation in removals(done, counts, 1)] == [RealServers.of(KEY, ONE, 0)]
    assert removals(done, counts, 0) == []


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
def test_no_other_real_server_is_removed_with_it(done: Outcome) -> None:
    assert removals([done], {KEY: {ONE: IDLE}}, 9) == []


@pytest.mark.parametrize("counts", [{}, {KEY: None}, {OTHER: {ONE: IDLE}}])
def test_no_real_server_with_unknown_connections_is_removed(
    counts: dict[VirtualServerKey, dict[RealServerKey, Connections] | None],
) -> None:
    assert removals([outcome(Verb.SET, ONE)], counts, 9) == []
