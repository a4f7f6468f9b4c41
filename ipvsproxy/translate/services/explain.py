"""Why a Service is served as it is: each endpoint with the reason why it is used or not.

Rule: nothing is decided here. Desired state comes from ``state.translate``; reasons come from the functions that it calls.
"""

import dataclasses
import enum
import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Endpoint, EndpointSlice, EndpointSliceName, Service, ServicePort, Skipped
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import VirtualServer
from ipvsproxy.translate.services import state, topology
from ipvsproxy.translate.settings import Settings
from ipvsproxy.translate.view import NodeView

ENDPOINTS_AT_ONCE = 50
"""Endpoints that are explained without a pause: less than a millisecond of work."""


class Role(enum.StrEnum):
    """The role of a virtual server's address for its Service."""

    CLUSTER_IP = "cluster IP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER_IP = "load balancer IP"
    NODE_PORT = "node port"


class NotUsed(NamedTuple):
    """Why an endpoint is not used: a code for programs, and a text for people."""

    code: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frontend:
    """A virtual server of a Service, and the role of its address."""

    role: Role
    virtual_server: VirtualServer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndpointUse:
    """One endpoint at one service port.

    ``internal`` and ``external`` say why it does not get traffic to the cluster IP, and to all other addresses; None if it does.
    ``cluster`` is about traffic of this node's clients to all other addresses, if these have a second scope.
    ``port`` is 0 if its EndpointSlice has none for the service port.
    """

    slice: EndpointSliceName
    endpoint: Endpoint
    port: int
    internal: NotUsed | None
    external: NotUsed | None
    cluster: NotUsed | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """One service port in one family."""

    port: ServicePort
    family: Family
    frontends: tuple[Frontend, ...]
    endpoints: tuple[EndpointUse, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A Service, its desired state on this node, and the reasons. ``skipped`` has the skipped parts by object."""

    service: Service
    desired: ServiceState
    ports: tuple[PortUse, ...]
    skipped: Mapping[str, tuple[Skipped, ...]]


def explaining(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings
) -> Generator[None, None, Explanation]:
    """Explains a Service step by step: it may have thousands of endpoints. The slices are those labelled with its name."""
    ordered = sorted(slices, key=lambda item: item.name)
    desired = state.translate(service, ordered, view, settings)
    families = [address.family for address in service.cluster_addresses if address.family in settings.families]
    mine = {family: [item for item in ordered if item.family is family] for family in families}
    by_port = {family: topology.slices_by_port(slices_of_family) for family, slices_of_family in mine.items()}
    frontends = _frontends(service, desired, view)
    ports = [] if service.not_served else [(port, family) for port in service.ports for family in families]
    by_slice = {f"EndpointSlice {item.name}": item.skipped for item in ordered}
    yield
    uses: list[PortUse] = []
    for port, family in ports:
        found = topology.find_endpoints(by_port[family], port)
        choice = state.routes_of_port(service, port, family, found, view)
        numbers: dict[EndpointSliceName, list[int]] = {}
        for item, number in by_port[family].get((port.name, port.protocol), ()):
            numbers.setdefault(item.name, []).append(number)
        used: list[EndpointUse] = []
        explained: set[RealServerKey] = set()
        for item in mine[family]:
            for use in _uses(item, port, found, choice, explained, numbers=numbers.get(item.name, ())):
                used.append(use)
                if len(used) % ENDPOINTS_AT_ONCE == 0:
                    yield
        own = (port.protocol, family, port.port, False), (port.protocol, family, port.node_port, True)
        at_port = tuple(itertools.chain.from_iterable(frontends.get(one, ()) for one in own))
        uses.append(PortUse(port=port, family=family, frontends=at_port, endpoints=tuple(used)))
    return Explanation(
        service=service,
        desired=desired,
        ports=tuple(uses),
        skipped={name: skipped for name, skipped in {"": desired.rare.skipped, **by_slice}.items() if skipped},
    )


def _frontends(
    service: Service, desired: ServiceState, view: NodeView
) -> Mapping[tuple[Protocol, Family, int, bool], list[Frontend]]:
    """The virtual servers of a Service by protocol, family, number, and whether that is the number of a node port."""
    addresses: Mapping[Role, Iterable[Address]] = {
        Role.CLUSTER_IP: service.cluster_addresses,
        Role.EXTERNAL_IP: service.options.external_addresses,
        Role.LOAD_BALANCER_IP: service.options.load_balancer_addresses,
    }
    named = {address: role for role, those in reversed([*addresses.items()]) for address in those}
    of_node = frozenset(address for those in view.node_port_addresses.values() for address in those)
    ports = {(port.protocol, port.port) for port in service.ports}
    of_other_ports = {(port.protocol, port.node_port) for port in service.ports if port.node_port != port.port}
    frontends: dict[tuple[Protocol, Family, int, bool], list[Frontend]] = {}
    for virtual_server in desired.served:
        key = virtual_server.key
        number = (key.protocol, key.port)
        role = named.get(key.address) if number in ports else None
        # A node port goes before the other addresses of another port, as in ``state.Roles``.
        if role is None or (key.address in of_node and role is not Role.CLUSTER_IP and number in of_other_ports):
            role = Role.NODE_PORT
        place = (key.protocol, key.address.family, key.port, role is Role.NODE_PORT)
        frontends.setdefault(place, []).append(Frontend(role=role, virtual_server=virtual_server))
    return frontends


def _uses(
    item: EndpointSlice,
    port: ServicePort,
    by_key: topology.Endpoints,
    choice: topology.EndpointChoice,
    explained: set[RealServerKey],
    *,
    numbers: Collection[int],
) -> Iterator[EndpointUse]:
    if not numbers:
        name = f"named {port.name!r}" if port.name else "without a name"
        reason = NotUsed("no_such_port", f"its EndpointSlice has no {port.protocol.name} port {name}")
        for endpoint in item.endpoints:
            yield EndpointUse(slice=item.name, endpoint=endpoint, port=0, internal=reason, external=reason, cluster=reason)
    for number in numbers:
        for endpoint in item.endpoints:
            key, conditions = RealServerKey.of(endpoint.address, number), endpoint.conditions
            counts = by_key[key] == conditions and key not in explained  # of two equal ones, the first
            if counts:
                explained.add(key)
            internal, external, cluster = (
                _reason(route.scope.why_not(conditions)) if counts else _DUPLICATE
                for route in (choice.internal, choice.external, choice.cluster)
            )
            yield EndpointUse(
                slice=item.name, endpoint=endpoint, port=number, internal=internal, external=external, cluster=cluster
            )


_DUPLICATE = NotUsed("duplicate", "another entry for the same address and port counts instead")


def _reason(why_not: topology.WhyNot | None) -> NotUsed | None:
    return NotUsed(why_not.code, why_not.value) if why_not else None


def unserved_slices(
    service: Service, slices: Iterable[EndpointSlice], settings: Settings
) -> Iterator[tuple[EndpointSlice, NotUsed]]:
    """The EndpointSlices of families that are not served, with the reason."""
    families = {address.family for address in service.cluster_addresses}
    for item in sorted(slices, key=lambda one: one.name):
        if item.family and item.family not in families:
            yield item, NotUsed("wrong_family", f"the Service has no cluster IP of {item.family.label}")
        elif item.family and item.family not in settings.families:
            yield item, NotUsed("family_not_served", f"this host cannot serve {item.family.label}")
