"""The objects of a translated Service in the form of texts, for tests."""

from collections.abc import Iterable

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.rules import ChainKey, Rule, Skeleton, render
from ipvsproxy.model.service import EndpointSlice, Service, ServiceType
from ipvsproxy.model.sets import IpSet, SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate import trace
from ipvsproxy.translate.skeleton import build_skeleton
from ipvsproxy.translate.trace import TracedClient
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView
from tests.support import builders


def state_of(
    service: Service, *slices: EndpointSlice, view: NodeView | None = None, settings: Settings | None = None
) -> ServiceState:
    """Translates the Service for the given node view, or for the default node of ``builders`` if ``view`` is None."""
    return builders.translate(service, slices, view or builders.node_view(), settings or Settings())


def frontends(*states: ServiceState) -> set[str]:
    """All virtual servers, as texts such as ``TCP 10.96.0.10:80``."""
    return {str(key) for state in states for key in state.virtual_servers}


def backends(state: ServiceState, address: str, port: int = 80, protocol: Protocol = Protocol.TCP) -> set[str]:
    """The real servers of a virtual server, as texts such as ``10.244.0.5:8080``. The virtual server must exist."""
    return {str(key) for key in state.virtual_servers[VirtualServerKey(protocol, parse_address(address), port)].real_servers}


def members(kind: SetKind, *states: ServiceState, family: Family = Family.IPV4) -> set[str]:
    """The entries of a set, as ipset prints them."""
    name = IpSet(kind, family).name
    return {str(entry) for state in states for entry in state.entries if entry.set == name}


def skeleton_of(
    *states: ServiceState,
    family: Family = Family.IPV4,
    view: NodeView | None = None,
    settings: Settings | None = None,
) -> Skeleton:
    """The rules of a node with these Services."""
    occupied = {kind for kind in SetKind if members(kind, *states, family=family)}
    refused = [key for state in states for key in state.rare.refused]
    return build_skeleton(family, settings or Settings(), view or builders.node_view(), occupied, refused)


def outline(skeleton: Skeleton, table: str, chain: str) -> list[tuple[str, str]]:
    """The set and the target of each rule of a chain."""
    rules = skeleton.chains[ChainKey(table, chain)]
    return [(rule.set.set if rule.set else "", _target(rule, skeleton.family)) for rule in rules]


def _target(rule: Rule, family: Family) -> str:
    return render(Rule(target=rule.target), family).removeprefix("-j ")


def texts(skeleton: Skeleton, table: str, chain: str) -> Iterable[str]:
    """The rules of a chain as iptables-save prints them."""
    return skeleton.in_force.chains[ChainKey(table, chain)]


def exposed(protocol: Protocol, *, is_local: bool) -> Service:
    """A Service with every kind of address: the load balancer's address is 192.0.2.80, and the external address is 192.0.2.90."""
    return builders.service(
        "web",
        builders.service_port(80, protocol, node_port=30080),
        kind=ServiceType.LOAD_BALANCER,
        external=["192.0.2.90"],
        load_balancer=["192.0.2.80"],
        external_local=is_local,
    )


def traced(service: Service, key: VirtualServerKey, client: TracedClient, settings: Settings) -> trace.Trace:
    """The way of a client's connection through the rules of a node that serves only this Service."""
    view = builders.node_view(node_object=builders.node(pod_networks=["10.244.3.0/24"]), settings=settings)
    state = state_of(service, builders.endpoint_slice(builders.endpoint("10.244.3.1")), view=view, settings=settings)
    connection = trace.connection_of(client, key, settings, view)
    rules = skeleton_of(state, view=view, settings=settings)
    return trace.follow(rules, set(state.entries).__contains__, connection, has_scopes=False)
