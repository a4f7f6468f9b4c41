"""Makes series of prometheus_client from declared metrics: recorded ones, and gauges that are counted at each scrape.

Counting spares a sync the update of gauges. ``take_snapshot`` only copies references; ``gauges`` takes time for each object, and
pauses.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, metrics_core
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.leftovers import AnyPlace
from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.series import Metric, Type
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.reconcile.survey import Statistics, Survey
from ipvsproxy.store.objects import Store

OBJECTS_AT_ONCE = 200
"""The number of virtual servers or addresses that are counted without a pause: some tenths of a millisecond of work."""
NEVER_READ = ("timeouts", "flow")
"""Kinds of kernel objects that are written, but never read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of the gauges. ``clock`` is the one of drains and watches."""

    survey: Survey
    store: Store
    status: Status
    clock: Callable[[], float]
    watches: Callable[[], Mapping[ObjectKind, WatchStatus]] = dict
    stale: Callable[[], Collection[ObjectKind]] = tuple
    leftovers: Callable[[], Mapping[AnyPlace, bool]] = dict
    other_backend: Callable[[], bool] = bool
    unopened_ports: Callable[[], int] = int


class Watch(NamedTuple):
    """Whether a watch is open and stale, and the age of its last contact with the API server; None without one."""

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state behind all gauges at one moment.

    ``kernel`` is desired and observed state in numbers. ``untaken`` are changes that no sync has taken, by kind of API object.
    ``unreadable`` counts parts of the kernel; ``leftovers`` says whether rules of another proxy may remain in a place,
    ``other_backend`` whether something of ours in the other backend does; ``unopened_ports`` counts health-check ports. Ages
    are 0 without an object that has one.
    """

    kernel: Statistics
    doubted: Mapping[str, int]
    untaken: Mapping[ObjectKind, int]
    oldest_change_age_s: float
    unreadable: int
    leftovers: Mapping[AnyPlace, bool]
    other_backend: bool
    unopened_ports: int
    watches: Mapping[ObjectKind, Watch]


class Counted(NamedTuple):
    """A metric with the values of its series by label values."""

    metric: Metric
    values: Mapping[tuple[str, ...], float]


def take_snapshot(sources: Sources) -> Snapshot:
    """Take a snapshot of all sources."""
    stale = sources.stale()
    now = sources.clock()
    return Snapshot(
        kernel=sources.survey.statistics(now),
        doubted={kind.value: of.missing for kind, of in sources.store.doubts.items()},
        untaken=dict(sources.store.untaken),
        oldest_change_age_s=sources.status.oldest_change_age_s,
        unreadable=len(sources.status.unreadable()),
        leftovers=sources.leftovers(),
        other_backend=sources.other_backend(),
        unopened_ports=sources.unopened_ports(),
        watches={
            kind: Watch(watch.connected, kind in stale, None if watch.contact_s is None else now - watch.contact_s)
            for kind, watch in sources.watches().items()
        },
    )


def gauges(snapshot: Snapshot, families: Collection[Family]) -> Iterator[Counted | None]:
    """All gauges of a snapshot, with a pause (None) after each ``OBJECTS_AT_ONCE``."""
    kernel = snapshot.kernel
    yield _one(series.SERVICE_CHANGES_PENDING, snapshot.untaken.get(ObjectKind.SERVICE, 0))
    yield _one(series.ENDPOINT_CHANGES_PENDING, snapshot.untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one(series.OLDEST_CHANGE_AGE, snapshot.oldest_change_age_s)
    yield _one(series.UNREADABLE_PARTS, snapshot.unreadable)
    places = snapshot.leftovers.items()
    yield Counted(series.LEFTOVER_RULES, {(place.family.label, str(place.variant)): is_there for place, is_there in places})
    yield _one(series.OTHER_BACKEND_LEFT, snapshot.other_backend)
    yield _one(series.UNOPENED_PORTS, snapshot.unopened_ports)
    # By the length of an address: 36 ms for 100,000 virtual servers and their addresses, and 55 ms by ``Address.family``.
    by_length = {family.bits // 8: family for family in families}
    virtual_servers, real_servers = (dict.fromkeys(families, 0) for _ in range(2))
    for number, (key, server) in enumerate(zip(kernel.virtual_servers, kernel.observed, strict=True), 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(key.address))
        if family and key not in kernel.foreign:
            virtual_servers[family] += 1
            real_servers[family] += len(server.real_servers)
    yield _by_family(series.VIRTUAL_SERVERS, virtual_servers)
    yield _by_family(series.REAL_SERVERS, real_servers)
    for metric, local in ((series.ADDRESSES, kernel.addresses), (series.ROUTES, kernel.routes)):
        counts = dict.fromkeys(families, 0)
        for number, address in enumerate(local, 1):
            if number % OBJECTS_AT_ONCE == 0:
                yield None
            family = by_length.get(len(address))
            if family:
                counts[family] += 1
        yield _by_family(metric, counts)
    yield _labelled(series.SET_ENTRIES, kernel.set_entries)
    yield _labelled(series.PENDING, kernel.pending)
    yield _labelled(series.DRIFT, {kind: count for kind, count in kernel.drifted.items() if kind not in NEVER_READ})
    yield _labelled(series.DOUBTED_DELETIONS, snapshot.doubted)
    yield _one(series.CONFLICTS, kernel.conflicts)
    yield _one(series.WITHOUT_SCOPE, kernel.without_scope)
    yield _one(series.DRAINS, kernel.drains)
    yield _one(series.WAITING_REMOVALS, kernel.waiting_removals)
    yield _one(series.OLDEST_DRAIN_AGE, kernel.oldest_drain_age_s)
    yield _labelled(series.WATCH_CONNECTED, {kind.value: watch.is_open for kind, watch in snapshot.watches.items()})
    yield _labelled(series.WATCH_STALE, {kind.value: watch.is_stale for kind, watch in snapshot.watches.items()})
    contacts = {kind.value: watch.contact_age_s for kind, watch in snapshot.watches.items() if watch.contact_age_s is not None}
    yield _labelled(series.WATCH_CONTACT_AGE, contacts)


def _one(metric: Metric, value: float) -> Counted:
    return Counted(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> Counted:
    return Counted(metric, {(key,): value for key, value in values.items()})


def _by_family(metric: Metric, values: Mapping[Family, int]) -> Counted:
    return _labelled(metric, {family.label: value for family, value in values.items()})


class Recorded:
    """The values of recorded metrics. Label values are in the order of the declaration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in series.RECORDED:
            if not metric.is_late:
                self._make(metric)
            for labels in metric.at_zero:
                self.show(metric, *labels)

    def _make(self, metric: Metric) -> None:
        match metric.type:
            case Type.COUNTER:
                made = Counter(metric.name, metric.meaning, metric.labels, registry=self._registry)
                self._counters[metric.name] = made
            case Type.GAUGE:
                self._gauges[metric.name] = Gauge(metric.name, metric.meaning, metric.labels, registry=self._registry)
            case Type.HISTOGRAM:
                self._histograms[metric.name] = Histogram(metric, self._registry)

    def show(self, metric: Metric, *labels: str) -> None:
        """Show a series at zero before its first value."""
        match metric.type:
            case Type.COUNTER:
                self.add(metric, *labels, count=0)
            case Type.GAUGE:
                self._gauges[metric.name].labels(*labels)
            case Type.HISTOGRAM:
                self._histograms[metric.name].show(*labels)

    def add(self, metric: Metric, *labels: str, count: float = 1) -> None:
        """Add to a counter or a gauge."""
        parent = self._counters[metric.name] if metric.type is Type.COUNTER else self._gauges[metric.name]
        (parent.labels(*labels) if labels else parent).inc(count)

    def set(self, metric: Metric, *labels: str, value: float) -> None:
        """Set a gauge."""
        if metric.name not in self._gauges:
            self._make(metric)
        parent = self._gauges[metric.name]
        (parent.labels(*labels) if labels else parent).set(value)

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        """Count one observation in a histogram."""
        self._histograms[metric.name].observe(value, *labels)


class Histogram(Collector):
    """A histogram with bucket bounds in Go's notation. Only one thread may write a combination of label values; any may read.

    Dashboards and recording rules name buckets by text: kube-proxy's ``le="1"`` is not prometheus_client's ``le="1.0"``.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._texts = (*(f"{bound:g}" for bound in metric.bounds), "+Inf")
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def show(self, *labels: str) -> None:
        """Show a series at zero before its first observation."""
        self._counts.setdefault(labels, [0] * len(self._texts))
        self._sums.setdefault(labels, 0.0)

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation."""
        self.show(*labels)
        self._counts[labels][bisect.bisect_left(self._metric.bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterator[metrics_core.Metric]:
        """The metric with its series in the order of their first appearance, for the registry."""
        family = HistogramMetricFamily(self._metric.name, self._metric.meaning, labels=self._metric.labels)
        for labels, counts in list(self._counts.items()):
            family.add_metric(labels, list(zip(self._texts, itertools.accumulate(counts), strict=True)), self._sums[labels])
        yield family


class Tables(Collector):
    """The metrics that are counted from the tables at a scrape."""

    def __init__(self) -> None:
        self.sources: Sources | None = None
        self.families: tuple[Family, ...] = ()
        self._counted: Sequence[Counted] = ()

    def counting(self) -> Iterator[None]:
        """Count the present state, with pauses. Until the end, ``collect`` has the former counts."""
        counted: list[Counted] = []
        for one in gauges(take_snapshot(self.sources), self.families) if self.sources else ():
            if one is None:
                yield
            else:
                counted.append(one)
        self._counted = counted

    def collect(self) -> Iterator[metrics_core.Metric]:
        """The last complete counts, for the registry."""
        for metric, values in self._counted:
            kind = CounterMetricFamily if metric.type is Type.COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.meaning, labels=metric.labels)
            for labels, value in values.items():
                family.add_metric(labels, value)
            yield family
