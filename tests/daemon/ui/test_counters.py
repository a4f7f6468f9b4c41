"""Covers the limit on the number of viewers, and the rates of Services, which are computed from the kernel's counters."""

from collections.abc import Mapping

import pytest

from ipvsproxy.daemon.ui.counters import IDLE_S, MOST_VIEWERS, REMEMBERED, VIEWER_S, Rates, ServiceRates, Viewers
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.steps import ITEMS_AT_ONCE
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
        counters = {key: _counted(connections) for key, connections in counted.items()}
        list(self.rates.taking(counters, self.now, desired))


def test_rates_are_known_after_the_counters_were_read_twice() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1000})
    assert scene.rates.of(WEB) is None
    assert scene.rates.interval_s is None
    scene.read({CLUSTER: 1020})
    assert scene.rates.of(WEB) == Rates(10, 50, 10_000)
    assert scene.rates.of(CART) == Rates()
    assert scene.rates.interval_s == 2


def test_the_rate_of_a_service_includes_all_of_its_virtual_servers() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1, NODE_PORT: 1})
    scene.read({CLUSTER: 5, NODE_PORT: 7})
    assert scene.rates.of(WEB) == Rates(5, 25, 5000)


def test_the_shown_rate_is_the_mean_of_the_last_two_rates() -> None:
    scene = Scene()
    for connections in (100, 100, 140):  # as if the kernel had updated its counters late
        scene.read({CLUSTER: connections})
    shown = scene.rates.of(WEB)
    assert shown is not None
    assert shown.connections == 10
    assert scene.rates.line(WEB) == ([0.0, 20.0], [0.0, 20_000.0])


@pytest.mark.parametrize(("before", "now", "rate"), [(1000, 6, 3.0), (0, 4, 2.0)], ids=["reset", "zero before"])
def test_the_rate_of_a_virtual_server_is_counted_from_zero_after_its_counters_were_reset(
    before: int, now: int, rate: float
) -> None:
    scene = Scene()
    scene.read({CLUSTER: before} if before else {})
    scene.read({CLUSTER: now})
    assert scene.rates.line(WEB)[0] == [rate]


def test_virtual_servers_that_belong_to_no_service_are_not_counted() -> None:
    scene = Scene()
    for connections in (1, 9):
        scene.read({CLUSTER: connections}, {})
    assert scene.rates.line(WEB) == ([], [])


def test_the_counts_of_a_removed_virtual_server_are_forgotten_and_do_not_affect_later_rates() -> None:
    scene = Scene()
    scene.read({CLUSTER: 100, OTHER: 1})
    scene.read({CLUSTER: 102, OTHER: 1})
    scene.read({OTHER: 3}, {OTHER: DESIRED[OTHER]})
    scene.read({CLUSTER: 200, OTHER: 3})
    assert scene.rates.line(WEB)[0] == [1.0, 0.0, 100.0]


def test_a_service_without_traffic_uses_no_memory_after_a_while() -> None:
    scene = Scene()
    scene.read({CLUSTER: 1})
    scene.read({CLUSTER: 2})
    for _ in range(REMEMBERED - 1):
        scene.read({CLUSTER: 2})
    assert len(scene.rates.line(WEB)[0]) == REMEMBERED
    scene.read({CLUSTER: 2})
    assert scene.rates.line(WEB) == ([], [])


def test_other_tasks_run_while_the_counters_of_many_virtual_servers_are_processed() -> None:
    keys = [builders.frontend(f"10.97.{number // 250}.{number % 250}", 80) for number in range(1000)]
    desired = {
        key: VirtualServer(key, VirtualServerSettings("rr"), owner=Owner(1, ServiceName("load", str(number))))
        for number, key in enumerate(keys)
    }
    figures = ServiceRates()
    # the third reading also goes through the histories that the second reading created
    for count, passes in ((1, 1), (2, 1), (3, 2)):
        pauses = len(list(figures.taking(dict.fromkeys(keys, _counted(count)), count, desired)))
        assert pauses == passes * 1000 / ITEMS_AT_ONCE


def test_a_viewer_beyond_the_limit_is_refused_until_an_earlier_viewer_has_left() -> None:
    viewers = Viewers()
    for number in range(MOST_VIEWERS):
        assert viewers.admit(str(number), number / 100)
    assert not viewers.admit("late", 1)
    assert viewers.admit("3", 1)
    assert viewers.admit("late", VIEWER_S)


def test_the_page_counts_as_viewed_only_for_some_time_after_the_last_request() -> None:
    viewers = Viewers()
    assert not viewers.have_looked(0)
    viewers.admit("", 5)
    assert viewers.have_looked(4.5 + IDLE_S)
    assert not viewers.have_looked(5 + IDLE_S)
