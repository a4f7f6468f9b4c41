"""Decides which endpoints of a service port this node uses (pkg/proxy/topology.go in kubernetes/kubernetes).

Hints and traffic policies restrict the choice. Terminating endpoints that still serve are used only as the last resort.

Rule: a ``Scope`` defines which endpoints a kind of traffic may use, and whether only terminating endpoints remain for that
traffic. ``Scope.why_not`` applies a scope to one endpoint; if the endpoint is not used, the method returns the reason.
"""

import enum
import zlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.real_servers import PORT_SIZE, EvenWeights
from ipvsproxy.model.service import Conditions, EndpointSlice, ServicePort

Endpoints = Mapping[bytes, Conditions]
"""Maps each endpoint of a service port to its conditions. The key of the mapping is the endpoint's ``RealServerKey``, as plain
bytes. Each address occurs only once."""
SlicesByPort = Mapping[tuple[str, Protocol], Sequence[tuple[EndpointSlice, int]]]
"""The EndpointSlices that have a port, each with the number of the port in the slice; the key is the port's name and protocol."""


def slices_by_port(slices: Iterable[EndpointSlice]) -> SlicesByPort:
    """For each port name and protocol: the EndpointSlices that have such a port, each with the port's number in the slice."""
    by_port: dict[tuple[str, Protocol], list[tuple[EndpointSlice, int]]] = {}
    for item in slices:
        for one in item.ports:
            by_port.setdefault((one.name, one.protocol), []).append((item, one.port))
    return by_port


def find_endpoints(by_port: SlicesByPort, port: ServicePort) -> Endpoints:
    """The endpoints of a service port, with their port numbers.

    The endpoints come from each EndpointSlice that has a port with the name and protocol of the service port. All EndpointSlices
    must be of one family. Each address counts once: a later entry replaces an earlier entry, unless the later entry is
    terminating. Two entries with one address are possible because a new pod may get the address of a terminating pod.
    """
    endpoints: dict[bytes, Conditions] = {}
    for item, number in by_port.get((port.name, port.protocol), ()):
        suffix = number.to_bytes(PORT_SIZE, "big")
        for address, conditions in zip(item.each_address, item.conditions, strict=True):
            key = address + suffix
            if not conditions.terminating or key not in endpoints:
                endpoints[key] = conditions
    return endpoints


class WhyNot(enum.StrEnum):
    """The reason why an endpoint is not used."""

    NOT_READY = "it is not ready"
    TERMINATING = "it is terminating, and other endpoints are ready"
    NOT_SERVING = "it is terminating, and no longer serves"
    OTHER_NODE = "it is on another node, and the traffic policy is Local"
    HINT_FOR_OTHER_NODE = "its hints are for other nodes"
    HINT_FOR_OTHER_ZONE = "its hints are for other zones"


class Scope(msgspec.Struct, frozen=True, gc=False):
    """The endpoints that one kind of traffic to a service port may use.

    ``last_resort`` means that the scope contains no ready endpoint, so terminating endpoints that still serve are used. If
    ``node`` is not empty, only endpoints on this node are used. If ``node_hint`` or ``zone_hint`` is not empty, only endpoints
    with that hint are used.
    """

    last_resort: bool
    node: str = ""
    node_hint: str = ""
    zone_hint: str = ""

    def why_not(self, endpoint: Conditions) -> WhyNot | None:  # noqa: PLR0911 - one return for each reason
        """The reason why an endpoint is not used; None if the endpoint is used."""
        if self.node and endpoint.node_name != self.node:
            return WhyNot.OTHER_NODE
        if self.last_resort or not endpoint.ready:
            if not endpoint.terminating:
                return WhyNot.NOT_READY
            if not endpoint.serving:
                return WhyNot.NOT_SERVING
            return None if self.last_resort else WhyNot.TERMINATING
        if self.node_hint and self.node_hint not in endpoint.node_hints:
            return WhyNot.HINT_FOR_OTHER_NODE
        if self.zone_hint and self.zone_hint not in endpoint.zone_hints:
            return WhyNot.HINT_FOR_OTHER_ZONE
        return None

    def used(self, endpoints: Endpoints) -> Sequence[bytes]:
        """The keys of the endpoints that the scope uses."""
        return [key for key, conditions in endpoints.items() if self.why_not(conditions) is None]


class Route(msgspec.Struct, frozen=True, gc=False):
    """A scope, and its real servers in the order that this node uses."""

    scope: Scope
    weights: EvenWeights


class EndpointChoice(msgspec.Struct, frozen=True, gc=False):
    """The routes of one service port: one for traffic to the cluster IP, and one for traffic to all other addresses.

    ``cluster`` is the route that ignores the traffic policy; clients of this node use it for addresses other than the cluster IP.
    ``lacks_local`` means that a traffic policy requires endpoints on this node, but only other nodes have usable endpoints.
    """

    internal: Route
    external: Route
    cluster: Route
    lacks_local: bool


def choose_routes(endpoints: Endpoints, node: str, zone: str, *, internal_local: bool, external_local: bool) -> EndpointChoice:
    """The routes of one service port, as determined by its traffic policies.

    With internalTrafficPolicy Local, the cluster IP never leads to another node. With externalTrafficPolicy Local and no endpoint
    on this node, all endpoints serve. Clients in the cluster may use any endpoint. The load balancer's health check directs
    clients outside the cluster to other nodes.
    """
    ready = [endpoint for endpoint in endpoints.values() if endpoint.ready]
    node_hint, zone_hint = _hints(ready, node, zone)
    cluster = Scope(not ready, "", node_hint, zone_hint)
    asks_each = len(ready) < len(endpoints) or node_hint or zone_hint  # rarely
    everywhere = Route(cluster, in_order(cluster.used(endpoints) if asks_each else endpoints, node))
    if not (internal_local or external_local):
        return EndpointChoice(everywhere, everywhere, everywhere, lacks_local=False)
    here = local_route(endpoints, node)
    return EndpointChoice(
        here if internal_local else everywhere,
        here if external_local and here.weights else everywhere,
        everywhere,
        lacks_local=bool(everywhere.weights) and not here.weights,
    )


def local_route(endpoints: Endpoints, node: str) -> Route:
    """The route for traffic that may use only the endpoints on ``node``."""
    has_ready = any(endpoint.ready and endpoint.node_name == node for endpoint in endpoints.values())
    local = Scope(last_resort=not has_ready, node=node)
    return Route(local, in_order(local.used(endpoints), node))


def tunnel_route(endpoints: Endpoints, node: str) -> EvenWeights:
    """The real servers for packets that another node has sent to this node by tunnel.

    If no endpoint may be used, the result has the endpoints of this node that have just started or are no longer ready. The other
    node may use such an endpoint, because it may learn earlier than this node that the endpoint is ready. It may also learn later
    than this node that the endpoint is no longer ready.
    """
    starting = [key for key, one in endpoints.items() if one.node_name == node and not one.terminating]
    return local_route(endpoints, node).weights or in_order(starting, node)


def in_order(keys: Iterable[bytes], node: str) -> EvenWeights:
    """The real servers with these keys, in this node's own order.

    The order depends only on the node's name and on the set of real servers, so the order is the same at every start. If all
    nodes used one order, the first connection of each node would go to the same real server (kubernetes/kubernetes #121591).
    """
    # Python's hash of two numbers is the same in each process and, unlike a checksum, not linear. If the hash is applied twice,
    # the results are evenly distributed.
    seed = zlib.crc32(node.encode())
    return EvenWeights.of(sorted(keys, key=lambda key: hash((hash((seed, int.from_bytes(key, "big"))), seed))))


def _hints(ready: Sequence[Conditions], node: str, zone: str) -> tuple[str, str]:
    """The node hint and the zone hint that a ready endpoint must have.

    A hint is empty if endpoints need no hint of that kind. Hints count only if every ready endpoint has a hint and at least one
    hint is for this node or its zone. If some hints are missing, the control plane is about to write all hints again. Hints for
    nodes (PreferSameNode) take precedence over hints for zones (PreferSameZone, PreferClose, topology-mode).
    """
    if not ready or not (ready[0].node_hints or ready[0].zone_hints):  # nearly always
        return "", ""
    if all(one.node_hints for one in ready) and any(node in one.node_hints for one in ready):
        return node, ""
    if zone and all(one.zone_hints for one in ready) and any(zone in one.zone_hints for one in ready):
        return "", zone
    return "", ""
