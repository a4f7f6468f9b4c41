"""Makes series of prometheus_client from declared metrics: recorded ones, and those that are counted at a scrape."""

import bisect
import itertools
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, metrics_core
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ipvsproxy.daemon.metrics import gauges, series
from ipvsproxy.daemon.metrics.series import Metric, Type
from ipvsproxy.model.net import Family


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
        self.sources: gauges.Sources | None = None
        self.families: tuple[Family, ...] = ()
        self._counted: Sequence[gauges.Counted] = ()

    def counting(self) -> Iterator[None]:
        """Count the present state, with pauses. Until the end, ``collect`` has the former counts."""
        counted: list[gauges.Counted] = []
        for one in gauges.gauges(gauges.take_snapshot(self.sources), self.families) if self.sources else ():
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
