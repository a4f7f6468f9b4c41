"""Explains how a Service is served: lists each endpoint with the reason why the endpoint is used or not used.

Rule: this module decides nothing. ``desired_state.Translation`` determines the desired state and the endpoints that are used.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.net import Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Endpoint, EndpointSlice, EndpointSliceName, Service, Skipped
from ipvsproxy.model.state import ServiceState
from ipvsproxy.translate.services import desired_state, topology
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView

ENDPOINTS_AT_ONCE = 50
"""The number of endpoints that are explained between two pauses. Explaining them takes less than a millisecond."""


class NotUsed(NamedTuple):
    """The reason why an endpoint is not used: a code for programs, and a text for people."""

    code: str
    reason: str


class EndpointUse(NamedTuple):
    """One endpoint at one service port.

    ``internal``, ``external`` and ``cluster`` are the reasons why the endpoint gets no traffic of one kind; a reason of None
    means that the endpoint gets this traffic. ``internal`` is about traffic to the cluster IP, and ``external`` about traffic to
    all other addresses. Some addresses have a separate virtual server for processes and pods of this node; ``cluster`` is about
    the traffic to it. ``port`` is 0 if the endpoint's EndpointSlice has no port for the service port.
    """

    slice: EndpointSliceName
    endpoint: Endpoint
    port: int
    internal: NotUsed | None
    external: NotUsed | None
    cluster: NotUsed | None


class PortUse(NamedTuple):
    """One service port in one family, and the use of each of its endpoints."""

    served: desired_state.ServedPort
    endpoints: Sequence[EndpointUse]


class Explanation(NamedTuple):
    """A Service, its desired state on this node, and the reasons for the desired state.

    ``skipped`` has the skipped parts of each object.
    """

    service: Service
    desired: ServiceState
    ports: tuple[PortUse, ...]
    skipped: Mapping[str, tuple[Skipped, ...]]


def explaining(
    service: Service, slices: Iterable[EndpointSlice], view: NodeView, settings: Settings
) -> Generator[None, None, Explanation]:
    """Explains a Service; yields after each piece of work, because the Service may have thousands of endpoints.

    ``slices`` are the EndpointSlices that are labelled with the name of the Service.
    """
    ordered = sorted(slices, key=lambda item: item.name)
    translation = desired_state.Translation(service, view, settings)
    yield from translation.adding(ordered)
    desired = translation.state()
    yield
    places = {port: place for place, port in enumerate(service.ports)}
    by_port = {family: topology.slices_by_port(one for one in ordered if one.family is family) for family in Family}
    uses: list[PortUse] = []
    for served in sorted(translation.ports, key=lambda one: places[one.port]):
        used: list[EndpointUse] = []
        explained: set[RealServerKey] = set()
        numbers: dict[EndpointSliceName, list[int]] = {}
        for item, number in by_port[served.family].get((served.port.name, served.port.protocol), ()):
            numbers.setdefault(item.name, []).append(number)
        for item in (one for one in ordered if one.family is served.family):
            for use in _uses(item, served, explained, numbers.get(item.name, ())):
                used.append(use)
                if len(used) % ENDPOINTS_AT_ONCE == 0:
                    yield
        uses.append(PortUse(served, used))
    by_slice = {f"EndpointSlice {item.name}": item.skipped for item in ordered}
    return Explanation(
        service=service,
        desired=desired,
        ports=tuple(uses),
        skipped={name: skipped for name, skipped in {"": desired.rare.skipped, **by_slice}.items() if skipped},
    )


def _uses(
    item: EndpointSlice, served: desired_state.ServedPort, explained: set[RealServerKey], numbers: Collection[int]
) -> Iterator[EndpointUse]:
    port, choice = served.port, served.choice
    if not numbers:
        name = f"named {port.name!r}" if port.name else "without a name"
        reason = NotUsed("no_such_port", f"its EndpointSlice has no {port.protocol.name} port {name}")
        for endpoint in item.endpoints:
            yield EndpointUse(item.name, endpoint, 0, reason, reason, reason)
    for number in numbers:
        for endpoint in item.endpoints:
            key, conditions = RealServerKey.of(endpoint.address, number), endpoint.conditions
            # only the first of several equal entries is used
            counts = served.endpoints[key] == conditions and key not in explained
            if counts:
                explained.add(key)
            reasons = (
                _reason(route.scope.why_not(conditions)) if counts else _DUPLICATE
                for route in (choice.internal, choice.external, choice.cluster)
            )
            yield EndpointUse(item.name, endpoint, number, *reasons)


_DUPLICATE = NotUsed("duplicate", "another entry for the same address and port counts instead")


def _reason(why_not: topology.WhyNot | None) -> NotUsed | None:
    return NotUsed(why_not.name.lower(), why_not.value) if why_not else None


def unserved_slices(
    service: Service, slices: Iterable[EndpointSlice], settings: Settings
) -> Iterator[tuple[EndpointSlice, NotUsed]]:
    """The EndpointSlices of each family in which the Service is not served, with the reason."""
    families = {address.family for address in service.cluster_addresses}
    for item in sorted(slices, key=lambda one: one.name):
        if item.family and item.family not in families:
            yield item, NotUsed("wrong_family", f"the Service has no cluster IP of {item.family.label}")
        elif item.family and item.family not in settings.families:
            yield item, NotUsed("family_not_served", f"this host cannot serve {item.family.label}")
