"""The guard against lists that lack too many objects: such a list counts only after another list has confirmed it."""

import dataclasses

from ipvsproxy.model.service import ObjectKind

LEAST = 10
"""Fewer missing objects than this are always removed at once, except Nodes, of which a cluster may have few."""
CONFIRMED_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A doubted list: the time when it arrived (by the caller's clock), and the numbers of missing and of known objects.

    ``is_first``: the list is an empty first list, so the number of missing objects is unknown.
    """

    since_s: float
    missing: int
    known: int
    is_first: bool = False

    @property
    def due_s(self) -> float:
        """The time from which another list confirms this doubted list."""
        return self.since_s + CONFIRMED_AFTER_S


class Guard:
    """Judges lists.

    ``percent`` is the largest share of the objects that one list may remove, 0..100; 0 means that every list is accepted.
    ``all_nodes``: all Nodes are watched, so lists of Nodes are judged too.
    """

    def __init__(self, percent: int, *, all_nodes: bool = False) -> None:
        self.percent = percent
        self.all_nodes = all_nodes
        self.doubts: dict[ObjectKind, Doubt] = {}

    def accepts(self, kind: ObjectKind, *, missing: int, known: int, now: float) -> bool:
        """Whether the objects that are missing from a complete list may be removed."""
        is_much = missing >= (1 if kind is ObjectKind.NODE else LEAST) and missing * 100 > self.percent * known
        return self._weigh(kind, Doubt(since_s=now, missing=missing, known=known), is_doubtful=is_much)

    def accepts_first(self, kind: ObjectKind, *, is_empty: bool, now: float) -> bool:
        """Whether objects that no list has ever contained may be removed."""
        return self._weigh(kind, Doubt(since_s=now, missing=0, known=0, is_first=True), is_doubtful=is_empty)

    def _weigh(self, kind: ObjectKind, doubt: Doubt, *, is_doubtful: bool) -> bool:
        before = self.doubts.pop(kind, None)
        if not self.percent or not is_doubtful or (before and doubt.since_s >= before.due_s):
            return True
        self.doubts[kind] = dataclasses.replace(doubt, since_s=before.since_s) if before else doubt
        return False
