"""Covers how many real servers may be removed now, depending on recent additions and removals."""

import math

from ipvsproxy.reconcile.attempts import ADDED_S, FEWEST_KEPT, KEPT_S, MOST_KEPT, WALKED, Pace


def test_the_largest_number_of_removals_is_allowed_if_no_real_server_was_added_recently() -> None:
    assert Pace().room(5) == MOST_KEPT


def test_removed_real_servers_reduce_the_number_of_allowed_removals_until_the_kernel_frees_them() -> None:
    pace = Pace()
    pace.note(added=0, removed=4_000, now=100.9)
    pace.note(added=0, removed=1_000, now=101.5)
    assert pace.room(102) == MOST_KEPT - 5_000
    assert pace.room(100 + KEPT_S) == MOST_KEPT - 1_000
    assert pace.room(101 + KEPT_S) == MOST_KEPT


def test_the_number_of_allowed_removals_is_never_negative() -> None:
    pace = Pace()
    pace.note(added=0, removed=2 * MOST_KEPT, now=100)
    assert pace.room(101) == 0


def test_the_more_real_servers_are_added_the_fewer_removals_are_allowed() -> None:
    pace = Pace()
    for tenth in range(4):
        pace.note(added=100, removed=0, now=100 + tenth / 10)
    assert pace.room(100.5) == WALKED / 400
    pace.note(added=400, removed=0, now=105)
    assert pace.room(105) == WALKED / 800
    pace.note(added=98_000, removed=0, now=106)
    assert pace.room(106) == FEWEST_KEPT
    assert pace.room(105 + ADDED_S) == FEWEST_KEPT
    assert pace.room(106 + ADDED_S) == MOST_KEPT


def test_a_few_additions_do_not_reduce_the_number_of_allowed_removals() -> None:
    pace = Pace()
    pace.note(added=1, removed=0, now=100)
    assert pace.room(100) == MOST_KEPT


def test_changes_s_is_the_earliest_time_at_which_more_removals_may_be_allowed() -> None:
    pace = Pace()
    assert pace.changes_s == math.inf
    pace.note(added=0, removed=5, now=100.5)
    pace.note(added=0, removed=5, now=150)
    assert pace.changes_s == 100 + KEPT_S
    pace.note(added=5, removed=0, now=160)
    assert pace.changes_s == 160 + ADDED_S
    pace.room(160 + ADDED_S)
    assert pace.changes_s == 100 + KEPT_S
