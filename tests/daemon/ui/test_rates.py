"""Covers rates of Services from readings of the kernel's counters."""

from collections.abc import Mapping

import pytest

from ipvsproxy.daemon.ui import rates
from ipvsproxy.daemon.ui.rates import LENGTH_S, NO_RATES, POINTS, REMEMBERED, History, Point, Rates, ServiceRates
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.virtual_servers import Counters, VirtualServer, VirtualServerKey, VirtualServerSettings
from tests.support import builders

WEB, CART = ServiceName("shop", "web"), ServiceName("shop", "cart")
CLUSTER, NODE_PORT = builders.frontend("10.96.0.80", 80), builders.frontend("192.168.0.10", 30080)
OTHER = builders.frontend("10.96.0.81", 80)
DESIRED = {
    key: VirtualServer(key, VirtualServerSettings("rr"), owner=Owner(1, name))
    for key, name in ((CLUSTER, WEB), (NODE_PORT, WEB), (OTHER, CART))
}


def _counted(connections: int) -> Counters:
    return Counters(connections, connections * 3, connections * 2, connections * 100, connections * 900)


class Scene:
    """A node whose counters are read every two seconds."""

    def __init__(self) -> None:
        self.rates = ServiceRates()
        self.now = 0.0

    def read(self, counted: Mapping[VirtualServerKey, int], desired: Mapping[VirtualServerKey, VirtualServer] = DESIRED) -> None:
        self.now += 2
        self.rates.begin(self.now)
        for key, connections in counted.items():
            list(self.rates.take({key: _counted(connections)}, desired))
        list(self.rates.finish(desired))


def test_rates_are_known_after_two_readings() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1000})
    assert scene.rates.of(WEB) is None
    assert scene.rates.interval_s is None
    scene.read({CLUSTER: 1020})
    assert scene.rates.of(WEB) == Rates(10, 50, 10_000)
    assert scene.rates.of(CART) == NO_RATES
    assert scene.rates.interval_s == 2


def test_a_service_counts_all_of_its_virtual_servers() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1, NODE_PORT: 1})
    scene.read({CLUSTER: 5, NODE_PORT: 7})
    assert scene.rates.of(WEB) == Rates(5, 25, 5000)


def test_the_shown_rate_is_the_mean_of_the_last_two() -> None:
    scene = Scene()
    for connections in (100, 100, 140):  # the kernel has added up late
        scene.read({CLUSTER: connections})
    shown = scene.rates.of(WEB)
    assert shown is not None
    assert shown.connections == 10
    assert scene.rates.line(WEB) == ([0.0, 20.0], [0.0, 20_000.0])


def test_a_counter_reset_counts_from_zero() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1000})
    scene.read({CLUSTER: 6})
    assert scene.rates.line(WEB)[0] == [3.0]


def test_a_virtual_server_that_was_at_zero_counts_from_there() -> None:
    scene = Scene()
    scene.read({})
    scene.read({CLUSTER: 4})
    assert scene.rates.line(WEB)[0] == [2.0]


def test_virtual_servers_of_nobody_do_not_count() -> None:
    scene = Scene()
    for connections in (1, 9):
        scene.read({CLUSTER: connections}, {})
    assert scene.rates.line(WEB) == ([], [])


def test_a_virtual_server_that_is_gone_is_forgotten_and_begins_anew() -> None:
    scene = Scene()
    scene.read({CLUSTER: 100, OTHER: 1})
    scene.read({CLUSTER: 102, OTHER: 1})
    scene.read({OTHER: 3}, {OTHER: DESIRED[OTHER]})
    scene.read({CLUSTER: 200, OTHER: 3})
    assert scene.rates.line(WEB)[0] == [1.0, 0.0, 100.0]


def test_a_service_without_traffic_takes_no_memory_after_a_while() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1})
    scene.read({CLUSTER: 2})
    for _ in range(REMEMBERED - 1):
        scene.read({CLUSTER: 2})
    assert len(scene.rates.line(WEB)[0]) == REMEMBERED
    scene.read({CLUSTER: 2})
    assert scene.rates.line(WEB) == ([], [])


def test_an_unfinished_reading_counts_for_the_next_one() -> None:
    scene = Scene()
    scene.read({CLUSTER: 0})
    scene.now += 2
    scene.rates.begin(scene.now)
    list(scene.rates.take({CLUSTER: _counted(6)}, DESIRED))  # and then the kernel failed
    scene.read({CLUSTER: 8})
    assert scene.rates.line(WEB)[0] == [2.0]
    assert scene.rates.interval_s == 4


def test_all_can_be_forgotten() -> None:
    scene = Scene()
    for connections in (1, 2):
        scene.read({CLUSTER: connections})
    scene.rates.clear()
    assert scene.rates.of(WEB) is None


def test_services_are_ranked_by_what_is_shown() -> None:
    scene = Scene()
    for connections in (0, 4, 6):
        scene.read({CLUSTER: connections, OTHER: 3 * connections})
    for index, figure in enumerate(Rates._fields):
        rank = scene.rates.ranking(index)
        web, cart = scene.rates.of(WEB), scene.rates.of(CART)
        assert web is not None
        assert cart is not None
        assert rank(WEB) / rank(CART) == pytest.approx(getattr(web, figure) / getattr(cart, figure))


def test_work_on_many_virtual_servers_pauses() -> None:
    keys = [builders.frontend(f"10.97.{number // 250}.{number % 250}", 80) for number in range(1000)]
    desired = {
        key: VirtualServer(key, VirtualServerSettings("rr"), owner=Owner(1, ServiceName("load", str(number))))
        for number, key in enumerate(keys)
    }
    figures = ServiceRates()
    for count in (1, 2):
        figures.begin(count)
        assert len(list(figures.take(dict.fromkeys(keys, _counted(count)), desired))) == 1000 / rates.ROWS_AT_ONCE
        pauses = len(list(figures.finish(desired)))
    assert pauses == 1000 / rates.ROWS_AT_ONCE


def test_rates_of_one_object() -> None:
    assert rates.between(_counted(1), _counted(3), 2) == Rates(1, 5, 1000)
    assert rates.between(None, _counted(3), 3) == Rates(1, 5, 1000)


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
