"""Covers the counts and ages that a scrape shows; objects of other programs are not counted."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import Metric

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.leftover_removal import AnyPlace
from ipvsproxy.daemon.metrics import metrics
from ipvsproxy.daemon.metrics.figures import Sources
from ipvsproxy.daemon.sources.source import Trouble, WatchStatus
from ipvsproxy.kernel.iptables.leftover_rules import RulesPlace
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.kernel.nftables.nft_tables import TablePlace
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.service import ObjectKind, Owner, Put, ServiceName
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind, mark_entry
from ipvsproxy.model.state import Observation, ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.store.objects import Store
from tests.support import builders
from tests.support.draining import show_draining
from tests.support.summaries import Clock

BOTH = (Family.IPV4, Family.IPV6)
KINDS = ("device", "set", "set_entry", "rules", "virtual_server", "address", "route", "sysctl")
OWNER = Owner(0, ServiceName(builders.NAMESPACE, "web"))
WEB_KEY = builders.frontend("10.96.0.10", 80)
POD, OTHER_POD = builders.backend("10.244.0.5"), builders.backend("10.244.0.6")
CLUSTER_IPS = IpSet(SetKind.CLUSTER_IP, Family.IPV4).name


class Figures:
    """All sources that a scrape reads; the clock shows second 100."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.reconciler = Reconciler(Policy())
        self.store = Store(started_s=0)
        self.status = Status(families=BOTH, sync_period_s=30, clock=self.clock, wall_clock=self.clock)
        self.watches: Mapping[ObjectKind, WatchStatus] = {}
        self.leftovers: Mapping[AnyPlace, bool] = {}
        self.other_backend = False

    def observe(self, **observed: Any) -> None:
        """Let the reconciler observe these objects in the kernel."""
        at_once(self.reconciler.observer.observing(Observation(**observed), now=0))

    def gauges(self) -> Iterator[Metric | None]:
        sources = Sources(
            survey=self.reconciler.survey,
            store=self.store,
            status=self.status,
            watches=lambda: self.watches,
            leftovers=lambda: self.leftovers,
            other_backend=lambda: self.other_backend,
        )
        return metrics.gauges(sources, BOTH)

    def read(self) -> dict[str, dict[tuple[str, ...], float]]:
        families = filter(None, self.gauges())
        return {one.name: {tuple(sample.labels.values()): sample.value for sample in one.samples} for one in families}


def _server(*backends: str) -> ObservedVirtualServer:
    return ObservedVirtualServer(VirtualServerSettings("rr"), {builders.backend(one): 1 for one in backends})


def test_metrics_show_leftover_rules_by_family_and_variant() -> None:
    figures = Figures()
    assert figures.read()["ipvsproxy_leftover_rules"] == {}
    figures.leftovers = {
        RulesPlace(Variant.NF_TABLES, Family.IPV4, is_used=True): False,
        RulesPlace(Variant.LEGACY, Family.IPV6, is_used=False): True,
        TablePlace(Family.IPV4, "kube-proxy"): True,
    }
    assert figures.read()["ipvsproxy_leftover_rules"] == {
        ("IPv4", "nf_tables"): 0,
        ("IPv6", "legacy"): 1,
        ("IPv4", "nftables"): 1,
    }


def test_metrics_show_leftover_objects_of_the_unused_backend() -> None:
    figures = Figures()
    for figures.other_backend in (False, True):
        assert figures.read()["ipvsproxy_other_backend_left"] == {(): figures.other_backend}


def test_the_counts_by_family_contain_only_our_own_virtual_servers_and_real_servers() -> None:
    figures = Figures()
    ours = builders.frontend("10.96.0.10", 80), builders.frontend("fd00:10:96::10", 80)
    foreign = builders.frontend("192.0.2.1", 80)
    figures.observe(
        virtual_servers={
            ours[0]: _server("10.244.0.5", "10.244.0.6"),
            ours[1]: _server("fd00:10:244::5"),
            foreign: _server("10.244.0.7"),
        },
        sets={},
        addresses=frozenset(key.address for key in ours),
        routes=frozenset({ours[1].address}),
    )
    values = figures.read()
    assert values["ipvsproxy_virtual_servers"] == {("IPv4",): 1, ("IPv6",): 1}
    assert values["ipvsproxy_real_servers"] == {("IPv4",): 2, ("IPv6",): 1}
    assert values["ipvsproxy_addresses"] == {("IPv4",): 1, ("IPv6",): 1}
    assert values["ipvsproxy_routes"] == {("IPv4",): 0, ("IPv6",): 1}
    assert values["ipvsproxy_tunnels"] == {("IPv4",): 0, ("IPv6",): 0}


def test_tunnelled_real_servers_are_counted_by_family() -> None:
    figures, key = Figures(), FirewallMark.of(Family.IPV4, 1)
    weights = {builders.backend("10.244.0.5"): 1, builders.backend("172.18.0.3", 80): TUNNELLED + 2}
    entry = mark_entry(key)
    figures.observe(
        virtual_servers={key: ObservedVirtualServer(VirtualServerSettings("mh"), weights)},
        sets={entry.set: frozenset({entry})},
    )
    assert figures.read()["ipvsproxy_tunnels"] == {("IPv4",): 1, ("IPv6",): 0}


def test_gauges_show_the_entries_of_each_set_and_the_pending_objects_of_each_kind() -> None:
    figures = Figures()
    figures.reconciler.put_node(BOTH, (), None)
    assert figures.read()["ipvsproxy_pending"][("set",)] == 34
    entry = SetEntry(CLUSTER_IPS, parse_address("10.96.0.10"), None, 80)
    figures.observe(sets={CLUSTER_IPS: frozenset({entry})}, device=True)
    values = figures.read()
    assert len(values["ipvsproxy_set_entries"]) == 34
    assert values["ipvsproxy_set_entries"][CLUSTER_IPS,] == 1
    assert values["ipvsproxy_pending"][("set_entry",)] == 1
    assert values["ipvsproxy_pending"][("device",)] == 0


def test_metrics_show_the_numbers_of_draining_and_waiting_real_servers_and_the_age_of_the_oldest_drain() -> None:
    figures = Figures()
    settings = VirtualServerSettings("rr")
    web = ServiceState(owner=OWNER, served=(VirtualServer(WEB_KEY, settings, owner=OWNER),))
    at_once(figures.reconciler.putting(OWNER.service, web))
    assert figures.read()["ipvsproxy_oldest_drain_age_seconds"] == {(): 0}
    show_draining(figures.reconciler, WEB_KEY, POD, now=40)
    show_draining(figures.reconciler, WEB_KEY, POD, OTHER_POD, now=70)
    values = figures.read()
    assert values["ipvsproxy_drains"] == {(): 2}
    assert values["ipvsproxy_waiting_removals"] == {(): 0}
    assert values["ipvsproxy_oldest_drain_age_seconds"] == {(): 60}
    # A real server without connections counts as waiting and not as draining.
    list(figures.reconciler.noting_connections({WEB_KEY: {OTHER_POD: ConnectionCounts(1, 0)}}, 80))
    values = figures.read()
    assert values["ipvsproxy_drains"] == {(): 1}
    assert values["ipvsproxy_waiting_removals"] == {(): 1}
    assert values["ipvsproxy_oldest_drain_age_seconds"] == {(): 30}
    show_draining(figures.reconciler, WEB_KEY, OTHER_POD, now=90)
    assert figures.read()["ipvsproxy_waiting_removals"] == {(): 0}


def test_metrics_show_the_number_and_the_age_of_changes_that_wait_for_a_sync() -> None:
    figures = Figures()
    web = builders.service()
    figures.store.deliver([Put(ObjectKind.SERVICE, web.name, web)], now=100)
    figures.clock.now += 5
    values = figures.read()
    assert values["kubeproxy_sync_proxy_rules_service_changes_pending"] == {(): 1}
    assert values["kubeproxy_sync_proxy_rules_endpoint_changes_pending"] == {(): 0}
    assert values["ipvsproxy_oldest_change_age_seconds"] == {(): 5}
    figures.store.take()
    assert figures.read()["kubeproxy_sync_proxy_rules_service_changes_pending"] == {(): 0}


def test_metrics_show_the_status_of_each_watch() -> None:
    figures = Figures()
    figures.watches = {
        ObjectKind.SERVICE: WatchStatus(connected=True, contact_s=90.0, restarts=Counter({Trouble.EXPIRED: 2})),
        ObjectKind.NODE: WatchStatus(),
    }
    values = figures.read()
    assert values["ipvsproxy_watch_connected"] == {("Service",): 1, ("Node",): 0}
    assert values["ipvsproxy_watch_contact_age_seconds"] == {("Service",): 10}
    assert values["ipvsproxy_watch_restarts"] == {("Service", "expired"): 2}


def test_drift_is_counted_by_object_kind() -> None:
    figures = Figures()
    address = parse_address("10.96.0.10")
    at_once(figures.reconciler.putting(OWNER.service, ServiceState(owner=OWNER, addresses=(address,))))
    for addresses in (frozenset({address}), frozenset()):
        figures.observe(addresses=addresses)
    drift = figures.read()["ipvsproxy_drift"]
    assert drift == {(kind,): float(kind == "address") for kind in KINDS}


def test_counting_many_objects_for_a_scrape_lets_other_tasks_run_in_between() -> None:
    figures, many = Figures(), 3 * ITEMS_AT_ONCE
    addresses = [f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}" for number in range(many)]
    figures.observe(
        virtual_servers={builders.frontend(one, 80): _server() for one in addresses},
        addresses=frozenset(builders.addresses(*addresses)),
    )
    assert sum(one is None for one in figures.gauges()) == 3 + 3
