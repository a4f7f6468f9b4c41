"""Totals by labels of counters that may have counter resets."""

from collections.abc import Collection, Container, Hashable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from ipvsproxy.model.virtual_servers import Counters

ROWS_AT_ONCE = 100
"""The number of rows that are taken in between two readings of the clock."""
ZERO = Counters()
K = TypeVar("K", bound=Hashable)


class Row(NamedTuple):
    """Counters of one kernel object, and the labels of their series."""

    key: Hashable
    labels: str
    counters: Counters | None
    """None if the object is there, but its counters were not read."""


class _Marked(msgspec.Struct, gc=False):
    """An object or total with the number of the last booking in which it was there."""

    booking: int = 0


class Total(_Marked, gc=False):
    """The sum of the counters of all objects with the same labels, in the order of ``Counters``."""

    counts: list[int] = msgspec.field(default_factory=lambda: list(ZERO))


class _Booked(_Marked, gc=False):
    """The last known counters of an object."""

    counters: Counters = ZERO


S = TypeVar("S", bound=_Marked)


class Ledger:
    """Totals by labels. At most ``limit`` labels have a total of their own; ``others`` is that of the rest, the ``unlisted``.

    Present objects are marked with the number of the booking; objects with another number are gone. Differences of sets would
    show the same, but each set operation is one call, which blocks the loop for its whole duration.
    """

    def __init__(self, limit: int) -> None:
        self.totals: dict[str, Total] = {}
        self.others = Total()
        self.unlisted: set[str] = set()
        self._limit = limit
        self._bookings = 0
        self._last: dict[Hashable, _Booked] = {}

    def booking(self, rows: Collection[Row], ownerless: Container[Hashable] = ()) -> Iterator[None]:
        """Take in the counters of all present objects, with pauses. Labels without an object are forgotten.

        A total grows by the difference to the last counters of an object, and after a counter reset by all of the new ones.

        ``ownerless`` are present objects without labels: their counters up to now are not counted again later.

        A caller that stops at a pause leaves each row booked as a whole or not at all: nothing is counted twice.
        """
        self._bookings += 1
        yield from self._marking(rows)
        yield from _forgetting(self.totals, self._bookings)
        yield from _forgetting(self._last, self._bookings, ownerless)
        for number, (key, labels, counters) in enumerate(rows, 1):
            if number % ROWS_AT_ONCE == 0:
                yield
            booked = self._last.get(key)
            if booked is None:
                booked = self._last[key] = _Booked(self._bookings)
            last, current = booked.counters, booked.counters if counters is None else counters
            booked.counters = current
            if current == last:
                continue
            if any(map(int.__lt__, current, last)):
                last = ZERO  # a counter reset: the object was made again
            counts = self._total(labels).counts
            for index, (new, old) in enumerate(zip(current, last, strict=True)):
                counts[index] += new - old

    def _marking(self, rows: Collection[Row]) -> Iterator[None]:
        """Mark the present objects and totals."""
        unlisted: set[str] = set()
        for number, (key, labels, _) in enumerate(rows, 1):
            if number % ROWS_AT_ONCE == 0:
                yield
            if booked := self._last.get(key):
                booked.booking = self._bookings
            if total := self.totals.get(labels):
                total.booking = self._bookings
            elif labels in self.unlisted:
                unlisted.add(labels)
        self.unlisted = unlisted

    def _total(self, labels: str) -> Total:
        total = self.totals.get(labels)
        if total is not None:
            return total
        if len(self.totals) >= self._limit:
            self.unlisted.add(labels)
            return self.others
        self.unlisted.discard(labels)
        total = self.totals[labels] = Total(self._bookings)
        return total


def _forgetting(marked: dict[K, S], booking: int, keeping: Container[Hashable] = ()) -> Iterator[None]:
    """Forget all that has no mark of this booking, except for ``keeping``, with pauses."""
    gone: list[K] = []
    for number, (key, one) in enumerate(marked.items(), 1):
        if number % ROWS_AT_ONCE == 0:
            yield
        if one.booking != booking and key not in keeping:
            gone.append(key)
    for number, key in enumerate(gone, 1):
        if number % ROWS_AT_ONCE == 0:
            yield
        del marked[key]
