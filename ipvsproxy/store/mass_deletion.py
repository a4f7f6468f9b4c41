"""Doubts about lists that are suddenly much shorter: an API server that has just started may return an empty one.

Rule 1: if one complete list lacks more than a share of all objects, none of them is removed.
Rule 2: a second complete list, ``CONFIRMED_AFTER_S`` later or more, that also lacks too much confirms the first.
Rule 3: an empty first list is doubted, since every API server has at least the Service of its own address. Until it is confirmed,
observed objects of the kernel stay.
Rule 4: deletions that a watch reports one by one are always accepted.
"""

import dataclasses

from ipvsproxy.model.service import ObjectKind

LEAST = 10
"""Fewer missing objects than this are always removed at once."""
CONFIRMED_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A doubted list: its time (by the caller's clock), and the numbers of missing and of known objects.

    ``is_first``: it is an empty first list, so the number of missing objects is unknown.
    """

    since_s: float
    missing: int
    known: int
    is_first: bool = False

    @property
    def due_s(self) -> float:
        """The time from which another list confirms it."""
        return self.since_s + CONFIRMED_AFTER_S


class Guard:
    """Judges lists. ``percent`` is the largest share that one list may remove, 0..100; 0 accepts every list."""

    def __init__(self, percent: int) -> None:
        self.percent = percent
        self.doubts: dict[ObjectKind, Doubt] = {}

    def accepts(self, kind: ObjectKind, *, missing: int, known: int, now: float) -> bool:
        """Whether the objects that a complete list lacks may be removed."""
        is_much = missing >= LEAST and missing * 100 > self.percent * known
        return self._weigh(kind, Doubt(since_s=now, missing=missing, known=known), is_doubtful=is_much)

    def accepts_first(self, kind: ObjectKind, *, is_empty: bool, now: float) -> bool:
        """Whether objects that no list has ever contained may be removed."""
        return self._weigh(kind, Doubt(since_s=now, missing=0, known=0, is_first=True), is_doubtful=is_empty)

    @property
    def doubts_the_first(self) -> bool:
        """Whether the first list of a kind is doubted."""
        return any(doubt.is_first for doubt in self.doubts.values())

    def _weigh(self, kind: ObjectKind, doubt: Doubt, *, is_doubtful: bool) -> bool:
        before = self.doubts.pop(kind, None)
        if not self.percent or not is_doubtful or (before and doubt.since_s >= before.due_s):
            return True
        self.doubts[kind] = dataclasses.replace(doubt, since_s=before.since_s) if before else doubt
        return False
