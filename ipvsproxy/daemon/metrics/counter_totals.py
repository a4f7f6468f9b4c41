"""Totals, by labels, of counters that may begin again at zero."""

from collections.abc import Collection, Container, Hashable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from ipvsproxy.model.kernel import Counters

ROWS_AT_ONCE = 100
"""Rows that are taken in between two looks at the clock."""
NOTHING = Counters()
K = TypeVar("K", bound=Hashable)


class Row(NamedTuple):
    """Counters of one kernel object, and the labels of the series that they belong to."""

    key: Hashable
    labels: str
    counters: Counters | None
    """None where they were not told, although the object is there."""


class _Seen(msgspec.Struct, gc=False):
    """What was there in a booking: the number of the last one of those."""

    booking: int = 0


class Total(_Seen, gc=False):
    """What all objects with the same labels have counted, in the order of ``Counters``."""

    counts: list[int] = msgspec.field(default_factory=lambda: list(NOTHING))


class _Booked(_Seen, gc=False):
    """What an object had counted when it was told of last."""

    counters: Counters = NOTHING


S = TypeVar("S", bound=_Seen)


class Ledger:
    """Totals by labels. ``limit`` bounds how many have their own; ``others`` is that of the rest, which are ``unlisted``.

    What is there is marked with the number of the booking, and what has another one is gone: sets of all that there are, and
    their differences, are made in one call each, which keeps the loop for as long as it takes.
    """

    def __init__(self, limit: int) -> None:
        self.totals: dict[str, Total] = {}
        self.others = Total()
        self.unlisted: set[str] = set()
        self._limit = limit
        self._bookings = 0
        self._last: dict[Hashable, _Booked] = {}

    def booking(self, rows: Collection[Row], nobodys: Container[Hashable] = ()) -> Iterator[None]:
        """Take in all counters that there are now, with a pause now and then. Labels that none of them has are forgotten.

        ``nobodys`` are objects that are there, too, and have no labels now: what they had counted is not counted again later.

        Who leaves it at a pause has some rows booked as a whole and the others not at all: nothing is counted twice.
        """
        self._bookings += 1
        yield from self._marking(rows)
        yield from _forgetting(self.totals, self._bookings)
        yield from _forgetting(self._last, self._bookings, nobodys)
        for number, (key, labels, told) in enumerate(rows, 1):
            if number % ROWS_AT_ONCE == 0:
                yield
            booked = self._last.get(key)
            if booked is None:
                booked = self._last[key] = _Booked(self._bookings)
            before, now = booked.counters, booked.counters if told is None else told
            booked.counters = now
            if now == before:
                continue
            if any(map(int.__lt__, now, before)):
                before = NOTHING  # it was made again
            counts = self._total(labels).counts
            for index, (new, old) in enumerate(zip(now, before, strict=True)):
                counts[index] += new - old

    def _marking(self, rows: Collection[Row]) -> Iterator[None]:
        """Note that these are there."""
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


def _forgetting(held: dict[K, S], booking: int, keeping: Container[Hashable] = ()) -> Iterator[None]:
    """Forget what was not there in this booking, but for what is to be kept, with a pause now and then."""
    gone: list[K] = []
    for number, (key, one) in enumerate(held.items(), 1):
        if number % ROWS_AT_ONCE == 0:
            yield
        if one.booking != booking and key not in keeping:
            gone.append(key)
    for number, key in enumerate(gone, 1):
        if number % ROWS_AT_ONCE == 0:
            yield
        del held[key]
