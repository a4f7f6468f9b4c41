"""Which Service port has which firewall mark, for the second scope of its external addresses.

Rule 1: a Service port has one mark, for all of its external addresses and both families, and keeps it: what the kernel's sets
showed at the start goes before a choice of our own.
Rule 2: if there are more Service ports than marks, those of the youngest Services have none. Their addresses have one scope, as
with kube-proxy.
Rule 3: a mark that the kernel still has, whoever put it there, is given to no other Service port.
"""

import bisect
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.kernel import FirewallMark, MarkedEntry, Owner, VirtualServerKey
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ClusterScope


class MarkedPort(NamedTuple):
    """A Service port, by the number and protocol of its cluster IP."""

    service: ServiceName
    protocol: Protocol
    port: int


class Marks:
    """The marks, and the Service ports that have one or wait for one.

    ``is_busy`` says whether the kernel has a mark, in either family. No mark is given before ``recall``.
    """

    def __init__(self, is_busy: Callable[[int], bool]) -> None:
        self.is_known = False
        """Whether the marks that the kernel has are known."""
        self.bits = 0
        """The bits of packet marks in use. All others are left as they are."""
        self._is_busy = is_busy
        self._count = 0
        self._last = 0
        """The number of the last mark that was looked at for the first time. Later ones were never given."""
        self._free: collections.deque[int] = collections.deque()
        """Marks up to that number that were taken back, or that the kernel had."""
        self._has_room = True
        self._news: list[MarkedPort] = []
        self._marks: dict[MarkedPort, int] = {}
        self._ports: dict[int, MarkedPort] = {}
        self._by_age: list[tuple[Owner, MarkedPort]] = []
        """Those with a mark, the oldest Service first."""
        self._waiting: list[tuple[Owner, MarkedPort]] = []
        self._recalled: dict[VirtualServerKey, int] = {}
        """The marks that the kernel's sets gave to virtual servers when they were first read."""
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
        self.bits, self._count, self._last = bits, (1 << bits.bit_count()) - 1, 0
        self._has_room = True
        for known in (self._marks, self._ports, self._by_age, self._waiting, self._free):
            known.clear()

    def recall(self, entries: Iterable[MarkedEntry]) -> None:
        """Note the marks that the kernel's sets give. From now on, Service ports get marks."""
        self.is_known = True
        self._recalled = {
            VirtualServerKey(entry.protocol, entry.address, entry.port): entry.mark
            for entry in entries
            if entry.address is not None and entry.protocol is not None
        }

    def take(self, owner: Owner, service: ServiceName, scope: ClusterScope) -> tuple[int, ServiceName | None]:
        """The mark of a Service port, or 0 while it has to wait; and the Service that loses a mark by this, if any."""
        port = MarkedPort(service, scope.protocol, scope.port)
        mark = self._marks.get(port, 0)
        if mark:
            return mark, None
        mark = self._recalled_for(scope) or self._next_free()
        loser = None
        if not mark and self._by_age and (owner, port) < self._by_age[-1]:
            lost_by, lost = self._by_age[-1]
            mark, loser = self._marks[lost], lost.service
            self._release(lost_by, lost)
        waits = (owner, port)
        place = bisect.bisect_left(self._waiting, waits)
        is_waiting = self._waiting[place : place + 1] == [waits]
        if not mark:
            if not is_waiting:
                self._waiting.insert(place, waits)
                self._news.append(port)
            return 0, None
        if is_waiting:
            del self._waiting[place]
        self._marks[port], self._ports[mark], self._protocols[mark] = mark, port, scope.protocol
        bisect.insort(self._by_age, waits)
        return mark, loser

    def release(self, owner: Owner, service: ServiceName, scopes: Iterable[ClusterScope]) -> None:
        """Take back the marks of Service ports."""
        for port in dict.fromkeys(MarkedPort(service, scope.protocol, scope.port) for scope in scopes):
            if port in self._marks:
                self._release(owner, port)
                continue
            place = bisect.bisect_left(self._waiting, (owner, port))
            if self._waiting[place : place + 1] == [(owner, port)]:
                del self._waiting[place]

    def note_room(self) -> None:
        """A mark has gone from the kernel: it may be given again."""
        self._has_room = True

    def next_in_turn(self) -> ServiceName | None:
        """The Service of the oldest Service port that waits, if there may be a mark for it now."""
        return self._waiting[0][1].service if self._waiting and self._has_room else None

    def mark_of(self, port: MarkedPort) -> int:
        """The mark of a Service port; 0 if it has none."""
        return self._marks.get(port, 0)

    def port_of(self, mark: int) -> MarkedPort | None:
        """The Service port that has a mark."""
        return self._ports.get(mark)

    def protocol_of(self, mark: int) -> Protocol | None:
        """The protocol of the Service port that has a mark, or had it last; None if it is not known."""
        return self._protocols.get(mark)

    def _release(self, owner: Owner, port: MarkedPort) -> None:
        mark = self._marks.pop(port)
        del self._ports[mark]
        self._free.append(mark)
        self._by_age.pop(bisect.bisect_left(self._by_age, (owner, port)))
        self._has_room = True

    def _recalled_for(self, scope: ClusterScope) -> int:
        marks = [self._recalled.pop(key, 0) for key in scope.virtual_servers] if self._recalled else ()
        return next((mark for mark in marks if mark and not mark & ~self.bits and mark not in self._ports), 0)

    def _next_free(self) -> int:
        """A mark that nobody has, 0 without one. One that the kernel has keeps its turn."""
        if not self._has_room:
            return 0
        for _ in range(len(self._free)):
            mark = self._free.popleft()
            if mark in self._ports:
                continue
            if not self._is_busy(mark):
                return mark
            self._free.append(mark)
        while self._last < self._count:
            self._last += 1
            mark = spread(self._last, self.bits)
            if mark in self._ports:
                continue
            if not self._is_busy(mark):
                return mark
            self._free.append(mark)
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
