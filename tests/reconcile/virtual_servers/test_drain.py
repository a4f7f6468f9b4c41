"""Drains by themselves: when their connections are due, when one is over.

How they begin and end: ``test_reconciler_drains``.
"""

import pytest

from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import Connections, RealServers, VirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.reconcile.virtual_servers import drain
from ipvsproxy.reconcile.virtual_servers.drain import LONGEST_INTERVAL_S, SHORTEST_INTERVAL_S, Drains, removals_at_once
from tests.support import builders

KEY, OTHER = builders.frontend("10.96.0.1", 80), builders.frontend("10.96.0.2", 80)
ONE, TWO, THREE = (builders.backend(f"10.244.0.{number}") for number in (1, 2, 3))
BUSY, IDLE = Connections(1, 0), Connections(0, 0)


def drains(*real_servers: RealServerKey, deadline_s: float = 0, now: float = 100) -> Drains:
    all_drains = Drains(deadline_s)
    for real_server in real_servers:
        all_drains.begin(KEY, real_server, now)
    return all_drains


def test_the_connections_of_a_new_drain_are_due_at_once() -> None:
    all_drains = drains(ONE)
    assert all_drains.due(100) == [KEY]
    assert all_drains.next_s() == 100
    assert len(all_drains) == 1


def test_drains_whose_counts_could_not_be_read_are_all_due_again_later() -> None:
    all_drains = drains(ONE, TWO)
    assert all_drains.judge(KEY, None, 100) == []
    assert all_drains.due(100) == []
    assert all_drains.next_s() == 100 + SHORTEST_INTERVAL_S


def test_a_deadline_of_less_than_a_second_counts() -> None:
    all_drains = drains(ONE, deadline_s=0.5)
    all_drains.judge(KEY, {ONE: BUSY}, 100)
    assert all_drains.next_s() == 100.5
    assert all_drains.expire(100.4) == []
    assert all_drains.expire(100.5) == [KEY]


def test_a_deadline_is_over_at_the_time_of_next_s_however_it_was_rounded() -> None:
    all_drains = drains(ONE, deadline_s=200, now=2021.07)
    all_drains.judge(KEY, {ONE: BUSY}, 2200)
    due_s = all_drains.next_s()
    assert due_s is not None
    assert due_s - 2021.07 < 200, "as it happens"
    assert all_drains.expire(due_s) == [KEY]


def test_without_drains_nothing_is_due() -> None:
    all_drains = drains()
    assert (all_drains.next_s(), all_drains.due(100), all_drains.expire(100)) == (None, [], [])
    assert all_drains.may_remove(KEY, ONE) is None


@pytest.mark.checklist(89)
def test_a_real_server_without_connections_is_over() -> None:
    all_drains = drains(ONE)
    assert all_drains.may_remove(KEY, ONE) is False
    assert all_drains.judge(KEY, {ONE: IDLE}, 100) == [ONE]
    assert all_drains.may_remove(KEY, ONE) is True
    assert all_drains.next_s() is None
    assert all_drains.due(1000) == []


@pytest.mark.checklist(90)
@pytest.mark.parametrize("counts", [Connections(1, 0), Connections(0, 1)])
def test_a_real_server_with_active_or_closing_connections_is_kept(counts: Connections) -> None:
    all_drains = drains(ONE)
    assert all_drains.judge(KEY, {ONE: counts}, 100) == []
    assert all_drains.may_remove(KEY, ONE) is False
    assert [drain.connections for drain in all_drains] == [counts]


def test_a_drain_whose_real_server_is_gone_from_the_kernel_is_over() -> None:
    all_drains = drains(ONE)
    assert all_drains.judge(KEY, {}, 100) == [ONE]


def test_unreadable_counts_end_no_drain_and_are_due_again_later() -> None:
    all_drains = drains(ONE)
    assert all_drains.judge(KEY, None, 100) == []
    assert all_drains.may_remove(KEY, ONE) is False
    assert all_drains.due(100) == []
    assert all_drains.due(100 + SHORTEST_INTERVAL_S) == [KEY]


def test_counts_of_a_virtual_server_without_drains_mean_nothing() -> None:
    assert drains(ONE).judge(OTHER, {ONE: IDLE}, 100) == []


def test_old_drains_are_due_less_often_but_at_least_twice_a_minute() -> None:
    all_drains = drains(ONE)
    waits = []
    for age_s in (0, 40, 4000):
        all_drains.judge(KEY, {ONE: BUSY}, 100 + age_s)
        due_s = all_drains.next_s()
        assert due_s is not None
        waits.append(due_s - 100 - age_s)
    assert waits == [SHORTEST_INTERVAL_S, 10, LONGEST_INTERVAL_S]


def test_the_deadline_ends_a_drain_whatever_its_connections() -> None:
    all_drains = drains(ONE, deadline_s=60)
    all_drains.judge(KEY, {ONE: BUSY}, 159)
    assert all_drains.expire(159.9) == []
    assert all_drains.next_s() == 160
    assert all_drains.expire(160) == [KEY]
    assert all_drains.may_remove(KEY, ONE) is True
    assert all_drains.expire(161) == []


def test_without_a_deadline_a_drain_takes_as_long_as_it_takes() -> None:
    all_drains = drains(ONE)
    all_drains.judge(KEY, {ONE: BUSY}, 1e6)
    assert all_drains.expire(1e9) == []
    assert all_drains.may_remove(KEY, ONE) is False


def test_beginning_again_does_not_move_the_deadline() -> None:
    all_drains = drains(ONE, deadline_s=60)
    all_drains.begin(KEY, ONE, 150)
    assert all_drains.expire(160) == [KEY]


def test_ending_a_drain_that_never_began_is_no_error() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.end(OTHER, ONE)
    all_drains.end_all(OTHER)
    all_drains.end(KEY, ONE)
    all_drains.end(KEY, ONE)
    assert [(drain.virtual_server, drain.key) for drain in all_drains] == [(KEY, TWO)]
    all_drains.end(KEY, TWO)
    assert len(all_drains) == 0


def test_all_drains_end_with_their_virtual_server() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.begin(OTHER, ONE, 100)
    all_drains.end_all(KEY)
    assert [(drain.virtual_server, drain.key) for drain in all_drains] == [(OTHER, ONE)]


def test_only_drains_of_existing_real_servers_are_kept() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.keep_only(KEY, {TWO})
    all_drains.keep_only(OTHER, {TWO})
    assert [drain.key for drain in all_drains] == [TWO]


def test_drains_without_connections_wait_for_room_and_the_oldest_goes_first() -> None:
    all_drains = drains(ONE, TWO, THREE)
    assert all_drains.judge(KEY, {ONE: BUSY, TWO: IDLE}, 100, may_wait=10) == []
    all_drains.judge(KEY, {}, 101, may_wait=10)
    assert (all_drains.due(1000), len(all_drains)) == ([], 3), "there is nothing more to look at"
    assert all_drains.release(0) == []
    assert all_drains.next_s() is None
    assert all_drains.release(2) == [KEY, KEY]
    assert [all_drains.may_remove(KEY, one) for one in (ONE, TWO, THREE)] == [False, True, True]
    assert (all_drains.waiting, all_drains.over) == (1, 2)
    assert all_drains.release(9) == [KEY]
    all_drains.end_all(KEY)
    assert (all_drains.waiting, all_drains.over, len(all_drains)) == (0, 0, 0)


def test_no_more_drains_wait_than_may_wait() -> None:
    all_drains = drains(ONE, TWO, THREE)
    assert all_drains.judge(KEY, {ONE: IDLE, TWO: BUSY, THREE: IDLE}, 100, may_wait=1) == [THREE]
    assert all_drains.judge(KEY, {TWO: IDLE}, 101, may_wait=1) == [TWO], "those that wait already are counted"
    assert all_drains.release(9) == [KEY]


def test_a_drain_that_is_desired_again_or_loses_its_virtual_server_waits_no_more() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.begin(OTHER, ONE, 100)
    all_drains.judge(KEY, {}, 100, may_wait=10)
    all_drains.judge(OTHER, {}, 100, may_wait=10)
    all_drains.end(KEY, ONE)
    all_drains.end_all(OTHER)
    assert all_drains.release(9) == [KEY]
    assert all_drains.may_remove(KEY, TWO) is True


def waiting_unseen(*real_servers: RealServerKey, deadline_s: float = 0) -> Drains:
    all_drains = Drains(deadline_s)
    for real_server in real_servers:
        all_drains.begin(KEY, real_server, 100, may_wait=10)
    return all_drains


def test_a_drain_that_begins_without_room_is_not_due_before_ask() -> None:
    all_drains = waiting_unseen(ONE, TWO, THREE)
    assert (all_drains.due(1000), all_drains.next_s(), all_drains.waiting) == ([], None, 3)
    assert all_drains.release(9) == [], "it may have connections"
    assert all_drains.any_unread
    all_drains.ask(1, 200)
    assert (all_drains.due(200), all_drains.waiting) == ([KEY], 2)
    assert all_drains.judge(KEY, {ONE: BUSY, TWO: IDLE, THREE: BUSY}, 200, may_wait=10) == []
    assert [(drain.key, drain.connections, drain.waits) for drain in all_drains] == [
        (ONE, BUSY, False),
        (TWO, IDLE, True),
        (THREE, BUSY, False),
    ], "one answer tells of all"
    assert all_drains.next_s() == 200 + 0.25 * 100
    assert all_drains.release(9) == [KEY]
    assert all_drains.may_remove(KEY, TWO) is True
    all_drains.ask(9, 200)
    assert (all_drains.due(200), all_drains.any_unread) == ([], False), "all have been looked at"


def test_only_as_many_drains_begin_unread_as_may_wait() -> None:
    all_drains = Drains(0)
    assert all_drains.has_place(KEY, 1)
    all_drains.begin(KEY, ONE, 100, may_wait=1)
    assert not all_drains.has_place(KEY, 1)
    assert all_drains.due(100) == []
    all_drains.begin(KEY, TWO, 100, may_wait=1)
    assert all_drains.due(100) == [KEY]
    assert all_drains.judge(KEY, {}, 100, may_wait=1) == [TWO]
    assert (all_drains.waiting, all_drains.over) == (1, 1)


def test_unreadable_counts_leave_waiting_drains_as_they_are() -> None:
    all_drains = waiting_unseen(ONE, TWO)
    all_drains.ask(1, 200)
    assert all_drains.judge(KEY, None, 200, may_wait=10) == []
    assert (all_drains.due(200), all_drains.waiting) == ([], 1)
    assert all_drains.due(200 + 0.25 * 100) == [KEY]


def test_the_oldest_unread_drains_are_due_first_and_ended_ones_are_not() -> None:
    all_drains = waiting_unseen(ONE)
    all_drains.begin(OTHER, ONE, 101, may_wait=10)
    all_drains.begin(OTHER, TWO, 102, may_wait=10)
    all_drains.end(KEY, ONE)
    all_drains.ask(1, 200)
    assert all_drains.due(200) == [OTHER]
    assert all_drains.waiting == 1
    all_drains.end_all(OTHER)
    all_drains.ask(9, 200)
    assert (all_drains.due(200), all_drains.waiting, len(all_drains)) == ([], 0, 0)


def test_the_deadline_ends_the_waiting_of_unread_drains() -> None:
    all_drains = waiting_unseen(ONE, deadline_s=60)
    assert all_drains.expire(160) == [KEY]
    assert (all_drains.may_remove(KEY, ONE), all_drains.waiting) == (True, 0)
    all_drains.ask(9, 160)
    assert all_drains.due(160) == []


def test_the_deadline_ends_the_waiting_for_room() -> None:
    all_drains = drains(ONE, deadline_s=60)
    all_drains.judge(KEY, {ONE: IDLE}, 100, may_wait=10)
    assert all_drains.expire(160) == [KEY]
    assert all_drains.release(9) == []


def test_a_shorter_deadline_counts_for_drains_that_have_begun() -> None:
    all_drains = drains(ONE, deadline_s=600)
    all_drains.deadline_s = 50
    assert all_drains.next_s() == 100
    assert all_drains.due(100) == [KEY]
    assert all_drains.expire(150) == [KEY]


def test_a_due_drain_stays_due_until_its_counts_are_noted() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.begin(OTHER, ONE, 100)
    assert list(all_drains.due(100)) == list(all_drains.due(100)) == [KEY, OTHER]
    all_drains.judge(KEY, None, 100)
    assert all_drains.due(100) == [OTHER]


def test_the_oldest_is_the_one_that_has_kept_its_connections_longest() -> None:
    all_drains = drains(ONE, TWO)
    assert drains().oldest_age_s(500) == 0
    all_drains.begin(KEY, THREE, 130)
    assert all_drains.oldest_age_s(150) == 50
    all_drains.judge(KEY, {TWO: BUSY, THREE: BUSY}, 150, may_wait=10)
    all_drains.end(KEY, TWO)
    assert all_drains.oldest_age_s(160) == 30, "one waits for its removal, one has ended"


def test_ended_drains_do_not_pile_up() -> None:
    all_drains = drains(ONE, TWO)
    all_drains.judge(KEY, {ONE: BUSY}, 99, may_wait=10)
    for number in range(10_000):
        all_drains.begin(OTHER, TWO, 100 + number)
        all_drains.judge(OTHER, {}, 100 + number, may_wait=10)
        all_drains.end(OTHER, TWO)
        all_drains.begin(OTHER, THREE, 100 + number, may_wait=10)
        all_drains.end(OTHER, THREE)
    assert len(all_drains._idle) < 2_000 > len(all_drains._unread)
    assert len(all_drains._by_due) < 2_000 > len(all_drains._by_age)
    assert all_drains.due(100) == [KEY]


def outcome(verb: Verb, key: RealServerKey, weight: int = 0, error: str = "") -> Outcome:
    return Outcome(Operation(verb, RealServers.of(KEY, key, weight)), error)


def test_a_drain_that_has_just_begun_without_connections_is_removed() -> None:
    done = [outcome(Verb.ADD, THREE, 1), outcome(Verb.SET, ONE), outcome(Verb.SET, TWO)]
    assert removals_at_once(done, {KEY: {ONE: IDLE, TWO: IDLE, THREE: IDLE}}, 9) == [
        Operation(Verb.REMOVE, RealServers.of(KEY, ONE, 0)),
        Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0)),
    ]
    assert removals_at_once(done, {KEY: {ONE: BUSY}}, 9) == [Operation(Verb.REMOVE, RealServers.of(KEY, TWO, 0))], (
        "the other is gone already"
    )


def test_no_more_are_removed_than_there_is_room_for() -> None:
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
def test_no_other_real_server_is_removed_with_it(done: Outcome) -> None:
    assert removals_at_once([done], {KEY: {ONE: IDLE}}, 9) == []


@pytest.mark.parametrize("counts", [{}, {KEY: None}, {OTHER: {ONE: IDLE}}])
def test_no_real_server_with_unknown_connections_is_removed(
    counts: dict[VirtualServerKey, dict[RealServerKey, Connections] | None],
) -> None:
    assert removals_at_once([outcome(Verb.SET, ONE)], counts, 9) == []


def test_a_virtual_server_may_have_a_deadline_of_its_own() -> None:
    all_drains = Drains(1000)
    all_drains.set_deadline(KEY, 60)
    for key in (KEY, OTHER):
        all_drains.begin(key, ONE, 100)
        all_drains.judge(key, {ONE: BUSY}, 100)
    assert all_drains.expire(159) == []
    all_drains.judge(KEY, {ONE: BUSY}, 159)
    all_drains.judge(OTHER, {ONE: BUSY}, 159)
    assert all_drains.next_s() == 160
    assert all_drains.expire(160) == [KEY]
    assert all_drains.may_remove(KEY, ONE)
    assert all_drains.expire(1099) == []
    assert all_drains.expire(1100) == [OTHER]


def test_a_deadline_of_its_own_holds_for_drains_that_have_begun_and_ends_with_them() -> None:
    all_drains = drains(ONE, deadline_s=0)
    all_drains.judge(KEY, {ONE: BUSY}, 100)
    all_drains.set_deadline(KEY, 60)
    all_drains.set_deadline(KEY, 60)
    assert all_drains.expire(130) == []
    all_drains.set_deadline(KEY, 20)
    assert all_drains.oldest_age_s(130) == 30
    assert all_drains.expire(130) == [KEY]
    all_drains.begin(KEY, TWO, 130)
    all_drains.judge(KEY, {TWO: BUSY}, 130)
    all_drains.end(KEY, TWO)
    assert all_drains.next_s() is None
    assert all_drains.expire(1000) == []


def test_without_its_own_deadline_the_common_one_holds_from_the_begin_of_the_drain() -> None:
    all_drains = drains(deadline_s=100)
    all_drains.set_deadline(KEY, 3600)
    all_drains.begin(KEY, ONE, 100)
    all_drains.begin(OTHER, ONE, 110)
    for key in (KEY, OTHER):
        all_drains.judge(key, {ONE: BUSY}, 190)
    assert all_drains.expire(205) == []
    all_drains.set_deadline(KEY, None)
    assert all_drains.expire(205) == [KEY]
    assert all_drains.expire(210) == [OTHER]


def test_ended_drains_with_deadlines_of_their_own_do_not_pile_up() -> None:
    all_drains = drains()
    all_drains.set_deadline(KEY, 3600)
    for _ in range(3 * 1000):
        all_drains.begin(KEY, ONE, 100)
        all_drains.end(KEY, ONE)
    assert len(all_drains._by_end) < 1500


STREWN_S = (1, 2, 10, 3, 4, 11, 12)
"""The begins of drains. Without most of them, the two that are left are not in order on a heap as it was."""
LEFT_S = (3, 10)


@pytest.mark.parametrize("deadline_s", [None, 100])
def test_drains_stay_in_order_when_most_of_them_have_ended(monkeypatch: pytest.MonkeyPatch, deadline_s: float | None) -> None:
    monkeypatch.setattr(drain, "_ENDED_KEPT", 0)
    all_drains = drains()
    all_drains.set_deadline(KEY, deadline_s)
    by_begin = {since_s: builders.backend(f"10.244.0.{since_s}") for since_s in STREWN_S}
    for since_s, real_server in by_begin.items():
        all_drains.begin(KEY, real_server, since_s)
    for since_s in set(STREWN_S) - set(LEFT_S):
        all_drains.end(KEY, by_begin[since_s])
    all_drains.begin(OTHER, ONE, 20)
    assert all_drains.next_s() == 3
    if deadline_s:
        assert all_drains.expire(3 + deadline_s) == [KEY]
        assert all_drains.expire(10 + deadline_s) == [KEY]


def test_unread_drains_are_asked_for_although_most_of_them_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "_ENDED_KEPT", 0)
    all_drains = waiting_unseen(ONE, *(builders.backend(f"10.244.1.{number}") for number in range(9)))
    all_drains.keep_only(KEY, {ONE})
    all_drains.begin(OTHER, TWO, 101)
    assert len(all_drains._unread) == 1
    all_drains.judge(OTHER, {}, 101)
    all_drains.ask(1, 200)
    assert all_drains.due(200) == [KEY]


def test_the_oldest_is_none_that_has_ended_although_it_had_a_deadline_of_its_own() -> None:
    all_drains = Drains(0)
    all_drains.set_deadline(KEY, 600)
    for number, real_server in enumerate((ONE, TWO)):
        all_drains.begin(KEY, real_server, 100 + 30 * number)
    all_drains.end(KEY, ONE)
    assert all_drains.oldest_age_s(150) == 20


def test_the_common_deadline_does_not_end_drains_with_one_of_their_own_that_had_begun_before() -> None:
    all_drains = drains(ONE, deadline_s=60)
    all_drains.begin(OTHER, ONE, 100)
    all_drains.set_deadline(KEY, 600)
    assert all_drains.expire(160) == [OTHER]
    assert all_drains.expire(700) == [KEY]
