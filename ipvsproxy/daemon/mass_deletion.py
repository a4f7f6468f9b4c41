"""Lists that are suddenly much shorter are not believed at once: an empty list may be a lie of a server that has just come up.

Rule 1: where more than a share of all is missing from one complete list, nothing of it is removed.
Rule 2: a second complete list, ``CONFIRMED_AFTER_S`` later or more, that lacks too much as well confirms the first.
Rule 3: what is deleted one by one is believed: a server that tells of deletions has seen them.
"""

import dataclasses

from ipvsproxy.model.service import ObjectKind

LEAST = 10
"""Fewer than this may always go at once."""
CONFIRMED_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A list that is not believed: since when, by the clock of whoever tells the time, and how much was missing of how much."""

    since_s: float
    missing: int
    known: int

    @property
    def due_s(self) -> float:
        """From when on another list confirms it."""
        return self.since_s + CONFIRMED_AFTER_S


class Guard:
    """Judges lists. ``percent`` is the largest part of all that may go at once, 0..100; 0 believes everything."""

    def __init__(self, percent: int) -> None:
        self.percent = percent
        self.doubts: dict[ObjectKind, Doubt] = {}

    def believes(self, kind: ObjectKind, *, missing: int, known: int, now: float) -> bool:
        """Whether what a complete list lacks may be removed."""
        is_much = self.percent > 0 and missing >= LEAST and missing * 100 > self.percent * known
        doubt = self.doubts.pop(kind, None)
        if not is_much or (doubt and now >= doubt.due_s):
            return True
        self.doubts[kind] = Doubt(since_s=doubt.since_s if doubt else now, missing=missing, known=known)
        return False
