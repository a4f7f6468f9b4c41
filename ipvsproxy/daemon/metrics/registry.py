"""Makes series of prometheus_client from declared metrics: recorded ones, and gauges that are counted at each scrape.

Counting spares a sync the update of gauges. It begins with copies of references, so that all figures are of one moment; then it
takes time for each object, and pauses.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
_BY_LENGTH = {family.bits // 8: family for family in Family}
"""By the length of an address: 36 ms for 100,000 virtual servers and their addresses, and 55 ms by ``Address.family``."""


class Watch(NamedTuple):
    """Whether a watch is open and stale, and the age of its last contact with the API server; None without one."""

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of the figures of metrics and page. ``clock`` is the one of drains and watches.

    ``leftovers`` says whether rules of another proxy may remain in a place, ``other_backend`` whether something of ours in the
    other backend does; ``unopened_ports`` counts health-check ports.
    """

    survey: Survey
    store: Store
    status: Status
    clock: Callable[[], float]
    watches: Callable[[], Mapping[ObjectKind, WatchStatus]] = dict
    stale: Callable[[], Collection[ObjectKind]] = tuple
    leftovers: Callable[[], Mapping[AnyPlace, bool]] = dict
    other_backend: Callable[[], bool] = bool
    unopened_ports: Callable[[], int] = int

    def watch_states(self) -> Mapping[ObjectKind, Watch]:
        """The watch of each kind now."""
        stale, now = self.stale(), self.clock()
        return {
            kind: Watch(watch.connected, kind in stale, None if watch.contact_s is None else max(0.0, now - watch.contact_s))
            for kind, watch in self.watches().items()
        }


class Counted(NamedTuple):
    """A metric with the values of its series by label values."""

    metric: Metric
    values: Mapping[tuple[str, ...], float]


class Numbers(NamedTuple):
    """The virtual servers and real servers of ours in the kernel, by family."""

    virtual_servers: collections.Counter[Family]
    real_servers: collections.Counter[Family]


def counting(statistics: Statistics, numbers: Numbers) -> Iterator[None]:
    """Adds to ``numbers``, with a pause after each ``OBJECTS_AT_ONCE``."""
    for number, (key, server) in enumerate(zip(statistics.virtual_servers, statistics.observed, strict=True), 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield
        if key not in statistics.foreign:
            family = _BY_LENGTH[len(key.address)]
            numbers.virtual_servers[family] += 1
            numbers.real_servers[family] += len(server.real_servers)


def gauges(sources: Sources, families: Collection[Family]) -> Iterator[Counted | None]:
    """All gauges of this moment, with a pause (None) after each ``OBJECTS_AT_ONCE``."""
    kernel, status, untaken = sources.survey.statistics(sources.clock()), sources.status, sources.store.untaken
    watches = {kind.value: watch for kind, watch in sources.watch_states().items()}
    doubted = {kind.value: doubt.missing for kind, doubt in sources.store.doubts.items()}
    yield _one(series.SERVICE_CHANGES_PENDING, untaken.get(ObjectKind.SERVICE, 0))
    yield _one(series.ENDPOINT_CHANGES_PENDING, untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one(series.OLDEST_CHANGE_AGE, status.oldest_change_age_s)
    yield _one(series.UNREADABLE_PARTS, len(status.unreadable()))
    places = sources.leftovers().items()
    yield Counted(series.LEFTOVER_RULES, {(place.family.label, str(place.variant)): is_there for place, is_there in places})
    yield _one(series.OTHER_BACKEND_LEFT, sources.other_backend())
    yield _one(series.UNOPENED_PORTS, sources.unopened_ports())
    numbers = Numbers(collections.Counter(), collections.Counter())
    yield from counting(kernel, numbers)
    yield _by_family(series.VIRTUAL_SERVERS, numbers.virtual_servers, families)
    yield _by_family(series.REAL_SERVERS, numbers.real_servers, families)
    for metric, local in ((series.ADDRESSES, kernel.addresses), (series.ROUTES, kernel.routes)):
        counts = collections.Counter[Family]()
        for number, address in enumerate(local, 1):
            if number % OBJECTS_AT_ONCE == 0:
                yield None
            counts[_BY_LENGTH[len(address)]] += 1
        yield _by_family(metric, counts, families)
    yield _labelled(series.SET_ENTRIES, kernel.set_entries)
    yield _labelled(series.PENDING, kernel.pending)
    yield _labelled(series.DRIFT, {kind: count for kind, count in kernel.drifted.items() if kind not in NEVER_READ})
    yield _labelled(series.DOUBTED_DELETIONS, doubted)
    yield _one(series.CONFLICTS, kernel.conflicts)
    yield _one(series.WITHOUT_SCOPE, kernel.without_scope)
    yield _one(series.DRAINS, kernel.drains)
    yield _one(series.WAITING_REMOVALS, kernel.waiting_removals)
    yield _one(series.OLDEST_DRAIN_AGE, kernel.oldest_drain_age_s)
    yield _labelled(series.WATCH_CONNECTED, {kind: watch.is_open for kind, watch in watches.items()})
    yield _labelled(series.WATCH_STALE, {kind: watch.is_stale for kind, watch in watches.items()})
    contacts = {kind: watch.contact_age_s for kind, watch in watches.items() if watch.contact_age_s is not None}
    yield _labelled(series.WATCH_CONTACT_AGE, contacts)


def _one(metric: Metric, value: float) -> Counted:
    return Counted(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> Counted:
    return Counted(metric, {(key,): value for key, value in values.items()})


def _by_family(metric: Metric, values: Mapping[Family, int], families: Iterable[Family]) -> Counted:
    return _labelled(metric, {family.label: values[family] for family in families})


class Recorded:
    """The values of recorded metrics. Label values are in the order of the declaration."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._values: dict[str, Counter | Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in series.RECORDED:
            if metric.type is Type.HISTOGRAM:
                self._histograms[metric.name] = Histogram(metric, self._registry)
            elif not metric.is_late:
                self._of(metric)
            for labels in metric.at_zero:
                self.show(metric, *labels)

    def _of(self, metric: Metric, *labels: str) -> Counter | Gauge:
        """A counter or a gauge; with label values, the one of these."""
        if metric.name not in self._values:
            make = Counter if metric.type is Type.COUNTER else Gauge
            self._values[metric.name] = make(metric.name, metric.meaning, metric.labels, registry=self._registry)
        made = self._values[metric.name]
        return made.labels(*labels) if labels else made

    def show(self, metric: Metric, *labels: str) -> None:
        """Show a series at zero before its first value."""
        if metric.type is Type.HISTOGRAM:
            self._histograms[metric.name].show(*labels)
        else:
            self._of(metric, *labels)

    def add(self, metric: Metric, *labels: str, count: float = 1) -> None:
        """Add to a counter or a gauge."""
        self._of(metric, *labels).inc(count)

    def set(self, metric: Metric, *labels: str, value: float) -> None:
        """Set a gauge."""
        gauge = self._of(metric, *labels)
        if isinstance(gauge, Gauge):
            gauge.set(value)

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
        for one in gauges(self.sources, self.families) if self.sources else ():
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
