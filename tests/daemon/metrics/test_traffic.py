"""Covers the kernel's counters by Service port: their sums and labels, and how long a scrape waits for them.

``tests/kernel/ipvs/test_ipvs_driver.py`` covers the counters of a real kernel, and ``test_scrape_cost`` covers the cost of a
scrape.
"""

import concurrent.futures
import errno
import itertools
import threading
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics.figures import Sampler, Sources
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.daemon.metrics.traffic import CountedObject, Ledger, Traffic
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.rows import EndpointTraffic, TrafficReader
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Service, ServiceType
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.model.virtual_servers import ConnectionCounts, Counters, VirtualServerKey
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders, http_client
from tests.support.draining import show_draining
from tests.support.memory_node import InlineExecutor, put
from tests.support.summaries import Clock

CLUSTER = builders.frontend("10.96.0.10", 80)
EXTERNAL = builders.frontend("192.0.2.10", 80)
NODE_PORT = builders.frontend(builders.NODE_ADDRESS, 30080)
POD = builders.backend("10.244.0.5")
WEB = builders.service(
    "web",
    builders.service_port(80, name="http", node_port=30080),
    kind=ServiceType.NODE_PORT,
    cluster=["10.96.0.10"],
    external=["192.0.2.10"],
)
HTTP = 'namespace="default",service="web",port="http",protocol="TCP"'


class Ipvs(TrafficReader):
    """A simulated kernel that has counters, and that records how often the counters are read."""

    def __init__(self) -> None:
        self.counters: dict[VirtualServerKey, Counters] = {}
        self.of_endpoints: dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]] = {}
        self.error: KernelError | None = None
        self.readings = 0
        self.read_endpoints: list[VirtualServerKey] = []

    def totals(self) -> Counters:
        raise AssertionError("a scrape does not ask for the totals")

    def services(self, always: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        """The counters of the virtual servers, in two parts."""
        self.readings += 1
        if self.error:
            raise self.error
        counters = {key: counted for key, counted in self.counters.items() if any(counted) or key in always}
        yield dict(itertools.islice(counters.items(), 1))
        yield dict(itertools.islice(counters.items(), 1, None))

    def endpoints(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]]:
        self.read_endpoints += keys
        return {key: self.of_endpoints.get(key, {}) for key in keys}


class Scene:
    """A node whose metrics are scraped every ten seconds."""

    def __init__(
        self,
        *services: Service,
        limit: int = 100,
        of_endpoints: bool = False,
        executor: concurrent.futures.Executor | None = None,
    ) -> None:
        self.clock = Clock()
        self.kernel = Ipvs()
        self.store = Store(started_s=0)
        self.reconciler = Reconciler(Policy())
        status = Status(families=tuple(Family), sync_period_s=30, clock=self.clock, wall_clock=self.clock)
        self.sources = Sources(survey=self.reconciler.survey, store=self.store, status=status)
        sampler = Sampler(KernelThread(executor or InlineExecutor(), self.kernel), self.clock)
        self.traffic = Traffic(sampler, self.sources, limit=limit, of_endpoints=of_endpoints)
        for service in services:
            self.put(service)

    def put(self, service: Service) -> None:
        self.store.deliver([put(service)], 0)
        at_once(self.reconciler.putting(service.name, builders.translate(service, (), builders.node_view(), Settings())))

    async def scrape(self, counters: Mapping[VirtualServerKey, Counters] | None = None) -> Mapping[str, int]:
        """Scrapes and returns the samples; ``counters``, unless None, first replace the kernel's counters."""
        self.kernel.counters = self.kernel.counters if counters is None else dict(counters)
        self.clock.now += 10
        await self.traffic.refresh()
        lines = b"".join(self.traffic.render(openmetrics=False)).decode().splitlines()
        samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: int(value) for name, _, value in samples}


async def test_the_counters_of_all_virtual_servers_of_a_service_port_are_added_up() -> None:
    scene = Scene(WEB)
    scene.kernel.counters = {
        CLUSTER: Counters(1, 10, 9, 1000, 900),
        EXTERNAL: Counters(2, 20, 18, 2000, 1800),
        NODE_PORT: Counters(4, 40, 36, 4000, 3600),
    }
    samples = await scene.scrape()
    assert {name: value for name, value in samples.items() if name.startswith("ipvsproxy_service")} == {
        f"ipvsproxy_service_connections_total{{{HTTP}}}": 7,
        f'ipvsproxy_service_packets_total{{{HTTP},direction="in"}}': 70,
        f'ipvsproxy_service_packets_total{{{HTTP},direction="out"}}': 63,
        f'ipvsproxy_service_bytes_total{{{HTTP},direction="in"}}': 7000,
        f'ipvsproxy_service_bytes_total{{{HTTP},direction="out"}}': 6300,
    }


async def test_ports_without_traffic_and_virtual_servers_of_other_programs_have_no_series() -> None:
    scene = Scene(WEB)
    samples = await scene.scrape({CLUSTER: Counters(), builders.frontend("192.0.2.99", 443): Counters(5, 5, 5, 5, 5)})
    assert not [name for name in samples if name.startswith("ipvsproxy_service")]


async def test_a_node_port_is_not_mixed_up_with_a_service_port_of_the_same_number() -> None:
    ports = [builders.service_port(80, name="http", node_port=8443), builders.service_port(8443, name="https", node_port=30443)]
    scene = Scene(builders.service("web", *ports, kind=ServiceType.NODE_PORT, cluster=["10.96.0.10"]))
    scene.kernel.counters = {
        builders.frontend(builders.NODE_ADDRESS, 8443): Counters(1),
        builders.frontend("10.96.0.10", 8443): Counters(2),
    }
    samples = await scene.scrape()
    assert samples[f"ipvsproxy_service_connections_total{{{HTTP}}}"] == 1
    assert samples[f"ipvsproxy_service_connections_total{{{HTTP.replace('http', 'https')}}}"] == 2


async def test_a_total_does_not_fall_when_a_virtual_server_is_removed_or_its_counters_are_reset() -> None:
    scene = Scene(WEB)
    total = f"ipvsproxy_service_connections_total{{{HTTP}}}"
    assert (await scene.scrape({CLUSTER: Counters(100), EXTERNAL: Counters(50)}))[total] == 150
    assert (await scene.scrape({CLUSTER: Counters(101)}))[total] == 151
    assert (await scene.scrape({CLUSTER: Counters(3), EXTERNAL: Counters(2)}))[total] == 156


async def test_a_service_port_with_a_new_name_gets_a_new_series() -> None:
    scene = Scene(WEB)
    await scene.scrape({CLUSTER: Counters(1)})
    scene.put(builders.service("web", builders.service_port(80, name="plain"), cluster=["10.96.0.10"]))
    samples = await scene.scrape({CLUSTER: Counters(4)})
    assert samples[f"ipvsproxy_service_connections_total{{{HTTP.replace('http', 'plain')}}}"] == 3


async def test_ports_beyond_the_limit_share_one_series_and_a_metric_has_the_number_of_these_ports() -> None:
    addresses = [f"10.96.0.{number}" for number in range(1, 6)]
    scene = Scene(*(builders.service(f"s{address[8:]}", cluster=[address]) for address in addresses), limit=2)
    samples = await scene.scrape({builders.frontend(address, 80): Counters(10) for address in addresses})
    together = 'namespace="(others)",service="(others)",port="",protocol=""'
    assert samples[f"ipvsproxy_service_connections_total{{{together}}}"] == 30
    assert samples['ipvsproxy_traffic_listed{kind="service"}'] == 2
    assert samples['ipvsproxy_traffic_unlisted{kind="service"}'] == 3
    # The next port with traffic gets the series that has become free. The total of ``(others)``, which the ports without a series
    # share, does not change.
    at_once(scene.reconciler.putting(builders.service("s1").name, None))
    scene.kernel.counters[builders.frontend("10.96.0.5", 80)] = Counters(11)
    samples = await scene.scrape()
    own = 'namespace="default",service="s5",port="",protocol="TCP"'
    assert samples[f"ipvsproxy_service_connections_total{{{own}}}"] == 1
    assert not any('service="s1"' in name for name in samples)
    assert samples[f"ipvsproxy_service_connections_total{{{together}}}"] == 30
    assert samples['ipvsproxy_traffic_unlisted{kind="service"}'] == 2


async def test_no_counters_are_read_and_no_series_are_shown_if_the_limit_is_zero() -> None:
    scene = Scene(WEB, limit=0)
    assert not await scene.scrape({CLUSTER: Counters(1)})
    assert scene.kernel.readings == 0


async def test_counters_that_cannot_be_read_keep_their_last_values() -> None:
    scene = Scene(WEB)
    await scene.scrape({CLUSTER: Counters(8)})
    scene.kernel.error = KernelError(action="read the counters", errno=errno.EIO)
    assert (await scene.scrape())[f"ipvsproxy_service_connections_total{{{HTTP}}}"] == 8


async def test_a_service_port_keeps_its_connections_total_when_one_of_its_virtual_servers_is_removed() -> None:
    scene = Scene(WEB)
    await scene.scrape({CLUSTER: Counters(), EXTERNAL: Counters(7)})
    del scene.kernel.counters[EXTERNAL]
    scene.put(builders.service("web", *WEB.ports, kind=ServiceType.NODE_PORT, cluster=["10.96.0.10"]))
    assert (await scene.scrape())[f"ipvsproxy_service_connections_total{{{HTTP}}}"] == 7


async def test_traffic_is_not_counted_twice_after_counting_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipvsproxy.model.steps.ITEMS_AT_ONCE", 1)
    services = [builders.service(f"s{number}", cluster=[f"10.96.0.{number}"]) for number in range(1, 6)]
    scene = Scene(*services)
    keys = [builders.frontend(f"10.96.0.{number}", 80) for number in range(1, 6)]
    await scene.scrape(dict.fromkeys(keys, Counters(7)))
    scene.kernel.counters = dict.fromkeys(keys, Counters(9))
    ledger = scene.traffic._services
    rows = [(key, labels, Counters(9)) for key, (_, labels) in scene.traffic._labels.items()]
    for pauses in range(2 * len(rows)):
        for _ in itertools.islice(ledger.booking(rows), pauses):
            pass
    samples = await scene.scrape()
    assert {value for name, value in samples.items() if name.startswith("ipvsproxy_service_connections_total")} == {9}


async def test_ports_without_traffic_use_no_memory() -> None:
    addresses = [f"10.96.{number // 256}.{number % 256}" for number in range(1000)]
    scene = Scene(*(builders.service(f"service-{number}", cluster=[one]) for number, one in enumerate(addresses)))
    await scene.scrape({builders.frontend(one, 80): Counters(int(number == 3)) for number, one in enumerate(addresses)})
    assert len(scene.traffic._labels) == len(scene.traffic._services._last) == 1


async def test_while_the_kernel_thread_is_busy_a_scrape_shows_the_previous_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = concurrent.futures.ThreadPoolExecutor(1)
    scene = Scene(WEB, executor=executor)
    total = f"ipvsproxy_service_connections_total{{{HTTP}}}"
    await scene.scrape({CLUSTER: Counters(8)})
    scene.kernel.counters = {CLUSTER: Counters(9)}
    programmed = threading.Event()
    executor.submit(programmed.wait)
    try:
        with monkeypatch.context() as patched:
            patched.setattr("ipvsproxy.daemon.metrics.traffic.LONGEST_READING_S", 0.02)
            samples = await scene.scrape()
    finally:
        programmed.set()
    assert samples[total] == 8
    assert (await scene.scrape())[total] == 9
    assert scene.kernel.readings == 2, "a reading without a waiting scrape is dropped"


async def test_draining_endpoints_are_shown_with_their_connections() -> None:
    scene = Scene(WEB)
    for key in (CLUSTER, EXTERNAL):
        show_draining(scene.reconciler, key, POD)
        list(scene.reconciler.noting_connections({key: {POD: ConnectionCounts(3, 1)}}, 1))
    samples = await scene.scrape()
    endpoint = f'{HTTP},endpoint="10.244.0.5:8080"'
    assert samples[f'ipvsproxy_endpoint_open_connections{{{endpoint},state="active"}}'] == 6
    assert samples[f'ipvsproxy_endpoint_open_connections{{{endpoint},state="inactive"}}'] == 2
    assert not any(name.startswith("ipvsproxy_endpoint_bytes") for name in samples)
    assert not scene.kernel.read_endpoints


def test_a_draining_endpoint_is_not_shown_if_it_is_removed_while_connections_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ipvsproxy.model.steps.ITEMS_AT_ONCE", 1)
    scene, waiting = Scene(WEB), builders.backend("10.244.0.6")
    show_draining(scene.reconciler, CLUSTER, POD, waiting)
    list(scene.reconciler.noting_connections({CLUSTER: {POD: ConnectionCounts(3, 1), waiting: ConnectionCounts(0, 0)}}, 1))
    assert scene.reconciler.survey.statistics(1).waiting_removals == 1
    connections: dict[str, ConnectionCounts] = {}
    for _ in scene.traffic._adding_drains(connections):
        show_draining(scene.reconciler, CLUSTER, POD)
    assert connections == {f'{HTTP},endpoint="10.244.0.5:8080"': ConnectionCounts(3, 1)}


async def test_metrics_can_show_the_totals_of_each_endpoint() -> None:
    scene = Scene(WEB, of_endpoints=True)
    scene.kernel.counters = {CLUSTER: Counters(3), EXTERNAL: Counters()}
    scene.kernel.of_endpoints = {CLUSTER: {POD: EndpointTraffic(ConnectionCounts(2, 1), Counters(3, 30, 29, 300, 290))}}
    samples = await scene.scrape()
    endpoint = f'{HTTP},endpoint="10.244.0.5:8080"'
    assert samples[f"ipvsproxy_endpoint_connections_total{{{endpoint}}}"] == 3
    assert samples[f'ipvsproxy_endpoint_bytes_total{{{endpoint},direction="out"}}'] == 290
    assert samples[f'ipvsproxy_endpoint_open_connections{{{endpoint},state="active"}}'] == 2
    assert scene.kernel.read_endpoints == [CLUSTER], "endpoints of a virtual server without traffic are not read"


async def test_endpoints_are_not_counted_twice_if_their_virtual_server_was_absent_from_one_read() -> None:
    scene = Scene(WEB, of_endpoints=True)
    whole = {CLUSTER: Counters(100), EXTERNAL: Counters(50)}
    scene.kernel.of_endpoints = {key: {POD: EndpointTraffic(ConnectionCounts(2, 1), counted)} for key, counted in whole.items()}
    endpoint = f'{HTTP},endpoint="10.244.0.5:8080"'
    for counters in (whole, {CLUSTER: whole[CLUSTER]}, {}, whole):
        scene.kernel.counters = counters
        samples = await scene.scrape()
        assert samples[f"ipvsproxy_service_connections_total{{{HTTP}}}"] == 150
        assert samples[f"ipvsproxy_endpoint_connections_total{{{endpoint}}}"] == 150
        assert samples[f'ipvsproxy_endpoint_open_connections{{{endpoint},state="active"}}'] == 4


async def test_traffic_is_counted_once_even_if_its_virtual_server_is_undesired_for_a_while() -> None:
    """An undesired virtual server may stay in the kernel.

    It stays, for example, if its address is in an excluded range, or while its owner changes.
    """
    scene = Scene(WEB, of_endpoints=True)
    scene.kernel.counters = {CLUSTER: Counters(100), EXTERNAL: Counters(50)}
    scene.kernel.of_endpoints = {
        key: {POD: EndpointTraffic(ConnectionCounts(1, 0), counted)} for key, counted in scene.kernel.counters.items()
    }
    inside = builders.service("web", *WEB.ports, kind=ServiceType.NODE_PORT, cluster=["10.96.0.10"])
    for service in (WEB, inside, WEB):
        scene.put(service)
        samples = await scene.scrape()
        assert samples[f"ipvsproxy_service_connections_total{{{HTTP}}}"] == 150
        assert samples[f'ipvsproxy_endpoint_connections_total{{{HTTP},endpoint="10.244.0.5:8080"}}'] == 150


@pytest.mark.parametrize("limit", [1, 100])
async def test_prometheus_can_parse_the_page_in_both_formats(limit: int) -> None:
    scene = Scene(WEB, builders.service("db", cluster=["10.96.0.11"]), limit=limit, of_endpoints=True)
    scene.kernel.counters = {CLUSTER: Counters(1, 2, 3, 4, 5), builders.frontend("10.96.0.11", 80): Counters(1)}
    pods = (POD, builders.backend("10.244.0.6"))
    scene.kernel.of_endpoints = {CLUSTER: dict.fromkeys(pods, EndpointTraffic(ConnectionCounts(1, 0), Counters(1)))}
    metrics = Metrics()
    metrics.show(scene.sources, scene.traffic)
    formats: dict[str, Any] = {"": parser, "application/openmetrics-text": openmetrics_parser}
    for accept, format_parser in formats.items():
        page = http_client.whole(await metrics.expose(accept)).decode()
        types = {family.name: family.type for family in format_parser.text_string_to_metric_families(page)}
        assert types["ipvsproxy_service_bytes"] == types["ipvsproxy_endpoint_connections"] == "counter"
        assert types["ipvsproxy_endpoint_open_connections"] == "gauge"


MANY = 10 * ITEMS_AT_ONCE


def rows(count: int) -> list[CountedObject]:
    return [(number, f"label {number}", Counters(1)) for number in range(count)]


def pauses(ledger: Ledger, some: list[CountedObject]) -> int:
    return sum(1 for _ in ledger.booking(some))


def test_other_tasks_run_while_the_traffic_of_many_objects_is_counted() -> None:
    ledger = Ledger(MANY)
    assert pauses(ledger, rows(MANY)) == 20, "marking, and booking"
    assert pauses(ledger, rows(MANY)) == 40, "and scanning totals and objects that stay"
    assert pauses(ledger, []) == 40, "scanning, and forgetting"
    assert not ledger.totals
    assert not ledger._last


@hypothesis.given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 3)), max_size=8))
def test_objects_with_the_same_labels_add_to_one_total_until_the_last_object_is_gone(
    rounds: list[dict[int, int]],
) -> None:
    """The objects form pairs: two objects with the same labels share a series.

    Each round adds connections to some of the objects.
    """
    ledger = Ledger(10)
    counted: dict[int, int] = {}
    expected: dict[str, int] = {}
    for added in rounds:
        counted = {key: counted.get(key, 0) + more for key, more in added.items()}
        labels = {key: f"label {key // 2}" for key in added}
        expected = {label: total for label, total in expected.items() if label in labels.values()}
        for key, more in added.items():
            if more:
                expected[labels[key]] = expected.get(labels[key], 0) + more
        list(ledger.booking([(key, labels[key], Counters(count)) for key, count in counted.items()]))
        assert {label: total[0] for label, total in ledger.totals.items()} == expected
    assert ledger._last.keys() == counted.keys()
