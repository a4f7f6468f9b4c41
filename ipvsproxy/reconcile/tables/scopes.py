"""Derives the second scopes of external addresses (docs/scopes.md).

Virtual servers by firewall mark, and the set entries that mark packets, are derived from a Service's desired state.

Rule 1: a packet without a mark reaches the virtual server of its address, so a scope may be absent at any time. While a scope is
absent, its Service port has no mark.
Rule 2: marks are given only when every Service has a desired state, because until then, the owners of virtual servers are not
certain. A Service port has a mark while its Service owns at least one of the port's virtual servers.
Rule 3: a new process reads the set entries that already exist in the kernel. Each Service port gets the mark that most of the
port's entries give to packets. An entry counts only if its Service owns the virtual server of the entry.
Rule 4: a virtual server by firewall mark keeps its connections when no Service desires it any longer. The virtual server stays in
the desired state, without real servers, until its former real servers have drained; then it is removed. The set entries that give
the virtual server's mark to packets are removed first (see ``kinds/virtual_server_kind.py``).

Of marks:

Rule 5: a Service port has one mark for all of its external addresses in both families, and keeps the mark. With direct return a
Service port has two marks, one for each of the two ways in which its packets arrive.
Rule 6: marks are given in the order in which Service ports request marks. If there are more Service ports than marks, the Service
ports that requested a mark last must wait. A waiting Service port has only one scope, as with kube-proxy. Service ports first get
the marks that were never in use, and only then the marks that were given back.
Rule 7: a mark is not given to another Service port while an object in the kernel still uses the mark. The object may belong to
any program.
Rule 8: the largest marks are given first. Other programs usually number their marks from 1, and a packet with another program's
mark must not reach a virtual server of ipvsproxy.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import NODE_OWNER, Owner, ServiceName
from ipvsproxy.model.sets import DIRECT_KINDS, IP_SETS, SCOPE_KINDS, IpSet, MarkedEntry, SetEntry, SetKind, mark_entry
from ipvsproxy.model.state import Clients, ClusterScope, ServiceState
from ipvsproxy.model.steps import at_once, each
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.reconcile.virtual_servers import ownership


class MarkedPort(NamedTuple):
    """A Service port and the group of clients for which its mark is used.

    The Service port is identified by its port number and protocol at the cluster IP.
    """

    service: ServiceName
    protocol: Protocol
    port: int
    clients: Clients = Clients.OF_NODE


class Marks:
    """The marks, and the Service ports that have a mark or wait for a mark.

    ``is_busy`` returns whether an object in the kernel uses a mark.
    """

    def __init__(self, is_busy: Callable[[int], bool]) -> None:
        self.bits = 0
        """The bits of packet marks that ipvsproxy uses. All other bits stay as they are."""
        self._is_busy = is_busy
        self._unused = 0
        """The number of the mark that is tried next. Marks are tried once each, from the largest number down; 0 means that all
        marks were tried."""
        self._returned: dict[int, Protocol | None] = {}
        """The marks that were taken back from a port, and the marks that were in use in the kernel when they were tried. The
        value is the protocol of the mark's last port; None if the protocol is unknown."""
        self._marks: dict[MarkedPort, int] = {}
        self._ports: dict[int, MarkedPort] = {}
        self._waiting: dict[MarkedPort, None] = {}
        self.waiting: Collection[MarkedPort] = self._waiting
        """The Service ports that wait for a mark, in the order in which they will get one."""
        self._news: list[MarkedPort] = []

    def take_news(self) -> Sequence[MarkedPort]:
        """The Service ports that have started to wait for a mark since the last call, and still wait."""
        news, self._news = self._news, []
        return [port for port in news if port in self._waiting]

    def adopt(self, bits: int) -> None:
        """Use the given bits from now on, and take back all marks."""
        self.bits, self._unused = bits, (1 << bits.bit_count()) - 1
        for known in (self._marks, self._ports, self._waiting, self._returned):
            known.clear()

    def want(self, port: MarkedPort) -> None:
        """Let a Service port wait for a mark, unless the port already has a mark."""
        if port not in self._marks and port not in self._waiting:
            self._waiting[port] = None
            self._news.append(port)

    def release(self, port: MarkedPort) -> bool:
        """Take the mark back from a Service port, or stop the port from waiting for a mark.

        Returns whether the port had a mark.
        """
        self._waiting.pop(port, None)
        mark = self._marks.pop(port, 0)
        if mark:
            del self._ports[mark]
            self._returned[mark] = port.protocol
        return bool(mark)

    def give(self, recalled: Iterable[tuple[MarkedPort, int]] = ()) -> list[MarkedPort]:
        """Give marks to the waiting Service ports; returns the ports that got a mark.

        ``recalled`` pairs ports with the marks that entries in the kernel already use for them. A port gets its recalled mark, if
        the mark is free, instead of a new mark. If ``recalled`` has several marks for a port, the first mark is chosen.
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
        """The free marks, in the order in which they are given to Service ports."""
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
        """The mark of a Service port; 0 if the port has no mark."""
        return self._marks.get(port, 0)

    def port_of(self, mark: int) -> MarkedPort | None:
        """The Service port that has the given mark."""
        return self._ports.get(mark)

    def protocol_of(self, mark: int) -> Protocol | None:
        """The protocol of the last Service port that had the given mark; None if the protocol is not known."""
        return self._returned.get(mark)


def spread(number: int, bits: int) -> int:
    """Copies the bits of a number to the bit positions that are set in the mask ``bits``.

    The lowest bit of the number goes to the lowest bit of ``bits``, and the other bits follow in their order.
    """
    mark = 0
    while bits and number:
        lowest = bits & -bits
        if number & 1:
            mark |= lowest
        number >>= 1
        bits ^= lowest
    return mark


def by_family(mark: int) -> Mapping[Family, FirewallMark]:
    """The virtual server of a mark in each of the two families."""
    return {family: FirewallMark.of(family, mark) for family in Family}


_OF_LOCAL_POLICY = frozenset({SetKind.SCOPE, SetKind.NO_LOCAL})


@dataclasses.dataclass(eq=False)
class Scopes:
    """Holds the Services that have second scopes, and the firewall marks of the ports of these Services.

    Also has the undesired virtual servers by firewall mark that still drain.

    ``families`` are the families that this node serves. ``putting`` is the function that writes the desired state of a Service
    into the tables.
    """

    virtual_servers: Table[VirtualServerKey, VirtualServer, ObservedVirtualServer]
    entries: Mapping[str, Table[SetEntry, Owner, bool]]
    sets: Table[IpSet, Owner, bool]
    putting: Callable[[ServiceName, ServiceState], Generator[None, None, None]]
    families: frozenset[Family] = frozenset()

    def __post_init__(self) -> None:
        self.marks = Marks(self._has_mark)
        self.has_observed_all = False
        """Whether this process has read all sets that an earlier process may have left behind."""
        sets = [one for one in IP_SETS.values() if one.kind in SCOPE_KINDS]
        self._sets = {family: [(one, self.entries[one.name]) for one in sets if one.family is family] for family in Family}
        """For each family, the sets that exist only for second scopes, each with the table of its entries."""
        self._states: dict[ServiceName, ServiceState] = {}
        """The desired state of each Service with second scopes, as passed to ``put``, before marks are added to the state."""
        self._changed: dict[ServiceName, None] = {}
        """The Services whose ports may have begun or ceased to need a mark."""
        self._recalls = True
        """Whether the next assignment of marks gives each Service port the mark that the port's set entries in the kernel already
        have."""
        self._closing: dict[FirewallMark, None] = {}
        """The virtual servers by firewall mark that no Service desires and that still drain."""
        self._refused: set[FirewallMark] = set()
        """Other programs' virtual servers that look like ours, because ipvsproxy has a set entry with their mark."""

    def resolve(self, name: ServiceName, state: ServiceState | None) -> ServiceState | None:
        """Adds the virtual servers with firewall marks, and the set entries that mark packets, to a Service's state.

        Virtual servers and entries are added for each of the Service's ports that has a mark.
        """
        before = self._states.pop(name, None)
        if before is not None:
            for port in _ports(before).keys() - (_ports(state).keys() if state is not None else ()):
                self.marks.release(port)
        if state is None or not state.rare.scopes:
            return state
        self._states[name] = state
        self._changed[name] = None
        served, entries = list(state.served), list(state.entries)
        for scope in state.rare.scopes:
            mark = self.marks.mark_of(_port(state, scope))
            if mark:
                key = FirewallMark.of(scope.family, mark)
                self._stop_closing(key)
                served.append(VirtualServer(key, scope.settings, scope.weights, state.owner, scope.protocol, scope.thresholds))
                entries.append(mark_entry(key))
                set_name = IpSet(scope.clients.value, scope.family).name
                entries += [
                    MarkedEntry(set_name, one.address, one.protocol, one.port, mark=mark, mask=self.marks.bits)
                    for one in scope.virtual_servers
                ]
        return state.with_objects(tuple(served), tuple(entries))

    def note_change(self, name: ServiceName) -> None:
        """Records that a Service has gained or lost a virtual server."""
        if name in self._states:
            self._changed[name] = None

    def use_bits(self, bits: int) -> None:
        """Use the given bits of packet marks. If other bits were used before, every scope gets a new mark."""
        if bits == self.marks.bits:
            return
        self.marks.adopt(bits)
        self._recalls = True
        for name, state in list(self._states.items()):
            at_once(self.putting(name, state))

    def _giving_marks(self) -> Iterator[None]:
        """Give marks to the ports that need a mark, and take marks back from all other ports.

        The desired state of each affected Service is set again.
        """
        changed, self._changed = self._changed, {}
        concerned: dict[ServiceName, None] = {}

        def judge(state: ServiceState) -> None:
            for port, scopes in _ports(state).items():
                if any(self.virtual_servers.owner_of(key) == state.owner for one in scopes for key in one.virtual_servers):
                    self.marks.want(port)
                elif self.marks.release(port):
                    concerned[port.service] = None

        yield from each(judge, filter(None, map(self._states.get, changed)))
        recalled, self._recalls = self._recalled() if self._recalls else (), False
        concerned |= dict.fromkeys(port.service for port in self.marks.give(recalled))
        for name in concerned:
            yield from self.putting(name, self._states[name])

    def _recalled(self) -> Iterable[tuple[MarkedPort, int]]:
        """Pairs of a Service port and a mark; entries of sets in the kernel give the mark to the port's packets.

        Pairs of port and mark are ordered by the number of their entries, the largest number first. If two pairs have equally
        many entries, the pair whose mark has fewer entries in total comes first.
        """
        marks = {
            (ip_set.kind, ownership.virtual_server_of(entry)): entry.mark
            for name, ip_set in IP_SETS.items()
            if ip_set.gives_marks
            for entry in self.entries[name].observed
            if isinstance(entry, MarkedEntry) and entry.mask == self.marks.bits and not self._is_foreign(entry.mark)
        }
        entries_of_mark = Counter(marks.values())
        entries = Counter(
            (_port(state, scope), marks[scope.clients.value, key])
            for state in self._states.values()
            for scope in state.rare.scopes
            for key in scope.virtual_servers
            if (scope.clients.value, key) in marks and self.virtual_servers.owner_of(key) == state.owner
        )
        return sorted(entries, key=lambda one: (-entries[one], entries_of_mark[one[1]]))

    def refuse(self, key: FirewallMark) -> None:
        """Release a mark, because another program has made a virtual server with this mark.

        The mark's Service port gets another mark.
        """
        port = self.marks.port_of(key.mark)
        if port is not None:
            self._refused.add(key)
            self.marks.release(port)
            at_once(self.putting(port.service, self._states[port.service]))

    def is_refused(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server belongs to another program, although a set entry suggests that it belongs to ipvsproxy."""
        return key in self._refused

    def _has_mark(self, mark: int) -> bool:
        """Whether an object in the kernel uses a mark.

        The object may be a virtual server of any program, or the set entry which shows that a virtual server belongs to
        ipvsproxy.
        """
        return any(key in self.virtual_servers.observed or self.is_witnessed(key) for key in by_family(mark).values())

    def is_witnessed(self, key: FirewallMark) -> bool:
        """Whether the kernel has the set entry which shows that the virtual server of a mark belongs to ipvsproxy."""
        entry = mark_entry(key)
        return entry in self.entries[entry.set].observed

    def _is_foreign(self, mark: int) -> bool:
        """Whether another program has a virtual server with this firewall mark."""
        return any(key in self.virtual_servers.observed and not self.is_witnessed(key) for key in by_family(mark).values())

    def tending(self, *, may_close: bool) -> Generator[None, None, None]:
        """Gives marks to Service ports, and drains each undesired virtual server of a firewall mark before it is removed.

        Yields so that other tasks can run.

        A set that only scopes use stays desired while one of its entries is desired or observed. Marks are given, and drains
        begin, only if ``may_close`` is true. The caller sets ``may_close`` only when every Service has a desired state.
        """
        table = self.virtual_servers
        self._refused = {key for key in self._refused if self.is_witnessed(key)}
        for key in list(self._closing):
            observed = table.observed.get(key)
            if observed is None or not observed.real_servers:
                self._stop_closing(key)
        if may_close:
            self.has_observed_all = True
            yield from self._giving_marks()
            for key in [key for key in table.surplus if isinstance(key, FirewallMark)]:
                if table.observed[key].real_servers:
                    self._close(key)
        for family in self.families:
            self._desire_sets(family)

    def _close(self, key: FirewallMark) -> None:
        self._closing[key] = None
        settings, protocol = self.virtual_servers.observed[key].settings, self.marks.protocol_of(key.mark)
        self.virtual_servers.desire(key, NODE_OWNER, VirtualServer(key, settings, owner=NODE_OWNER, marked=protocol))
        entry = mark_entry(key)
        self.entries[entry.set].desire(entry, NODE_OWNER, NODE_OWNER)

    def _stop_closing(self, key: FirewallMark) -> None:
        if key in self._closing:
            del self._closing[key]
            self.virtual_servers.release(key, NODE_OWNER)
            entry = mark_entry(key)
            self.entries[entry.set].release(entry, NODE_OWNER)

    def _desire_sets(self, family: Family) -> None:
        used = {ip_set.kind for ip_set, table in self._sets[family] if table.desired or table.observed}
        has_direct_return = not used.isdisjoint(DIRECT_KINDS)
        has_local = not used.isdisjoint(SCOPE_KINDS if not has_direct_return else _OF_LOCAL_POLICY)
        for ip_set, _ in self._sets[family]:
            is_used = has_direct_return if ip_set.kind in DIRECT_KINDS else has_local
            is_used |= ip_set.kind is SetKind.MARKS and has_direct_return
            if is_used and ip_set not in self.sets.desired:
                self.sets.desire(ip_set, NODE_OWNER, NODE_OWNER)
            elif not is_used and ip_set in self.sets.desired:
                self.sets.release(ip_set, NODE_OWNER)


def _ports(state: ServiceState) -> Mapping[MarkedPort, list[ClusterScope]]:
    """The scopes of the Service, grouped by ``MarkedPort``. Each list has the scopes of a port in both IP families."""
    ports: dict[MarkedPort, list[ClusterScope]] = {}
    for scope in state.rare.scopes:
        ports.setdefault(_port(state, scope), []).append(scope)
    return ports


def _port(state: ServiceState, scope: ClusterScope) -> MarkedPort:
    return MarkedPort(state.owner.service, scope.protocol, scope.port, scope.clients)
