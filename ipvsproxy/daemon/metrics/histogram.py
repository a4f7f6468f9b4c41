"""A histogram of Prometheus with bucket bounds in Go's notation.

Dashboards and recording rules name buckets by text: kube-proxy's ``le="1"`` is not prometheus_client's ``le="1.0"``.
"""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FAST_S = tuple(round(0.001 * 2**step, 3) for step in range(15))
"""kube-proxy's buckets for durations of milliseconds."""
SLOW_S = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
"""kube-proxy's buckets for durations from a quarter of a second to minutes."""
REQUEST_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
"""client-go's buckets for requests to the API server (component-base/metrics/prometheus/restclient)."""


class Series(NamedTuple):
    """One combination of label values: the number of observations up to each bound, by the bound's text, and their sum."""

    labels: tuple[str, ...]
    buckets: Sequence[tuple[str, int]]
    total: float


class Histogram:
    """Counts observations by label values and bucket. Only one thread may write a combination; any may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """``bounds`` are the upper bounds of the buckets, ascending, without infinity."""
        self._bounds = bounds
        self._texts = (*(f"{bound:g}" for bound in bounds), "+Inf")
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def show(self, *labels: str) -> None:
        """Show a series at zero before its first observation."""
        self._counts.setdefault(labels, [0] * len(self._texts))
        self._sums.setdefault(labels, 0.0)

    def observe(self, value: float, *labels: str) -> None:
        """Count one observation."""
        self.show(*labels)
        self._counts[labels][bisect.bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def series(self) -> Iterator[Series]:
        """All series, in the order of their first appearance."""
        for labels, counts in list(self._counts.items()):
            at_most = list(zip(self._texts, itertools.accumulate(counts), strict=True))
            yield Series(labels, at_most, self._sums[labels])
