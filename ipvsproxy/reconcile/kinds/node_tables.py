"""All tables of the node, and the code that puts desired state into the tables.

Rule 1: a new desired state of a Service replaces the whole former desired state of the Service.
Rule 2: a set entry describes a virtual server, so only the Service that owns the virtual server desires the set entry (see
``ownership``).
Rule 3: a rule is desired while the set that it names has an entry, or while a virtual server needs the rule. A rule is added
before the entries and virtual servers that need the rule, and removed after them.
"""

import collections
import itertools
from collections.abc import Callable, Collection, Container, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.model.kernel import (
    DEVICE,
    TIMEOUTS,
    BoundAddresses,
    Device,
    HealthCheck,
    HealthCheckPort,
    LocalRoutes,
    Sysctl,
    Timeouts,
)
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import NODE_OWNER, Owner, ServiceName
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, IpSet, SetEntry, SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import each
from ipvsproxy.model.virtual_servers import Role, VirtualServerKey
from ipvsproxy.reconcile.kinds.declaration import ReconciledKind, Stage
from ipvsproxy.reconcile.kinds.flows import Flows
from ipvsproxy.reconcile.kinds.local_addresses import Addresses, Routes
from ipvsproxy.reconcile.kinds.node_objects import Devices, IpvsTimeouts, Rules, Sysctls
from ipvsproxy.reconcile.kinds.set_kinds import Entries, SetCopies, Sets
from ipvsproxy.reconcile.kinds.virtual_server_kind import VirtualServers
from ipvsproxy.reconcile.tables.scopes import Scopes
from ipvsproxy.reconcile.tables.slow_start import SlowStarts
from ipvsproxy.reconcile.tables.table import Table, always, presence, replacing
from ipvsproxy.reconcile.virtual_servers import ownership
from ipvsproxy.reconcile.virtual_servers.drain import Drains

_NOTHING = ServiceState(owner=NODE_OWNER)
"""The desired state of a Service that does not exist."""


class NodeTables:
    """The desired and the observed state of the node, in one or more tables for each kind of kernel object."""

    def __init__(
        self,
        drains: Drains,
        is_excluded: Callable[[VirtualServerKey], bool] = lambda _: False,
        is_served: Callable[[Family], bool] = always,
    ) -> None:
        """A virtual server for which ``is_excluded`` returns true is never removed.

        A virtual server or an address is removed only if this node serves its IP family.
        """
        self._states: dict[ServiceName, ServiceState] = {}
        self.states: Mapping[ServiceName, ServiceState] = self._states
        """The desired state of each Service."""
        self._fewer_entries: dict[ServiceName, tuple[SetEntry, ...]] = {}
        """The desired set entries of each Service whose state has virtual servers that another Service owns. Some entries of the
        Service's own state are left out."""
        self.restricting: dict[ServiceName, ServiceState] = {}
        """The desired state of each Service that has a virtual server whose source ranges do not include this node."""
        self.in_rules: dict[Family, frozenset[VirtualServerKey]] = {}
        """For each family: the virtual servers that have a rule of their own among the desired rules."""
        self.unequal: dict[Table[Any, Any, Any], None] = {}
        """The tables with pending or surplus keys: usually none of about 50 tables."""
        self.drains, self.is_excluded, self.is_served = drains, is_excluded, is_served
        self.of_virtual_servers, self.of_entries, self.of_rules = VirtualServers(self), Entries(self), Rules(self)
        self.of_sysctls, self.of_timeouts, self.of_flows = Sysctls(self), IpvsTimeouts(self), Flows(self)
        of_addresses, of_routes, of_sets, of_devices = Addresses(self), Routes(self), Sets(self), Devices(self)
        self.kinds: Sequence[ReconciledKind[Any, Any, Any]] = (
            self.of_sysctls,
            self.of_timeouts,
            of_devices,
            of_sets,
            SetCopies(self),
            self.of_entries,
            self.of_rules,
            self.of_virtual_servers,
            of_addresses,
            of_routes,
            self.of_flows,
        )
        """All kinds. A new kind needs a module in the package ``kinds``, and a driver in the package ``kernel``."""
        self.by_class: Mapping[type, ReconciledKind[Any, Any, Any]] = {item: one for one in self.kinds for item in one.classes}
        self.virtual_servers = self.of_virtual_servers.objects
        self.entries = self.of_entries.by_set
        self.addresses = of_addresses.objects
        self.routes = of_routes.objects
        self.bindings: Mapping[type[BoundAddresses | LocalRoutes], Table[Address, Owner, bool]] = {
            BoundAddresses: self.addresses,
            LocalRoutes: self.routes,
        }
        """The tables of the two kinds of objects that make service addresses local: addresses on the device, and local routes.
        Each desired address is in only one of the two tables."""
        self.local: Container[Address] = collections.ChainMap(self.addresses.observed, self.routes.observed)
        """The observed service addresses on the device and in local routes."""
        self.sets = of_sets.objects
        self.devices = of_devices.objects
        self.sysctls = self.of_sysctls.objects
        self.timeouts = self.of_timeouts.objects
        self.skeletons = self.of_rules.objects
        self.flows = self.of_flows.objects
        self.health_checks: Table[HealthCheckPort, HealthCheck, bool] = Table(
            lambda check: check.owner, lambda _desired, _observed: False, always
        )
        """The desired health-check node ports. The table has no observed values, because a listener is not a kernel object.
        Therefore the table is never in ``unequal``."""
        self.scopes = Scopes(self.virtual_servers, self.entries, self.sets, self.putting)
        """Second scopes of external addresses."""
        self.slow_starts = SlowStarts(self.virtual_servers, self._putting)

    def stage(self, operation: Operation) -> Stage:
        """The stage of an operation.

        Raises:
            KeyError: objects of this kind never get an operation with this verb.
        """
        return self.by_class[type(operation.item)].stage(operation)

    def put_node(self, families: Collection[Family], sysctls: Iterable[Sysctl], timeouts: Timeouts | None) -> None:
        """Set the desired objects that the node needs independently of its Services.

        The objects are the device, the sets of the families in use, and the kernel settings.
        """
        self.scopes.families = frozenset(families)
        desired = [ip_set for ip_set in IP_SETS.values() if ip_set.family in families and ip_set.kind not in SCOPE_KINDS]
        desired += [ip_set for ip_set in self.sets.desired if ip_set.family in families and ip_set.kind in SCOPE_KINDS]
        self.sets.replace(NODE_OWNER, dict(self.sets.desired), presence(desired, NODE_OWNER))
        self.devices.replace(NODE_OWNER, dict(self.devices.desired), presence([Device(DEVICE)], NODE_OWNER))
        self.sysctls.replace(NODE_OWNER, dict(self.sysctls.desired), {item.path: item for item in sysctls})
        self.timeouts.replace(NODE_OWNER, dict(self.timeouts.desired), {TIMEOUTS: timeouts} if timeouts else {})

    def put_tunnel_sources(self, addresses: Iterable[Address]) -> None:
        """Set the addresses of the other nodes whose tunnels are accepted."""
        for family in self.scopes.families:
            name = IpSet(SetKind.NODES, family).name
            entries = (SetEntry(name, one) for one in addresses if one.family is family)
            self.entries[name].replace(NODE_OWNER, dict(self.entries[name].desired), presence(entries, NODE_OWNER))

    def put_skeleton(self, skeleton: Skeleton) -> None:
        """Set the desired rules of a family."""
        family = skeleton.family
        before = self.skeletons.desired.get(family)
        rules = itertools.chain.from_iterable(skeleton.chains.values())
        self.in_rules[family] = frozenset(rule.virtual_server for rule in rules if rule.virtual_server)
        self.skeletons.replace(NODE_OWNER, {family: before} if before else {}, {family: skeleton})

    def putting(self, name: ServiceName, state: ServiceState | None) -> Generator[None, None, None]:
        """Replaces the desired state of a Service; yields after each piece of work.

        A state of None means that the Service no longer exists.
        """
        state = self.scopes.resolve(name, state)
        self.slow_starts.note(name, state, is_known=name in self._states)
        return self._putting(name, state)

    def _putting(self, name: ServiceName, state: ServiceState | None) -> Generator[None, None, None]:
        before = self._states.pop(name, None)
        self.restricting.pop(name, None)
        affected: set[Owner] = set()
        if before and (state is None or before.owner != state.owner):
            affected |= yield from self._desiring(before.owner, before, _NOTHING)
            before = None
        if state:
            self._states[name] = state
            if state.rare.refused:
                self.restricting[name] = state
            affected |= yield from self._desiring(state.owner, before or _NOTHING, state)
        for owner in affected:
            state = self._states[owner.service]
            yield from self._desiring_entries(owner, state, state)
            self.scopes.note_change(owner.service)

    def _desiring(self, owner: Owner, before: ServiceState, after: ServiceState) -> Generator[None, None, set[Owner]]:
        parts: list[tuple[Table[Any, Any, Any], Mapping[Any, Any], Mapping[Any, Any]]] = [
            (self.virtual_servers, before.virtual_servers, after.virtual_servers)
        ]
        if before.addresses != after.addresses:
            parts.append((self.addresses, presence(before.addresses, owner), presence(after.addresses, owner)))
        if before.routes != after.routes:
            parts.append((self.routes, presence(before.routes, owner), presence(after.routes, owner)))
        if before.rare.local_endpoints != after.rare.local_endpoints:
            parts.append((self.health_checks, _checks(owner, before), _checks(owner, after)))
        affected = yield from replacing(owner, parts)
        if before.rare.flows != after.rare.flows:
            yield from self.of_flows.desiring(owner, before.rare.flows, after.rare.flows)
        yield from self._desiring_entries(owner, before, after)
        return affected - {owner}

    def _desiring_entries(self, owner: Owner, last: ServiceState, state: ServiceState) -> Iterator[None]:
        before = self._fewer_entries.pop(owner.service, last.entries)
        after = self._rightful_entries(owner, state)
        if after is not state.entries:
            self._fewer_entries[owner.service] = after
        if before == after:
            return
        if before:
            gone = itertools.filterfalse(frozenset(after).__contains__, before)
            yield from each(lambda entry: self.entries[entry.set].release(entry, owner), gone)
        new = itertools.filterfalse(frozenset(before).__contains__, after)
        yield from each(lambda entry: self.entries[entry.set].desire(entry, owner, owner), new)

    def _rightful_entries(self, owner: Owner, state: ServiceState) -> tuple[SetEntry, ...]:
        if not self.virtual_servers.contested:
            return state.entries
        lost = {key for key in state.virtual_servers if self.virtual_servers.owner_of(key) != owner}
        if not lost:
            return state.entries
        # If the Service still owns a virtual server of a node port, the entry of the node port stays.
        of_node_ports = {one.key for one in state.served if one.role is Role.NODE_PORT}
        lost_ports = set(map(ownership.node_port, of_node_ports & lost)) - set(map(ownership.node_port, of_node_ports - lost))
        return tuple(
            entry
            for entry in state.entries
            if ownership.virtual_server_of(entry) not in lost and ownership.node_port_of(entry) not in lost_ports
        )


def _checks(owner: Owner, state: ServiceState) -> Mapping[HealthCheckPort, HealthCheck]:
    return {port: HealthCheck(owner, count) for port, count in state.rare.local_endpoints.items()}
