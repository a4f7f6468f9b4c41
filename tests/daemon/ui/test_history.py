"""Covers the ring of the last quarter of an hour."""

from ipvsproxy.daemon.ui.history import LENGTH_S, POINTS, History, Point
from ipvsproxy.model.virtual_servers import Counters

BEGAN_S = 1_700_000_000.0


def _add(history: History, now: float, connections: int | None) -> None:
    counted = (
        None if connections is None else Counters(connections, 2 * connections, 3 * connections, 4 * connections, 5 * connections)
    )
    history.add(counted, now, BEGAN_S + now)


def test_the_first_point_knows_no_rates() -> None:
    history = History()
    assert history.last is None
    _add(history, 0, 7)
    assert history.last == Point(BEGAN_S, None, None, None, None, None, 0, None)


def test_a_point_has_the_rates_since_the_one_before() -> None:
    history = History()
    _add(history, 0, 0)
    _add(history, 30, 60)
    assert history.last == Point(BEGAN_S + 30, 2, 4, 6, 8, 10, 0, None)


def test_short_intervals_are_taken_together() -> None:
    history = History()
    for now, connections in ((0, 0), (2, 0), (4, 40)):  # the kernel has added up late
        _add(history, now, connections)
    assert history.last is not None
    assert history.last.connections == 10


def test_counters_that_were_set_to_zero_count_from_there() -> None:
    history = History()
    _add(history, 0, 1000)
    _add(history, 10, 20)
    assert history.last is not None
    assert history.last.connections == 2


def test_unreadable_counters_leave_a_gap() -> None:
    history = History()
    for now, connections in ((0, 0), (10, 10), (20, None), (30, 30)):
        _add(history, now, connections)
    assert [point.connections for point in history.since(0)] == [None, 1, None, None]


def test_changes_belong_to_the_next_point_with_the_longest_latency() -> None:
    history = History()
    history.note_changes(2, 0.5)
    history.note_changes(1, 0.2)
    history.note_changes(0, 9.0)
    _add(history, 0, 0)
    _add(history, 10, 0)
    assert [(point.changes, point.latency_s) for point in history.since(0)] == [(3, 0.5), (0, None)]


def test_the_ring_is_bounded_in_time_and_number() -> None:
    history = History()
    for number in range(2 * POINTS):
        _add(history, number * 2.0, number)
    kept = list(history.since(0))
    assert len(kept) == POINTS
    _add(history, 4 * POINTS + LENGTH_S, 0)
    assert len(list(history.since(0))) == 1


def test_only_later_points_are_told() -> None:
    history = History()
    for now in (0, 2, 4):
        _add(history, now, 0)
    assert [point.at_s - BEGAN_S for point in history.since(BEGAN_S)] == [2, 4]


def test_points_are_as_old_as_they_are_after_the_clock_was_set_back() -> None:
    history = History()
    for now in (0.0, 10.0, 20.0):
        _add(history, now, 0)
    history.add(Counters(0, 0, 0, 0, 0), 30.0, BEGAN_S - 3570)
    assert [point.at_s - BEGAN_S for point in history.since(0)] == [-3600, -3590, -3580, -3570]
    history.add(Counters(0, 0, 0, 0, 0), 40.0, BEGAN_S - 3560)
    assert [point.at_s - BEGAN_S for point in history.since(BEGAN_S - 3580)] == [-3570, -3560]


def test_points_are_forgotten_when_the_clock_was_set_far_ahead() -> None:
    history = History()
    _add(history, 0, 0)
    history.add(Counters(5, 5, 5, 5, 5), 5.0, BEGAN_S + 1e6)
    assert [(point.at_s, point.connections) for point in history.since(0)] == [(BEGAN_S + 1e6, 1.0)]
