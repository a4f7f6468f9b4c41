"""Which Service port has which firewall mark, for the second scope of its external addresses.

Rule 1: a Service port has one mark, for all of its external addresses and both families, and keeps it: what the kernel's sets
showed at the start goes before a choice of our own.
Rule 2: if there are more Service ports than marks, those of the youngest Services have none. Their addresses have one scope, as
with kube-proxy.
Rule 3: a mark that the kernel still has, whoever put it there, is given to no other Service port.
Rule 4: the largest marks come first. A packet with a mark comes to its virtual server wherever it is bound for, and programs that
mark packets of their own mostly begin at 1.
"""

import bisect
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.owner import Owner
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.sets import MarkedEntry
from ipvsproxy.model.state import ClusterScope
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey


class MarkedPort(NamedTuple):
    """A Service port, by the number and protocol of its cluster IP."""

    service: ServiceName
    protocol: Protocol
    port: int


class Marks:
    """The marks, and the Service ports that have one or wait for one.

    ``is_busy`` says whether the kernel has a mark, in either family. ``is_recallable`` says whether the kernel still has an entry
    that was recalled, and its mark belongs to no other program. No mark is given before ``recall``.
    """

    def __init__(self, is_busy: Callable[[int], bool], is_recallable: Callable[[MarkedEntry], bool]) -> None:
        self.is_known = False
        """Whether the marks that the kernel has are known."""
        self.bits = 0
        """The bits of packet marks in use. All others are left as they are."""
        self._is_busy = is_busy
        self._is_recallable = is_recallable
        self._next = 0
        """The number of the next mark that was never looked at; 0 if there is none."""
        self._free: collections.deque[int] = collections.deque()
        """Marks with larger numbers that nobody has."""
        self._returning: dict[int, None] = {}
        """Marks that were taken back, while the kernel still has them."""
        self._held: dict[int, None] = {}
        """Marks that the kernel had when they were looked at."""
        self._has_room = True
        self._news: list[MarkedPort] = []
        self._marks: dict[MarkedPort, int] = {}
        self._ports: dict[int, MarkedPort] = {}
        self._by_age: list[tuple[Owner, MarkedPort]] = []
        """Those with a mark, the oldest Service first."""
        self._waiting: list[tuple[Owner, MarkedPort]] = []
        self._recalled: dict[VirtualServerKey, MarkedEntry] = {}
        """The entries of the kernel's sets that gave marks to virtual servers when they were first read."""
        self._protocols: dict[int, Protocol] = {}

    @property
    def waiting(self) -> Sequence[MarkedPort]:
        """The Service ports without a mark, the oldest Service first."""
        return [port for _, port in self._waiting]

    @property
    def waiting_count(self) -> int:
        """The number of Service ports without a mark."""
        return len(self._waiting)

    def take_news(self) -> Sequence[MarkedPort]:
        """The Service ports that have begun to wait since the last call."""
        news, self._news = self._news, []
        return news

    def adopt(self, bits: int) -> None:
        """Use these bits from now on. Every mark is given anew, so every scope must be put again."""
        self.bits, self._next = bits, (1 << bits.bit_count()) - 1
        self._has_room = True
        for known in (self._marks, self._ports, self._by_age, self._waiting, self._free, self._returning, self._held):
            known.clear()

    def recall(self, entries: Iterable[MarkedEntry]) -> None:
        """Note the marks that the kernel's sets give. From now on, Service ports get marks."""
        self.is_known = True
        self._recalled = {
            VirtualServerKey(entry.protocol, entry.address, entry.port): entry
            for entry in entries
            if entry.address is not None and entry.protocol is not None
        }

    def take(
        self, owner: Owner, service: ServiceName, scope: ClusterScope, scopes: Sequence[ClusterScope]
    ) -> tuple[int, ServiceName | None]:
        """The mark of a Service port, or 0 while it has to wait; and the Service that loses a mark by this, if any.

        What a Service loses is free once the kernel has forgotten it: until then the port waits. ``scopes`` are all of the
        Service: the kernel may have lost the mark of a port in one family, and have it in the other.
        """
        port = MarkedPort(service, scope.protocol, scope.port)
        mark = self._marks.get(port, 0)
        if mark:
            return mark, None
        waits, loser = (owner, port), None
        place = bisect.bisect_left(self._waiting, waits)
        is_waiting = self._waiting[place : place + 1] == [waits]
        mark = self._recalled_for(port, scopes) or self._next_free()
        if not mark and self._by_age and waits < self._by_age[-1] and place >= len(self._returning):
            lost_by, lost = self._by_age[-1]
            loser = lost.service
            self._release(lost_by, lost)
            mark = self._next_free()
        if not mark:
            if not is_waiting:
                self._waiting.insert(place, waits)
                self._news.append(port)
            return 0, loser
        if is_waiting:
            del self._waiting[place]
        self._marks[port], self._ports[mark], self._protocols[mark] = mark, port, scope.protocol
        bisect.insort(self._by_age, waits)
        return mark, loser

    def pass_on(self, before: Owner, after: Owner, scopes: Iterable[ClusterScope]) -> None:
        """Let the ports of a Service keep their marks, or wait in their new turn, when its owner is another."""
        service = after.service
        for port in dict.fromkeys(MarkedPort(service, scope.protocol, scope.port) for scope in scopes):
            among = self._by_age if port in self._marks else self._waiting
            place = bisect.bisect_left(among, (before, port))
            if among[place : place + 1] == [(before, port)]:
                del among[place]
                bisect.insort(among, (after, port))

    def release(self, owner: Owner, service: ServiceName, scopes: Iterable[ClusterScope]) -> None:
        """Take back the marks of Service ports."""
        for port in dict.fromkeys(MarkedPort(service, scope.protocol, scope.port) for scope in scopes):
            if port in self._marks:
                self._release(owner, port)
                continue
            place = bisect.bisect_left(self._waiting, (owner, port))
            if self._waiting[place : place + 1] == [(owner, port)]:
                del self._waiting[place]

    def refuse(self, owner: Owner, mark: int) -> None:
        """Take a mark back from its Service port: another program uses it."""
        self._release(owner, self._ports[mark])
        self._returning.pop(mark, None)
        self._held[mark] = None

    def next_in_turn(self) -> ServiceName | None:
        """The Service of the oldest Service port that waits, if there may be a mark for it now."""
        if not self._waiting:
            return None
        if not self._has_room:
            self._reclaim()
        is_older = not self._returning and bool(self._by_age) and self._waiting[0] < self._by_age[-1]
        return self._waiting[0][1].service if self._has_room or is_older else None

    def mark_of(self, port: MarkedPort) -> int:
        """The mark of a Service port; 0 if it has none."""
        return self._marks.get(port, 0)

    def port_of(self, mark: int) -> MarkedPort | None:
        """The Service port that has a mark."""
        return self._ports.get(mark)

    def protocol_of(self, mark: int) -> Protocol | None:
        """The protocol of the Service port that has a mark, or had it last; None if it is not known."""
        return self._protocols.get(mark)

    def _reclaim(self) -> None:
        """Take the marks that the kernel has forgotten."""
        for marks in (self._returning, self._held):
            for mark in [mark for mark in marks if not self._is_busy(mark)]:
                del marks[mark]
                self._free.append(mark)
                self._has_room = True

    def _release(self, owner: Owner, port: MarkedPort) -> None:
        mark = self._marks.pop(port)
        del self._ports[mark]
        self._by_age.pop(bisect.bisect_left(self._by_age, (owner, port)))
        if self._is_busy(mark):
            self._returning[mark] = None
        else:
            self._free.append(mark)
            self._has_room = True

    def _recalled_for(self, port: MarkedPort, scopes: Iterable[ClusterScope]) -> int:
        if not self._recalled:
            return 0
        same = [scope for scope in scopes if (scope.protocol, scope.port) == (port.protocol, port.port)]
        entries = [self._recalled.pop(key, None) for scope in same for key in scope.virtual_servers]
        marks = (entry.mark for entry in entries if entry and self._is_recallable(entry))
        usable = (mark for mark in marks if mark and not mark & ~self.bits)
        recalled = next((mark for mark in usable if mark not in self._ports and mark not in self._returning), 0)
        self._held.pop(recalled, None)
        return recalled

    def _next_free(self) -> int:
        """A mark that nobody has, 0 without one."""
        if not self._has_room:
            return 0
        while self._free or self._next:
            if self._free:
                mark = self._free.popleft()
            else:
                mark, self._next = spread(self._next, self.bits), self._next - 1
            if mark in self._ports:
                continue
            if not self._is_busy(mark):
                return mark
            self._held[mark] = None
        self._has_room = False
        return 0


def spread(number: int, bits: int) -> int:
    """The mark of a number: its lowest bit in the lowest of ``bits``, and so on."""
    mark = 0
    while bits and number:
        lowest = bits & -bits
        if number & 1:
            mark |= lowest
        number >>= 1
        bits ^= lowest
    return mark


def by_family(mark: int) -> Mapping[Family, FirewallMark]:
    """The virtual servers that a mark names."""
    return {family: FirewallMark.of(family, mark) for family in Family}
