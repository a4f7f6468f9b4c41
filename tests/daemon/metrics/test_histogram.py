"""Buckets: where an observation is counted, and how bounds are written."""

from ipvsproxy.daemon.metrics import histogram
from ipvsproxy.daemon.metrics.histogram import Histogram, Series


def test_an_observation_is_counted_in_every_bucket_that_it_fits_in() -> None:
    seen = Histogram((0.5, 1, 2))
    for value in (0.5, 0.6, 1.0, 3.0):
        seen.observe(value, "IPv4")
    assert list(seen.series()) == [Series(("IPv4",), [("0.5", 1), ("1", 3), ("2", 3), ("+Inf", 4)], 5.1)]


def test_a_series_can_be_there_before_anything_is_observed_and_is_not_reset() -> None:
    seen = Histogram((1,))
    seen.show("IPv6")
    assert list(seen.series()) == [Series(("IPv6",), [("1", 0), ("+Inf", 0)], 0.0)]
    seen.observe(1, "IPv6")
    seen.show("IPv6")
    assert list(seen.series()) == [Series(("IPv6",), [("1", 1), ("+Inf", 1)], 1.0)]


def test_bounds_are_those_of_kube_proxy() -> None:
    assert [histogram.FAST_S[0], histogram.FAST_S[1], histogram.FAST_S[-1], len(histogram.FAST_S)] == [0.001, 0.002, 16.384, 15]
    # 0.25, 0.5, 1 to 59 by 1, 60 to 115 by 5, 120 to 300 by 30
    assert list(histogram.SLOW_S[:4]) == [0.25, 0.5, 1, 2]
    assert list(histogram.SLOW_S[59:64]) == [58, 59, 60, 65, 70]
    assert list(histogram.SLOW_S[-8:]) == [115, 120, 150, 180, 210, 240, 270, 300]
    assert len(histogram.SLOW_S) == 2 + 59 + 12 + 7
