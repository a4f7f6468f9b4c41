"""An in-memory node that serves a Service, with query helpers that many tests share."""

from collections.abc import Iterable

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import EndpointSlice, Service
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers, VirtualServerKey
from tests.reconcile import examples, simulation
from tests.support import builders

KEY = builders.frontend(builders.CLUSTER_IP, 80)
ONE, TWO = builders.backend("10.244.0.1"), builders.backend("10.244.0.2")
FOREIGN = builders.frontend("203.0.113.9", 25)
BUSY = ConnectionCounts(1, 0)
DNS_FLOW = examples.flow(builders.CLUSTER_IP)


def web(*endpoints: str, name: str = "web", created_s: float = 5.0) -> tuple[Service, EndpointSlice]:
    slices = builders.endpoint_slice(*map(builders.endpoint, endpoints), service=name)
    return builders.service(name, created_s=created_s), slices


def dns(*endpoints: str) -> tuple[Service, EndpointSlice]:
    port = builders.endpoint_port(53, Protocol.UDP)
    slices = builders.endpoint_slice(*map(builders.endpoint, endpoints), service="dns", ports=(port,))
    return builders.service("dns", builders.service_port(53, Protocol.UDP)), slices


def running(*endpoints: str, drain_deadline_s: float = 0) -> simulation.SimulatedNode:
    """A node that serves one Service with these endpoints."""
    node = simulation.SimulatedNode(drain_deadline_s=drain_deadline_s)
    node.put(*web(*endpoints))
    node.sync()
    return node


def weights(node: simulation.SimulatedNode, key: VirtualServerKey = KEY) -> dict[RealServerKey, int]:
    return node.kernel.virtual_servers[key].real_servers


def set_weight(real_server: RealServerKey, weight: int, key: VirtualServerKey = KEY) -> Operation:
    return Operation(Verb.SET, RealServers.of(key, real_server, weight))


def removal(real_server: RealServerKey, key: VirtualServerKey = KEY) -> Operation:
    return Operation(Verb.REMOVE, RealServers.of(key, real_server, 0))


def kinds(operations: Iterable[Operation]) -> list[tuple[Verb, type]]:
    return list(dict.fromkeys((operation.verb, type(operation.item)) for operation in operations))


def draining(drain_deadline_s: float = 0) -> simulation.SimulatedNode:
    """A node with a real server that drains and still has a connection."""
    node = running("10.244.0.1", "10.244.0.2", drain_deadline_s=drain_deadline_s)
    node.kernel.connection_counts[KEY, ONE] = BUSY
    node.put(*web("10.244.0.2"))
    node.sync()
    return node
