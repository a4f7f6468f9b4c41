"""Answers queries about the desired and the observed state, for commands, metrics and the log. Queries never change the state."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS, BoundAddresses, FlowCleaning, HealthCheck, HealthCheckPort, LocalRoutes
from ipvsproxy.model.kind import KINDS
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Item, Operation
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import Owner, Service, ServiceName, ServicePort
from ipvsproxy.model.sets import DIRECT_KINDS, IP_SETS, SCOPE_KINDS, ForeignElement, IpSet, SetEntry, SetKind, mark_entry
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    Role,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.reconcile.kinds.declaration import Difference, Stage
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.reconcile.tables.table import Conflict, Table
from ipvsproxy.reconcile.virtual_servers import ownership

COMPARED_KINDS = tuple(dict.fromkeys(kind.name for object_class, kind in KINDS.items() if object_class is not FlowCleaning))
"""The names of all kinds of objects whose desired and observed state are compared; operations use the same names."""


class Sides(NamedTuple):
    """The desired and the observed state of one virtual server.

    ``is_foreign`` means that the virtual server exists in the kernel but does not belong to ipvsproxy.
    """

    desired: VirtualServer | None
    observed: ObservedVirtualServer | None
    is_foreign: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Counts of desired and observed objects, at one moment.

    ``virtual_servers`` has the keys of all observed virtual servers, and ``observed`` has their observed states in the same
    order. ``foreign`` has the keys of virtual servers that do not belong to ipvsproxy. ``set_entries`` has a count for each set.
    ``pending`` and ``drifted`` have a count for each kind of kernel object. ``conflicts`` counts the combinations of address and
    port that several Services desire. ``without_scope`` counts the Service ports that have no mark for their second scope.
    ``waiting_removals`` is the number of real servers at weight 0 whose removal is postponed. ``oldest_drain_age_s`` is 0 if no
    real server drains.
    """

    virtual_servers: Sequence[VirtualServerKey]
    observed: Sequence[ObservedVirtualServer]
    foreign: frozenset[VirtualServerKey]
    addresses: Sequence[Address]
    routes: Sequence[Address]
    set_entries: Mapping[str, int]
    pending: Mapping[str, int]
    drifted: Mapping[str, int]
    conflicts: int
    without_scope: int
    drains: int
    waiting_removals: int
    oldest_drain_age_s: float


class Survey:
    """Reads the tables of a reconciler."""

    def __init__(self, tables: NodeTables) -> None:
        self._tables = tables
        self._drains = tables.drains
        self.states: Mapping[ServiceName, ServiceState] = tables.states
        """The desired state of each Service."""
        self.virtual_servers: Mapping[VirtualServerKey, VirtualServer] = tables.virtual_servers.desired
        """The desired virtual servers."""
        self.health_checks: Mapping[HealthCheckPort, HealthCheck] = tables.health_checks.desired
        """The desired health-check node ports."""

    def subjects(self) -> tuple[list[str], list[str]]:
        """The names of the sets, and the paths of the settings, that a reading of the kernel must include.

        The result includes all desired sets. It also includes all sets that only scopes use, even while no Service desires them.
        Until all sets have been read once, the result includes the sets of direct return. Afterwards, the result includes a set
        of direct return only if the set is desired or exists in the kernel.
        """
        tables = self._tables
        left = tables.sets.observed if tables.scopes.has_observed_all else IP_SETS.values()
        of_scopes = (one for one in IP_SETS.values() if one.kind in SCOPE_KINDS and one.family in tables.scopes.families)
        scoped = (one for one in of_scopes if one.kind not in DIRECT_KINDS or one in left)
        return list(dict.fromkeys(one.name for one in (*tables.sets.desired, *scoped))), list(tables.sysctls.desired)

    def occupied(self, family: Family, *, settled: bool = False) -> frozenset[SetKind]:
        """The kinds of sets that have an entry in the kernel, or will have one; rules depend on these kinds.

        If ``settled`` is true, only desired entries count. A set with only a ``ForeignElement`` does not count. A rule for such a
        set would apply to all packets, although the rule is meant only for the packets of some Services.
        """
        tables = self._tables

        def is_occupied(name: str, ip_set: IpSet) -> bool:
            if not settled and ip_set.kind in SCOPE_KINDS and ip_set not in tables.sets.observed:
                return False
            entries = tables.entries[name]
            if entries.desired or settled:
                return bool(entries.desired)
            return not all(isinstance(entry, ForeignElement) for entry in entries.observed)

        return frozenset(one.kind for name, one in IP_SETS.items() if one.family is family and is_occupied(name, one))

    def refused(self, *, settled: bool = False) -> frozenset[VirtualServerKey]:
        """The virtual servers whose source ranges do not include this node, so that rules refuse the node's own connections.

        The result includes undesired virtual servers that have not been removed yet, because rules still name them. If
        ``settled`` is true, the result has only desired virtual servers.
        """
        table, restricting, in_rules = self._tables.virtual_servers, self._tables.restricting, self._tables.in_rules
        desired = {key for state in restricting.values() for key in state.rare.refused if table.owner_of(key) == state.owner}
        going = () if settled else (key for keys in in_rules.values() for key in keys if key in table.surplus)
        return frozenset(desired.union(going))

    def routed(self, keys: Iterable[VirtualServerKey], *, settled: bool = False) -> frozenset[VirtualServerKey]:
        """The virtual servers among ``keys`` whose address has an observed or desired local route.

        ``settled`` has the same meaning as for ``refused``.
        """
        desired, observed = self._tables.routes.desired, {} if settled else self._tables.routes.observed
        return frozenset(key for key in keys if key.address in desired or key.address in observed)

    @property
    def settings_given_up(self) -> Mapping[str, str]:
        """The paths of the settings that could not be written, each with the reason for the failure.

        A setting is left out as soon as its desired or observed value changes.
        """
        return self._tables.of_sysctls.given_up

    def unmet_settings(self) -> Mapping[str, str]:
        """The wrong settings among ``INDISPENSABLE_SETTINGS``: the key is the path, and the value is the observed value."""
        sysctls = self._tables.sysctls
        return {path: sysctls.observed.get(path, "missing") for path in INDISPENSABLE_SETTINGS if path in sysctls.pending}

    def lacking(self, families: Collection[Family]) -> frozenset[Family]:
        """The families that lack an object that all Services of the family need: the device, a set, the rules or a setting."""
        tables = self._tables
        if tables.devices.pending:
            return frozenset(families)
        unset = {family for path in self.unmet_settings() for family in INDISPENSABLE_SETTINGS[path]}
        without_sets = {ip_set.family for ip_set in tables.sets.pending if ip_set.kind not in SCOPE_KINDS}
        without_rules = set(filter(tables.of_rules.lacks, tables.skeletons.pending))
        return frozenset(families) & (unset | without_sets | without_rules)

    def unserved(self, families: Collection[Family]) -> frozenset[Family]:
        """The families for which the kernel lacks more than half of the desired virtual servers."""
        table = self._tables.virtual_servers
        absent = Counter(key.address.family for key in table.pending if key not in table.observed)
        if not absent:
            return frozenset()
        desired = Counter(key.address.family for key in table.desired)
        return frozenset(family for family in families if absent[family] * 2 > desired[family])

    def lacking_entries(self, families: Collection[Family]) -> frozenset[Family]:
        """The families that have a set in which a desired entry is missing."""
        entries = self._tables.of_entries
        return frozenset(families) & {IP_SETS[entries.names[table]].family for table in entries.unequal() if table.pending}

    @property
    def without_scope(self) -> Sequence[MarkedPort]:
        """The Service ports that wait for a packet mark for their second scope.

        The port at the head of the list gets the next mark.
        """
        return list(self._tables.scopes.marks.waiting)

    def scope(self, port: MarkedPort, family: Family) -> FirewallMark | None:
        """The virtual server of a Service port's second scope; None if the port has no second scope."""
        mark = self._tables.scopes.marks.mark_of(port)
        key = FirewallMark.of(family, mark)
        return key if mark and key in self._tables.virtual_servers.desired else None

    def port_of(self, key: FirewallMark) -> MarkedPort | None:
        """The Service port that has the firewall mark in ``key``; None if no Service port has this mark."""
        return self._tables.scopes.marks.port_of(key.mark)

    def service_port(self, service: Service, desired: VirtualServer) -> ServicePort | None:
        """The port of ``service`` to which the virtual server ``desired`` belongs."""
        key, is_node_port = desired.key, desired.role is Role.NODE_PORT
        asked = self.port_of(key) if isinstance(key, FirewallMark) else key
        if asked is None:
            return None
        ports = (port for port in service.ports if port.protocol is asked.protocol)
        return next((port for port in ports if (port.node_port if is_node_port else port.port) == asked.port), None)

    @property
    def draining(self) -> int:
        """The number of draining real servers."""
        return len(self._drains)

    def draining_connections(self) -> list[tuple[VirtualServerKey, RealServerKey, ConnectionCounts]]:
        """The draining real servers whose connections are known, except real servers that only wait for their removal."""
        drains = self._drains.with_connections()
        return [(one.virtual_server, one.key, one.connections) for one in drains if one.connections is not None]

    @property
    def draining_virtual_servers(self) -> Collection[VirtualServerKey]:
        """The virtual servers with a draining real server."""
        return self._drains.virtual_servers

    def draining_of(self, key: VirtualServerKey) -> Mapping[RealServerKey, ConnectionCounts | None]:
        """The draining real servers of a virtual server, including real servers that only wait for their removal.

        The value is the real server's connection counts at the last reading, or None if the counts were not read.
        """
        return {real_server: drain.connections for real_server, drain in self._drains.of(key).items()}

    def pending_owners(self) -> Iterator[Owner]:
        """The owner of each desired object whose desired and observed values differ.

        An owner occurs once for each of its objects whose desired and observed values differ. The caller must not await
        during the iteration.
        """
        for table in self._tables.unequal:
            yield from filter(None, map(table.owner_of, table.pending))

    def virtual_server_keys(self) -> Collection[VirtualServerKey]:
        """All desired virtual servers, followed by the observed virtual servers that are not desired."""
        table = self._tables.virtual_servers
        return {**dict.fromkeys(table.desired), **dict.fromkeys(table.observed)}

    def sides(self, key: VirtualServerKey) -> Sides:
        """The desired and the observed state of a virtual server, and whether it is foreign."""
        table = self._tables.virtual_servers
        return Sides(table.desired.get(key), table.observed.get(key), key in table.foreign)

    def has(self, owner: Owner, key: VirtualServerKey) -> bool:
        """Whether a virtual server belongs to the given owner. Other Services may also desire the virtual server."""
        return self._tables.virtual_servers.owner_of(key) == owner

    def conflicts(self) -> Iterator[Conflict]:
        """The conflicts about virtual servers that several Services desire."""
        return filter(None, map(self.conflict, self._tables.virtual_servers.contested))

    def conflict(self, key: VirtualServerKey) -> Conflict | None:
        """The conflict about one virtual server; None if at most one Service desires the virtual server."""
        winner, *waiting = self._tables.virtual_servers.desires(key) or (None,)
        if winner is None or not waiting:
            return None
        reasons = tuple(ownership.reason(winner, other) for other in waiting)
        return Conflict(key, winner.owner, tuple(other.owner for other in waiting), reasons)

    def is_desired_entry(self, entry: SetEntry) -> bool:
        """Whether a Service or the node desires a set entry."""
        return entry in self._tables.entries[entry.set].desired

    def rules(self, family: Family) -> Skeleton:
        """The desired rules of a family.

        Raises:
            KeyError: this node does not serve the family.
        """
        return self._tables.skeletons.desired[family]

    def witness(self, key: VirtualServerKey) -> BoundAddresses | LocalRoutes | SetEntry | None:
        """The observed address, local route or set entry which shows that a virtual server belongs to ipvsproxy, or None."""
        for object_class, table in self._tables.bindings.items():
            if key.address in table.observed:
                return object_class.of(key.address)
        if isinstance(key, FirewallMark):
            entry = mark_entry(key)
            return entry if entry in self._tables.entries[entry.set].observed else None
        port = ownership.node_port(key)
        entries = (entry for table in self._tables.entries.values() for entry in table.observed)
        return next(
            (one for one in entries if ownership.virtual_server_of(one) == key or ownership.node_port_of(one) == port), None
        )

    def stale(self) -> Collection[VirtualServerKey]:
        """The observed virtual servers that belong to ipvsproxy although no Service desires them."""
        return self._tables.virtual_servers.surplus

    def foreign(self) -> Iterator[tuple[VirtualServerKey, ObservedVirtualServer]]:
        """The observed virtual servers of other programs, except virtual servers that a Service desires.

        Foreign virtual servers may belong to keepalived, docker or an administrator, and are never removed.
        """
        table = self._tables.virtual_servers
        keys = sorted(table.foreign, key=lambda key: (isinstance(key, FirewallMark), key.protocol, key.address, key.port))
        return ((key, table.observed[key]) for key in keys if key not in table.desired)

    def owner_of(self, item: Item) -> Owner | None:
        """The owner of a kernel object; ``NODE_OWNER`` if the node itself needs the object, None if the object is not desired."""
        table, key = self._tables.by_class[type(item)].place(item)
        return table.owner_of(key)

    def stage_of(self, operation: Operation) -> Stage:
        """The stage of an operation in a plan."""
        return self._tables.stage(operation)

    def differences(self) -> Iterator[Difference]:
        """All differences between the desired and the observed state, in the order of the tables."""
        return itertools.chain.from_iterable(kind.differences() for kind in self._tables.kinds)

    def statistics(self, now: float) -> Statistics:
        """Counts of the objects in the tables, as a copy that the caller may read while the tables change."""
        tables, drains = self._tables, self._drains
        by_kind: dict[str, list[Table[Any, Any, Any]]] = {}
        for kind in tables.kinds:
            by_kind.setdefault(kind.name, []).extend(kind.tables)
        return Statistics(
            virtual_servers=list(tables.virtual_servers.observed),
            observed=list(tables.virtual_servers.observed.values()),
            foreign=frozenset(tables.virtual_servers.foreign),
            addresses=list(tables.addresses.observed),
            routes=list(tables.routes.observed),
            set_entries={ip_set.name: len(tables.entries[ip_set.name].observed) for ip_set in tables.sets.desired},
            pending={kind: sum(len(one.pending) + len(one.surplus) for one in tables) for kind, tables in by_kind.items()},
            drifted={kind: sum(one.drifted for one in tables) for kind, tables in by_kind.items()},
            conflicts=len(tables.virtual_servers.contested),
            without_scope=len(tables.scopes.marks.waiting),
            drains=len(drains) - drains.waiting,
            waiting_removals=drains.waiting,
            oldest_drain_age_s=drains.oldest_age_s(now),
        )
