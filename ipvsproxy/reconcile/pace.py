"""How many real servers may be removed now, so that those which are added do not pay for it.

The kernel keeps a removed real server on a list for two to three minutes, and each one that is added walks the whole list, with
packets held off meanwhile (``ip_vs_trash_get_dest`` and ``IP_VS_DEST_TRASH_PERIOD``, net/netfilter/ipvs/ip_vs_ctl.c): 0.05 to
0.1 µs for each entry. After a thousand replaced endpoints a second, for a minute, that is 4 ms for each one more.

That helps in a burst. Where so many are replaced for longer, all that may wait do so already, and the list grows as without.
"""

import collections
import itertools
import math

KEPT_S = 180.0
"""How long a removed real server stays on the kernel's list, at most, if nothing holds it."""
RATE_WINDOW_S = 10.0
"""The rate of additions is that of so many seconds, or that of the last ones, where this is higher."""
SURGE_S = 3
"""How many these are. A storm that begins would otherwise be taken for little, and leave a list for minutes that is too long."""
STEPS_PER_S = 1_000_000
"""So many entries of the list may all additions of a second walk together: a twentieth to a tenth of a processor."""
MOST_KEPT = 10_000
"""Longest list when next to nothing is added: half a millisecond to one for an addition."""
FEWEST_KEPT = 1_000
"""A list of this length costs next to nothing, however much is added."""

PATIENT_SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "fo", "ovf"})
"""Schedulers that pass over a real server of weight 0. Others refuse clients in its place (sh, dh, mh), or are not known."""
FEW_WAITING = 2
"""So many empty real servers may wait in any virtual server; in a larger one, as many as it has others. Its scheduler walks over
them for each connection."""


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
        """The largest sum of one of so many seconds, this one included, and when the last such one is not among them any more."""
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
    """What was added and removed lately."""

    def __init__(self) -> None:
        self._added = _Window(RATE_WINDOW_S)
        self._removed = _Window(KEPT_S)

    def note(self, *, added: int, removed: int, now: float) -> None:
        """Book how many real servers were added and removed, by themselves or with their virtual server."""
        if added:
            self._added.add(added, now)
        if removed:
            self._removed.add(removed, now)

    def changes_s(self, now: float) -> float:
        """When there will be more room by itself, if nothing is added or removed; infinite where that will not be."""
        surge, over_s = self._added.peak(now, SURGE_S)
        surge_s = over_s if surge > self._added.total(now) / RATE_WINDOW_S else math.inf
        return min(self._added.shrinks_s, self._removed.shrinks_s, surge_s)

    def room(self, now: float) -> int:
        """How many more may be removed now; 0 or more."""
        added_per_s = max(self._added.total(now) / RATE_WINDOW_S, self._added.peak(now, SURGE_S)[0])
        most = min(MOST_KEPT, max(FEWEST_KEPT, STEPS_PER_S / added_per_s)) if added_per_s else MOST_KEPT
        return max(0, int(most) - self._removed.total(now))
