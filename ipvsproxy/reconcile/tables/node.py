"""All tables of the node, and the way of desired state into them.

Rule 1: the desired state of a Service replaces its former one as a whole.
Rule 2: a set entry describes a virtual server, so only the Service that has the virtual server desires the entry (see
``precedence``).
Rule 3: a rule is desired while its set has an entry, or a virtual server needs it: it comes first and goes last.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.model.kernel import (
    DEVICE,
    TIMEOUTS,
    BoundAddresses,
    Device,
    Flow,
    FlowCleaning,
    HealthCheck,
    HealthCheckPort,
    LocalRoutes,
    Sysctl,
    Timeouts,
)
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Item
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import MARKING_TABLE, ObservedSkeleton, Skeleton
from ipvsproxy.model.service import NODE_OWNER, Owner, ServiceName
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, ForeignElement, IpSet, SetCopy, SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, RealServers, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.tables.presence import PresenceTable, presence
from ipvsproxy.reconcile.tables.scopes import Scopes
from ipvsproxy.reconcile.tables.slow_start import SlowStarts
from ipvsproxy.reconcile.tables.table import Conflict, Table
from ipvsproxy.reconcile.virtual_servers import ownership, precedence


def _always(_: object) -> bool:
    return True


def _never(_: object) -> bool:
    return False


_NOTHING = ServiceState(owner=NODE_OWNER)
"""The desired state of a Service that does not exist."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The real servers that may go on answering a flow, and their Service."""

    owner: Owner
    real_servers: frozenset[RealServerKey]


class _Local(Container[Address]):
    """The addresses of several mappings, without a copy."""

    def __init__(self, mappings: Sequence[Mapping[Address, object]]) -> None:
        self._mappings = mappings

    def __contains__(self, address: object) -> bool:
        return any(address in mapping for mapping in self._mappings)


class Tables:
    """Desired and observed state of the node, by kind of kernel object."""

    def __init__(
        self,
        virtual_server_differs: Callable[[VirtualServer, ObservedVirtualServer], bool],
        is_excluded: Callable[[VirtualServerKey], bool],
        is_served: Callable[[Family], bool] = _always,
    ) -> None:
        """Excluded virtual servers are never removed, nor virtual servers and addresses of a family that is not served."""
        self._states: dict[ServiceName, ServiceState] = {}
        self._fewer_entries: dict[ServiceName, tuple[SetEntry, ...]] = {}
        """The entries of Services that do not have all of their virtual servers, and so fewer entries than in their state."""
        self._entries_by_service: dict[ServiceName, frozenset[SetEntry]] = {}
        """The entries of Services that were compared with others for a virtual server."""
        self._restricting: dict[ServiceName, ServiceState] = {}
        self._in_rules: dict[Family, frozenset[VirtualServerKey]] = {}
        """The virtual servers that the desired rules of a family name one by one."""
        self._settings_given_up: dict[str, tuple[Sysctl, str | None, str]] = {}
        self._unequal: dict[Table[Any, Any, Any], None] = {}
        self.virtual_servers: Table[VirtualServerKey, VirtualServer, ObservedVirtualServer] = Table(
            lambda desired: desired.owner,
            virtual_server_differs,
            lambda key: not is_served(key.address.family) or is_excluded(key),
            self._unequal,
            self._rank_of,
        )
        self.entries: Mapping[str, Table[SetEntry, Owner, bool]] = {
            name: PresenceTable(_never, self._unequal) for name in IP_SETS
        }
        self._names = {table: name for name, table in self.entries.items()}
        self._entries_of = {
            family: [(IP_SETS[name].kind, table) for name, table in self.entries.items() if IP_SETS[name].family is family]
            for family in Family
        }
        self.addresses: Table[Address, Owner, bool] = PresenceTable(lambda address: not is_served(address.family), self._unequal)
        self.routes: Table[Address, Owner, bool] = PresenceTable(lambda address: not is_served(address.family), self._unequal)
        self.bindings: Mapping[type[BoundAddresses | LocalRoutes], Table[Address, Owner, bool]] = {
            BoundAddresses: self.addresses,
            LocalRoutes: self.routes,
        }
        """The tables of both ways by which a service address becomes local. An address is desired in one of them."""
        self.local: Container[Address] = _Local(tuple(table.observed for table in self.bindings.values()))
        """The observed service addresses of both ways."""
        self.sets: Table[IpSet, Owner, bool] = PresenceTable(lambda ip_set: ip_set.kind not in SCOPE_KINDS, self._unequal)
        self.copies: Table[SetCopy, Owner, bool] = PresenceTable(_never, self._unequal)
        """Copies of sets are never desired."""
        self.devices: Table[Device, Owner, bool] = PresenceTable(_always, self._unequal)
        self.sysctls: Table[str, Sysctl, str] = Table(
            _node, lambda desired, observed: not desired.is_met_by(observed), lambda _: True, self._unequal
        )
        self.timeouts: Table[str, Timeouts, Timeouts] = Table(
            _node, lambda desired, observed: desired != observed, lambda _: True, self._unequal
        )
        self.skeletons: Table[Family, Skeleton, ObservedSkeleton] = Table(
            _node, lambda desired, observed: desired.in_force != observed, lambda _: True, self._unequal
        )
        self.flows: Table[Flow, Keep, frozenset[RealServerKey]] = Table(
            lambda keep: keep.owner, lambda desired, observed: not observed <= desired.real_servers, lambda _: True, self._unequal
        )
        self.health_checks: Table[HealthCheckPort, HealthCheck, bool] = Table(
            lambda check: check.owner, lambda _desired, _observed: False, _never
        )
        """Only the desired side is used, since a listener is not a kernel object. The table is never among the unequal ones."""
        self.foundation: Sequence[tuple[type, Table[Any, Any, Any]]] = (
            (Sysctl, self.sysctls),
            (Timeouts, self.timeouts),
            (Device, self.devices),
            (IpSet, self.sets),
            (SetCopy, self.copies),
            (Skeleton, self.skeletons),
        )
        """The tables of objects that the node needs with any Services, each with the class of its objects.

        In a table of presence the objects are the keys; else they are the desired values.
        """
        self.by_class: Sequence[tuple[type, Table[Any, Any, Any]]] = (
            (VirtualServer, self.virtual_servers),
            *((SetEntries, table) for table in self.entries.values()),
            *self.bindings.items(),
            *self.foundation,
            (FlowCleaning, self.flows),
        )
        """All tables of kernel objects."""
        self._by_class = dict(self.by_class)
        self.scopes = Scopes(self.virtual_servers, self.entries, self.sets, self.put)
        """Second scopes of external addresses."""
        self.slow_starts = SlowStarts(self.virtual_servers, self._put)

    @property
    def unequal(self) -> Collection[Table[Any, Any, Any]]:
        """The tables with pending or surplus keys: of four dozen, most of the time none."""
        return self._unequal

    def of(self, object_class: type) -> Table[Any, Any, Any]:
        """The table of a class of objects, except set entries."""
        return self._by_class[object_class]

    def table(self, item: Item) -> Table[Any, Any, Any]:
        """The table of an object; real servers are in that of their virtual server."""
        match item:
            case SetEntries():
                return self.entries[item.set]
            case RealServers():
                return self.virtual_servers
            case _:
                return self.of(type(item))

    def place(self, item: Item) -> tuple[Table[Any, Any, Any], Any]:
        """The table of an object, and its key there.

        Raises:
            ValueError: the item is several objects.
        """
        return self.table(item), item.virtual_server if isinstance(item, RealServers) else item.key

    def unequal_entries(self) -> list[tuple[str, Table[SetEntry, Owner, bool]]]:
        """The unequal tables of set entries, each with the name of its set."""
        return [(self._names[table], table) for table in self._unequal if table in self._names]

    @property
    def states(self) -> Mapping[ServiceName, ServiceState]:
        """The desired state of each Service."""
        return self._states

    def put_node(self, families: Collection[Family], sysctls: Iterable[Sysctl], timeouts: Timeouts | None) -> None:
        """The objects that the node needs with any Services: the device, the sets of the families in use, kernel settings."""
        self.scopes.families = frozenset(families)
        desired = [ip_set for ip_set in IP_SETS.values() if ip_set.family in families and ip_set.kind not in SCOPE_KINDS]
        desired += [ip_set for ip_set in self.sets.desired if ip_set.family in families and ip_set.kind in SCOPE_KINDS]
        self.sets.replace(NODE_OWNER, dict(self.sets.desired), presence(desired, NODE_OWNER))
        self.devices.replace(NODE_OWNER, dict(self.devices.desired), presence([Device(DEVICE)], NODE_OWNER))
        self.sysctls.replace(NODE_OWNER, dict(self.sysctls.desired), {item.path: item for item in sysctls})
        self.timeouts.replace(NODE_OWNER, dict(self.timeouts.desired), {TIMEOUTS: timeouts} if timeouts else {})

    def set_names(self) -> list[str]:
        """The sets that a reading must include: those that are desired, and those that only scopes use, desired or not."""
        families = self.scopes.families
        scoped = (ip_set for ip_set in IP_SETS.values() if ip_set.kind in SCOPE_KINDS and ip_set.family in families)
        return list(dict.fromkeys(ip_set.name for ip_set in (*self.sets.desired, *scoped)))

    def give_up_setting(self, item: Sysctl, reason: str) -> None:
        """Give up a kernel setting that cannot be written, until its desired or observed value changes."""
        self._settings_given_up[item.path] = (item, self.sysctls.observed.get(item.path), reason)

    @property
    def settings_given_up(self) -> Mapping[str, str]:
        """The settings that could not be written, and whose two sides have not changed since: path and reason."""
        return {
            path: reason
            for path, (desired, observed, reason) in self._settings_given_up.items()
            if path in self.sysctls.pending
            and (desired, observed) == (self.sysctls.desired[path], self.sysctls.observed.get(path))
        }

    def put_skeleton(self, skeleton: Skeleton) -> None:
        """The desired rules of a family."""
        family = skeleton.family
        before = self.skeletons.desired.get(family)
        rules = itertools.chain.from_iterable(skeleton.chains.values())
        self._in_rules[family] = frozenset(rule.virtual_server for rule in rules if rule.virtual_server)
        self.skeletons.replace(NODE_OWNER, {family: before} if before else {}, {family: skeleton})

    def put(self, name: ServiceName, state: ServiceState | None) -> None:
        """The desired state of a Service; None when it is gone."""
        if self.scopes.concern(name, state):
            state = self.scopes.resolve(name, state)
        if self.slow_starts or (state is not None and state.rare.slow_start_s):
            self.slow_starts.note(name, state, is_known=name in self._states)
        self._put(name, state)

    def _put(self, name: ServiceName, state: ServiceState | None) -> None:
        before = self._states.pop(name, None)
        self._entries_by_service.pop(name, None)
        self._restricting.pop(name, None)
        affected: set[Owner] = set()
        if before and (state is None or before.owner != state.owner):
            affected |= self._desire(before.owner, before, _NOTHING)
            before = None
        if state:
            self._states[name] = state
            if state.rare.refused:
                self._restricting[name] = state
            affected |= self._desire(state.owner, before or _NOTHING, state)
            affected |= self._rank_again(state)
        for owner in affected:
            state = self._states[owner.service]
            self._desire_entries(owner, state, state)
            self.scopes.note_change(owner.service)

    def _rank_of(self, key: VirtualServerKey, owner: Owner) -> precedence.Rank:
        entries = self._entries_by_service.get(owner.service)
        if entries is None:
            entries = self._entries_by_service[owner.service] = frozenset(self._states[owner.service].entries)
        return precedence.rank(owner, entries, key)

    def _rank_again(self, state: ServiceState) -> set[Owner]:
        """Rank a Service's virtual servers again: its role may have changed. Only contested keys are compared."""
        if not self.virtual_servers.contested:
            return set()
        return set().union(*[self.virtual_servers.rank_again(item.key, state.owner) for item in state.served])

    def _desire(self, owner: Owner, before: ServiceState, after: ServiceState) -> set[Owner]:
        affected = self.virtual_servers.replace(owner, before.virtual_servers, after.virtual_servers)
        if before.addresses != after.addresses:
            self.addresses.replace(owner, presence(before.addresses, owner), presence(after.addresses, owner))
        if before.routes != after.routes:
            self.routes.replace(owner, presence(before.routes, owner), presence(after.routes, owner))
        if before.rare.flows != after.rare.flows:
            self._desire_flows(owner, before.rare.flows, after.rare.flows)
        if before.rare.local_endpoints != after.rare.local_endpoints:
            self.health_checks.replace(owner, _checks(owner, before), _checks(owner, after))
        self._desire_entries(owner, before, after)
        return affected - {owner}

    def _desire_flows(
        self, owner: Owner, before: Mapping[Flow, frozenset[RealServerKey]], after: Mapping[Flow, frozenset[RealServerKey]]
    ) -> None:
        """Desire flows. Only a flow that has lost a real server, or has its first ones, needs cleaning."""
        self.flows.replace(owner, _keeps(owner, before), _keeps(owner, after))
        for flow in (*before, *after):
            desired, observed = self.flows.desired.get(flow), self.flows.observed.get(flow)
            if desired is None:
                self.flows.confirm(flow, None)
            elif observed is not None and observed <= desired.real_servers:
                self.flows.confirm(flow, desired.real_servers)

    def _desire_entries(self, owner: Owner, last: ServiceState, state: ServiceState) -> None:
        before = self._fewer_entries.pop(owner.service, last.entries)
        after = self._rightful_entries(owner, state)
        if after is not state.entries:
            self._fewer_entries[owner.service] = after
        if before == after:
            return
        if before:
            desired = frozenset(after)
            for entry in before:
                if entry not in desired:
                    self.entries[entry.set].release(entry, owner)
        known = frozenset(before)
        for entry in after:
            if entry not in known:
                self.entries[entry.set].desire(entry, owner, owner)

    def _rightful_entries(self, owner: Owner, state: ServiceState) -> tuple[SetEntry, ...]:
        if not self.virtual_servers.contested:
            return state.entries
        lost = {key for key in state.virtual_servers if not self.virtual_servers.is_owned_by(key, owner)}
        if not lost:
            return state.entries
        # A virtual server whose address no entry names is that of a node port; one that the Service has keeps the port's entry.
        named = {ownership.virtual_server_of(entry) for entry in state.entries if IP_SETS[entry.set].kind not in SCOPE_KINDS}
        kept_ports = {ownership.node_port(key) for key in state.virtual_servers.keys() - lost - named}
        lost_ports = {ownership.node_port(key) for key in lost - named} - kept_ports
        return tuple(
            entry
            for entry in state.entries
            if ownership.virtual_server_of(entry) not in lost and ownership.node_port_of(entry) not in lost_ports
        )

    def occupied(self, family: Family, *, settled: bool = False) -> frozenset[SetKind]:
        """The kinds of sets with an entry, or soon with one. ``settled``: once everything is as desired.

        A ``ForeignElement`` alone does not count: a rule for it would do to all packets what it does to those of some Services.
        """
        return frozenset(
            kind
            for kind, table in self._entries_of[family]
            if (table.desired or (not settled and any(not isinstance(entry, ForeignElement) for entry in table.observed)))
            and (settled or kind not in SCOPE_KINDS or IpSet(kind, family) in self.sets.observed)
        )

    def refused(self, *, settled: bool = False) -> frozenset[VirtualServerKey]:
        """The virtual servers that this node itself may not use, and those that rules still name until they are removed.

        ``settled``: without the latter, as once everything is as desired.
        """
        desired = {
            key
            for state in self._restricting.values()
            for key in state.rare.refused
            if self.virtual_servers.is_owned_by(key, state.owner)
        }
        if settled:
            return frozenset(desired)
        going = {key for keys in self._in_rules.values() for key in keys if self.is_going(key)}
        return frozenset(desired | going)

    def routed(self, keys: Iterable[VirtualServerKey], *, settled: bool = False) -> frozenset[VirtualServerKey]:
        """Those of some virtual servers whose address is local by a route, or soon.

        ``settled``: as for ``refused``.
        """
        desired, observed = self.routes.desired, {} if settled else self.routes.observed
        return frozenset(key for key in keys if key.address in desired or key.address in observed)

    def lacks_rules(self, family: Family) -> bool:
        """Whether rules of a family are not in force, apart from those that give packets a mark: a kernel may refuse these."""
        if family not in self.skeletons.pending:
            return False
        desired, observed = self.skeletons.desired[family].in_force, self.skeletons.observed.get(family)
        return observed is None or observed.without(MARKING_TABLE) != desired.without(MARKING_TABLE)

    def is_going(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server is still observed although it is no longer desired."""
        return key in self.virtual_servers.surplus

    def conflicts(self) -> Iterator[Conflict]:
        """Virtual servers that several Services desire, with the reasons."""
        return map(self._with_reasons, self.virtual_servers.conflicts())

    def conflict(self, key: VirtualServerKey) -> Conflict | None:
        """The conflict about one virtual server."""
        conflict = self.virtual_servers.conflict(key)
        return conflict and self._with_reasons(conflict)

    def _with_reasons(self, one: Conflict) -> Conflict:
        winner, *waiting = (self._rank_of(one.key, owner) for owner in (one.winner, *one.waiting))
        return one._replace(reasons=tuple(precedence.reason(winner, other) for other in waiting))


def _keeps(owner: Owner, flows: Mapping[Flow, frozenset[RealServerKey]]) -> Mapping[Flow, Keep]:
    return {flow: Keep(owner, keep) for flow, keep in flows.items()}


def _checks(owner: Owner, state: ServiceState) -> Mapping[HealthCheckPort, HealthCheck]:
    return {
        HealthCheckPort(listener.family, listener.port): HealthCheck(owner, count)
        for listener, count in state.rare.local_endpoints.items()
    }


def _node(_: object) -> Owner:
    return NODE_OWNER
