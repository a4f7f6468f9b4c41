"""One Service in the table: how many of its endpoints are used, and what is wrong with it."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ipvsproxy.model.packed import pieces
from ipvsproxy.model.real_servers import PORT_SIZE, EvenWeights, RealServerKey, Weights
from ipvsproxy.model.service import EndpointSlice, Service
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import VirtualServerKey

PROBLEMS = 8
"""The most sentences about what is wrong with a Service."""
ADDRESSES = 16
PORTS = 16


class Endpoints(NamedTuple):
    """The endpoints of a Service in numbers of addresses. ``ready`` ones are used by this node; no address counts twice."""

    ready: int = 0
    draining: int = 0
    unused: int = 0


class Row(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a Service."""

    endpoints: Endpoints
    problems: tuple[str, ...]


def count_endpoints(
    slices: Iterable[EndpointSlice],
    state: ServiceState | None,
    draining_of: Callable[[VirtualServerKey], Collection[RealServerKey]],
    keys: Iterable[VirtualServerKey],
) -> Endpoints:
    """Count the endpoints of a Service whose virtual servers are ``keys``."""
    known: set[bytes] = set()
    for item in slices:
        if item.family:
            known.update(pieces(item.addresses, item.family.bits // 8))
    used: set[bytes] = set()
    for weights in _weights(state):
        # Weight 0 is a choice: no new connections.
        chosen = weights if isinstance(weights, EvenWeights) else (one for one, weight in weights.items() if weight)
        used.update(bytes(one[:-PORT_SIZE]) for one in chosen)
    draining = {bytes(one[:-PORT_SIZE]) for key in keys for one in draining_of(key)}
    return _shared(len(used), len(draining - used), len(known - used - draining))


@functools.lru_cache(maxsize=1024)
def _shared(ready: int, draining: int, unused: int) -> Endpoints:
    """One object for all Services with these numbers."""
    return Endpoints(ready, draining, unused)


def _weights(state: ServiceState | None) -> Collection[Weights]:
    """The different weights of a Service's virtual servers: many share one object."""
    if state is None:
        return ()
    every: tuple[Weights, ...] = (*(one.weights for one in state.served), *(one.weights for one in state.rare.scopes))
    return {id(weights): weights for weights in every}.values()


def problems(service: Service, state: ServiceState | None, endpoints: Endpoints, others: Sequence[str]) -> tuple[str, ...]:
    """What is wrong with a Service, the most serious first. ``others`` are what the node knows of it."""
    return tuple(dict.fromkeys((*others, *_own_problems(service, state, endpoints))))[:PROBLEMS]


def _own_problems(service: Service, state: ServiceState | None, endpoints: Endpoints) -> Iterator[str]:
    for one in (*service.skipped, *(state.rare.skipped if state else ())):
        if one.invalid:
            yield f"not used: {one}"
    if service.not_served and service.not_served.invalid:
        yield f"not served: {service.not_served}"
    if service.not_served or not service.ports:
        return
    if not endpoints.ready:
        yield f"none of its {endpoints.unused} endpoints is used" if endpoints.unused else "it has no endpoints"
    elif state and state.rare.without_local_internal:
        yield "its cluster IP has no endpoint on this node, where internalTrafficPolicy Local keeps the traffic"


def describe(service: Service, row: Row) -> dict[str, Any]:
    """The row as a document, without traffic."""
    options = service.options
    addresses = (*service.cluster_addresses, *options.external_addresses, *options.load_balancer_addresses)
    return {
        "name": str(service.name),
        "type": options.type.value,
        "served": service.not_served is None,
        "notServed": str(service.not_served) if service.not_served else "",
        "addresses": [str(address) for address in addresses[:ADDRESSES]],
        "addressCount": len(addresses),
        "ports": [
            {"name": one.name, "protocol": one.protocol.name, "port": one.port, "nodePort": one.node_port}
            for one in service.ports[:PORTS]
        ],
        "portCount": len(service.ports),
        "endpoints": row.endpoints._asdict(),
        "problems": row.problems,
    }
