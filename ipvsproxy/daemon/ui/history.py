"""The last quarter of an hour of the node, in a bounded ring: traffic, changes, and how long they took."""

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ipvsproxy.model.virtual_servers import Counters

LENGTH_S = 900.0
POINTS = 450
"""The most points: one every two seconds."""
SHORT_S = 5.0
"""Two intervals in a row that are shorter than this are taken together: the kernel adds up its counters every two seconds."""
COLUMNS = (
    "at",
    "connectionsPerSecond",
    "packetsInPerSecond",
    "packetsOutPerSecond",
    "bytesInPerSecond",
    "bytesOutPerSecond",
    "changes",
    "latencySeconds",
)
"""The names of the figures of a point, in the order of ``Point``."""


class Point(NamedTuple):
    """The node at one moment; rates and changes are those since the point before. ``at_s`` is in seconds since the epoch."""

    at_s: float
    connections: float | None
    packets_in: float | None
    packets_out: float | None
    bytes_in: float | None
    bytes_out: float | None
    changes: int
    latency_s: float | None


_UNKNOWN = (None,) * len(Counters._fields)


class _Sample(NamedTuple):
    taken_s: float
    counters: Counters


class History:
    """The points of the node."""

    def __init__(self) -> None:
        self._points: collections.deque[Point] = collections.deque(maxlen=POINTS)
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=3)
        self._changes = 0
        self._latency_s: float | None = None
        self._added_s = 0.0

    def note_changes(self, count: int, latency_s: float) -> None:
        """Some changes have come in force; ``latency_s`` is the time since the arrival of the oldest one."""
        if count:
            self._changes += count
            self._latency_s = max(latency_s, self._latency_s or 0.0)

    def add(self, counters: Counters | None, now: float, at_s: float) -> None:
        """Add a point. ``counters`` are those of the whole node, None if they could not be read; ``now`` is monotonic time."""
        if counters is None:
            self._samples.clear()
            rates: Sequence[float | None] = _UNKNOWN
        else:
            self._samples.append(_Sample(now, counters))
            rates = self._rates()
        self._follow_clock(now, at_s)
        self._points.append(Point._make((at_s, *rates, self._changes, self._latency_s)))
        self._changes, self._latency_s = 0, None
        while self._points[0].at_s < at_s - LENGTH_S:
            self._points.popleft()

    def _follow_clock(self, now: float, at_s: float) -> None:
        """Let the points be as old as they are when the clock of the node has been set back."""
        if self._points and at_s < (last_s := self._points[-1].at_s):
            moved_s = at_s - last_s - (now - self._added_s)
            self._points = collections.deque((point._replace(at_s=point.at_s + moved_s) for point in self._points), POINTS)
        self._added_s = now

    def _rates(self) -> Sequence[float | None]:
        last = self._samples[-1]
        since = next((one for one in self._samples if last.taken_s - one.taken_s < SHORT_S), last)
        if since is last and len(self._samples) > 1:
            since = self._samples[-2]
        seconds = last.taken_s - since.taken_s
        if seconds <= 0:
            return _UNKNOWN
        # Counters that were set to zero (ipvsadm --zero) count from there.
        differences = [new - old if new >= old else new for new, old in zip(last.counters, since.counters, strict=True)]
        return [difference / seconds for difference in differences]

    @property
    def last(self) -> Point | None:
        """The newest point; None before the first."""
        return self._points[-1] if self._points else None

    def since(self, at_s: float) -> Iterator[Point]:
        """The points after this time, the oldest first."""
        later = itertools.takewhile(lambda point: point.at_s > at_s, reversed(self._points))
        return reversed(list(later))
