"""Drift: an object in force that another program has changed. Drift is repaired at once, unless it returns again and again.

Rule 1: the first few times, drift is repaired at once and only counted. Drift that returns more often waits some time before each
repair, because another program sets another value, and a fight helps neither side.
Rule 2: only drift from the same desired value waits. A new desired value is programmed at once.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import SetEntry

FREE_HEALS = 3
"""How often the same drift is repaired without waiting, if it returns within ``CALM_S`` each time."""
CALM_S = 600.0
"""The time after which drift that has not returned is forgotten."""
FIRST_PATIENCE_S = 5.0
LONGEST_PATIENCE_S = 10.0
"""The longest wait.

A program that flushes our rules once a minute must not keep them absent: kube-proxy has a sync period of 30 s.
"""


class DriftPlace(NamedTuple):
    """A place of drift: the kind of kernel object, and the key in its table."""

    kind: str
    key: object

    def __str__(self) -> str:
        """The name for people, without the kind. Rules are named by their family; a set entry has the name of its set as well."""
        if isinstance(self.key, Family):
            return self.key.label
        return f"{self.key.set} {self.key}" if isinstance(self.key, SetEntry) else str(self.key)


class News(NamedTuple):
    """The drift since the last call: the number of objects by kind, and the places that wait for their repair.

    ``left_alone`` has the number of times that the desired value of each waiting place was undone.
    """

    drifted: Mapping[str, int]
    left_alone: Mapping[DriftPlace, int]


class _DriftHistory(NamedTuple):
    desired: object
    times: int
    last_s: float
    patience_ends_s: float


class Drifts:
    """All recent places of drift."""

    def __init__(self) -> None:
        self._drifted: Counter[str] = Counter()
        self._left_alone: dict[DriftPlace, int] = {}
        self._places: dict[DriftPlace, _DriftHistory] = {}
        """The history of each place; the place whose drift is longest ago comes first."""
        self._contested: set[DriftPlace] = set()
        self._withheld: dict[DriftPlace, float] = {}

    def __bool__(self) -> bool:
        """Whether any place must wait for its repair."""
        return bool(self._contested)

    def note(self, place: DriftPlace, desired: object, now: float) -> None:
        """Record drift at a place. ``desired`` is None if no value is desired there."""
        self._drifted[place.kind] += 1
        last = self._places.pop(place, None)
        again = last is not None and last.desired == desired and now - last.last_s <= CALM_S
        times = last.times + 1 if last is not None and again else 1
        excess = times - FREE_HEALS
        if excess <= 0:
            self._places[place] = _DriftHistory(desired, times, now, now)
            self._contested.discard(place)
            return
        patience_s = FIRST_PATIENCE_S if excess == 1 else LONGEST_PATIENCE_S
        self._places[place] = _DriftHistory(desired, times, now, now + patience_s)
        self._contested.add(place)
        self._left_alone[place] = times

    def begin_round(self) -> None:
        """Begin a round: ``may_heal`` is called again for every operation, and places without an operation stop waiting."""
        self._withheld.clear()

    def may_heal(self, place: DriftPlace, desired: object, now: float) -> bool:
        """Whether an operation on this place is allowed now."""
        if place not in self._contested:
            return True
        history = self._places[place]
        if history.patience_ends_s <= now or history.desired != desired:
            return True
        self._withheld[place] = history.patience_ends_s
        return False

    def forget_calm(self, now: float) -> None:
        """Forget places without drift for ``CALM_S``."""
        calm = list(itertools.takewhile(lambda known: now - known[1].last_s > CALM_S, self._places.items()))
        for place, _ in calm:
            del self._places[place]
            self._contested.discard(place)

    def next_s(self) -> float | None:
        """The time at which the first operation that was refused in this round is allowed."""
        return min(self._withheld.values(), default=None)

    def take_news(self) -> News:
        """The drift since the last call."""
        news = News(self._drifted, self._left_alone)
        self._drifted, self._left_alone = Counter(), {}
        return news
