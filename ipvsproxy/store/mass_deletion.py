"""Lists that are suddenly much shorter are not believed at once: an empty list may be a lie of a server that has just come up.

Rule 1: where more than a share of all is missing from one complete list, nothing of it is removed.
Rule 2: a second complete list, ``CONFIRMED_AFTER_S`` later or more, that lacks too much as well confirms the first.
Rule 3: the first list is doubted when it is empty, for every API server has at least the Service that leads to itself. Until it
is confirmed, what the kernel holds already stays.
Rule 4: what is deleted one by one is believed: a server that tells of deletions has seen them.
"""

import dataclasses

from ipvsproxy.model.service import ObjectKind

LEAST = 10
"""Fewer than this may always go at once."""
CONFIRMED_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A list that is not believed: since when, by the clock of whoever tells the time, and how much was missing of how much.

    ``is_first``: it is the first list that is empty, so that nobody knows what is missing.
    """

    since_s: float
    missing: int
    known: int
    is_first: bool = False

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
        is_much = missing >= LEAST and missing * 100 > self.percent * known
        return self._weigh(kind, Doubt(since_s=now, missing=missing, known=known), is_doubtful=is_much)

    def believes_first(self, kind: ObjectKind, *, is_empty: bool, now: float) -> bool:
        """Whether what no list has ever held may be removed."""
        return self._weigh(kind, Doubt(since_s=now, missing=0, known=0, is_first=True), is_doubtful=is_empty)

    @property
    def doubts_the_first(self) -> bool:
        """Whether the first list of a kind is not believed yet."""
        return any(doubt.is_first for doubt in self.doubts.values())

    def _weigh(self, kind: ObjectKind, doubt: Doubt, *, is_doubtful: bool) -> bool:
        before = self.doubts.pop(kind, None)
        if not self.percent or not is_doubtful or (before and doubt.since_s >= before.due_s):
            return True
        self.doubts[kind] = dataclasses.replace(doubt, since_s=before.since_s) if before else doubt
        return False
