"""Drains: a TCP real server that is no longer desired keeps its connections, and gets no new ones.

Its weight becomes 0 at once. It is removed when both of its connection counts are 0 and there is room on the kernel's list of
removed real servers (see ``pace``), or when its deadline is over. UDP and SCTP real servers are removed at once, as by
kube-proxy.

Without room, the connections of a draining real server are not read: they would change nothing, and a later answer of the kernel
shows several real servers of a virtual server at once.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import Connections, RealServers, VirtualServerKey

SHORTEST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
_NONE = Connections(0, 0)
_INTERVAL_SHARE = 0.25
"""The connections of a drain are read again after this share of its age: often at first, rarely later."""
_ENDED_KEPT = 1000
"""The most ended drains in a queue before it is rebuilt."""


@dataclasses.dataclass(slots=True, eq=False)
class Drain:
    """One draining real server. ``connections`` is None until they have been read.

    ``due_s`` is infinite if its connections need not be read: it ``waits`` for room, it is ``over``, or it has ended. A waiting
    one has no connections, or they have not been read.
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
        """Whether only its removal is left to do."""
        return self.due_s == math.inf and not self.waits


class Drains:
    """All draining real servers. A virtual server may have a deadline of its own.

    The cost of a call does not grow with the number of drains, except for iteration. So an ended drain stays in its queues until
    it comes to their front, or until ended ones are the majority.
    """

    def __init__(self, deadline_s: float) -> None:
        """``deadline_s`` 0 means no deadline."""
        self.deadline_s = deadline_s
        self._drains: dict[VirtualServerKey, dict[RealServerKey, Drain]] = {}
        self._count = 0
        self.waiting = 0
        """The number of drains that wait for room: without connections, or with unread ones."""
        self.over = 0
        """The number of drains that are over and not removed yet."""
        self._by_age: collections.deque[Drain] = collections.deque()
        self._idle: collections.deque[Drain] = collections.deque()
        """Drains that wait for room and have no connections, the oldest first."""
        self._unread: collections.deque[Drain] = collections.deque()
        """Drains that wait for room and whose connections were not read, the oldest first."""
        self._deadlines: dict[VirtualServerKey, float] = {}
        """The deadlines of virtual servers that have one of their own. Their drains are in ``_by_end``, not in ``_by_age``."""
        self._by_end: list[tuple[float, int, Drain]] = []
        self._by_due: list[tuple[float, int, Drain]] = []
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._drains)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Drain]:
        return itertools.chain.from_iterable(drains.values() for drains in self._drains.values())

    @property
    def virtual_servers(self) -> Collection[VirtualServerKey]:
        """The virtual servers with a draining real server."""
        return self._drains.keys()

    def of(self, key: VirtualServerKey) -> Collection[RealServerKey]:
        """The draining real servers of a virtual server."""
        return self._drains.get(key, {}).keys()

    def begin(self, key: VirtualServerKey, real_server: RealServerKey, now: float, *, may_wait: int = 0) -> None:
        """Begin a drain: the real server has weight 0 now. Beginning again changes nothing.

        ``may_wait``: if at most so many real servers of the virtual server drain, its connections are not read before ``ask``.
        """
        drains = self._drains.setdefault(key, {})
        if real_server not in drains:
            drains[real_server] = drain = Drain(key, real_server, since_s=now, due_s=now)
            self._count += 1
            self._tidy()
            if key in self._deadlines:
                self._end_at(drain)
            else:
                self._by_age.append(drain)
            if len(drains) <= may_wait:
                self._wait(drain, self._unread)
            else:
                self._read_at(drain, now)

    @property
    def has_deadlines(self) -> bool:
        """Whether any virtual server has a deadline of its own."""
        return bool(self._deadlines)

    def set_deadline(self, key: VirtualServerKey, deadline_s: float | None) -> None:
        """Set the deadline of all drains of a virtual server, present ones included; None for the common one."""
        if self._deadlines.get(key) == deadline_s:
            return
        if deadline_s is not None:
            self._deadlines[key] = deadline_s
        else:
            del self._deadlines[key]
        present = self._drains.get(key)
        if not present:
            return
        if deadline_s is not None:
            for drain in present.values():
                self._end_at(drain)
        ordinary = (drain for drain in self if drain.virtual_server not in self._deadlines and not drain.has_ended)
        self._by_age = collections.deque(sorted(ordinary, key=lambda drain: drain.since_s))

    def has_place(self, key: VirtualServerKey, may_wait: int) -> bool:
        """Whether one more real server of this virtual server could drain without a question about its connections."""
        return len(self._drains.get(key, ())) < may_wait

    def end(self, key: VirtualServerKey, real_server: RealServerKey) -> None:
        """End a drain: the real server is gone, or desired again."""
        drains = self._drains.get(key, {})
        drain = drains.pop(real_server, None)
        if drain is not None:
            self._count -= 1
            self.over -= drain.over
            self._leave(drain)
            if not drains:
                del self._drains[key]

    def end_all(self, key: VirtualServerKey) -> None:
        """End all drains of a virtual server, which is gone."""
        self.keep_only(key, ())

    def keep_only(self, key: VirtualServerKey, real_servers: Collection[RealServerKey]) -> None:
        """End all drains of a virtual server except these."""
        for real_server in [one for one in self._drains.get(key, ()) if one not in real_servers]:
            self.end(key, real_server)

    def may_remove(self, key: VirtualServerKey, real_server: RealServerKey) -> bool | None:
        """Whether a real server may be removed, as ``judge``, ``release`` or ``expire`` decided.

        Without connections and with room, or past its deadline. None: it does not drain.
        """
        drain = self._drains.get(key, {}).get(real_server)
        return drain.over if drain else None

    def expire(self, now: float) -> Collection[VirtualServerKey]:
        """Let drains past their deadline be over. Returns their virtual servers."""
        late = []
        while self.deadline_s > 0 and (oldest := self._oldest()) and oldest.since_s + self.deadline_s <= now:
            self._finish(oldest)
            late.append(oldest.virtual_server)
        while (end := self._next_end()) is not None and end[0] <= now:
            self._finish(end[2])
            late.append(end[2].virtual_server)
        return late

    def _end_at(self, drain: Drain) -> None:
        """Have a drain end at the deadline of its virtual server."""
        heapq.heappush(self._by_end, (drain.since_s + self._deadlines[drain.virtual_server], next(self._numbers), drain))

    def _is_valid(self, end: tuple[float, int, Drain]) -> bool:
        """Whether an entry of ``_by_end`` holds: the drain has not ended, and the deadline of its virtual server is the same."""
        deadline_s = self._deadlines.get(end[2].virtual_server)
        return deadline_s is not None and not end[2].has_ended and end[2].since_s + deadline_s == end[0]

    def _next_end(self) -> tuple[float, int, Drain] | None:
        while self._by_end and not self._is_valid(self._by_end[0]):
            heapq.heappop(self._by_end)
        return self._by_end[0] if self._by_end else None

    def release(self, room: int) -> Collection[VirtualServerKey]:
        """Let so many waiting drains without connections be over, the oldest first. Returns their virtual servers."""
        released: list[VirtualServerKey] = []
        while self._idle and len(released) < room:
            drain = self._idle.popleft()
            if drain.waits:
                self._finish(drain)
                released.append(drain.virtual_server)
        return released

    @property
    def any_unread(self) -> bool:
        """Whether there may be waiting drains whose connections were not read."""
        return bool(self._unread)

    def ask(self, count: int, now: float) -> None:
        """Ask for the connections of so many of them, the oldest first."""
        while self._unread and count > 0:
            drain = self._unread.popleft()
            if drain.waits and drain.connections is None:
                self._leave(drain)
                self._read_at(drain, now)
                count -= 1

    def due(self, now: float) -> Collection[VirtualServerKey]:
        """The virtual servers whose connection counts should be read now, and passed to ``judge``, or they are due again."""
        entries = []
        while self._by_due and self._by_due[0][0] <= now:
            entry = heapq.heappop(self._by_due)
            if entry[0] == entry[2].due_s:
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._by_due, entry)
        return list(dict.fromkeys(drain.virtual_server for _, _, drain in entries))

    def next_s(self) -> float | None:
        """When the next drain is due, by interval or deadline; drains that wait for room are not."""
        while self._by_due and self._by_due[0][0] != self._by_due[0][2].due_s:
            heapq.heappop(self._by_due)
        times = [self._by_due[0][0]] if self._by_due else []
        if self.deadline_s > 0 and (oldest := self._oldest()):
            times.append(oldest.since_s + self.deadline_s)
        if end := self._next_end():
            times.append(end[0])
        return min(times, default=None)

    def judge(
        self, key: VirtualServerKey, counts: Mapping[RealServerKey, Connections] | None, now: float, *, may_wait: int = 0
    ) -> Collection[RealServerKey]:
        """Judge drains by the connection counts of a virtual server. Returns its real servers whose drain is over now.

        None means that the counts could not be read: they are due again later. A real server without a count is no longer in the
        kernel, and so has no connections. ``may_wait``: so many real servers without connections wait for ``release``.
        """
        over: list[RealServerKey] = []
        drains = self._drains.get(key, {})
        waiting = sum(drain.waits for drain in drains.values())
        for real_server, drain in drains.items():
            if drain.over or (drain.waits and (counts is None or drain.connections is not None)):
                continue
            if drain.waits:  # and its connections were not read
                waiting -= 1
                self._leave(drain)
            if counts is not None:
                drain.connections = counts.get(real_server, _NONE)
            if counts is None or not (drain.connections and drain.connections.is_idle):
                share_s = (now - drain.since_s) * _INTERVAL_SHARE
                self._read_at(drain, now + min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, share_s)))
            elif waiting < may_wait:
                waiting += 1
                self._wait(drain, self._idle)
            else:
                self._finish(drain)
                over.append(real_server)
        self._tidy()
        return over

    def oldest_age_s(self, now: float) -> float:
        """The age of the oldest drain with connections, in seconds; 0 without one."""
        self._oldest()
        ages_s = (now - drain.since_s for drain in self._by_age if not (drain.waits or drain.has_ended))
        others_s = (now - drain.since_s for _, _, drain in self._by_end if not (drain.waits or drain.has_ended))
        return max(0.0, next(ages_s, 0.0), *others_s)

    def _read_at(self, drain: Drain, due_s: float) -> None:
        drain.due_s = due_s
        heapq.heappush(self._by_due, (due_s, next(self._numbers), drain))

    def _wait(self, drain: Drain, queue: collections.deque[Drain]) -> None:
        drain.waits, drain.due_s = True, math.inf
        self.waiting += 1
        queue.append(drain)

    def _oldest(self) -> Drain | None:
        while self._by_age and self._by_age[0].has_ended:
            self._by_age.popleft()
        return self._by_age[0] if self._by_age else None

    def _tidy(self) -> None:
        """Rebuild queues in which ended drains are the majority."""
        kept = self._count - self.over
        if len(self._by_age) > 2 * kept + _ENDED_KEPT:
            self._by_age = collections.deque(drain for drain in self._by_age if not drain.has_ended)
        if len(self._by_end) > 2 * kept + _ENDED_KEPT:
            self._by_end = [end for end in self._by_end if self._is_valid(end)]
            heapq.heapify(self._by_end)
        if len(self._idle) > 2 * self.waiting + _ENDED_KEPT:
            self._idle = collections.deque(drain for drain in self._idle if drain.waits)
        if len(self._unread) > 2 * self.waiting + _ENDED_KEPT:
            self._unread = collections.deque(drain for drain in self._unread if drain.waits and drain.connections is None)
        if len(self._by_due) > 2 * (kept - self.waiting) + _ENDED_KEPT:
            self._by_due = [entry for entry in self._by_due if entry[0] == entry[2].due_s]
            heapq.heapify(self._by_due)

    def _finish(self, drain: Drain) -> None:
        drain.over = True
        self.over += 1
        self._leave(drain)

    def _leave(self, drain: Drain) -> None:
        self.waiting -= drain.waits
        drain.due_s, drain.waits = math.inf, False


def removals_at_once(
    outcomes: Iterable[Outcome], counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None], room: int
) -> list[Operation]:
    """The removals of real servers without connections whose drain has just begun by these outcomes.

    ``counts`` were read afterwards; None for unreadable ones. ``room`` is the most removals.
    """
    operations: list[Operation] = []
    for operation, error, *_ in outcomes:
        verb, item = operation
        if verb is Verb.SET and isinstance(item, RealServers) and item.drains and not error:
            connections = counts.get(item.virtual_server)
            if connections is not None:
                idle = (key for key in item.keys if connections.get(key, _NONE).is_idle)
                operations += (Operation(Verb.REMOVE, RealServers.of(item.virtual_server, key, 0)) for key in idle)
    return operations[:room]
