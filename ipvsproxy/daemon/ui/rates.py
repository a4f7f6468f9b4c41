"""Connections, packets and bytes per second of each Service, from readings of the kernel's counters.

Rule 1: a rate is that between two readings of one virtual server; a counter reset counts from zero.
Rule 2: the rate that is shown is the mean of the last two: the kernel adds up its counters every two seconds, so a single one of
a short interval may be nothing or the double.
Rule 3: a Service without traffic in all remembered readings takes no memory.
"""

import struct
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from ipvsproxy.model.kernel import Counters, VirtualServer, VirtualServerKey
from ipvsproxy.model.service import ServiceName

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
    return _per_second(_difference(before or _NOTHING, now), seconds)


def _difference(before: tuple[int, ...], now: tuple[int, ...]) -> list[int]:
    differences = [new - old for new, old in zip(now, before, strict=True)]
    return list(now) if min(differences) < 0 else differences  # it was made again


def _per_second(counts: list[int], seconds: float) -> Rates:
    connections, packets_in, packets_out, bytes_in, bytes_out = counts
    return Rates(connections / seconds, (packets_in + packets_out) / seconds, (bytes_in + bytes_out) / seconds)


class ServiceRates:
    """The rates of all Services."""

    def __init__(self) -> None:
        self.readings = 0
        """The number of complete readings; figures change with it."""
        self.interval_s: float | None = None
        """Between the last two readings."""
        self._read_s: float | None = None
        self._began_s = 0.0
        self._last: dict[VirtualServerKey, bytes] = {}
        self._next: dict[VirtualServerKey, bytes] = {}
        self._sums: dict[ServiceName, list[int]] = {}
        self._histories: dict[ServiceName, _History] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.__init__()  # type: ignore[misc]

    def begin(self, now: float) -> None:
        """Begin a reading; an unfinished one is forgotten."""
        self._began_s, self._next, self._sums = now, {}, {}

    def take(
        self, counters: Mapping[VirtualServerKey, Counters], desired: Mapping[VirtualServerKey, VirtualServer]
    ) -> Iterator[None]:
        """Take in a part of a reading, with pauses. Those of no Service do not count; virtual servers at zero may be missing."""
        last, sums = self._last, self._sums
        for number, (key, counted) in enumerate(counters.items(), 1):
            if number % ROWS_AT_ONCE == 0:
                yield
            server = desired.get(key)
            if server is None:
                continue
            packed = _COUNTERS.pack(*counted)
            before = last.get(key)
            self._next[server.key] = packed
            if packed == before or self._read_s is None:
                continue
            differences = _difference(_COUNTERS.unpack(before) if before else _NOTHING, counted)
            name = server.owner.service
            if total := sums.get(name):
                for index, difference in enumerate(differences):
                    total[index] += difference
            else:
                sums[name] = differences

    def finish(self, ended: list[ServiceName]) -> Iterator[None]:
        """End a reading, with pauses. Adds the Services to ``ended`` that have had no traffic for long."""
        self._last, self._next = self._next, {}
        before_s, self._read_s = self._read_s, self._began_s
        if before_s is None:
            return
        seconds = max(self._began_s - before_s, 0.001)
        number = self.readings + 1
        for index, name in enumerate(self._sums, 1):
            if index % ROWS_AT_ONCE == 0:
                yield
            if name not in self._histories:
                self._histories[name] = _History(array("f", bytes(4 * _LENGTH)), number)
        gone: list[ServiceName] = []
        for index, (name, history) in enumerate(self._histories.items(), 1):
            if index % ROWS_AT_ONCE == 0:
                yield
            counts = self._sums.get(name)
            rates = _per_second(counts, seconds) if counts else NO_RATES
            for place, rate in zip(_places(number), rates, strict=True):
                history.figures[place] = rate
            if counts:
                history.busy = number
            elif number - history.busy >= REMEMBERED:
                gone.append(name)
        for name in gone:
            del self._histories[name]
        ended += gone
        self._sums = {}
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

    def has_traffic(self, name: ServiceName) -> bool:
        """Whether a Service has figures, which change with each reading."""
        return name in self._histories

    def line(self, name: ServiceName) -> tuple[list[float], list[float]]:
        """Connections and bytes per second of the last readings, the oldest first; both empty without traffic."""
        history = self._histories.get(name)
        if history is None:
            return [], []
        count = min(self.readings, REMEMBERED)
        places = [_places(number) for number in range(self.readings - count + 1, self.readings + 1)]
        figures = history.figures
        return [round(figures[place[0]], 2) for place in places], [round(figures[place[2]], 1) for place in places]


def _places(number: int) -> tuple[int, int, int]:
    """Where a reading has its connections, packets and bytes."""
    return number % REMEMBERED, 2 * REMEMBERED + number % 2, REMEMBERED + number % REMEMBERED
