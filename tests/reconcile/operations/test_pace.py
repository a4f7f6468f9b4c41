"""How many real servers may be removed after recent additions and removals."""

import math

from ipvsproxy.reconcile.operations.pace import FEWEST_KEPT, KEPT_S, MOST_KEPT, RATE_WINDOW_S, SURGE_S, WALKED_PER_S, Pace


def test_without_additions_there_is_room_for_many() -> None:
    assert Pace().room(5) == MOST_KEPT


def test_removed_real_servers_take_room_until_the_kernel_has_forgotten_them() -> None:
    pace = Pace()
    pace.note(added=0, removed=4_000, now=100.9)
    pace.note(added=0, removed=1_000, now=101.5)
    assert pace.room(102) == MOST_KEPT - 5_000
    assert pace.room(100 + KEPT_S) == MOST_KEPT - 1_000
    assert pace.room(101 + KEPT_S) == MOST_KEPT


def test_more_removals_than_there_was_room_for_leave_none() -> None:
    pace = Pace()
    pace.note(added=0, removed=2 * MOST_KEPT, now=100)
    assert pace.room(101) == 0


def test_the_more_is_added_the_shorter_the_list_must_be() -> None:
    pace = Pace()
    pace.note(added=400, removed=0, now=100)
    assert pace.room(100) == WALKED_PER_S / 400
    for second in range(101, 104):
        pace.note(added=400, removed=0, now=second)
    assert pace.room(103) == WALKED_PER_S / 400
    pace.note(added=98_000, removed=0, now=104)
    assert pace.room(104) == FEWEST_KEPT
    assert pace.room(104 + RATE_WINDOW_S) == MOST_KEPT


def test_a_surge_counts_at_once_and_is_less_when_it_is_over() -> None:
    pace = Pace()
    pace.note(added=100, removed=0, now=99)
    pace.note(added=2_000, removed=0, now=100)
    assert pace.room(100) == pace.room(99 + SURGE_S) == FEWEST_KEPT, "whatever came before and after it"
    assert pace.room(100 + SURGE_S) == int(WALKED_PER_S * RATE_WINDOW_S / 2_100)


def test_additions_within_one_second_are_added_up() -> None:
    pace = Pace()
    for tenth in range(4):
        pace.note(added=100, removed=0, now=100 + tenth / 10)
    assert pace.room(100.5) == WALKED_PER_S / 400


def test_the_time_at_which_room_grows_is_known() -> None:
    pace = Pace()
    assert pace.changes_s(99) == math.inf
    pace.note(added=0, removed=5, now=100.5)
    pace.note(added=0, removed=5, now=150)
    assert pace.changes_s(150) == 100 + KEPT_S
    pace.note(added=5, removed=0, now=160)
    assert pace.changes_s(160 + SURGE_S) == 160 + RATE_WINDOW_S


def test_room_grows_at_the_known_time_when_a_surge_is_over() -> None:
    """Otherwise, additions in one burst after the other would only be checked during the next surge."""
    pace = Pace()
    pace.note(added=500, removed=0, now=100.5)
    pace.note(added=500, removed=0, now=109.5)
    assert pace.changes_s(109.5) == 100 + RATE_WINDOW_S
    assert pace.changes_s(110) == 109 + SURGE_S
    assert pace.room(109 + SURGE_S) > pace.room(109.9 + SURGE_S - 1)
    assert pace.changes_s(109 + SURGE_S) == 109 + RATE_WINDOW_S


def test_additions_that_are_as_many_each_second_are_no_surge() -> None:
    pace = Pace()
    for second in range(100, 111):
        pace.note(added=500, removed=0, now=second)
    assert pace.changes_s(110) == 101 + RATE_WINDOW_S


def test_few_additions_leave_as_much_room_as_none() -> None:
    pace = Pace()
    pace.note(added=1, removed=0, now=100)
    assert pace.room(100) == MOST_KEPT
