"""Prometheus metrics: kube-proxy's series under their original names, and the series of ipvsproxy with the prefix ``ipvsproxy_``.

Rule 1: each series that kube-proxy has in IPVS mode exists here, with the same name, type, labels and buckets.
Rule 2: a value that can be counted from the tables is counted at a scrape, never during a sync. Counting begins by copying
references, so that all values belong to the same moment. Counting takes time for each object, so counting pauses now and then to
let other tasks run.
Rule 3: a series that an alert may use exists from the start of the process, with the value zero.
"""

import asyncio
import collections
import errno
import importlib.metadata
import itertools
import platform
import time
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, ProcessCollector, metrics_core
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.figures import Sources, counting
from ipvsproxy.daemon.metrics.series import Metric
from ipvsproxy.daemon.metrics.traffic import Traffic
from ipvsproxy.model import steps
from ipvsproxy.model.kernel import FlowCleaning
from ipvsproxy.model.kind import KINDS, DriverName
from ipvsproxy.model.net import FAMILY_BY_LENGTH, Family
from ipvsproxy.model.plan import Outcome
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.state import ServiceState

T = TypeVar("T")

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_FORMAT = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_END = b"# EOF\n"
_GZIP = 16 + zlib.MAX_WBITS  # the value that makes zlib write a gzip header and trailer
_OPEN_FORMAT: Callable[[Collector], bytes] = openmetrics.generate_latest
NEVER_READ = ("timeouts", "flow")
"""Kinds of kernel objects that are written, but never read."""


def gauges(sources: Sources, families: Collection[Family]) -> Iterator[metrics_core.Metric | None]:
    """All gauges with their current values; the generator pauses (yields None) after each ``ITEMS_AT_ONCE`` objects."""
    kernel, status, untaken = sources.survey.statistics(sources.status.clock()), sources.status, sources.store.untaken
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
            if number % steps.ITEMS_AT_ONCE == 0:
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
    restarted = ((kind.value, watch.restarts) for kind, watch in sources.watches().items())
    yield _family(series.WATCH_RESTARTS, {(kind, why.value): count for kind, one in restarted for why, count in one.items()})


def _one(metric: Metric, value: float) -> metrics_core.Metric:
    return _family(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> metrics_core.Metric:
    return _family(metric, {(key,): value for key, value in values.items()})


def _family(metric: Metric, values: Mapping[tuple[str, ...], float]) -> metrics_core.Metric:
    kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _by_family(metric: Metric, values: Mapping[Family, int], families: Iterable[Family]) -> metrics_core.Metric:
    return _labelled(metric, {family.label: values[family] for family in families})


_CLASSES: Mapping[str, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


def _as_in_go(family: metrics_core.Metric) -> metrics_core.Metric:
    """A metric whose bucket bounds are written in Go's notation.

    Dashboards and recording rules refer to buckets by text, and kube-proxy's text ``le="1"`` differs from prometheus_client's
    ``le="1.0"``.
    """
    for number, sample in enumerate(family.samples if family.type == "histogram" else ()):
        if bound := sample.labels.get("le"):
            family.samples[number] = sample._replace(labels={**sample.labels, "le": bound.removesuffix(".0")})
    return family


class Families(Collector):
    """A collection of metrics with fixed values; the collection can be added to a registry, or used as a registry."""

    def __init__(self, families: Iterable[metrics_core.Metric] = ()) -> None:
        self.families = families

    def collect(self) -> Iterable[metrics_core.Metric]:
        """The metrics."""
        return self.families


class Metrics:
    """All metric series of this process.

    All times that callers pass must come from ``clock``. ``wall_clock`` returns the seconds since the epoch.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no such series
        self._families: tuple[Family, ...] = ()
        self._clock = clock
        self._wall_clock = wall_clock
        self._registry = CollectorRegistry()
        self._rendering = asyncio.Lock()
        self._without_local: dict[ServiceName, frozenset[tuple[str, Family]]] = {}
        self._sources: Sources | None = None
        self._counted = Families()
        self._traffic: Traffic | None = None
        self._made: dict[str, Any] = {}
        for metric in series.RECORDED:
            if not metric.is_late:
                self._value(metric)
            for labels in metric.at_zero:
                self._value(metric, *labels)
        for driver in DriverName:
            self._value(series.APPLY_DURATION, driver)
        self._value(series.CONFIG_IN_FORCE).set(1)
        self._value(series.BUILD_INFO, importlib.metadata.version("ipvsproxy"), platform.python_version()).set(1)
        self._registry.register(self._counted)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def show(self, sources: Sources, traffic: Traffic | None = None) -> None:
        """From now on, show the series of the given sources, of their IP families, and of the given traffic counters."""
        self._traffic = traffic
        self._families = tuple(sources.status.families)
        self._sources = sources
        for family in self._families:
            for metric in series.RECORDED:
                if metric.labels == series.BY_FAMILY:
                    self._value(metric, family.label)
            for policy in series.POLICIES:
                self._value(series.NO_LOCAL_ENDPOINTS, policy, family.label)
        self.queued()

    # Recording.

    def _value(self, metric: Metric, *labels: str) -> Any:
        """The prometheus_client object of a metric, or of the metric's series with the given label values.

        Label values are given in the order in which the metric's declaration lists the labels. As soon as this method has been
        called for a series, the series is visible with the value zero.
        """
        if metric.name not in self._made:
            buckets = {"buckets": metric.bounds} if metric.type == "histogram" else {}
            make = _CLASSES[metric.type]
            self._made[metric.name] = make(metric.name, metric.meaning, metric.labels, registry=self._registry, **buckets)
        made = self._made[metric.name]
        return made.labels(*labels) if labels else made

    def queued(self) -> None:
        """Called when a change waits for the next sync."""
        now_s = self._wall_clock()
        for family in self._families:
            self._value(series.LAST_QUEUED, family.label).set(now_s)

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
        changes = summary.changes
        now_s = self._wall_clock()
        for family in self._families:
            self._value(series.SYNC_DURATION, family.label).observe(summary.duration_s)
            if family not in summary.lacking:
                self._value(series.LAST_SYNC, family.label).set(now_s)
        for family, began_s in changes.triggers:
            self._value(series.PROGRAMMING_DURATION, family.label).observe(max(0.0, now_s - began_s))
        self._value(series.SERVICE_CHANGES).inc(changes.counts.get(ObjectKind.SERVICE, 0))
        self._value(series.ENDPOINT_CHANGES).inc(changes.counts.get(ObjectKind.ENDPOINT_SLICE, 0))
        self._count_without_local(changes.services, summary.states)
        if changes.services:
            self._value(series.PHASE_DURATION, "waiting").observe(summary.waited_s)
        for phase, duration_s in zip(
            series.PHASES[1:], (summary.observed_s, summary.translated_s, summary.applied_s), strict=True
        ):
            self._value(series.PHASE_DURATION, phase).observe(duration_s)
        for outcome, counts in (("done", summary.report.done), ("failed", summary.report.failed)):
            for (verb, kind), count in counts.items():
                self._value(series.OPERATIONS, verb, kind, outcome).inc(count)
        self._value(series.SURPRISES).inc(summary.report.surprises)
        for complaint in changes.complaints:
            for skipped in complaint.skipped:
                if skipped.invalid:
                    self._value(series.INVALID_OBJECTS, complaint.kind.value, "part" if skipped.field else "object").inc()

    def _count_without_local(self, names: Collection[ServiceName], states: Mapping[ServiceName, ServiceState]) -> None:
        for name in names:
            before, state = self._without_local.pop(name, frozenset()), states.get(name)
            after = state.rare.without_local if state else frozenset()
            if after:
                self._without_local[name] = after
            for places, change in ((before, -1), (after, 1)):
                for policy, family in places:
                    self._value(series.NO_LOCAL_ENDPOINTS, policy, family.label).inc(change)

    def applied(self, outcomes: Sequence[Outcome], duration_s: float) -> None:
        """Called in the thread of the kernel driver after the driver has applied operations."""
        driver = KINDS[type(outcomes[0].operation.item)].driver
        self._value(series.APPLY_DURATION, driver).observe(duration_s)
        if driver in series.NETLINK_DRIVERS:
            self._value(series.NETLINK_BATCHES, driver).inc()
        cleaned = set()
        for outcome in outcomes:
            item = outcome.operation.item
            if outcome.error and driver in series.NETLINK_DRIVERS:
                self._value(series.NETLINK_ERRORS, driver, errno.errorcode.get(outcome.errno, "other")).inc()
            if outcome.error and isinstance(item, Skeleton):
                self._value(series.RESTORE_FAILURES, item.family.label).inc()
            if isinstance(item, FlowCleaning):
                self._value(series.DELETED_FLOWS, item.flow.family.label).inc(outcome.removed)
                cleaned.add(item.flow.family)
        for family in cleaned:
            self._value(series.CONNTRACK_DURATION, family.label).observe(duration_s)

    def would_differ(self, differences: Mapping[str, int]) -> None:
        """Called when a dry run has read the kernel, and compared it with the desired state.

        ``differences`` gives the number of differing objects by kind.
        """
        for kind, count in differences.items():
            self._value(series.DRY_RUN_DIFFERENCES, kind).set(count)
        self._value(series.DRY_RUN_LAST_LOOK).set(self._wall_clock())

    def requested(self, host: str, code: str, duration_s: float, method: str) -> None:
        """Called when a request to the API server has ended.

        ``code`` is the HTTP status, or ``<error>`` if the API server did not answer.
        """
        self._value(series.REQUESTS, code, host, method).inc()
        self._value(series.REQUEST_DURATION, host, method).observe(duration_s)

    def announced(self, outcome: str) -> None:
        """Count a Kubernetes event by its outcome, which is ``posted``, ``failed`` or ``dropped``."""
        self._value(series.EVENTS, outcome).inc()

    def configured(self, is_in_force: bool) -> None:  # noqa: FBT001 - the method has no other argument
        """Called when the configuration file has been read again."""
        self._value(series.CONFIG_IN_FORCE).set(is_in_force)

    def health_answered(self, path: str, status: int) -> None:
        """Count an answer of ``/healthz`` or ``/livez``."""
        self._value(series.HEALTHZ if path == "/healthz" else series.LIVEZ, str(status)).inc()

    # The page.

    async def expose(self, accept: str = "", accept_encoding: str = "") -> Answer:
        """The metrics page, in the richest format that the client accepts.

        Only one scrape runs at a time, so that all scrapes together use at most one processor.
        """
        async with self._rendering:
            if self._traffic:
                await self._traffic.refresh()
            return await self._render(accept, accept_encoding)

    async def _render(self, accept: str, accept_encoding: str) -> Answer:
        is_open = "application/openmetrics-text" in accept
        await asyncio.sleep(0)  # Other tasks may run before and after the snapshot of the tables is taken.
        counted = gauges(self._sources, self._families) if self._sources else ()
        self._counted.families = [one for one in await in_slices(_gathering(counted), self._clock) if one]
        families = (Families([_as_in_go(family)]) for family in self._registry.collect())
        text = _OPEN_FORMAT if is_open else prometheus_client.generate_latest
        # The metrics page is rendered in the event loop, where other waiting tasks can run after each step. If another thread
        # rendered the page, Python would switch back to the event loop's thread only after a longer wait.
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
    """Collects all items of a generator, and pauses after each item."""
    gathered: list[T] = []
    for item in items:
        gathered.append(item)
        yield
    return gathered


def _compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    stream = zlib.compressobj(level=1, wbits=_GZIP)
    yield from map(stream.compress, parts)
    yield stream.flush()
