"""Limits how many real servers are removed at a time, so that additions stay fast.

The kernel keeps a removed real server on a list for two to three minutes. Each addition walks the whole list, and packets wait
meanwhile (``ip_vs_trash_get_dest`` and ``IP_VS_DEST_TRASH_PERIOD``, net/netfilter/ipvs/ip_vs_ctl.c): 0.05 to 0.1 µs for each
entry. After a minute of a thousand replaced endpoints a second, each addition takes 4 ms.

Limiting removals helps in a burst. In a longer storm, all real servers that may wait are waiting already, and the list grows as
it would without a limit.
"""

import itertools
import math
from collections import Counter

KEPT_S = 180.0
"""The longest time that a removed real server stays on the kernel's list, if no connection holds it."""
ADDED_S = 10.0
"""The seconds over which additions are counted: the more additions, the shorter the list must be."""
WALKED = 2_000_000
"""The most entries of the list that all additions of ``ADDED_S`` may walk: one or two hundredths of a processor."""
MOST_KEPT = 10_000
"""The longest list with few additions: half a millisecond to one for an addition."""
FEWEST_KEPT = 1_000
"""A list of this length is always allowed: walking it for a thousand additions a second takes 5 to 10 % of a processor."""

PATIENT_SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "fo", "ovf"})
"""Schedulers that skip a real server of weight 0. Other schedulers refuse clients instead (sh, dh, mh), or are unknown."""
FEW_WAITING = 2
"""The number of real servers without connections that may wait in any virtual server.

In a larger virtual server, as many may wait as are desired. The scheduler walks over waiting real servers for each connection.
"""


class _Window:
    """A sum of counts over the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._counts: Counter[float] = Counter()
        """Counts by the time at which they leave the window, in whole seconds, earliest first."""

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
    """The recent additions and removals of real servers."""

    def __init__(self) -> None:
        self._added = _Window(ADDED_S)
        self._removed = _Window(KEPT_S)

    def note(self, *, added: int, removed: int, now: float) -> None:
        """Record added and removed real servers, including those removed with their virtual server."""
        if added:
            self._added.add(added, now)
        if removed:
            self._removed.add(removed, now)

    @property
    def changes_s(self) -> float:
        """The time at which ``room`` may next grow by itself, as of its last call; infinite if it will not grow."""
        return min(self._added.shrinks_s, self._removed.shrinks_s)

    def room(self, now: float) -> int:
        """The number of further removals that are possible now; 0 or more."""
        most = WALKED // max(1, self._added.total(now))
        return max(0, min(MOST_KEPT, max(FEWEST_KEPT, most)) - self._removed.total(now))
