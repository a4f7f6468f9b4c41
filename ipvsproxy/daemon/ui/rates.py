"""Connections, packets and bytes per second: of each Service, and of the node in the last quarter of an hour.

Rule 1: a rate is that between two readings of one virtual server; a counter reset counts from zero.
Rule 2: the rate that is shown is the mean of the last two: the kernel adds up its counters every two seconds, so a single one of
a short interval may be nothing or the double.
Rule 3: a Service without traffic in all remembered readings takes no memory.
"""

import collections
import itertools
import struct
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.virtual_servers import Counters, VirtualServer, VirtualServerKey

REMEMBERED = 24
"""The readings of which the small lines are made."""
ROWS_AT_ONCE = 100
_COUNTERS = struct.Struct("=5Q")
_NOTHING = (0, 0, 0, 0, 0)


class Rates(NamedTuple):
    """Connections, packets and bytes per second; packets and bytes of both directions."""

    connections: float = 0.0
    packets: float = 0.0
    bytes: float = 0.0


NO_RATES = Rates()


class _History(msgspec.Struct, gc=False):
    """The last readings of one Service: connections and bytes of ``REMEMBERED`` ones, then packets of the last two.

    One array, because each takes 64 bytes for itself. ``busy`` is the number of the last reading with traffic.
    """

    figures: "array[float]"
    busy: int


_LENGTH = 2 * REMEMBERED + 2


def between(before: Counters | None, now: Counters, seconds: float) -> Rates:
    """The rates between two readings of one object; ``before`` is None if it had counted nothing."""
    return Rates._make(count / seconds for count in _counts(before or _NOTHING, now))


def _counts(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, int, int]:
    """Connections, packets and bytes since then."""
    if any(map(int.__lt__, now, before)):
        before = _NOTHING  # it was made again
    return now[0] - before[0], now[1] + now[2] - before[1] - before[2], now[3] + now[4] - before[3] - before[4]


class ServiceRates:
    """The rates of all Services."""

    def __init__(self) -> None:
        self.readings = 0
        """The number of complete readings after the first one; figures change with it."""
        self.interval_s: float | None = None
        """Between the last two readings."""
        self._read_s: float | None = None
        self._began_s = 0.0
        self._seen = 0
        self._last: dict[VirtualServerKey, bytes] = {}
        self._histories: dict[ServiceName, _History] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def begin(self, now: float) -> None:
        """Begin a reading. What an unfinished one has counted counts for this one."""
        self._began_s, self._seen = now, 0

    def take(
        self, counters: Mapping[VirtualServerKey, Counters], desired: Mapping[VirtualServerKey, VirtualServer]
    ) -> Iterator[None]:
        """Take in a part of a reading, with pauses. Those of no Service do not count; virtual servers at zero may be missing."""
        last, number = self._last, self.readings + 1
        for index, (key, counted) in enumerate(counters.items(), 1):
            if index % ROWS_AT_ONCE == 0:
                yield
            server = desired.get(key)
            if server is None:
                continue
            self._seen += 1
            packed, before = _COUNTERS.pack(*counted), last.get(key)
            if packed == before:
                continue
            last[server.key] = packed
            if self._read_s is not None:
                counts = _counts(_COUNTERS.unpack(before) if before else _NOTHING, counted)
                self._add(server.owner.service, counts, number)

    def _add(self, name: ServiceName, counts: tuple[int, int, int], number: int) -> None:
        """Add counts to the place of a reading; they become rates at its end."""
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = _History(array("f", bytes(4 * _LENGTH)), 0)
        is_first, figures = history.busy != number, history.figures
        history.busy = number
        for place, count in zip(_places(number), counts, strict=True):
            figures[place] = count if is_first else figures[place] + count

    def finish(self, desired: Container[VirtualServerKey]) -> Iterator[None]:
        """End a reading, with pauses. Services that have had no traffic for long are forgotten."""
        before_s, self._read_s = self._read_s, self._began_s
        if before_s is None:
            return
        seconds, number = max(self._began_s - before_s, 0.001), self.readings + 1
        if self._seen != len(self._last):
            yield from _forgetting(self._last, desired)
        places, ended = _places(number), list[ServiceName]()
        for index, (name, history) in enumerate(self._histories.items(), 1):
            if index % ROWS_AT_ONCE == 0:
                yield
            figures, is_busy = history.figures, history.busy == number
            for place in places:
                figures[place] = figures[place] / seconds if is_busy else 0.0
            if number - history.busy >= REMEMBERED:
                ended.append(name)
        for name in ended:
            del self._histories[name]
        self.interval_s = seconds
        self.readings = number

    def of(self, name: ServiceName) -> Rates | None:
        """The rates of a Service now; None before the second reading."""
        if not self.readings:
            return None
        history = self._histories.get(name)
        if history is None:
            return NO_RATES
        figures = history.figures
        if self.readings == 1:
            return Rates._make(figures[place] for place in _places(1))
        now, before = _places(self.readings), _places(self.readings - 1)
        return Rates._make((figures[new] + figures[old]) / 2 for new, old in zip(now, before, strict=True))

    def ranking(self, index: int) -> Callable[[ServiceName], float]:
        """A function that gives one of the rates of a Service, for sorting: connections, packets or bytes."""
        now, before = _places(self.readings)[index], _places(self.readings - (self.readings > 1))[index]
        histories = self._histories

        def rank(name: ServiceName) -> float:
            history = histories.get(name)
            return history.figures[now] + history.figures[before] if history else 0.0

        return rank

    def line(self, name: ServiceName) -> tuple[list[float], list[float]]:
        """Connections and bytes per second of the last readings, the oldest first; both empty without traffic."""
        history = self._histories.get(name)
        if history is None:
            return [], []
        count = min(self.readings, REMEMBERED)
        places = [_places(number) for number in range(self.readings - count + 1, self.readings + 1)]
        figures = history.figures
        return [round(figures[place[0]], 2) for place in places], [round(figures[place[2]], 1) for place in places]


def _forgetting(last: dict[VirtualServerKey, bytes], desired: Container[VirtualServerKey]) -> Iterator[None]:
    gone: list[VirtualServerKey] = []
    for index, key in enumerate(last, 1):
        if index % ROWS_AT_ONCE == 0:
            yield
        if key not in desired:
            gone.append(key)
    for key in gone:
        del last[key]


def _places(number: int) -> tuple[int, int, int]:
    """Where a reading has its connections, packets and bytes."""
    return number % REMEMBERED, 2 * REMEMBERED + number % 2, REMEMBERED + number % REMEMBERED


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
