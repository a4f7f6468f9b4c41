"""The series themselves: names, labels, buckets, and which of them are there from the start."""

import importlib.metadata
import platform
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ipvsproxy.daemon.metrics import gauges, histogram
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind

CODES = ("200", "503")
POLICIES = ("internal", "external")
NETLINK_DRIVERS = ("ipvs", "ipset", "addresses", "conntrack")
PHASES = ("waiting", "observe", "translate", "apply")


class SyncSeries:
    """Of kube-proxy's, those about syncs (pkg/proxy/metrics in kubernetes/kubernetes)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        sync = "kubeproxy_sync_proxy_rules"
        by_family = ("ip_family",)
        self.sync_duration = Histogram(f"{sync}_duration_seconds", "How long a sync took.", by_family, histogram.FAST_S, registry)
        self.programming_duration = Histogram(
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
        self.conntrack_duration = Histogram(
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

    def show(self, families: Sequence[str]) -> None:
        """Have all series of these families, at zero."""
        for family in families:
            for shown in (self.sync_duration, self.programming_duration, self.conntrack_duration):
                shown.show(family)
            for series in (self.last_timestamp, self.restore_failures, self.deleted_entries):
                series.labels(family)
            for policy in POLICIES:
                self.no_local_endpoints.labels(policy, family)


class RequestSeries:
    """Of kube-proxy's, those about requests: for its health, and its own to the API server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.healthz = Counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", ("code",), registry=registry)
        self.livez = Counter("kubeproxy_proxy_livez_total", "Answers of /livez.", ("code",), registry=registry)
        self.requests = Counter(
            "rest_client_requests_total", "Requests to the API server.", ("code", "host", "method"), registry=registry
        )
        self.request_duration = Histogram(
            "rest_client_request_duration_seconds",
            "Until the API server began to answer.",
            ("host", "verb"),
            histogram.REQUEST_S,
            registry,
        )
        for code in CODES:
            self.healthz.labels(code)
            self.livez.labels(code)


class OwnSeries:
    """What kube-proxy does not tell. ``drivers`` are the names of those that apply operations."""

    def __init__(self, registry: CollectorRegistry, drivers: Iterable[str]) -> None:
        self.latency = Histogram(
            "ipvsproxy_sync_phase_duration_seconds",
            "What a sync spent its time with; waiting is that of its oldest change, before it began.",
            ("phase",),
            histogram.FAST_S,
            registry,
        )
        self.driver_duration = Histogram(
            "ipvsproxy_apply_duration_seconds",
            "How long a run of operations took that went to one driver.",
            ("driver",),
            histogram.FAST_S,
            registry,
        )
        batches = Counter(
            "ipvsproxy_netlink_batches_total",
            "Runs of operations that went to one driver by netlink, in as few system calls as they fit into.",
            ("driver",),
            registry=registry,
        )
        self.netlink_errors = Counter(
            "ipvsproxy_netlink_errors_total",
            "Operations that the kernel refused by netlink, or did not answer, by the name of the error number.",
            ("driver", "error"),
            registry=registry,
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
        self.config_in_force = Gauge(
            "ipvsproxy_config_in_force",
            "Whether the configuration file, as it was last read, is in force, but for what needs a restart.",
            registry=registry,
        )
        self.config_in_force.set(1)
        for outcome in ("posted", "failed", "dropped"):
            self.events.labels(outcome)
        build = Gauge("ipvsproxy_build_info", "Version of this program.", ("version", "python_version"), registry=registry)
        build.labels(importlib.metadata.version("ipvsproxy"), platform.python_version()).set(1)
        for phase in PHASES:
            self.latency.show(phase)
        for driver in drivers:
            self.driver_duration.show(driver)
        self.batches_of = {driver: batches.labels(driver) for driver in NETLINK_DRIVERS}
        for kind in ObjectKind:
            for extent in ("object", "part"):
                self.invalid.labels(kind.value, extent)


class DryRunSeries:
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


class Histogram(Collector):
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
        """The one family, for the registry."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for series in self._histogram.series():
            family.add_metric(series.labels, series.buckets, series.total)
        yield family


class Tables(Collector):
    """What is counted when somebody asks."""

    def __init__(self) -> None:
        self.sources: gauges.Sources | None = None
        self.families: tuple[Family, ...] = ()
        self._counted: Sequence[gauges.Gauges] = ()

    def counting(self) -> Iterator[None]:
        """Count all, with a pause now and then, from what there is now. Until it is over, what was counted last counts."""
        counted: list[gauges.Gauges] = []
        for one in gauges.gauges(gauges.look(self.sources), self.families) if self.sources else ():
            if one is None:
                yield
            else:
                counted.append(one)
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        """What was counted last, for the registry."""
        for one in self._counted:
            kind = CounterMetricFamily if one.only_grows else GaugeMetricFamily
            family = kind(one.name, one.documentation, labels=one.labels)
            for labels, value in one.values.items():
                family.add_metric(labels, value)
            yield family
