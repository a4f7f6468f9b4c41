"""Assigns firewall marks to Service ports, for the second scopes of their external addresses.

Rule 1: a Service port has one mark for all of its external addresses in both families, and keeps this mark.
Rule 2: first in, first out. If there are more Service ports than marks, the later Service ports wait, and have one scope
meanwhile, as with kube-proxy. A mark that was given back is reused after all marks that were never used.
Rule 3: a mark that the kernel still has, whichever program put it there, is given to no other Service port.
Rule 4: the largest marks come first. A packet with a mark comes to the virtual server of the mark whatever its destination, and
programs that mark their own packets usually begin at 1.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.virtual_servers import FirewallMark


class MarkedPort(NamedTuple):
    """A Service port, named by its port number and protocol at the cluster IP."""

    service: ServiceName
    protocol: Protocol
    port: int


class Marks:
    """The marks, and the Service ports that have one or wait for one. ``is_busy`` says whether the kernel has a mark."""

    def __init__(self, is_busy: Callable[[int], bool]) -> None:
        self.bits = 0
        """The bits of packet marks that ipvsproxy uses. All other bits stay as they are."""
        self._is_busy = is_busy
        self._unused = 0
        """The number of the next mark that was never considered; 0 if all were."""
        self._returned: dict[int, Protocol | None] = {}
        """Marks that were given back, or that the kernel had already, with the protocol of the last port of each mark."""
        self._marks: dict[MarkedPort, int] = {}
        self._ports: dict[int, MarkedPort] = {}
        self._waiting: dict[MarkedPort, None] = {}
        self.waiting: Collection[MarkedPort] = self._waiting
        """The Service ports without a mark, in the order in which they get marks."""
        self._news: list[MarkedPort] = []

    def take_news(self) -> Sequence[MarkedPort]:
        """The waiting Service ports that have begun to wait since the last call."""
        news, self._news = self._news, []
        return [port for port in news if port in self._waiting]

    def adopt(self, bits: int) -> None:
        """Use these bits from now on, and take back all marks."""
        self.bits, self._unused = bits, (1 << bits.bit_count()) - 1
        for known in (self._marks, self._ports, self._waiting, self._returned):
            known.clear()

    def want(self, port: MarkedPort) -> None:
        """Let a Service port wait for a mark, unless it has a mark."""
        if port not in self._marks and port not in self._waiting:
            self._waiting[port] = None
            self._news.append(port)

    def release(self, port: MarkedPort) -> bool:
        """Take the mark back from a Service port, or end its wait. Returns whether it had a mark."""
        self._waiting.pop(port, None)
        mark = self._marks.pop(port, 0)
        if mark:
            del self._ports[mark]
            self._returned[mark] = port.protocol
        return bool(mark)

    def give(self, recalled: Iterable[tuple[MarkedPort, int]] = ()) -> list[MarkedPort]:
        """Give marks to the waiting Service ports, and return the ports that got a mark.

        ``recalled`` are ports with marks that the kernel has for them, which take precedence. Of several marks of a port, the
        first is chosen.
        """
        given = []
        for port, mark in recalled:
            if port in self._waiting and mark not in self._ports and mark and not mark & ~self.bits:
                del self._waiting[port]
                self._give(port, mark)
                given.append(port)
        in_turn = []
        for port, mark in zip(self._waiting, self._free(), strict=False):
            self._give(port, mark)
            in_turn.append(port)
        for port in in_turn:
            del self._waiting[port]
        return given + in_turn

    def _give(self, port: MarkedPort, mark: int) -> None:
        self._returned.pop(mark, None)
        self._marks[port], self._ports[mark] = mark, port

    def _free(self) -> Iterator[int]:
        """The free marks, in the order in which they are given."""
        while self._unused:
            mark, self._unused = spread(self._unused, self.bits), self._unused - 1
            if mark in self._ports:
                continue
            if self._is_busy(mark):
                self._returned[mark] = None
            else:
                yield mark
        yield from [mark for mark in self._returned if not self._is_busy(mark)]

    def mark_of(self, port: MarkedPort) -> int:
        """The mark of a Service port; 0 if it has none."""
        return self._marks.get(port, 0)

    def port_of(self, mark: int) -> MarkedPort | None:
        """The Service port that has a mark."""
        return self._ports.get(mark)

    def protocol_of(self, mark: int) -> Protocol | None:
        """The protocol of the Service port that had a mark last; None if it is not known."""
        return self._returned.get(mark)


def spread(number: int, bits: int) -> int:
    """Spreads a number over ``bits``: the lowest bit of the number goes to the lowest of ``bits``, and so on."""
    mark = 0
    while bits and number:
        lowest = bits & -bits
        if number & 1:
            mark |= lowest
        number >>= 1
        bits ^= lowest
    return mark


def by_family(mark: int) -> Mapping[Family, FirewallMark]:
    """The virtual server of a mark in each family."""
    return {family: FirewallMark.of(family, mark) for family in Family}
