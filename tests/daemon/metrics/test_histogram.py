"""Covers the buckets of an observation, and the notation of bounds."""

from ipvsproxy.daemon.metrics import histogram
from ipvsproxy.daemon.metrics.histogram import Histogram, Series


def test_an_observation_counts_in_every_bucket_with_a_bound_not_below_it() -> None:
    measured = Histogram((0.5, 1, 2))
    for value in (0.5, 0.6, 1.0, 3.0):
        measured.observe(value, "IPv4")
    assert list(measured.series()) == [Series(("IPv4",), [("0.5", 1), ("1", 3), ("2", 3), ("+Inf", 4)], 5.1)]


def test_show_adds_a_series_before_its_first_observation_and_does_not_reset_it() -> None:
    measured = Histogram((1,))
    measured.show("IPv6")
    assert list(measured.series()) == [Series(("IPv6",), [("1", 0), ("+Inf", 0)], 0.0)]
    measured.observe(1, "IPv6")
    measured.show("IPv6")
    assert list(measured.series()) == [Series(("IPv6",), [("1", 1), ("+Inf", 1)], 1.0)]


def test_bounds_are_those_of_kube_proxy() -> None:
    assert [histogram.FAST_S[0], histogram.FAST_S[1], histogram.FAST_S[-1], len(histogram.FAST_S)] == [0.001, 0.002, 16.384, 15]
    # 0.25, 0.5, 1 to 59 by 1, 60 to 115 by 5, 120 to 300 by 30
    assert list(histogram.SLOW_S[:4]) == [0.25, 0.5, 1, 2]
    assert list(histogram.SLOW_S[59:64]) == [58, 59, 60, 65, 70]
    assert list(histogram.SLOW_S[-8:]) == [115, 120, 150, 180, 210, 240, 270, 300]
    assert len(histogram.SLOW_S) == 2 + 59 + 12 + 7
