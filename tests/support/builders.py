"""Builds values with defaults, so that a test gives only the values that matter for the test.

Addresses and ranges are given as text. By default, endpoints are on this node, ready, and without hints.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Address, Family, Network, Protocol, parse_address, parse_network
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import (
    Conditions,
    Endpoint,
    EndpointPort,
    EndpointSlice,
    EndpointSliceName,
    Node,
    Service,
    ServiceName,
    ServiceOptions,
    ServicePort,
    ServiceType,
)
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate.services import desired_state
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView, view_node

NAMESPACE = "default"
THIS_NODE = "node-a"
OTHER_NODE = "node-b"
ZONE = "zone-a"
NODE_ADDRESS = "192.168.0.10"
CLUSTER_IP = "10.96.0.10"
CREATED_S = 1_700_000_000.0


def service_port(number: int = 80, protocol: Protocol = Protocol.TCP, *, name: str = "", node_port: int = 0) -> ServicePort:
    """A port of a Service."""
    return ServicePort(name=name, protocol=protocol, port=number, node_port=node_port)


def service(
    name: str = "web",
    *ports: ServicePort,
    namespace: str = NAMESPACE,
    kind: ServiceType = ServiceType.CLUSTER_IP,
    cluster: Iterable[str] = (CLUSTER_IP,),
    external: Iterable[str] = (),
    load_balancer: Iterable[str] = (),
    source_ranges: Iterable[str] = (),
    affinity_timeout_s: int = 0,
    internal_local: bool = False,
    external_local: bool = False,
    health_check_node_port: int = 0,
    created_s: float = CREATED_S,
) -> Service:
    """A Service. If no ports are given, the Service has the port TCP 80."""
    return Service(
        name=ServiceName(namespace, name),
        uid=f"uid-of-{name}",
        created_s=created_s,
        ports=ports or (service_port(),),
        cluster_addresses=addresses(*cluster),
        options=ServiceOptions(
            type=kind,
            external_addresses=addresses(*external),
            load_balancer_addresses=addresses(*load_balancer),
            source_ranges=networks(*source_ranges),
            affinity_timeout_s=affinity_timeout_s,
            internal_traffic_local=internal_local,
            external_traffic_local=external_local,
            health_check_node_port=health_check_node_port,
        ),
    )


def with_options(item: Service, **options: Any) -> Service:
    """Returns the Service with some of its options changed."""
    return msgspec.structs.replace(item, options=msgspec.structs.replace(item.options, **options))


def endpoint(
    address: str,
    node: str = THIS_NODE,
    *,
    ready: bool = True,
    serving: bool = True,
    terminating: bool = False,
    zones: Iterable[str] = (),
    nodes: Iterable[str] = (),
    zone: str = "",
) -> Endpoint:
    """An endpoint. ``zones`` and ``nodes`` are the hints of the endpoint."""
    conditions = Conditions(ready, serving, terminating, node, frozenset(zones), frozenset(nodes), zone)
    return Endpoint(parse_address(address), conditions)


def draining(address: str, node: str = THIS_NODE, *, zones: Iterable[str] = ()) -> Endpoint:
    """An endpoint that is terminating but still serves."""
    return endpoint(address, node, ready=False, terminating=True, zones=zones)


def dead(address: str, node: str = THIS_NODE) -> Endpoint:
    """An endpoint that is not ready and does not serve."""
    return endpoint(address, node, ready=False, serving=False)


def endpoint_port(number: int = 8080, protocol: Protocol = Protocol.TCP, *, name: str = "") -> EndpointPort:
    """A port of an EndpointSlice."""
    return EndpointPort(name, protocol, number)


def endpoint_slice(
    *endpoints: Endpoint,
    service: str = "web",
    suffix: str = "1",
    namespace: str = NAMESPACE,
    ports: Iterable[EndpointPort] = (EndpointPort("", Protocol.TCP, 8080),),
    family: Family | None = None,
) -> EndpointSlice:
    """An EndpointSlice of a Service. The slice has the IP family of its endpoints, or IPv4 if it has no endpoints."""
    return EndpointSlice(
        name=EndpointSliceName(namespace, f"{service}-{suffix}"),
        service=ServiceName(namespace, service),
        family=family or (endpoints[0].address.family if endpoints else Family.IPV4),
        ports=tuple(ports),
        addresses=b"".join(one.address for one in endpoints),
        conditions=tuple(one.conditions for one in endpoints),
    )


def node(
    *texts: str,
    name: str = THIS_NODE,
    zone: str = ZONE,
    pod_networks: Iterable[str] = (),
    leaving: bool = False,
) -> Node:
    """A Node with these addresses; if no address is given, the Node has ``NODE_ADDRESS``."""
    return Node(
        name=name,
        uid=f"uid-of-{name}",
        zone=zone,
        addresses=addresses(*(texts or (NODE_ADDRESS,))),
        pod_networks=networks(*pod_networks),
        leaving=leaving,
    )


def interface_address(interface: str, address: str) -> InterfaceAddress:
    """An address of an interface of this host."""
    parsed = parse_address(address)
    return InterfaceAddress(interface, parsed, parsed.family.bits)


def networks(*texts: str) -> tuple[Network, ...]:
    """Address ranges."""
    return tuple(map(parse_network, texts))


def addresses(*texts: str) -> tuple[Address, ...]:
    """IP addresses."""
    return tuple(map(parse_address, texts))


def api_servers(slices: Iterable[EndpointSlice]) -> frozenset[RealServerKey]:
    """The addresses of the API servers, taken from the EndpointSlices of the Service for the API server."""
    return frozenset(RealServerKey.of(one.address, port.port) for item in slices for one in item.endpoints for port in item.ports)


def node_view(
    interfaces: Mapping[str, Iterable[str]] | None = None,
    *,
    node_object: Node | None = None,
    settings: Settings | None = None,
) -> NodeView:
    """This node with these interfaces; by default, the only interface is eth0, with the addresses of the Node object."""
    known = node_object or node()
    by_interface = interfaces if interfaces is not None else {"eth0": [str(address) for address in known.addresses]}
    carried = [interface_address(interface, text) for interface, texts in by_interface.items() for text in texts]
    return view_node(settings or Settings(), known.name, known, carried, api_servers=())


def translate(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings, *, remembered: bool = False
) -> ServiceState:
    """The desired state of a Service on this node."""
    return at_once(desired_state.translating(service, slices, view, settings, remembered=remembered))


def frontend(address: str, port: int, protocol: Protocol = Protocol.TCP) -> VirtualServerKey:
    """The key of a virtual server."""
    return VirtualServerKey(protocol, parse_address(address), port)


def backend(address: str, port: int = 8080) -> RealServerKey:
    """The key of a real server."""
    return RealServerKey.of(parse_address(address), port)
