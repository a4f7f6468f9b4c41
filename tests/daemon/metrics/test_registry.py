"""Covers the buckets of an observation, and the notation of bounds."""

from prometheus_client import CollectorRegistry

from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.registry import Histogram
from ipvsproxy.daemon.metrics.series import Metric, Type


def _histogram(*bounds: float) -> tuple[Histogram, CollectorRegistry]:
    registry = CollectorRegistry()
    return Histogram(Metric("took", Type.HISTOGRAM, "How long it took.", ("family",), bounds), registry), registry


def _shown(registry: CollectorRegistry) -> list[tuple[str, str, float]]:
    samples = [one for metric in registry.collect() for one in metric.samples]
    return [(one.labels["family"], one.labels.get("le", one.name), one.value) for one in samples]


def test_an_observation_counts_in_every_bucket_with_a_bound_not_below_it() -> None:
    measured, registry = _histogram(0.5, 1, 2)
    for value in (0.5, 0.6, 1.0, 3.0):
        measured.observe(value, "IPv4")
    buckets = [("0.5", 1), ("1", 3), ("2", 3), ("+Inf", 4), ("took_count", 4), ("took_sum", 5.1)]
    assert _shown(registry) == [("IPv4", name, value) for name, value in buckets]


def test_show_adds_a_series_before_its_first_observation_and_does_not_reset_it() -> None:
    measured, registry = _histogram(1)
    measured.show("IPv6")
    assert _shown(registry)[:2] == [("IPv6", "1", 0), ("IPv6", "+Inf", 0)]
    measured.observe(1, "IPv6")
    measured.show("IPv6")
    assert _shown(registry)[:2] == [("IPv6", "1", 1), ("IPv6", "+Inf", 1)]


def test_bounds_are_those_of_kube_proxy() -> None:
    assert [series.FAST_S[0], series.FAST_S[1], series.FAST_S[-1], len(series.FAST_S)] == [0.001, 0.002, 16.384, 15]
    # 0.25, 0.5, 1 to 59 by 1, 60 to 115 by 5, 120 to 300 by 30
    assert list(series.SLOW_S[:4]) == [0.25, 0.5, 1, 2]
    assert list(series.SLOW_S[59:64]) == [58, 59, 60, 65, 70]
    assert list(series.SLOW_S[-8:]) == [115, 120, 150, 180, 210, 240, 270, 300]
    assert len(series.SLOW_S) == 2 + 59 + 12 + 7
