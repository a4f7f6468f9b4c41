"""Drift: what was in force and was found otherwise. It is healed at once, but not again and again.

Rule 1: the first few times it is only counted. What returns after that is left alone for a few seconds each time: somebody else
wants it otherwise, and a fight helps neither.
Rule 2: that holds for the wish that is undone. When the wish changes, it is programmed at once.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

FREE_HEALS = 3
"""So many times within ``CALM_S`` the same drift is healed without waiting."""
CALM_S = 600.0
"""A drift that did not return for so long is forgotten."""
FIRST_PATIENCE_S = 5.0
LONGEST_PATIENCE_S = 10.0
"""Who flushes our rules once a minute must not have them away for most of it: kube-proxy has them back within its sync period."""


class Place(NamedTuple):
    """Where drift was found: a kind of kernel object as operations name it, and the key in its table."""

    kind: str
    key: object


class News(NamedTuple):
    """What was found since the last time it was asked for: how many of each kind, and what is left alone for now.

    The number of a place is how often its wish was undone.
    """

    found: Mapping[str, int]
    left_alone: Mapping[Place, int]


class _History(NamedTuple):
    desired: object
    times: int
    last_s: float
    patience_ends_s: float


class Drifts:
    """All places where drift was found lately."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()
        self._left_alone: dict[Place, int] = {}
        self._places: dict[Place, _History] = {}
        self._contested: set[Place] = set()
        self._withheld: dict[Place, float] = {}

    def __bool__(self) -> bool:
        """Whether there is a place that is not healed at once."""
        return bool(self._contested)

    def note(self, place: Place, desired: object, now: float) -> None:
        """Book that a place was found otherwise than wished; ``desired`` None: nothing should be there."""
        self._found[place.kind] += 1
        last = self._places.get(place)
        again = last is not None and last.desired == desired and now - last.last_s <= CALM_S
        times = last.times + 1 if last is not None and again else 1
        excess = times - FREE_HEALS
        if excess <= 0:
            self._places[place] = _History(desired, times, now, now)
            self._contested.discard(place)
            return
        patience_s = FIRST_PATIENCE_S if excess == 1 else LONGEST_PATIENCE_S
        self._places[place] = _History(desired, times, now, now + patience_s)
        self._contested.add(place)
        self._left_alone[place] = times

    def begin_round(self) -> None:
        """All that there is to do will be asked about anew: what is not among it waits for nothing any more."""
        self._withheld.clear()

    def may_heal(self, place: Place, desired: object, now: float) -> bool:
        """Whether an operation on this place may be done now."""
        if place not in self._contested:
            return True
        history = self._places[place]
        if history.patience_ends_s <= now or history.desired != desired:
            return True
        self._withheld[place] = history.patience_ends_s
        return False

    def forget_calm(self, now: float) -> None:
        """Forget what has been calm for long."""
        for place in [place for place, history in self._places.items() if now - history.last_s > CALM_S]:
            del self._places[place]
            self._contested.discard(place)

    def next_s(self) -> float | None:
        """When the next operation that was not allowed in this round may be done."""
        return min(self._withheld.values(), default=None)

    def take_news(self) -> News:
        """What was found since this was called last."""
        news = News(self._found, self._left_alone)
        self._found, self._left_alone = Counter(), {}
        return news
