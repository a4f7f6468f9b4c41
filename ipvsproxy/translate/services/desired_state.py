"""Derives the desired state of this node's kernel from one Service and its endpoints.

Rule 1: the result depends only on the arguments, and never on another Service.
Rule 2: a family is served if the Service has a cluster IP of the family. In a served family, all addresses of the Service are
served.
Rule 3: a virtual server is desired even if it has no real servers. If a virtual server has no real servers, IPVS itself refuses
the client.
Rule 4: an external address with externalTrafficPolicy Local has a second scope: a virtual server by firewall mark for pods and
processes of this node. A second scope does not change the virtual server of the address, so packets without the scope's mark are
treated as by kube-proxy.
Rule 5: each address and port has only one role for a Service, for example as cluster IP or node port (see ``_is_taken``).
Rule 6: an external address with direct return has two scopes besides its virtual server: one for clients outside the cluster, and
one for packets that arrive by tunnel. Clients outside the cluster reach the endpoints of this node and, by tunnel, the endpoints
of other nodes. Packets that arrive by tunnel reach only the endpoints of this node, so no packet is forwarded a second time.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import msgspec

from ipvsproxy.model.annotations import HIGHEST_WEIGHT, Annotation
from ipvsproxy.model.kernel import Flow, HealthCheckPort
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.real_servers import NO_THRESHOLDS, TUNNELLED, RealServerKey, UnevenWeights, Weights
from ipvsproxy.model.service import EndpointSlice, Owner, Service, ServicePort, Skipped
from ipvsproxy.model.sets import NODE_PORT_SETS, IpSet, SetEntry, SetKind
from ipvsproxy.model.state import NO_RARITIES, Clients, ClusterScope, Rarities, ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import Role, VirtualServer, VirtualServerKey
from ipvsproxy.translate.services import refusal, topology, treatment
from ipvsproxy.translate.services.topology import Endpoints, find_endpoints, slices_by_port
from ipvsproxy.translate.translation_settings import Binding, Settings, TrafficScopes
from ipvsproxy.translate.view import NodeView

_NAMES: Mapping[Family, Mapping[SetKind, str]] = {
    family: {kind: IpSet(kind, family).name for kind in SetKind} for family in Family
}
_GATED = Skipped("spec.externalIPs", "the feature gate AllowServiceExternalIPs of this node is off", invalid=False)


class ServedPort(msgspec.Struct, frozen=True):
    """One Service port in one family: its endpoints, the endpoints that are used, and the virtual servers."""

    port: ServicePort
    family: Family
    endpoints: Endpoints
    choice: topology.EndpointChoice
    virtual_servers: list[VirtualServer]


def translating(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings, *, remembered: bool = False
) -> Generator[None, None, ServiceState]:
    """Finds the desired state of a Service on this node, in steps.

    ``slices`` are the EndpointSlices that are labelled with the Service's name, in any order. ``remembered`` means that the
    newest list of Services does not contain this Service, so each Service in the list has precedence over this Service.
    """
    translation = Translation(service, view, settings, remembered=remembered)
    yield from translation.adding(sorted(slices, key=lambda item: item.name))
    return translation.state()


class Translation:
    """Builds the desired state of a Service, one IP family after the other.

    The caller runs the generator ``adding`` to its end, and then calls ``state`` for the result.
    """

    def __init__(self, service: Service, view: NodeView, settings: Settings, *, remembered: bool = False) -> None:
        owner = Owner(service.created_s, service.name)
        self.owner = owner.remembered if remembered else owner
        self.how, treated, unused = treatment.treat(service, settings)
        self.service, not_admitted = refusal.admit(treated, view, settings)
        self.options = self.service.options
        self.view = view
        self.settings = settings
        self.skipped: dict[Skipped, None] = dict.fromkeys((*service.skipped, *unused, *not_admitted))
        if self.options.external_addresses and not settings.external_addresses:
            self.skipped[_GATED] = None
        self.ports: list[ServedPort] = []
        self._cluster_ports = {(port.protocol, port.port) for port in service.ports}
        self._node_ports = {(port.protocol, port.node_port) for port in service.ports if port.node_port}

        self.virtual_servers: dict[VirtualServerKey, VirtualServer] = {}
        self.entries: dict[SetEntry, None] = {}
        self.addresses: dict[Address, None] = {}
        self.refused: list[VirtualServerKey] = []
        self.flows: dict[Flow, frozenset[RealServerKey]] = {}
        self.local_endpoints: dict[HealthCheckPort, int] = {}
        self.without_local: set[tuple[str, Family]] = set()
        self.scopes: list[ClusterScope] = []

    def state(self) -> ServiceState:
        """The desired state."""
        if not_served := self.service.not_served:
            return ServiceState(owner=self.owner, rare=Rarities(skipped=(not_served, *self.service.skipped)))
        addresses = tuple(self.addresses)
        if addresses == self.service.cluster_addresses:
            addresses = self.service.cluster_addresses  # to save memory, the state shares the tuple of the parsed Service
        by_routes, chosen = self.settings.binding is Binding.ROUTES, self.how.chosen
        rare = Rarities(
            refused=tuple(self.refused),
            flows=self.flows,
            local_endpoints=self.local_endpoints,
            without_local=frozenset(self.without_local),
            skipped=tuple(self.skipped),
            scopes=tuple(self.scopes),
            slow_start_s=chosen.slow_start_s if self.ports else 0,
            drain_deadline_s=chosen.drain_deadline_s if self.ports else 0,
        )
        return ServiceState(
            owner=self.owner,
            served=tuple(self.virtual_servers.values()),
            entries=tuple(self.entries),
            addresses=() if by_routes else addresses,
            routes=addresses if by_routes else (),
            rare=NO_RARITIES if rare == NO_RARITIES else rare,
        )

    def adding(self, slices: Sequence[EndpointSlice]) -> Iterator[None]:
        """Adds the ports of the Service in each family, and the Service's health check; yields after each piece of work.

        The EndpointSlices are processed in the order of their names.
        """
        for address in () if self.service.not_served else self.service.cluster_addresses:
            if address.family in self.settings.families:
                yield from self._adding_family(address, [one for one in slices if one.family is address.family])
            else:
                reason = f"{address}: this node does not serve {address.family.label}, so nothing of that family is served"
                self.skipped[Skipped("spec.clusterIPs", reason, invalid=False)] = None

    def _adding_family(self, cluster_address: Address, slices: list[EndpointSlice]) -> Iterator[None]:
        options = self.options
        self.family = family = cluster_address.family
        self.set_names = _NAMES[family]
        self.cluster_address = cluster_address
        self.load_balancer_addresses = _of(family, options.load_balancer_addresses)
        self.external_addresses = _of(family, options.external_addresses) if self.settings.external_addresses else []
        self.node_addresses = self.view.node_port_addresses[family]
        self.virtual_server_settings = self.how.settings(family, options.affinity_timeout_s)
        local_ready: set[bytes] = set()  # calling ``set[bytes]()`` would take four times as long
        here, by_port, weighs = self.view.name, slices_by_port(slices), self.how.weighs(slices)
        for port in self.service.ports:
            endpoints = find_endpoints(by_port, port)
            local = {RealServerKey(key): one.ready for key, one in endpoints.items() if one.node_name == here}
            yield from self._adding_port(port, endpoints, local, self.how.weigh(endpoints, self.skipped) if weighs else None)
            local_ready |= {key.address for key, is_ready in local.items() if is_ready}
        if port_number := options.health_check_node_port:
            self._enter(SetKind.HEALTH_CHECK_NODE_PORT, port=port_number)
            self.local_endpoints[HealthCheckPort(family, port_number)] = len(local_ready)

    def _adding_port(
        self, port: ServicePort, endpoints: Endpoints, local: Iterable[RealServerKey], by_key: Mapping[bytes, int] | None
    ) -> Iterator[None]:
        # If a pod connects to itself through a service address, the pod must not see its own address as the address of the
        # client.
        for key in local:
            address = key.address
            self._enter(SetKind.LOOP_BACK, address, port.protocol, key.port, address)
        # The traffic policy Local matters only if clients outside the cluster can reach the port. An address in spec.externalIPs
        # makes the port reachable even if the feature gate keeps ipvsproxy from programming the address.
        options = self.options
        external_local = options.external_traffic_local and bool(
            port.node_port or _of(self.family, options.external_addresses + options.load_balancer_addresses)
        )
        choice = topology.choose_routes(
            endpoints,
            self.view.name,
            self.view.zone,
            internal_local=options.internal_traffic_local,
            external_local=external_local,
        )
        internal = self.how.weighed(choice.internal.weights, by_key)
        external = internal if choice.external is choice.internal else self.how.weighed(choice.external.weights, by_key)
        for policy, is_local in (("internal", options.internal_traffic_local), ("external", external_local)):
            if is_local and choice.lacks_local:
                self.without_local.add((policy, self.family))
        self.ports.append(ServedPort(port, self.family, endpoints, choice, []))
        self._serve(Role.CLUSTER_IP, self.cluster_address, port.protocol, port.port, internal)
        self._enter(SetKind.CLUSTER_IP, self.cluster_address, port.protocol, port.port)
        self._bind(self.cluster_address)
        if self.external_addresses or self.load_balancer_addresses:
            yield from self._adding_external_addresses(port, external)
        if port.node_port:
            self._add_node_port(port, external)
        if options.external_traffic_local and self.settings.scopes is TrafficScopes.API:
            cluster = external if choice.cluster is choice.external else self.how.weighed(choice.cluster.weights, by_key)
            self._add_scope(port, choice, cluster)
        elif self.how.chosen.direct_return and self.view.shared_tunnel:
            reason = f"another program of this node has an address on {self.view.shared_tunnel}"
            self.skipped[Skipped(Annotation.DIRECT_RETURN.field, reason)] = None
        elif self.how.chosen.direct_return and (self.external_addresses or self.load_balancer_addresses):
            self._add_direct_return(port, endpoints, external, by_key)
        if port.protocol is not Protocol.TCP:
            self._add_flows(port, endpoints)

    # If a Service uses an address and port twice, only the first role counts. The order of roles is: the cluster IP, node ports,
    # all other addresses. If several Services use the same address and port, the same order decides which Service gets them (see
    # ``rank``). Source ranges restrict the load balancer's address even if it is also an external IP, as with kube-proxy.

    def _is_taken(self, port: ServicePort, address: Address, number: int) -> bool:
        """Whether the cluster IP or another node port of the Service already uses this address and port number."""
        if address == self.cluster_address:
            return (port.protocol, number) in self._cluster_ports
        return number != port.node_port and address in self.node_addresses and (port.protocol, number) in self._node_ports

    def _adding_external_addresses(self, port: ServicePort, external: Weights) -> Iterator[None]:
        local, ranges = self.options.external_traffic_local, self._source_ranges()
        for number, address in enumerate(self.external_addresses, 1):
            if not self._is_taken(port, address, port.port):
                self._serve(Role.EXTERNAL_IP, address, port.protocol, port.port, external)
                self._enter(SetKind.EXTERNAL_IP_LOCAL if local else SetKind.EXTERNAL_IP, address, port.protocol, port.port)
            self._bind_unless_elsewhere(address)
            if number % ITEMS_AT_ONCE == 0:
                yield
        for number, address in enumerate(self.load_balancer_addresses, 1):
            if not self._is_taken(port, address, port.port):
                self._serve(Role.LOAD_BALANCER_IP, address, port.protocol, port.port, external)
                self._enter(SetKind.LOAD_BALANCER, address, port.protocol, port.port)
                if local:
                    self._enter(SetKind.LOAD_BALANCER_LOCAL, address, port.protocol, port.port)
            if ranges or self.options.admits_nobody:
                self._restrict(VirtualServerKey(port.protocol, address, port.port), ranges)
            self._bind_unless_elsewhere(address)
            if number % ITEMS_AT_ONCE == 0 or ranges:
                yield

    def _serve(self, role: Role, address: Address, protocol: Protocol, number: int, weights: Weights) -> None:
        key = VirtualServerKey(protocol, address, number)
        if key not in self.virtual_servers:
            settings, thresholds = self.virtual_server_settings, self.how.chosen.thresholds
            served = VirtualServer(key, settings, weights, self.owner, None, thresholds, role)
            self.virtual_servers[key] = served
            self.ports[-1].virtual_servers.append(served)

    def _add_node_port(self, port: ServicePort, weights: Weights) -> None:
        addresses = [one for one in self.node_addresses if not self._is_taken(port, one, port.node_port)]
        kinds = NODE_PORT_SETS[port.protocol] if self.options.external_traffic_local else NODE_PORT_SETS[port.protocol][:1]
        for address in addresses:
            self._serve(Role.NODE_PORT, address, port.protocol, port.node_port, weights)
        for kind in kinds if addresses else ():
            if port.protocol is Protocol.SCTP:
                for address in addresses:
                    self._enter(kind, address, port.protocol, port.node_port)
            else:
                self._enter(kind, port=port.node_port)

    def _add_scope(self, port: ServicePort, choice: topology.EndpointChoice, weights: Weights) -> None:
        """Add a scope for clients of this node, with the given real servers, to the external addresses of a port."""
        keys = self._external_keys(port)
        if not keys:
            return
        if choice.lacks_local:
            for key in keys:
                self._enter(SetKind.NO_LOCAL, key.address, key.protocol, key.port)
        settings = self.how.settings_by_mark(self.settings.hash_scheduler, self.options.affinity_timeout_s)
        scope = ClusterScope(self.family, port.protocol, port.port, tuple(keys), settings, weights, self.how.chosen.thresholds)
        self.scopes.append(scope)

    def _add_direct_return(
        self, port: ServicePort, endpoints: Endpoints, external: Weights, by_key: Mapping[bytes, int] | None
    ) -> None:
        """Add two scopes for the external addresses: one for clients outside the cluster, and one for packets from a tunnel.

        The packet inside a tunnel keeps the address that the client has chosen. This address must be local on the node at the end
        of the tunnel. The address of a node port is not local on any other node, so node ports have no direct return. A tunnel to
        another node is one real server. Its weight is the sum of the weights of that node's endpoints.
        """
        addresses = dict.fromkeys((*self.external_addresses, *self.load_balancer_addresses))
        keys = tuple(
            VirtualServerKey(port.protocol, one, port.port) for one in addresses if not self._is_taken(port, one, port.port)
        )
        if not keys:
            return
        direct: dict[bytes, int] = {}
        for key, weight in external.plain().items():
            node = endpoints[key].node_name
            if ends := _of(self.family, self.view.tunnel_ends.get(node, ())):
                through = RealServerKey.of(ends[0], port.port)
                direct[through] = min(direct.get(through, TUNNELLED) + weight, TUNNELLED + HIGHEST_WEIGHT)
            else:
                direct[key] = weight
                if node != self.view.name:
                    one = RealServerKey(key)
                    self._enter(SetKind.NOT_DIRECT, one.address, port.protocol, one.port)
        outside = UnevenWeights(dict(sorted(direct.items())))
        route = topology.tunnel_route(endpoints, self.view.name)
        # If all weights on this node are 0, another node sends new connections only while it does not know the weights. For these
        # connections, each weight is 1.
        here = self.how.weighed(route, by_key if by_key and any(by_key[key] for key in route.plain()) else None)
        hashing, timeout_s, limits = self.settings.hash_scheduler, self.options.affinity_timeout_s, self.how.chosen.thresholds
        for clients, weights, thresholds in (
            (Clients.OUTSIDE, outside, NO_THRESHOLDS),
            (Clients.BY_TUNNEL, here, limits),
        ):
            settings = self.how.settings_by_mark(hashing, timeout_s, by_hash=clients is Clients.OUTSIDE)
            scope = ClusterScope(self.family, port.protocol, port.port, keys, settings, weights, thresholds, clients)
            self.scopes.append(scope)

    def _external_keys(self, port: ServicePort) -> Sequence[VirtualServerKey]:
        """The virtual servers of a port on all addresses of the Service except the cluster IP."""
        named = [(address, port.port) for address in (*self.external_addresses, *self.load_balancer_addresses)]
        named += [(address, port.node_port) for address in self.node_addresses if port.node_port]
        return [VirtualServerKey(port.protocol, *one) for one in dict.fromkeys(named) if not self._is_taken(port, *one)]

    def _source_ranges(self) -> Sequence[Network]:
        """The ranges of the clients that may use the load balancer's addresses; empty if all clients are admitted."""
        ranges = [item for item in self.options.source_ranges if item.family is self.family]
        return [] if any(not item.prefix_length for item in ranges) else ranges

    def _restrict(self, key: VirtualServerKey, ranges: Iterable[Network]) -> None:
        """Admit only clients in the source ranges.

        Connections from clients on the node itself have the service address as their source.
        """
        self._enter(SetKind.LOAD_BALANCER_FIREWALL, key.address, key.protocol, key.port)
        name = self.set_names[SetKind.LOAD_BALANCER_SOURCE_CIDR]
        for item in ranges:
            self.entries[SetEntry(name, key.address, key.protocol, key.port, item.address, item.prefix_length)] = None
        if any(item.contains(self.view.primary_addresses[self.family]) for item in ranges):
            self._enter(SetKind.LOAD_BALANCER_SOURCE_IP, key.address, key.protocol, key.port, key.address)
        else:
            self.refused.append(key)

    def _add_flows(self, port: ServicePort, endpoints: Endpoints) -> None:
        """Add the port's flows. Tracked flows to removed endpoints must be cleaned, because a flow outlives its endpoint.

        If no endpoint serves, the flows are not cleaned.
        """
        serving = frozenset([RealServerKey(key) for key, conditions in endpoints.items() if conditions.serving])
        if not serving:
            return
        # Flows to node ports are cleaned only for this node's addresses, because flows to node ports of another node belong to
        # that node.
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


def _of(family: Family, addresses: tuple[Address, ...]) -> list[Address]:
    return [address for address in addresses if address.family is family] if addresses else []
