"""Second scopes of external addresses: from a Service's desired state to virtual servers by mark and the entries that give marks.

Rule 1: a packet without a mark comes to the virtual server of its address, so a scope may be missing at any time, for a Service
port that has no mark yet or none any more.
Rule 2: a virtual server by mark that nobody desires keeps its connections: it has no real servers desired, so these drain, and it
is removed without them. Its entries go first (see ``precondition``).
"""

from collections.abc import Callable, Mapping, Sequence

from ipvsproxy.model.net import Family
from ipvsproxy.model.owner import NODE_OWNER, Owner
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, IpSet, MarkedEntry, SetEntry, SetKind, mark_entry
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.tables.marks import Marks, by_family
from ipvsproxy.reconcile.tables.table import Table


class Scopes:
    """The Services with second scopes, the marks of their ports, and the virtual servers by mark that are going.

    ``families`` are those that the node serves. ``put`` puts the desired state of a Service into the tables.
    """

    def __init__(
        self,
        virtual_servers: Table[VirtualServerKey, VirtualServer, ObservedVirtualServer],
        entries: Mapping[str, Table[SetEntry, Owner, bool]],
        sets: Table[IpSet, Owner, bool],
        put: Callable[[ServiceName, ServiceState], None],
    ) -> None:
        self.families: frozenset[Family] = frozenset()
        self.marks = Marks(self._has_mark, self._is_recallable)
        self._virtual_servers = virtual_servers
        self._entries = entries
        self._sets = sets
        self._put = put
        self._states: dict[ServiceName, ServiceState] = {}
        """The Services with two scopes, each as it was put: without marks."""
        self._closing: dict[FirewallMark, None] = {}
        """Undesired virtual servers, while they drain."""
        self._refused: set[FirewallMark] = set()
        """Virtual servers of other programs, while our entry still shows that they are ours."""

    def concern(self, name: ServiceName, state: ServiceState | None) -> bool:
        """Whether a Service has second scopes, or had them before."""
        return name in self._states or (state is not None and bool(state.rare.scopes))

    def resolve(self, name: ServiceName, state: ServiceState | None) -> tuple[ServiceState | None, Sequence[ServiceName]]:
        """The state with its virtual servers by mark and the entries of the marks; and the Services that lose a mark by this."""
        before = self._states.pop(name, None)
        if before is not None and state is None:
            self.marks.release(before.owner, name, before.rare.scopes)
        elif before is not None and state is not None:
            if before.owner != state.owner:
                self.marks.pass_on(before.owner, state.owner, before.rare.scopes)
            ports = {(scope.protocol, scope.port) for scope in state.rare.scopes}
            gone = [scope for scope in before.rare.scopes if (scope.protocol, scope.port) not in ports]
            self.marks.release(state.owner, name, gone)
        if state is None or not state.rare.scopes:
            return state, ()
        self._states[name] = state
        if not self.marks.is_known:
            return state, ()
        losers: list[ServiceName] = []
        served, entries = list(state.served), list(state.entries)
        for scope in state.rare.scopes:
            mark, loser = self.marks.take(state.owner, name, scope, state.rare.scopes)
            if loser is not None:
                losers.append(loser)
            if mark:
                key = FirewallMark.of(scope.family, mark)
                self._stop_closing(key)
                served.append(VirtualServer(key, scope.settings, scope.weights, state.owner, scope.protocol, scope.thresholds))
                entries.append(mark_entry(key))
                set_name = IpSet(SetKind.SCOPE, scope.family).name
                entries += [
                    MarkedEntry(set_name, one.address, one.protocol, one.port, mark=mark, mask=self.marks.bits)
                    for one in scope.virtual_servers
                ]
        return state.with_objects(tuple(served), tuple(entries)), losers

    def put_again(self, name: ServiceName) -> None:
        """Put a Service with second scopes anew: its marks may be others."""
        self._put(name, self._states[name])

    def use_bits(self, bits: int) -> None:
        """Use these bits of packet marks. If others were in use, every scope gets another mark."""
        if bits == self.marks.bits:
            return
        self.marks.adopt(bits)
        if self.marks.is_known:
            self.recall_marks()

    def recall_marks(self) -> None:
        """Note the marks that the kernel has, now that they were read, and put the scopes that have waited for that."""
        self.marks.recall(
            entry
            for name, ip_set in IP_SETS.items()
            if ip_set.gives_marks
            for entry in self._entries[name].observed
            if isinstance(entry, MarkedEntry) and entry.mask == self.marks.bits
        )
        for name in list(self._states):
            self.put_again(name)

    def refuse(self, key: FirewallMark) -> None:
        """Leave a mark to the program that has made a virtual server by it, and give its Service port another one."""
        port = self.marks.port_of(key.mark)
        if port is not None:
            self._refused.add(key)
            self.marks.refuse(self._states[port.service].owner, key.mark)
            self.put_again(port.service)

    def is_refused(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server is another program's, although our entry still shows that it is ours."""
        return key in self._refused

    def _has_mark(self, mark: int) -> bool:
        """Whether the kernel has a mark: as a virtual server, whoever's, or as an entry that shows that one is ours."""
        return any(key in self._virtual_servers.observed or self._is_witnessed(key) for key in by_family(mark).values())

    def _is_witnessed(self, key: FirewallMark) -> bool:
        entry = mark_entry(key)
        return entry in self._entries[entry.set].observed

    def _is_recallable(self, entry: MarkedEntry) -> bool:
        keys = by_family(entry.mark).values()
        is_ours = all(key not in self._virtual_servers.observed or self._is_witnessed(key) for key in keys)
        return is_ours and entry in self._entries[entry.set].observed

    def tend(self, *, may_close: bool) -> None:
        """Let undesired virtual servers by mark drain before they are removed, and give marks that have become free.

        Sets that only scopes use are desired while there are scopes, or remains of them. ``may_close``: every Service has been
        put.
        """
        table = self._virtual_servers
        self._refused = {key for key in self._refused if self._is_witnessed(key)}
        for key in list(self._closing):
            observed = table.observed.get(key)
            if observed is None or not observed.real_servers:
                self._stop_closing(key)
        if may_close:
            for key in [key for key in table.surplus if isinstance(key, FirewallMark)]:
                if table.observed[key].real_servers:
                    self._close(key)
        while (name := self.marks.next_in_turn()) is not None:
            self.put_again(name)
        for family in self.families:
            self._desire_sets(family)

    def _close(self, key: FirewallMark) -> None:
        self._closing[key] = None
        settings, protocol = self._virtual_servers.observed[key].settings, self.marks.protocol_of(key.mark)
        self._virtual_servers.desire(key, NODE_OWNER, VirtualServer(key, settings, owner=NODE_OWNER, marked=protocol))
        entry = mark_entry(key)
        self._entries[entry.set].desire(entry, NODE_OWNER, NODE_OWNER)

    def _stop_closing(self, key: FirewallMark) -> None:
        if key in self._closing:
            del self._closing[key]
            self._virtual_servers.release(key, NODE_OWNER)
            entry = mark_entry(key)
            self._entries[entry.set].release(entry, NODE_OWNER)

    def _desire_sets(self, family: Family) -> None:
        sets = [IpSet(kind, family) for kind in SetKind if kind in SCOPE_KINDS]
        tables = [self._entries[ip_set.name] for ip_set in sets]
        is_used = any(table.desired or table.observed for table in tables)
        for ip_set in sets:
            if is_used and ip_set not in self._sets.desired:
                self._sets.desire(ip_set, NODE_OWNER, NODE_OWNER)
            elif not is_used and ip_set in self._sets.desired:
                self._sets.release(ip_set, NODE_OWNER)
