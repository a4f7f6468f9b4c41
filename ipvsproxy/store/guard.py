"""The guard against lists that lack too many objects: another list must confirm that the objects are missing."""

from typing import NamedTuple

from ipvsproxy.model.service import ObjectKind

LEAST = 10
"""The smallest number of missing objects for which a list can be doubted; fewer missing objects are removed at once. Lists of
Nodes have no such minimum, because a cluster may have few Nodes."""
CONFIRMED_AFTER_S = 60.0


class Doubt(NamedTuple):
    """A doubted list: the time when the list arrived (by the caller's clock), and the numbers of missing and of known objects.

    ``is_first`` means that the list is an empty first list, so the number of missing objects is unknown.
    """

    since_s: float
    missing: int
    known: int
    is_first: bool = False

    @property
    def due_s(self) -> float:
        """The earliest time at which another list can confirm this doubted list."""
        return self.since_s + CONFIRMED_AFTER_S


class Guard:
    """Judges lists.

    ``percent`` is the largest share of the objects that one list may remove, 0..100; 0 means that every list is accepted.
    ``all_nodes`` means that all Nodes are watched, so lists of Nodes are judged, too.
    """

    def __init__(self, percent: int, *, all_nodes: bool = False) -> None:
        self.percent = percent
        self.all_nodes = all_nodes
        self.doubts: dict[ObjectKind, Doubt] = {}

    def accepts(
        self, kind: ObjectKind, *, missing: int, known: int, now: float, is_first: bool = False, is_empty: bool = False
    ) -> bool:
        """Whether objects that a complete list does not contain may be removed.

        ``is_first`` means that no list was accepted before, so only an empty list is doubted.
        """
        before = self.doubts.pop(kind, None)
        is_first |= before is not None and before.is_first
        is_much = missing >= (1 if kind is ObjectKind.NODE else LEAST) and missing * 100 > self.percent * known
        if not self.percent or not (is_empty if is_first else is_much) or (before and now >= before.due_s):
            return True
        since_s = before.since_s if before else now
        self.doubts[kind] = Doubt(since_s=since_s, missing=0 if is_first else missing, known=known, is_first=is_first)
        return False
