"""How many real servers may be removed now without making additions slow.

The kernel keeps a removed real server on a list for two to three minutes. Each addition walks the whole list, and packets wait
meanwhile (``ip_vs_trash_get_dest`` and ``IP_VS_DEST_TRASH_PERIOD``, net/netfilter/ipvs/ip_vs_ctl.c): 0.05 to 0.1 µs for each
entry. After a minute of a thousand replaced endpoints a second, each addition takes 4 ms.

A pace of removals helps in a burst. In a longer storm all real servers that may wait do so already, and the list grows as without
a pace.
"""

import collections
import itertools
import math

KEPT_S = 180.0
"""The longest time that a removed real server stays on the kernel's list, if nothing holds it."""
RATE_WINDOW_S = 10.0
"""The rate of additions is that of so many seconds, or of the last few, whichever is higher."""
SURGE_S = 3
"""The last few seconds. Without them a beginning storm would look small, and leave a list that is too long for minutes."""
WALKED_PER_S = 1_000_000
"""The most entries of the list that all additions of a second may walk: a twentieth to a tenth of a processor."""
MOST_KEPT = 10_000
"""The longest list with few additions: half a millisecond to one for an addition."""
FEWEST_KEPT = 1_000
"""A list of this length costs next to nothing with any number of additions."""

PATIENT_SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "fo", "ovf"})
"""Schedulers that skip a real server of weight 0. Others refuse clients instead (sh, dh, mh), or are unknown."""
FEW_WAITING = 2
"""So many real servers without connections may wait in any virtual server; in a larger one, as many as it has others. Its
scheduler walks over them for each connection."""


class _Window:
    """A sum over the last seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._counts: collections.deque[tuple[int, int]] = collections.deque()
        self._total = 0

    def add(self, count: int, now: float) -> None:
        second = int(now)
        if self._counts and self._counts[-1][0] == second:
            self._counts[-1] = (second, self._counts[-1][1] + count)
        else:
            self._counts.append((second, count))
        self._total += count

    def peak(self, now: float, seconds: int) -> tuple[int, float]:
        """The largest sum of one of the last ``seconds`` seconds, and when that second leaves the window."""
        latest = itertools.takewhile(lambda count: count[0] > int(now) - seconds, reversed(self._counts))
        count, second = max(((count, second) for second, count in latest), default=(0, -math.inf))
        return count, second + seconds

    @property
    def shrinks_s(self) -> float:
        return self._counts[0][0] + self._length_s if self._counts else math.inf

    def total(self, now: float) -> int:
        while self._counts and self._counts[0][0] <= now - self._length_s:
            self._total -= self._counts.popleft()[1]
        return self._total


class Pace:
    """The recent additions and removals."""

    def __init__(self) -> None:
        self._added = _Window(RATE_WINDOW_S)
        self._removed = _Window(KEPT_S)

    def note(self, *, added: int, removed: int, now: float) -> None:
        """Record added and removed real servers, also those that went with their virtual server."""
        if added:
            self._added.add(added, now)
        if removed:
            self._removed.add(removed, now)

    def changes_s(self, now: float) -> float:
        """When room grows without additions and removals; infinite if it does not."""
        surge, over_s = self._added.peak(now, SURGE_S)
        surge_s = over_s if surge > self._added.total(now) / RATE_WINDOW_S else math.inf
        return min(self._added.shrinks_s, self._removed.shrinks_s, surge_s)

    def room(self, now: float) -> int:
        """The number of further removals that are possible now; 0 or more."""
        added_per_s = max(self._added.total(now) / RATE_WINDOW_S, self._added.peak(now, SURGE_S)[0])
        most = min(MOST_KEPT, max(FEWEST_KEPT, WALKED_PER_S / added_per_s)) if added_per_s else MOST_KEPT
        return max(0, int(most) - self._removed.total(now))
