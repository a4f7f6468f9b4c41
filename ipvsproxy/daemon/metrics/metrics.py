"""Prometheus metrics: kube-proxy's series under their original names, and the series of ipvsproxy with the prefix ``ipvsproxy_``.

Rule 1: each series of kube-proxy in IPVS mode exists with the same name, type, labels and buckets.
Rule 2: a value that can be counted from the tables is counted at a scrape, and not during a sync. Counting begins by copying
references, so that all values belong to the same moment. The counting itself takes time for each object, and pauses in between.
Rule 3: a series that an alert may use exists from the start of the process, with the value zero.
"""

import asyncio
import bisect
import collections
import errno
import importlib.metadata
import itertools
import platform
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, ProcessCollector, metrics_core
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.figures import FAMILY_BY_LENGTH, OBJECTS_AT_ONCE, Sources, counting
from ipvsproxy.daemon.metrics.series import Metric, Type
from ipvsproxy.daemon.metrics.traffic import Traffic
from ipvsproxy.daemon.sources.source import Trouble
from ipvsproxy.model.kernel import FlowCleaning
from ipvsproxy.model.kind import DriverName
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import KINDS, Outcome
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.state import ServiceState

T = TypeVar("T")

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_FORMAT = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = b"# EOF\n"
_GZIP = 16 + zlib.MAX_WBITS  # with a gzip header and trailer around the stream
_OPEN_FORMAT: Callable[[Collector], bytes] = openmetrics.generate_latest
NEVER_READ = ("timeouts", "flow")
"""Kinds of kernel objects that are written, but never read."""


def gauges(sources: Sources, families: Collection[Family]) -> Iterator[metrics_core.Metric | None]:
    """All gauges with their current values, with a pause (None) after each ``OBJECTS_AT_ONCE`` objects."""
    kernel, status, untaken = sources.survey.statistics(sources.clock()), sources.status, sources.store.untaken
    watches = {kind.value: watch for kind, watch in sources.watch_states().items()}
    doubted = {kind.value: doubt.missing for kind, doubt in sources.store.doubts.items()}
    yield _one(series.SERVICE_CHANGES_PENDING, untaken.get(ObjectKind.SERVICE, 0))
    yield _one(series.ENDPOINT_CHANGES_PENDING, untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one(series.OLDEST_CHANGE_AGE, status.oldest_change_age_s)
    yield _one(series.UNREADABLE_PARTS, len(status.unreadable()))
    places = sources.leftovers().items()
    yield _family(series.LEFTOVER_RULES, {(place.family.label, str(place.variant)): is_there for place, is_there in places})
    yield _one(series.OTHER_BACKEND_LEFT, sources.other_backend())
    yield _one(series.UNOPENED_PORTS, sources.unopened_ports())
    numbers = yield from counting(kernel)
    yield _by_family(series.VIRTUAL_SERVERS, numbers.virtual_servers, families)
    yield _by_family(series.REAL_SERVERS, numbers.real_servers, families)
    yield _by_family(series.TUNNELS, numbers.tunnels, families)
    for metric, local in ((series.ADDRESSES, kernel.addresses), (series.ROUTES, kernel.routes)):
        counts = collections.Counter[Family]()
        for number, address in enumerate(local, 1):
            if number % OBJECTS_AT_ONCE == 0:
                yield None
            counts[FAMILY_BY_LENGTH[len(address)]] += 1
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


def _one(metric: Metric, value: float) -> metrics_core.Metric:
    return _family(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> metrics_core.Metric:
    return _family(metric, {(key,): value for key, value in values.items()})


def _family(metric: Metric, values: Mapping[tuple[str, ...], float]) -> metrics_core.Metric:
    kind = CounterMetricFamily if metric.type is Type.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _by_family(metric: Metric, values: Mapping[Family, int], families: Iterable[Family]) -> metrics_core.Metric:
    return _labelled(metric, {family.label: values[family] for family in families})


class Recorded:
    """The values of the metrics that are recorded when an event happens.

    Label values are given in the order in which the metric's declaration lists the labels.
    """

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
        """A counter or a gauge; if label values are given, the series with these label values."""
        if metric.name not in self._values:
            make = Counter if metric.type is Type.COUNTER else Gauge
            self._values[metric.name] = make(metric.name, metric.meaning, metric.labels, registry=self._registry)
        made = self._values[metric.name]
        return made.labels(*labels) if labels else made

    def show(self, metric: Metric, *labels: str) -> None:
        """Make a series visible, with the value zero, before its first value is recorded."""
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
    """A histogram whose bucket bounds are written in Go's notation.

    Each combination of label values may be written by only one thread; any thread may read it.

    Dashboards and recording rules refer to buckets by text, and kube-proxy's text ``le="1"`` differs from prometheus_client's
    ``le="1.0"``.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._metric = metric
        self._texts = (*(f"{bound:g}" for bound in metric.bounds), "+Inf")
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        registry.register(self)

    def show(self, *labels: str) -> None:
        """Make a series visible, with the value zero, before its first observation."""
        self._counts.setdefault(labels, [0] * len(self._texts))
        self._sums.setdefault(labels, 0.0)

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation."""
        self.show(*labels)
        self._counts[labels][bisect.bisect_left(self._metric.bounds, value)] += 1
        self._sums[labels] += value

    def collect(self) -> Iterator[metrics_core.Metric]:
        """The metric for the registry; its series are in the order in which they first appeared."""
        family = HistogramMetricFamily(self._metric.name, self._metric.meaning, labels=self._metric.labels)
        for labels, counts in list(self._counts.items()):
            family.add_metric(labels, list(zip(self._texts, itertools.accumulate(counts), strict=True)), self._sums[labels])
        yield family


class Families(Collector):
    """Metrics that have already been created, to be added to a registry or used as a registry."""

    def __init__(self, families: Iterable[metrics_core.Metric] = ()) -> None:
        self.families = families

    def collect(self) -> Iterable[metrics_core.Metric]:
        """The metrics."""
        return self.families


class Metrics:
    """All metric series of this process.

    Times that callers pass are times of ``clock``; ``wall_clock`` gives seconds since the epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no such series
        self._families: tuple[Family, ...] = ()
        self._queued_s: float | None = None
        """The time of the last request for a sync, until a scrape has shown it."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._registry = CollectorRegistry()
        self._rendering = asyncio.Lock()
        self._without_local: dict[ServiceName, ServiceState] = {}
        self._sources: Sources | None = None
        self._counted = Families()
        self._traffic: Traffic | None = None
        self._values = Recorded(self._registry)
        for driver in DriverName:
            self._values.show(series.APPLY_DURATION, driver)
        self._values.set(series.CONFIG_IN_FORCE, value=1)
        self._values.set(series.BUILD_INFO, importlib.metadata.version("ipvsproxy"), platform.python_version(), value=1)
        self._registry.register(self._counted)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def show(self, families: Collection[Family], sources: Sources, traffic: Traffic | None = None) -> None:
        """From now on, show the series of these IP families, sources and traffic counters."""
        self._traffic = traffic
        self._families = tuple(sorted(families))
        self._sources = sources
        for family in self._families:
            for metric in series.EACH_FAMILY:
                self._values.show(metric, family.label)
            for policy in series.POLICIES:
                self._values.show(series.NO_LOCAL_ENDPOINTS, policy, family.label)
        self.queued(self._clock())

    # Recording.

    def queued(self, now: float) -> None:
        """A change waits for the next sync; ``now`` is a time of ``clock``."""
        self._queued_s = now

    def synced(self, summary: SyncSummary) -> None:
        """A sync has ended."""
        values, changes = self._values, summary.changes
        now_s = self._wall_clock()
        for family in self._families:
            values.observe(series.SYNC_DURATION, family.label, value=summary.duration_s)
            if family not in summary.lacking:
                values.set(series.LAST_SYNC, family.label, value=now_s)
        for trigger in changes.triggers:
            waited_s = max(0.0, now_s - trigger.began_s)
            values.observe(series.PROGRAMMING_DURATION, trigger.family.label, value=waited_s)
        values.add(series.SERVICE_CHANGES, count=changes.counts.get(ObjectKind.SERVICE, 0))
        values.add(series.ENDPOINT_CHANGES, count=changes.counts.get(ObjectKind.ENDPOINT_SLICE, 0))
        self._count_without_local(changes.services, summary.states)
        if changes.services:
            values.observe(series.PHASE_DURATION, "waiting", value=summary.waited_s)
        for phase, duration_s in zip(
            series.PHASES[1:], (summary.observed_s, summary.translated_s, summary.applied_s), strict=True
        ):
            values.observe(series.PHASE_DURATION, phase, value=duration_s)
        for outcome, counts in (("done", summary.report.done), ("failed", summary.report.failed)):
            for (verb, kind), count in counts.items():
                values.add(series.OPERATIONS, verb, kind, outcome, count=count)
        values.add(series.SURPRISES, count=summary.report.surprises)
        for complaint in changes.complaints:
            for skipped in complaint.skipped:
                if skipped.invalid:
                    values.add(series.INVALID_OBJECTS, complaint.kind.value, "part" if skipped.field else "object")

    def _count_without_local(self, names: Collection[ServiceName], states: Mapping[ServiceName, ServiceState]) -> None:
        for name in names:
            before, after = self._without_local.pop(name, None), states.get(name)
            if after and (after.rare.without_local_internal or after.rare.without_local_external):
                self._without_local[name] = after
            for state, change in ((before, -1), (self._without_local.get(name), 1)):
                if state:
                    lacking = zip(
                        series.POLICIES, (state.rare.without_local_internal, state.rare.without_local_external), strict=True
                    )
                    for policy, family in ((policy, family) for policy, families in lacking for family in families):
                        self._values.add(series.NO_LOCAL_ENDPOINTS, policy, family.label, count=change)

    def applied(self, outcomes: Sequence[Outcome], duration_s: float) -> None:
        """A kernel driver has applied operations. This method is called in the thread of the kernel driver."""
        driver = KINDS[type(outcomes[0].operation.item)].driver
        self._values.observe(series.APPLY_DURATION, driver, value=duration_s)
        if driver in series.NETLINK_DRIVERS:
            self._values.add(series.NETLINK_BATCHES, driver)
            for outcome in outcomes:
                if outcome.error:
                    self._values.add(series.NETLINK_ERRORS, driver, errno.errorcode.get(outcome.errno, "other"))
        for outcome in outcomes:
            if outcome.error and isinstance(outcome.operation.item, Skeleton):
                self._values.add(series.RESTORE_FAILURES, outcome.operation.item.family.label)
        cleaned = set()
        for outcome in outcomes if driver is DriverName.CONNTRACK else ():
            item = outcome.operation.item
            if isinstance(item, FlowCleaning):
                self._values.add(series.DELETED_FLOWS, item.flow.family.label, count=outcome.removed)
                cleaned.add(item.flow.family)
        for family in cleaned:
            self._values.observe(series.CONNTRACK_DURATION, family.label, value=duration_s)

    def would_differ(self, differences: Mapping[str, int]) -> None:
        """A dry run has read the kernel, and compared it with the desired state.

        ``differences`` gives the number of differing objects by kind.
        """
        for kind, count in differences.items():
            self._values.set(series.DRY_RUN_DIFFERENCES, kind, value=count)
        self._values.set(series.DRY_RUN_LAST_LOOK, value=self._wall_clock())

    def watch_restarted(self, kind: ObjectKind, trouble: Trouble) -> None:
        """A list or watch was started again."""
        self._values.add(series.WATCH_RESTARTS, kind.value, trouble.value)

    def requested(self, host: str, code: str, duration_s: float, method: str) -> None:
        """A request to the API server has ended. ``code`` is the HTTP status, or ``<error>`` if there was no answer."""
        self._values.add(series.REQUESTS, code, host, method)
        self._values.observe(series.REQUEST_DURATION, host, method, value=duration_s)

    def announced(self, outcome: str) -> None:
        """A Kubernetes event was ``posted``, ``failed`` to be written, or was ``dropped``."""
        self._values.add(series.EVENTS, outcome)

    def configured(self, is_in_force: bool) -> None:  # noqa: FBT001 - its only argument
        """The configuration file was read again."""
        self._values.set(series.CONFIG_IN_FORCE, value=is_in_force)

    def healthz(self, status: int) -> None:
        """``/healthz`` was answered."""
        self._values.add(series.HEALTHZ, str(status))

    def livez(self, status: int) -> None:
        """``/livez`` was answered."""
        self._values.add(series.LIVEZ, str(status))

    # The page.

    async def expose(self, accept: str = "", accept_encoding: str = "") -> Answer:
        """The metrics page, in the richest format that the client accepts.

        Scrapes take turns, so that all scrapes together use at most one processor.
        """
        async with self._rendering:
            self._show_queued()
            if self._traffic:
                await self._traffic.refresh()
            return await self._render(accept, accept_encoding)

    def _show_queued(self) -> None:
        """Convert each time only once, because two conversions of the same time would differ by the inaccuracy of the clocks."""
        if self._queued_s is None:
            return
        at_s = self._wall_clock() - (self._clock() - self._queued_s)
        self._queued_s = None
        for family in self._families:
            self._values.set(series.LAST_QUEUED, family.label, value=at_s)

    async def _render(self, accept: str, accept_encoding: str) -> Answer:
        is_open = "application/openmetrics-text" in accept
        await asyncio.sleep(0)  # Taking the snapshot of the tables is a separate step; the event loop runs before and after it.
        steps = gauges(self._sources, self._families) if self._sources else ()
        self._counted.families = [one for one in await in_slices(_gathering(steps), self._clock) if one]
        families = (Families([family]) for family in self._registry.collect())
        text = _OPEN_FORMAT if is_open else prometheus_client.generate_latest
        # The metrics page is rendered in the event loop, where other waiting tasks can run after each step. If the page were
        # rendered in another thread, Python would take longer to switch to the event loop.
        written = (text(one).removesuffix(OPENMETRICS_END) for one in families)
        first = await in_slices(_gathering(written), self._clock)
        traffic = self._traffic.render(openmetrics=is_open) if self._traffic else ()
        end = (OPENMETRICS_END,) if is_open else ()
        parts: Iterator[bytes] = itertools.chain((b"".join(first),), traffic, end)
        headers = {"Content-Type": OPENMETRICS_FORMAT if is_open else TEXT_FORMAT}
        if "gzip" in accept_encoding:
            headers["Content-Encoding"] = "gzip"
            parts = _compressed(parts)
        page = await in_slices(_gathering(parts), self._clock)
        return Answer(server.OK, b"", headers, [part for part in page if part])


def _gathering(items: Iterable[T]) -> Generator[None, None, list[T]]:
    """Collects all items, with a pause after each item."""
    gathered: list[T] = []
    for item in items:
        gathered.append(item)
        yield
    return gathered


def _compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    stream = zlib.compressobj(level=1, wbits=_GZIP)
    yield from map(stream.compress, parts)
    yield stream.flush()
