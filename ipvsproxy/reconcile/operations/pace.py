"""How many real servers may be removed now without making additions slow.

The kernel keeps a removed real server on a list for two to three minutes. Each addition walks the whole list, and packets wait
meanwhile (``ip_vs_trash_get_dest`` and ``IP_VS_DEST_TRASH_PERIOD``, net/netfilter/ipvs/ip_vs_ctl.c): 0.05 to 0.1 µs for each
entry. After a minute of a thousand replaced endpoints a second, each addition takes 4 ms.

A pace of removals helps in a burst. In a longer storm all real servers that may wait do so already, and the list grows as without
a pace.
"""

import itertools
import math
from collections import Counter

KEPT_S = 180.0
"""The longest time that a removed real server stays on the kernel's list, if nothing holds it."""
ADDED_S = 10.0
"""The more real servers were added in so many seconds, the shorter the list must be."""
WALKED = 2_000_000
"""The most entries of the list that all additions of ``ADDED_S`` may walk: one or two hundredths of a processor."""
MOST_KEPT = 10_000
"""The longest list with few additions: half a millisecond to one for an addition."""
FEWEST_KEPT = 1_000
"""A list of this length costs little: a thousand additions a second take a twentieth to a tenth of a processor to walk it."""

PATIENT_SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "fo", "ovf"})
"""Schedulers that skip a real server of weight 0. Others refuse clients instead (sh, dh, mh), or are unknown."""
FEW_WAITING = 2
"""So many real servers without connections may wait in any virtual server; in a larger one, as many as it has others. Its
scheduler walks over them for each connection."""


class _Window:
    """A sum over the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._counts: Counter[float] = Counter()
        """Counts by the time at which they leave the window, in whole seconds; the first one leaves first."""

    def add(self, count: int, now: float) -> None:
        self._counts[int(now) + self._length_s] += count

    def total(self, now: float) -> int:
        for time_s in list(itertools.takewhile(lambda time_s: time_s <= now, self._counts)):
            del self._counts[time_s]
        return self._counts.total()

    @property
    def shrinks_s(self) -> float:
        return next(iter(self._counts), math.inf)


class Pace:
    """The recent additions and removals."""

    def __init__(self) -> None:
        self._added = _Window(ADDED_S)
        self._removed = _Window(KEPT_S)

    def note(self, *, added: int, removed: int, now: float) -> None:
        """Record added and removed real servers, also those that went with their virtual server."""
        if added:
            self._added.add(added, now)
        if removed:
            self._removed.add(removed, now)

    @property
    def changes_s(self) -> float:
        """When room may grow without additions and removals, seen from the last call of ``room``; infinite if it does not."""
        return min(self._added.shrinks_s, self._removed.shrinks_s)

    def room(self, now: float) -> int:
        """The number of further removals that are possible now; 0 or more."""
        most = WALKED // max(1, self._added.total(now))
        return max(0, min(MOST_KEPT, max(FEWEST_KEPT, most)) - self._removed.total(now))
