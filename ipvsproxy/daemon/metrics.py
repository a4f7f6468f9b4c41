"""Prometheus metrics: kube-proxy's series under their own names, and those of ours, prefixed ``ipvsproxy_``.

Rule 1: what kube-proxy shows in IPVS mode is here with the same name, type, labels and buckets.
Rule 2: what can be counted from the tables is counted when it is asked for, and not on the way of a change.
Rule 3: a series that somebody may wait for with an alert is there from the start, at zero.
"""

import asyncio
import gzip
import importlib.metadata
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ipvsproxy.daemon import histogram, measure, pages
from ipvsproxy.daemon.pages import Answer
from ipvsproxy.daemon.reflector import Trouble
from ipvsproxy.daemon.summary import SyncSummary
from ipvsproxy.daemon.traffic import Traffic
from ipvsproxy.model.kernel import (
    BoundAddress,
    Device,
    FlowCleaning,
    IpSet,
    RealServer,
    SetEntry,
    Skeleton,
    Sysctl,
    Timeouts,
    VirtualServer,
)
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Outcome
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.state import ServiceState

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_FORMAT = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = b"# EOF\n"
_OPEN_FORMAT: Callable[[Collector], bytes] = openmetrics.generate_latest
CODES = ("200", "503")
POLICIES = ("internal", "external")
PHASES = ("waiting", "observe", "translate", "apply")
_DRIVERS: Mapping[type, str] = {
    VirtualServer: "ipvs",
    RealServer: "ipvs",
    Timeouts: "ipvs",
    SetEntry: "ipset",
    IpSet: "ipset",
    BoundAddress: "addresses",
    Device: "addresses",
    Sysctl: "sysctl",
    Skeleton: "iptables",
    FlowCleaning: "conntrack",
}


class Metrics:
    """All series of this process. ``wall_clock`` gives seconds since the epoch."""

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no such series
        self._families: tuple[Family, ...] = ()
        self._wall_clock = wall_clock
        self._registry = CollectorRegistry()
        self._rendering = asyncio.Lock()
        self._without_local: dict[ServiceName, ServiceState] = {}
        self._tables = _Tables()
        self._traffic: Traffic | None = None
        self._dry_run: _DryRunSeries | None = None
        self._kube = _KubeProxySeries(self._registry)
        self._own = _OwnSeries(self._registry)
        self._registry.register(self._tables)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def show(self, families: Collection[Family], sources: measure.Sources, traffic: Traffic | None = None) -> None:
        """Show the series of these families from now on, what these sources tell, and this traffic."""
        self._traffic = traffic
        self._families = tuple(sorted(families))
        self._tables.sources = sources
        self._tables.families = self._families
        self._kube.show([family.label for family in self._families])
        self.queued()

    # What happens.

    def queued(self) -> None:
        """There is something to do."""
        for family in self._families:
            self._kube.last_queued.labels(family.label).set(self._wall_clock())

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        kube, own, changes = self._kube, self._own, summary.changes
        now_s = self._wall_clock()
        for family in self._families:
            kube.sync_duration.observe(summary.duration_s, family.label)
            if family not in summary.lacking:
                kube.last_timestamp.labels(family.label).set(now_s)
        for trigger in changes.triggers:
            kube.programming_duration.observe(max(0.0, now_s - trigger.began_s), trigger.family.label)
        kube.service_changes.inc(changes.seen.get(ObjectKind.SERVICE, 0))
        kube.endpoint_changes.inc(changes.seen.get(ObjectKind.ENDPOINT_SLICE, 0))
        self._count_without_local(changes.services, summary.states)
        if changes.services:
            own.latency.observe(summary.waited_s, "waiting")
        for phase, duration_s in zip(PHASES[1:], (summary.observed_s, summary.translated_s, summary.applied_s), strict=True):
            own.latency.observe(duration_s, phase)
        for outcome, counts in (("done", summary.report.done), ("failed", summary.report.failed)):
            for (verb, kind), count in counts.items():
                own.operations.labels(verb, kind, outcome).inc(count)
        own.surprises.inc(summary.report.surprises)
        for complaint in changes.complaints:
            for skipped in complaint.skipped:
                if skipped.invalid:
                    own.invalid.labels(complaint.kind.value, "part" if skipped.field else "object").inc()

    def _count_without_local(self, names: Collection[ServiceName], states: Mapping[ServiceName, ServiceState]) -> None:
        for name in names:
            before, after = self._without_local.pop(name, None), states.get(name)
            if after and (after.without_local_internal or after.without_local_external):
                self._without_local[name] = after
            for state, step in ((before, -1), (self._without_local.get(name), 1)):
                if state:
                    found = zip(POLICIES, (state.without_local_internal, state.without_local_external), strict=True)
                    for policy, family in ((policy, family) for policy, families in found for family in families):
                        self._kube.no_local_endpoints.labels(policy, family.label).inc(step)

    def applied(self, outcomes: Sequence[Outcome], duration_s: float) -> None:
        """A driver has applied operations; called in the thread that it runs in."""
        driver = _DRIVERS[type(outcomes[0].operation.item)]
        self._own.driver_duration.observe(duration_s, driver)
        cleaned = set()
        for outcome in outcomes if driver in ("iptables", "conntrack") else ():
            match outcome.operation.item:
                case Skeleton(family=family) if outcome.error:
                    self._kube.restore_failures.labels(family.label).inc()
                case FlowCleaning(flow=flow):
                    self._kube.deleted_entries.labels(flow.family.label).inc(outcome.removed)
                    cleaned.add(flow.family)
                case _:
                    pass
        for family in cleaned:
            self._kube.conntrack_duration.observe(duration_s, family.label)

    def would_differ(self, differences: Mapping[str, int]) -> None:
        """A dry run has read the kernel and found these differences, by kind."""
        if self._dry_run is None:
            self._dry_run = _DryRunSeries(self._registry)
        for kind, count in differences.items():
            self._dry_run.differences.labels(kind).set(count)
        self._dry_run.looked.set(self._wall_clock())

    def watch_restarted(self, kind: ObjectKind, trouble: Trouble) -> None:
        """A list or watch had to be started again."""
        self._own.watch_restarts.labels(kind.value, trouble.value).inc()

    def requested(self, host: str, code: str, duration_s: float, method: str) -> None:
        """The API server has answered a request; ``code`` is that of HTTP, or ``<error>`` when there was no answer."""
        self._kube.requests.labels(code, host, method).inc()
        self._kube.request_duration.observe(duration_s, host, method)

    def announced(self, outcome: str) -> None:
        """A Kubernetes event was posted, failed to be, or was dropped."""
        self._own.events.labels(outcome).inc()

    def healthz(self, status: int) -> None:
        """``/healthz`` was answered."""
        self._kube.healthz.labels(str(status)).inc()

    def livez(self, status: int) -> None:
        """``/livez`` was answered."""
        self._kube.livez.labels(str(status)).inc()

    # What is told.

    async def expose(self, accept: str = "", accept_encoding: str = "") -> Answer:
        """The page, in the richest format that the client takes. One at a time: a scrape never takes more than one processor."""
        async with self._rendering:
            self._tables.look()
            if self._traffic:
                await self._traffic.refresh()
            return await asyncio.to_thread(self._render, accept, accept_encoding)

    def _render(self, accept: str, accept_encoding: str) -> Answer:
        is_open = "application/openmetrics-text" in accept
        body = _OPEN_FORMAT(self._registry) if is_open else prometheus_client.generate_latest(self._registry)
        if self._traffic:
            end = OPENMETRICS_END if is_open else b""
            body = body.removesuffix(end) + self._traffic.render(openmetrics=is_open) + end
        headers = {"Content-Type": OPENMETRICS_FORMAT if is_open else TEXT_FORMAT}
        if "gzip" in accept_encoding:
            headers["Content-Encoding"] = "gzip"
            body = gzip.compress(body, compresslevel=1)
        return Answer(pages.OK, body, headers)


class _KubeProxySeries:
    """What dashboards of kube-proxy show (pkg/proxy/metrics in kubernetes/kubernetes)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        sync = "kubeproxy_sync_proxy_rules"
        by_family = ("ip_family",)
        self.sync_duration = _Histogram(
            f"{sync}_duration_seconds", "How long a sync took.", by_family, histogram.FAST_S, registry
        )
        self.programming_duration = _Histogram(
            "kubeproxy_network_programming_duration_seconds",
            "From a change of endpoints, by its annotation, until it was programmed.",
            by_family,
            histogram.SLOW_S,
            registry,
        )
        self.last_timestamp = Gauge(
            f"{sync}_last_timestamp_seconds", "When a sync was last complete.", by_family, registry=registry
        )
        self.last_queued = Gauge(
            f"{sync}_last_queued_timestamp_seconds", "When a sync was last asked for.", by_family, registry=registry
        )
        self.restore_failures = Counter(
            f"{sync}_iptables_restore_failures_total", "Rules that could not be written.", by_family, registry=registry
        )
        self.no_local_endpoints = Gauge(
            f"{sync}_no_local_endpoints_total",
            "Services with a Local traffic policy whose endpoints are all on other nodes.",
            ("traffic_policy", "ip_family"),
            registry=registry,
        )
        self.service_changes = Counter(f"{sync}_service_changes_total", "Changes of Services.", registry=registry)
        self.endpoint_changes = Counter(f"{sync}_endpoint_changes_total", "Changes of EndpointSlices.", registry=registry)
        self.healthz = Counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", ("code",), registry=registry)
        self.livez = Counter("kubeproxy_proxy_livez_total", "Answers of /livez.", ("code",), registry=registry)
        self.conntrack_duration = _Histogram(
            "kubeproxy_conntrack_reconciler_sync_duration_seconds",
            "How long the cleaning of tracked flows took.",
            by_family,
            histogram.FAST_S,
            registry,
        )
        self.deleted_entries = Counter(
            "kubeproxy_conntrack_reconciler_deleted_entries_total",
            "Tracked flows removed.",
            by_family,
            registry=registry,
        )
        self.requests = Counter(
            "rest_client_requests_total", "Requests to the API server.", ("code", "host", "method"), registry=registry
        )
        self.request_duration = _Histogram(
            "rest_client_request_duration_seconds",
            "Until the API server began to answer.",
            ("host", "verb"),
            histogram.REQUEST_S,
            registry,
        )
        for code in CODES:
            self.healthz.labels(code)
            self.livez.labels(code)

    def show(self, families: Sequence[str]) -> None:
        """Have all series of these families, at zero."""
        for family in families:
            for shown in (self.sync_duration, self.programming_duration, self.conntrack_duration):
                shown.show(family)
            for series in (self.last_timestamp, self.restore_failures, self.deleted_entries):
                series.labels(family)
            for policy in POLICIES:
                self.no_local_endpoints.labels(policy, family)


class _OwnSeries:
    """What kube-proxy does not tell."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.latency = _Histogram(
            "ipvsproxy_sync_phase_duration_seconds",
            "What a sync spent its time with; waiting is that of its oldest change, before it began.",
            ("phase",),
            histogram.FAST_S,
            registry,
        )
        self.driver_duration = _Histogram(
            "ipvsproxy_apply_duration_seconds",
            "How long a run of operations took that went to one driver.",
            ("driver",),
            histogram.FAST_S,
            registry,
        )
        self.operations = Counter(
            "ipvsproxy_operations_total", "Operations on the kernel.", ("verb", "kind", "outcome"), registry=registry
        )
        self.surprises = Counter(
            "ipvsproxy_surprises_total", "Operations that found the kernel otherwise than believed.", registry=registry
        )
        self.invalid = Counter(
            "ipvsproxy_invalid_objects_total",
            "Changed objects, or parts of them, that break the API's rules and are not used.",
            ("kind", "extent"),
            registry=registry,
        )
        self.watch_restarts = Counter(
            "ipvsproxy_watch_restarts_total", "Lists and watches that were started again.", ("kind", "reason"), registry=registry
        )
        self.events = Counter(
            "ipvsproxy_events_total", "Kubernetes events: written, not taken, or too many.", ("outcome",), registry=registry
        )
        for outcome in ("posted", "failed", "dropped"):
            self.events.labels(outcome)
        build = Gauge("ipvsproxy_build_info", "Version of this program.", ("version", "python_version"), registry=registry)
        build.labels(importlib.metadata.version("ipvsproxy"), platform.python_version()).set(1)
        for phase in PHASES:
            self.latency.show(phase)
        for driver in dict.fromkeys(_DRIVERS.values()):
            self.driver_duration.show(driver)
        for kind in ObjectKind:
            for extent in ("object", "part"):
                self.invalid.labels(kind.value, extent)


class _DryRunSeries:
    """What a dry run finds. Not there before its first look: zero would say that all is equal."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.differences = Gauge(
            "ipvsproxy_dry_run_differences",
            "Kernel objects that a run would change, when the kernel was last read.",
            ("kind",),
            registry=registry,
        )
        self.looked = Gauge(
            "ipvsproxy_dry_run_last_look_timestamp_seconds", "When a dry run last read the kernel.", registry=registry
        )


class _Histogram(Collector):
    """A histogram in a registry. prometheus_client's own one writes bounds in another way."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._histogram = histogram.Histogram(bounds)
        self.show = self._histogram.show
        self.observe = self._histogram.observe
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for series in self._histogram.series():
            family.add_metric(series.labels, series.buckets, series.total)
        yield family


class _Tables(Collector):
    """What is counted when somebody asks. ``look`` comes first, in the loop."""

    def __init__(self) -> None:
        self.sources: measure.Sources | None = None
        self.families: tuple[Family, ...] = ()
        self._seen: measure.Snapshot | None = None

    def look(self) -> None:
        self._seen = measure.look(self.sources) if self.sources else None

    def collect(self) -> Iterator[Metric]:
        for gauges in measure.gauges(self._seen, self.families) if self._seen else ():
            kind = CounterMetricFamily if gauges.only_grows else GaugeMetricFamily
            family = kind(gauges.name, gauges.documentation, labels=gauges.labels)
            for labels, value in gauges.values.items():
                family.add_metric(labels, value)
            yield family
