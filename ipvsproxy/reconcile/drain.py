"""Graceful termination: a TCP real server that is not wanted any more keeps its connections, and gets no new ones.

It has weight 0 from the moment it is not wanted. It is removed when both of its connection counts are 0 and there is room for
it on the kernel's list of removed ones (see ``pace``), or when its deadline is over. UDP and SCTP real servers are removed at
once, as kube-proxy does.

Who begins to drain while there is no room is asked for its connections when there is some: they would change nothing before, and
the kernel then tells of several real servers of a virtual server at once.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from ipvsproxy.model.kernel import Connections, RealServers, VirtualServerKey
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey

SHORTEST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
_NONE = Connections(0, 0)
_INTERVAL_SHARE = 0.25
"""A drain is looked at again after this share of its age: often at first, seldom when it is an old one."""
_ENDED_KEPT = 1000
"""So many drains that have ended may stand in a queue before it is built anew."""


@dataclasses.dataclass(slots=True, eq=False)
class Drain:
    """One real server that is being emptied. ``connections`` is None until it has been looked at.

    ``due_s`` is infinite when it is not to be looked at: it ``waits`` for room, it is ``over``, or it has ended. One that waits
    has no connections, or has not been looked at.
    """

    virtual_server: VirtualServerKey
    key: RealServerKey
    since_s: float
    due_s: float
    connections: Connections | None = None
    waits: bool = False
    over: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing is to be done about it any more but its removal."""
        return self.due_s == math.inf and not self.waits


class Drains:
    """All real servers with weight 0 that are waiting for their connections to end.

    What a call costs depends on what it concerns, not on how many there are, but where all are listed. So what has ended stays
    in the queues until it comes to their front, or there is more of it than of others.
    """

    def __init__(self, deadline_s: float) -> None:
        """``deadline_s`` 0 means as long as it takes."""
        self.deadline_s = deadline_s
        self._drains: dict[VirtualServerKey, dict[RealServerKey, Drain]] = {}
        self._count = 0
        self.waiting = 0
        """How many wait for room: they are empty, or were not looked at."""
        self.over = 0
        """How many may be removed and have not been."""
        self._by_age: collections.deque[Drain] = collections.deque()
        self._empty: collections.deque[Drain] = collections.deque()
        """Those that wait for room and have no connections, the longest waiting first."""
        self._unseen: collections.deque[Drain] = collections.deque()
        """Those that wait for room and were not looked at, the longest waiting first."""
        self._looks: list[tuple[float, int, Drain]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._drains)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Drain]:
        return itertools.chain.from_iterable(drains.values() for drains in self._drains.values())

    @property
    def virtual_servers(self) -> Collection[VirtualServerKey]:
        """Those of which a real server drains."""
        return self._drains.keys()

    def begin(self, key: VirtualServerKey, real_server: RealServerKey, now: float, *, may_wait: int = 0) -> None:
        """It has weight 0 now. Beginning again changes nothing.

        ``may_wait``: where no more than so many drain of the virtual server, it is not looked at before ``ask``.
        """
        drains = self._drains.setdefault(key, {})
        if real_server not in drains:
            drains[real_server] = drain = Drain(key, real_server, since_s=now, due_s=now)
            self._count += 1
            self._tidy()
            self._by_age.append(drain)
            if len(drains) <= may_wait:
                self._wait(drain, self._unseen)
            else:
                self._look_at(drain, now)

    def has_place(self, key: VirtualServerKey, may_wait: int) -> bool:
        """Whether one more of this virtual server could begin without being looked at."""
        return len(self._drains.get(key, ())) < may_wait

    def end(self, key: VirtualServerKey, real_server: RealServerKey) -> None:
        """It is gone, or wanted again."""
        drains = self._drains.get(key, {})
        drain = drains.pop(real_server, None)
        if drain is not None:
            self._count -= 1
            self.over -= drain.over
            self._leave(drain)
            if not drains:
                del self._drains[key]

    def end_all(self, key: VirtualServerKey) -> None:
        """The virtual server is gone, and all of its real servers with it."""
        self.keep_only(key, ())

    def keep_only(self, key: VirtualServerKey, real_servers: Collection[RealServerKey]) -> None:
        """End all drains of a virtual server but these."""
        for real_server in [one for one in self._drains.get(key, ()) if one not in real_servers]:
            self.end(key, real_server)

    def is_over(self, key: VirtualServerKey, real_server: RealServerKey) -> bool | None:
        """Whether it may be removed: seen empty with room for it, or past its deadline. None: its drain has not begun."""
        drain = self._drains.get(key, {}).get(real_server)
        return drain.over if drain else None

    def expire(self, now: float) -> Collection[VirtualServerKey]:
        """End the patience with those whose deadline is over; returns their virtual servers."""
        late = []
        while self.deadline_s > 0 and (oldest := self._oldest()) and oldest.since_s + self.deadline_s <= now:
            self._finish(oldest)
            late.append(oldest.virtual_server)
        return late

    def release(self, room: int) -> Collection[VirtualServerKey]:
        """End the waiting of so many empty ones, the oldest first; returns their virtual servers."""
        released: list[VirtualServerKey] = []
        while self._empty and len(released) < room:
            drain = self._empty.popleft()
            if drain.waits:
                self._finish(drain)
                released.append(drain.virtual_server)
        return released

    @property
    def any_unseen(self) -> bool:
        """Whether there may be some that wait and were not looked at."""
        return bool(self._unseen)

    def ask(self, count: int, now: float) -> None:
        """Have so many of them looked at, the oldest first."""
        while self._unseen and count > 0:
            drain = self._unseen.popleft()
            if drain.waits and drain.connections is None:
                self._leave(drain)
                self._look_at(drain, now)
                count -= 1

    def due(self, now: float) -> Collection[VirtualServerKey]:
        """The virtual servers whose connection counts should be read now; booked by ``note``, or they are due again."""
        found = []
        while self._looks and self._looks[0][0] <= now:
            look = heapq.heappop(self._looks)
            if look[0] == look[2].due_s:
                found.append(look)
        for look in found:
            heapq.heappush(self._looks, look)
        return list(dict.fromkeys(drain.virtual_server for _, _, drain in found))

    def next_s(self) -> float | None:
        """When the next one is due, by interval or deadline; those that wait for room are not looked at."""
        while self._looks and self._looks[0][0] != self._looks[0][2].due_s:
            heapq.heappop(self._looks)
        times = [self._looks[0][0]] if self._looks else []
        if self.deadline_s > 0 and (oldest := self._oldest()):
            times.append(oldest.since_s + self.deadline_s)
        return min(times, default=None)

    def note(
        self, key: VirtualServerKey, counts: Mapping[RealServerKey, Connections] | None, now: float, *, may_wait: int = 0
    ) -> Collection[RealServerKey]:
        """Book the connection counts of a virtual server; returns its real servers whose drain is over now.

        None means that they could not be read: asked again later. A real server that is not among the counts is not in the
        kernel any more, and so is empty. ``may_wait``: so many of them wait for ``release`` when they are empty.
        """
        over: list[RealServerKey] = []
        drains = self._drains.get(key, {})
        waiting = sum(drain.waits for drain in drains.values())
        for real_server, drain in drains.items():
            if drain.over or (drain.waits and (counts is None or drain.connections is not None)):
                continue
            if drain.waits:  # and was not looked at
                waiting -= 1
                self._leave(drain)
            if counts is not None:
                drain.connections = counts.get(real_server, _NONE)
            if counts is None or drain.connections != _NONE:
                share_s = (now - drain.since_s) * _INTERVAL_SHARE
                self._look_at(drain, now + min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, share_s)))
            elif waiting < may_wait:
                waiting += 1
                self._wait(drain, self._empty)
            else:
                self._finish(drain)
                over.append(real_server)
        self._tidy()
        return over

    def oldest_age_s(self, now: float) -> float:
        """For how long the oldest one has kept its connections; 0 where there is none."""
        self._oldest()
        return max(0.0, next((now - drain.since_s for drain in self._by_age if not (drain.waits or drain.has_ended)), 0.0))

    def _look_at(self, drain: Drain, due_s: float) -> None:
        drain.due_s = due_s
        heapq.heappush(self._looks, (due_s, next(self._numbers), drain))

    def _wait(self, drain: Drain, queue: collections.deque[Drain]) -> None:
        drain.waits, drain.due_s = True, math.inf
        self.waiting += 1
        queue.append(drain)

    def _oldest(self) -> Drain | None:
        while self._by_age and self._by_age[0].has_ended:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def _tidy(self) -> None:
        """Build queues anew that have more in them of what has ended than of anything else."""
        kept = self._count - self.over
        if len(self._by_age) > 2 * kept + _ENDED_KEPT:
            self._by_age = collections.deque(drain for drain in self._by_age if not drain.has_ended)
        if len(self._empty) > 2 * self.waiting + _ENDED_KEPT:
            self._empty = collections.deque(drain for drain in self._empty if drain.waits)
        if len(self._unseen) > 2 * self.waiting + _ENDED_KEPT:
            self._unseen = collections.deque(drain for drain in self._unseen if drain.waits and drain.connections is None)
        if len(self._looks) > 2 * (kept - self.waiting) + _ENDED_KEPT:
            self._looks = [look for look in self._looks if look[0] == look[2].due_s]
            heapq.heapify(self._looks)

    def _finish(self, drain: Drain) -> None:
        drain.over = True
        self.over += 1
        self._leave(drain)

    def _leave(self, drain: Drain) -> None:
        self.waiting -= drain.waits
        drain.due_s, drain.waits = math.inf, False


def removals(
    outcomes: Iterable[Outcome], counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None], room: int
) -> list[Operation]:
    """The removal of each real server whose drain has just begun by one of these, and that has no connections.

    ``counts`` were read after that; None stands for what could not be read. ``room`` is how many they may be.
    """
    found: list[Operation] = []
    for operation, error, *_ in outcomes:
        verb, item = operation
        if verb is Verb.SET and type(item) is RealServers and item.weight == 0 and not error:
            connections = counts.get(item.virtual_server)
            if connections is not None:
                empty = (key for key in item.keys if connections.get(key, _NONE) == _NONE)
                found += (Operation(Verb.REMOVE, RealServers.of(item.virtual_server, key, 0)) for key in empty)
    return found[:room]
