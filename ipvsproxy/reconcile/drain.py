"""Graceful termination: a TCP real server that is not wanted any more keeps its connections, and gets no new ones.

It has weight 0 from the moment it is not wanted. It is removed when both of its connection counts are 0, or when its
deadline is over. UDP and SCTP real servers are removed at once, as kube-proxy does.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

from ipvsproxy.model.kernel import Connections, RealServer, RealServerKey, VirtualServerKey
from ipvsproxy.model.plan import Operation, Outcome, Verb

SHORTEST_INTERVAL_S = 1.0
LONGEST_INTERVAL_S = 30.0
_NONE = Connections(0, 0)
_INTERVAL_SHARE = 0.25
"""A drain is looked at again after this share of its age: often at first, seldom when it is an old one."""


@dataclasses.dataclass(slots=True)
class Drain:
    """One real server that is being emptied. ``connections`` is None until it has been looked at."""

    since_s: float
    due_s: float
    connections: Connections | None = None
    over: bool = False


class Drains:
    """All real servers with weight 0 that are waiting for their connections to end."""

    def __init__(self, deadline_s: float) -> None:
        """``deadline_s`` 0 means as long as it takes."""
        self.deadline_s = deadline_s
        self._drains: dict[VirtualServerKey, dict[RealServerKey, Drain]] = {}

    def __bool__(self) -> bool:
        return bool(self._drains)

    def __len__(self) -> int:
        return sum(len(drains) for drains in self._drains.values())

    def __iter__(self) -> Iterator[tuple[VirtualServerKey, RealServerKey, Drain]]:
        for key, drains in self._drains.items():
            for real_server, drain in drains.items():
                yield key, real_server, drain

    def begin(self, key: VirtualServerKey, real_server: RealServerKey, now: float) -> None:
        """It has weight 0 now. Beginning again changes nothing."""
        self._drains.setdefault(key, {}).setdefault(real_server, Drain(since_s=now, due_s=now))

    def end(self, key: VirtualServerKey, real_server: RealServerKey) -> None:
        """It is gone, or wanted again."""
        drains = self._drains.get(key)
        if drains is not None:
            drains.pop(real_server, None)
            if not drains:
                del self._drains[key]

    def end_all(self, key: VirtualServerKey) -> None:
        """The virtual server is gone, and all of its real servers with it."""
        self._drains.pop(key, None)

    def keep_only(self, key: VirtualServerKey, real_servers: Collection[RealServerKey]) -> None:
        """End all drains of a virtual server but these."""
        for real_server in [one for one in self._drains.get(key, ()) if one not in real_servers]:
            self.end(key, real_server)

    def is_over(self, key: VirtualServerKey, real_server: RealServerKey) -> bool | None:
        """Whether it may be removed: it was seen empty, or its deadline has passed. None: its drain has not begun."""
        drain = self._drains.get(key, {}).get(real_server)
        return drain.over if drain else None

    def expire(self, now: float) -> Collection[VirtualServerKey]:
        """End the patience with those whose deadline is over; returns their virtual servers."""
        late = []
        for key, _, drain in self if self.deadline_s > 0 else ():
            if not drain.over and now >= drain.since_s + self.deadline_s:
                drain.over = True
                late.append(key)
        return late

    def due(self, now: float) -> Collection[VirtualServerKey]:
        """The virtual servers whose connection counts should be read now."""
        return [
            key for key, drains in self._drains.items() if any(drain.due_s <= now and not drain.over for drain in drains.values())
        ]

    def next_s(self) -> float | None:
        """When the next one is due, by interval or deadline."""
        times = [
            min(drain.due_s, drain.since_s + self.deadline_s) if self.deadline_s > 0 else drain.due_s
            for _, _, drain in self
            if not drain.over
        ]
        return min(times, default=None)

    def note(
        self, key: VirtualServerKey, counts: Mapping[RealServerKey, Connections] | None, now: float
    ) -> Collection[RealServerKey]:
        """Book the connection counts of a virtual server; returns its real servers that are empty now.

        None means that they could not be read: asked again later. A real server that is not among the counts is not in the
        kernel any more, and so is empty.
        """
        empty: list[RealServerKey] = []
        for real_server, drain in self._drains.get(key, {}).items():
            age_s = now - drain.since_s
            drain.due_s = now + min(LONGEST_INTERVAL_S, max(SHORTEST_INTERVAL_S, age_s * _INTERVAL_SHARE))
            if counts is None:
                continue
            drain.connections = counts.get(real_server, _NONE)
            if drain.connections == _NONE:
                drain.over = True
                empty.append(real_server)
        return empty


def removals(
    outcomes: Iterable[Outcome], counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None]
) -> list[Operation]:
    """The removal of each real server whose drain has just begun by one of these, and that has no connections.

    ``counts`` were read after that; None stands for what could not be read.
    """
    found: list[Operation] = []
    for operation, error, *_ in outcomes:
        verb, item = operation
        if verb is Verb.SET and type(item) is RealServer and item.weight == 0 and not error:
            connections = counts.get(item.virtual_server)
            if connections is not None and connections.get(item.key, _NONE) == _NONE:
                found.append(Operation(Verb.REMOVE, item))
    return found
