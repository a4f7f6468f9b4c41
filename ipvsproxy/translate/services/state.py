"""From one Service and its endpoints to the desired state of this node's kernel.

Rule 1: the result depends on the arguments alone, and never on another Service.
Rule 2: a family is served if the Service has a cluster IP of it, with all other addresses of that family.
Rule 3: every virtual server exists, with or without real servers. Without any, IPVS itself refuses the client.
Rule 4: an external address with externalTrafficPolicy Local has a second scope, for clients of this node. Its virtual server is
the same with and without it, so a packet that does not get its mark fares as with kube-proxy.
Rule 5: an address and port has one role for its Service (see ``Roles``).
"""

import functools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence

from ipvsproxy.model.annotations import NO_ANNOTATIONS, ServiceAnnotations
from ipvsproxy.model.kernel import Flow, HealthListener
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.real_servers import RealServerKey, Weights
from ipvsproxy.model.service import EndpointSlice, Owner, Service, ServicePort, Skipped
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind, network_entry
from ipvsproxy.model.state import NO_RARITIES, ClusterScope, Rarities, ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.model.virtual_servers import VirtualServer, VirtualServerKey
from ipvsproxy.translate.services import refusal, topology, treatment
from ipvsproxy.translate.services.topology import Endpoints, find_endpoints, slices_by_port
from ipvsproxy.translate.settings import Binding, Settings, TrafficScopes
from ipvsproxy.translate.view import NodeView

_NODE_PORT_SETS: Mapping[Protocol, tuple[SetKind, SetKind]] = {
    Protocol.TCP: (SetKind.NODE_PORT_TCP, SetKind.NODE_PORT_LOCAL_TCP),
    Protocol.UDP: (SetKind.NODE_PORT_UDP, SetKind.NODE_PORT_LOCAL_UDP),
    Protocol.SCTP: (SetKind.NODE_PORT_SCTP, SetKind.NODE_PORT_LOCAL_SCTP),
}
_NAMES: Mapping[Family, Mapping[SetKind, str]] = {
    family: {kind: IpSet(kind, family).name for kind in SetKind} for family in Family
}


def translate(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings, *, remembered: bool = False
) -> ServiceState:
    """The desired state of a Service on this node. The slices are those labelled with its name, in any order.

    ``remembered``: the newest list lacks the Service, so Services on that list have precedence.
    """
    return at_once(translating(service, slices, view, settings, remembered=remembered))


def translating(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings, *, remembered: bool = False
) -> Generator[None, None, ServiceState]:
    """As ``translate``, in steps."""
    owner = Owner(service.created_s, service.name)
    if remembered:
        owner = owner.remembered
    if service.not_served:
        return ServiceState(owner=owner, rare=Rarities(skipped=(service.not_served, *service.skipped)))
    how, service, unused = treatment.treat(service, settings)
    service, not_admitted = refusal.admit(service, view, settings)
    skipped = dict.fromkeys((*service.skipped, *unused, *not_admitted))
    ordered = sorted(slices, key=lambda item: item.name)
    served = []
    for address in service.cluster_addresses:
        if address.family in settings.families:
            item = _FamilyState(service, owner, address, view, settings, how=how)
            yield from item.adding([one for one in ordered if one.family is item.family])
            served.append(item)
            skipped |= item.skipped
        else:
            reason = f"{address}: this node does not serve {address.family.label}, so nothing of that family is served"
            skipped[Skipped("spec.clusterIPs", reason, invalid=False)] = None
    addresses = tuple(address for item in served for address in item.addresses)
    if addresses == service.cluster_addresses:
        addresses = service.cluster_addresses  # most Services share one tuple
    by_routes = settings.binding is Binding.ROUTES
    return ServiceState(
        owner=owner,
        served=tuple(one for item in served for one in item.virtual_servers.values()),
        entries=tuple(entry for item in served for entry in item.entries),
        addresses=() if by_routes else addresses,
        routes=addresses if by_routes else (),
        rare=_rarities(served, how.chosen, tuple(skipped)),
    )


class Roles:
    """The role of each address and port that a Service may name twice: the first one counts.

    The cluster IP goes before a node port, and both before other addresses, as between Services (``precedence``). Source ranges
    of a load balancer restrict its address in any role, as with kube-proxy.
    """

    def __init__(self, service: Service, cluster_address: Address | None, node_port_addresses: Collection[Address]) -> None:
        self._ports = service.ports
        self._cluster_address = cluster_address
        self._node_port_addresses = node_port_addresses

    def is_taken(self, port: ServicePort, address: Address, number: int) -> bool:
        """Whether an external address or node port of this port has a role of another port, or is the cluster IP."""
        if address == self._cluster_address:
            return (port.protocol, number) in self._cluster_ports
        return number != port.node_port and address in self._node_port_addresses and (port.protocol, number) in self._node_ports

    @functools.cached_property
    def _cluster_ports(self) -> frozenset[tuple[Protocol, int]]:
        return frozenset((port.protocol, port.port) for port in self._ports)

    @functools.cached_property
    def _node_ports(self) -> frozenset[tuple[Protocol, int]]:
        return frozenset((port.protocol, port.node_port) for port in self._ports if port.node_port)


class _FamilyState:
    """The desired state of a Service in one family, while it is being built."""

    def __init__(
        self,
        service: Service,
        owner: Owner,
        cluster_address: Address,
        view: NodeView,
        settings: Settings,
        *,
        how: treatment.Treatment,
    ) -> None:
        self.family = family = cluster_address.family
        self.set_names = _NAMES[family]
        self.owner = owner
        self.service = service
        self.options = options = service.options
        self.view = view
        self.settings = settings
        self.cluster_address = cluster_address
        self.load_balancer_addresses = _of(family, options.load_balancer_addresses)
        self.external_addresses = _of(family, options.external_addresses) if settings.external_addresses else []
        self.node_addresses = view.node_port_addresses[family]
        self.roles = Roles(service, cluster_address, self.node_addresses)
        ranges = [item for item in options.source_ranges if item.family is family] if options.source_ranges else []
        self.source_ranges: list[Network] = [] if any(item.prefix_length == 0 for item in ranges) else ranges
        self.is_restricted = bool(self.source_ranges) or options.admits_nobody
        self.how = how
        self.thresholds = how.chosen.thresholds
        self.virtual_server_settings = how.settings(family, options.affinity_timeout_s)
        self.weighs = False
        self.skipped: dict[Skipped, None] = {}

        self.virtual_servers: dict[VirtualServerKey, VirtualServer] = {}
        self.entries: dict[SetEntry, None] = {}
        self.addresses: dict[Address, None] = {}
        self.refused: list[VirtualServerKey] = []
        self.flows: dict[Flow, frozenset[RealServerKey]] = {}
        self.local_endpoints: dict[HealthListener, int] = {}
        self.without_local_internal = False
        self.without_local_external = False
        self.scopes: list[ClusterScope] = []
        self.has_scopes = options.external_traffic_local and settings.scopes is TrafficScopes.API

    def adding(self, slices: list[EndpointSlice]) -> Iterator[None]:
        """Add every port, and the health check, in steps."""
        port_number, local_ready = self.options.health_check_node_port, set[bytes]()
        here, by_port = self.view.name, slices_by_port(slices)
        self.weighs = self.how.weighs(slices)
        for port in self.service.ports:
            endpoints = find_endpoints(by_port, port)
            local = {RealServerKey(key): one.ready for key, one in endpoints.items() if one.node_name == here}
            yield from self._adding_port(port, endpoints, local)
            local_ready |= {key.address for key, is_ready in local.items() if is_ready}
        if port_number:
            self._enter(SetKind.HEALTH_CHECK_NODE_PORT, port=port_number)
            listener = HealthListener(self.family, port_number, self.service.name)
            self.local_endpoints[listener] = len(local_ready)

    def _adding_port(self, port: ServicePort, endpoints: Endpoints, local: Iterable[RealServerKey]) -> Iterator[None]:
        # A pod that reaches itself through a service address must not see its own address as the client's.
        for key in local:
            address = key.address
            self._enter(SetKind.LOOP_BACK, address, port.protocol, key.port, address)
        choice = routes_of_port(self.service, port, self.family, endpoints, self.view)
        by_key = self.how.weigh(endpoints, self.skipped) if self.weighs else None
        internal = self.how.weighed(choice.internal.weights, by_key)
        external = internal if choice.external is choice.internal else self.how.weighed(choice.external.weights, by_key)
        self.without_local_internal |= choice.lacks_local and self.options.internal_traffic_local
        self.without_local_external |= choice.lacks_local and _is_external_local(self.service, port, self.family)
        self._serve(self.cluster_address, port.protocol, port.port, internal)
        self._enter(SetKind.CLUSTER_IP, self.cluster_address, port.protocol, port.port)
        self._bind(self.cluster_address)
        yield from self._adding_external_addresses(port, external)
        if port.node_port:
            self._add_node_port(port, external)
        if self.has_scopes:
            cluster = external if choice.cluster is choice.external else self.how.weighed(choice.cluster.weights, by_key)
            self._add_scope(port, choice, cluster)
        if port.protocol is not Protocol.TCP:
            self._add_flows(port, endpoints)

    def _adding_external_addresses(self, port: ServicePort, external: Weights) -> Iterator[None]:
        local = self.options.external_traffic_local
        for number, address in enumerate(self.external_addresses, 1):
            if not self.roles.is_taken(port, address, port.port):
                self._serve(address, port.protocol, port.port, external)
                self._enter(SetKind.EXTERNAL_IP_LOCAL if local else SetKind.EXTERNAL_IP, address, port.protocol, port.port)
            self._bind_unless_elsewhere(address)
            if number % ITEMS_AT_ONCE == 0:
                yield
        for number, address in enumerate(self.load_balancer_addresses, 1):
            if not self.roles.is_taken(port, address, port.port):
                self._serve(address, port.protocol, port.port, external)
                self._enter(SetKind.LOAD_BALANCER, address, port.protocol, port.port)
                if local:
                    self._enter(SetKind.LOAD_BALANCER_LOCAL, address, port.protocol, port.port)
            if self.is_restricted:
                self._restrict(VirtualServerKey(port.protocol, address, port.port))
            self._bind_unless_elsewhere(address)
            if number % ITEMS_AT_ONCE == 0 or self.source_ranges:
                yield

    def _serve(self, address: Address, protocol: Protocol, number: int, weights: Weights) -> None:
        key = VirtualServerKey(protocol, address, number)
        self.virtual_servers.setdefault(
            key, VirtualServer(key, self.virtual_server_settings, weights, self.owner, None, self.thresholds)
        )

    def _add_node_port(self, port: ServicePort, weights: Weights) -> None:
        addresses = [one for one in self.node_addresses if not self.roles.is_taken(port, one, port.node_port)]
        every, local = _NODE_PORT_SETS[port.protocol]
        kinds = (every, local) if self.options.external_traffic_local else (every,)
        for address in addresses:
            self._serve(address, port.protocol, port.node_port, weights)
        for kind in kinds if addresses else ():
            if port.protocol is Protocol.SCTP:
                for address in addresses:
                    self._enter(kind, address, port.protocol, port.node_port)
            else:
                self._enter(kind, port=port.node_port)

    def _add_scope(self, port: ServicePort, choice: topology.EndpointChoice, weights: Weights) -> None:
        """Add the scope of this node's clients, with these real servers, to the external addresses of a port."""
        keys = self._external_keys(port)
        if not keys:
            return
        if choice.lacks_local:
            for key in keys:
                self._enter(SetKind.NO_LOCAL, key.address, key.protocol, key.port)
        settings = self.how.settings_by_mark(self.settings.hash_scheduler, self.options.affinity_timeout_s)
        scope = ClusterScope(self.family, port.protocol, port.port, tuple(keys), settings, weights, self.thresholds)
        self.scopes.append(scope)

    def _external_keys(self, port: ServicePort) -> Sequence[VirtualServerKey]:
        """The virtual servers of a port on all of its addresses but the cluster IP."""
        named = [(address, port.port) for address in (*self.external_addresses, *self.load_balancer_addresses)]
        named += [(address, port.node_port) for address in self.node_addresses if port.node_port]
        return [VirtualServerKey(port.protocol, *one) for one in dict.fromkeys(named) if not self.roles.is_taken(port, *one)]

    def _restrict(self, key: VirtualServerKey) -> None:
        """Admit the source ranges alone. The node's own clients have the service address as their source."""
        self._enter(SetKind.LOAD_BALANCER_FIREWALL, key.address, key.protocol, key.port)
        name = self.set_names[SetKind.LOAD_BALANCER_SOURCE_CIDR]
        for item in self.source_ranges:
            self.entries[network_entry(name, key, item)] = None
        if any(item.contains(self.view.primary_addresses[self.family]) for item in self.source_ranges):
            self._enter(SetKind.LOAD_BALANCER_SOURCE_IP, key.address, key.protocol, key.port, key.address)
        else:
            self.refused.append(key)

    def _add_flows(self, port: ServicePort, endpoints: Endpoints) -> None:
        """Clean tracked flows, which outlive their endpoint; only if the port has another endpoint for them."""
        serving = frozenset([RealServerKey(key) for key, conditions in endpoints.items() if conditions.serving])
        if not serving:
            return
        # At node ports on this node's addresses alone: flows to the same node port of other nodes are not ours.
        for key in (VirtualServerKey(port.protocol, self.cluster_address, port.port), *self._external_keys(port)):
            self.flows[Flow(self.family, key.protocol, key.address, key.port)] = serving

    def _bind_unless_elsewhere(self, address: Address) -> None:
        if address not in self.view.elsewhere:
            self._bind(address)

    def _bind(self, address: Address) -> None:
        self.addresses[address] = None
        self._enter(SetKind.IPVS_IPS, address)

    def _enter(
        self,
        kind: SetKind,
        address: Address | None = None,
        protocol: Protocol | None = None,
        port: int = 0,
        other: Address | None = None,
    ) -> None:
        self.entries[SetEntry(self.set_names[kind], address, protocol, port, other)] = None


def _rarities(served: Sequence[_FamilyState], chosen: ServiceAnnotations, skipped: tuple[Skipped, ...]) -> Rarities:
    is_usual = not skipped and chosen is NO_ANNOTATIONS
    if is_usual and not any(
        item.refused
        or item.flows
        or item.local_endpoints
        or item.without_local_internal
        or item.without_local_external
        or item.scopes
        for item in served
    ):
        return NO_RARITIES
    return Rarities(
        refused=tuple(key for item in served for key in item.refused),
        flows={key: value for item in served for key, value in item.flows.items()},
        local_endpoints={key: value for item in served for key, value in item.local_endpoints.items()},
        without_local_internal=frozenset(item.family for item in served if item.without_local_internal),
        without_local_external=frozenset(item.family for item in served if item.without_local_external),
        skipped=skipped,
        scopes=tuple(scope for item in served for scope in item.scopes),
        slow_start_s=chosen.slow_start_s if served else 0,
        drain_deadline_s=chosen.drain_deadline_s if served else 0,
    )


def _of(family: Family, addresses: tuple[Address, ...]) -> list[Address]:
    return [address for address in addresses if address.family is family] if addresses else []


def routes_of_port(
    service: Service, port: ServicePort, family: Family, endpoints: Endpoints, view: NodeView
) -> topology.EndpointChoice:
    """The routes of a port in one family, by the Service's traffic policies."""
    return topology.choose_routes(
        endpoints,
        view.name,
        view.zone,
        internal_local=service.options.internal_traffic_local,
        external_local=_is_external_local(service, port, family),
    )


def _is_external_local(service: Service, port: ServicePort, family: Family) -> bool:
    """Whether externalTrafficPolicy Local matters: clients outside can reach the port.

    spec.externalIPs count even if the feature gate keeps them from being programmed.
    """
    options = service.options
    return options.external_traffic_local and (
        bool(port.node_port)
        or any(address.family is family for address in (*options.external_addresses, *options.load_balancer_addresses))
    )
