"""Drains: a TCP real server that is no longer desired keeps its connections but gets no new connections.

When a drain begins, the weight of the real server becomes 0 at once. A draining real server is removed when both of its
connection counts are 0 and the kernel's list of removed real servers has room (see ``attempts.py``). A draining real server is
also removed when its deadline has passed. Like kube-proxy, ipvsproxy removes UDP and SCTP real servers at once.

One reading of connection counts returns the counts of all real servers of one virtual server. Because real servers are not read
one by one, the time of the next reading is stored once for each virtual server.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, KeysView, Mapping

from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import NO_CONNECTIONS, ConnectionCounts, RealServers, VirtualServerKey

SHORTEST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
_INTERVAL_SHARE = 0.25
"""The interval between two readings of a drain's connections, as a share of the drain's age. Readings are therefore frequent at
first and rare later."""


@dataclasses.dataclass(slots=True, eq=False)
class Drain:
    """One draining real server. ``connections`` is None until the real server's connections have been read."""

    virtual_server: VirtualServerKey
    key: RealServerKey
    since_s: float
    connections: ConnectionCounts | None = None


class Drains:
    """All draining real servers.

    Each drain is in one of three states. State 1: the real server has connections, or may have connections. State 2: the real
    server has no connections, but the kernel's list of removed real servers has no room yet. State 3: the real server may be
    removed.
    """

    def __init__(self) -> None:
        self._drains: dict[VirtualServerKey, dict[RealServerKey, Drain]] = {}
        self._waiting: collections.OrderedDict[Drain, None] = collections.OrderedDict()
        """The drains that have no connections, and wait until the kernel's list of removed real servers has room. The drain that
        has waited longest comes first."""
        self._over: set[Drain] = set()
        self._due_s: dict[VirtualServerKey, float] = {}
        self._by_due: list[tuple[float, int, VirtualServerKey]] = []
        """A heap of the times at which connections must be read. An entry whose time differs from ``_due_s`` is outdated."""
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._drains)

    def __len__(self) -> int:
        return sum(map(len, self._drains.values()))

    @property
    def waiting(self) -> int:
        """The number of drains that have no connections, and wait until the kernel's list of removed real servers has room."""
        return len(self._waiting)

    @property
    def over(self) -> int:
        """The number of drains that are over but whose real server has not been removed yet."""
        return len(self._over)

    @property
    def virtual_servers(self) -> KeysView[VirtualServerKey]:
        """The virtual servers with a draining real server."""
        return self._drains.keys()

    def of(self, key: VirtualServerKey) -> Mapping[RealServerKey, Drain]:
        """The draining real servers of one virtual server."""
        return self._drains.get(key, {})

    def with_connections(self) -> Iterator[Drain]:
        """The drains whose real server has connections, or may have connections."""
        drains = itertools.chain.from_iterable(drains.values() for drains in self._drains.values())
        return (drain for drain in drains if drain not in self._waiting and drain not in self._over)

    def begin(self, key: VirtualServerKey, real_server: RealServerKey, now: float) -> None:
        """Begin the drain of a real server, which has weight 0 now. If the drain has already begun, the call changes nothing."""
        drains = self._drains.setdefault(key, {})
        if real_server not in drains:
            drains[real_server] = Drain(key, real_server, now)
            self.ask(key, now)

    def end(self, key: VirtualServerKey, real_server: RealServerKey) -> None:
        """End a drain whose real server has been removed or is desired again."""
        drains = self._drains.get(key, {})
        drain = drains.pop(real_server, None)
        if drain is not None:
            self._waiting.pop(drain, None)
            self._over.discard(drain)
            if not drains:
                del self._drains[key]
                self._due_s.pop(key, None)

    def keep_only(self, key: VirtualServerKey, real_servers: Collection[RealServerKey] = ()) -> None:
        """End all drains of a virtual server except the drains of the given real servers."""
        for real_server in [one for one in self.of(key) if one not in real_servers]:
            self.end(key, real_server)

    def may_remove(self, key: VirtualServerKey, real_server: RealServerKey) -> bool | None:
        """Whether a drain is over, as decided by ``judge`` or ``release``; None if the real server does not drain."""
        drain = self.of(key).get(real_server)
        return drain in self._over if drain else None

    def release(self, room: int) -> Collection[VirtualServerKey]:
        """End at most ``room`` waiting drains, so that their real servers may be removed.

        Waiting drains end in the order in which they began to wait. Returns the virtual servers of the drains that
        are over now.
        """
        released = [self._waiting.popitem(last=False)[0] for _ in range(min(room, len(self._waiting)))]
        self._over.update(released)
        return [drain.virtual_server for drain in released]

    def ask(self, key: VirtualServerKey, due_s: float) -> None:
        """Schedule a reading of a virtual server's connections at the given time, unless an earlier reading is scheduled."""
        if due_s < self._due_s.get(key, math.inf):
            self._due_at(key, due_s)

    def due(self, now: float) -> Collection[VirtualServerKey]:
        """The virtual servers whose connections should be read now.

        If the caller does not pass the counts of a virtual server to ``judge``, the virtual server is due again after
        ``SHORTEST_INTERVAL_S``.
        """
        due: list[VirtualServerKey] = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            due.append(self._by_due[0][2])
            self._due_at(due[-1], now + SHORTEST_INTERVAL_S)
        return due

    def next_s(self) -> float | None:
        """The earliest time at which connections must be read or a deadline passes; None if there is no such time."""
        while self._by_due and self._by_due[0][0] != self._due_s.get(self._by_due[0][2]):
            heapq.heappop(self._by_due)
        return self._by_due[0][0] if self._by_due else None

    def judge(
        self,
        key: VirtualServerKey,
        counts: Mapping[RealServerKey, ConnectionCounts] | None,
        now: float,
        *,
        deadline_s: float,
        may_wait: int,
    ) -> Collection[RealServerKey]:
        """Decide which drains of a virtual server are over, given its connection counts.

        Returns the real servers whose drain is over now. ``counts`` is None if the connections could not be read. A real server
        that is missing from ``counts`` is no longer in the kernel, and therefore has no connections. ``deadline_s`` is the time
        in seconds after which a drain is over although its real server still has connections. If a real server has no
        connections, it waits until ``release`` is called, even after the deadline. At most ``may_wait`` real servers wait.
        """
        drains = self.of(key)
        waiting = sum(drain in self._waiting for drain in drains.values())
        over: list[RealServerKey] = []
        due_s = math.inf
        for real_server, drain in drains.items():
            if drain in self._waiting or drain in self._over:
                continue
            if counts is not None:
                drain.connections = counts.get(real_server, NO_CONNECTIONS)
            end_s, is_idle = drain.since_s + deadline_s, drain.connections == NO_CONNECTIONS
            if is_idle and waiting < may_wait:
                waiting += 1
                self._waiting[drain] = None
            elif is_idle or end_s <= now:
                self._over.add(drain)
                over.append(real_server)
            else:
                interval_s = max(SHORTEST_INTERVAL_S, (now - drain.since_s) * _INTERVAL_SHARE)
                due_s = min(due_s, end_s, now + min(interval_s, LONGEST_INTERVAL_S))
        self._due_at(key, due_s)
        return over

    def oldest_age_s(self, now: float) -> float:
        """The age in seconds of the oldest drain whose real server has connections; 0 if there is no such drain."""
        return max((now - drain.since_s for drain in self.with_connections()), default=0.0)

    def _due_at(self, key: VirtualServerKey, due_s: float) -> None:
        self._due_s.pop(key, None)
        if due_s < math.inf:
            self._due_s[key] = due_s
            heapq.heappush(self._by_due, (due_s, next(self._numbers), key))


def removals_at_once(
    outcomes: Iterable[Outcome], counts: Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None], room: int
) -> list[Operation]:
    """The removals of the real servers that have no connections, and whose draining was started by an operation in ``outcomes``.

    ``counts`` were read after the outcomes; a value of None means that the counts could not be read. ``room`` is the largest
    number of removals to return.
    """
    idle = (
        Operation(Verb.REMOVE, RealServers.of(item.virtual_server, key, 0))
        for (verb, item), error, *_ in outcomes
        if verb is Verb.SET and isinstance(item, RealServers) and item.drains and not error
        if (connections := counts.get(item.virtual_server)) is not None
        for key in item.keys
        if connections.get(key, NO_CONNECTIONS) == NO_CONNECTIONS
    )
    return list(itertools.islice(idle, room))
