"""Hypothesis strategies: API documents of valid structure with arbitrary contents, and small sets of Services and endpoints."""

import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from ipvsproxy.model.annotations import Annotation
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import Endpoint, EndpointSlice, Service, ServicePort, ServiceType
from ipvsproxy.translate.api import schema
from tests.support import builders

_TEXTS = st.text(max_size=8) | st.sampled_from(
    [
        *("TCP", "UDP", "Local", "Cluster", "ClientIP", "IPv4", "IPv6", "FQDN", "None", "VIP", "Proxy", "InternalIP"),
        *("NodePort", "LoadBalancer", "ExternalName", "2026-01-02T03:04:05Z", "0001-01-01", "9999-12-31T23:59:59-23:59"),
        *("10.0.0.1", "fd00::1", "::ffff:1.2.3.4", "1.2.3.4/8", "::/0", "10.0.0.0/99", "01.02.03.004"),
    ]
)
NAMES = [
    *("kubernetes.io/service-name", "service.kubernetes.io/headless", "service.kubernetes.io/service-proxy-name"),
    *("topology.kubernetes.io/zone", "endpoints.kubernetes.io/last-change-trigger-time", "service.cilium.io/weight"),
    *("kube-router.io/service.scheduler", "kube-router.io/service.schedflags", "kube-router.io/service.skiplbips"),
    *(one.whole for one in Annotation),
]
"""The names of the labels and annotations that ipvsproxy reads."""
_NUMBERS = st.integers(-1, 70000) | st.integers(-(2**63), 2**63)
_PLAIN = {str: _TEXTS, int: _NUMBERS, bool: st.booleans(), types.NoneType: st.none()}


def documents(shape: type[schema.Schema]) -> st.SearchStrategy[dict[str, Any]]:
    """JSON objects in which every field of the schema may be present, null, or absent."""
    fields = {field.encode_name: _values(field.type) for field in msgspec.structs.fields(shape)}
    return st.fixed_dictionaries({}, optional=fields)


def _values(kind: Any) -> st.SearchStrategy[Any]:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in {list, tuple}:
        return st.lists(_values(arguments[0]), max_size=3)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.sampled_from(NAMES), _values(arguments[1]), max_size=4)
    if arguments:
        return st.one_of(*map(_values, arguments))
    return _PLAIN[kind] if kind in _PLAIN else documents(kind)


JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | _TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "object", "metadata", "items", "spec", "kind", "name"]) | _TEXTS, inner, max_size=4
        )
    ),
    max_leaves=12,
)
"""Arbitrary JSON documents, which often have the field names of lists and watch lines."""

ENDPOINTS = st.builds(
    builders.endpoint,
    st.sampled_from(["10.244.0.1", "10.244.0.2", "10.244.1.1", "10.244.1.2"]),
    st.sampled_from([builders.THIS_NODE, builders.OTHER_NODE]),
    ready=st.booleans(),
    serving=st.booleans(),
    terminating=st.booleans(),
    zones=st.sampled_from([(), (builders.ZONE,), ("zone-b",)]),
    nodes=st.sampled_from([(), (builders.THIS_NODE,), (builders.OTHER_NODE,)]),
)


def _without_contradictions(endpoints: list[Endpoint]) -> list[Endpoint]:
    """Only the last endpoint of each address, because two endpoints with one address may contradict each other."""
    return list({endpoint.address: endpoint for endpoint in endpoints}.values())


@st.composite
def slice_lists(draw: st.DrawFn, service: str = "web") -> list[EndpointSlice]:
    """Several EndpointSlices of one Service; each address is in only one of them."""
    endpoints = _without_contradictions(draw(st.lists(ENDPOINTS, max_size=5)))
    ports = [builders.endpoint_port(8080, name="a"), builders.endpoint_port(5353, Protocol.UDP, name="b")]
    cuts = sorted(draw(st.lists(st.integers(0, len(endpoints)), max_size=2)))
    parts = [endpoints[start:end] for start, end in zip([0, *cuts], [*cuts, len(endpoints)], strict=True)]
    return [
        builders.endpoint_slice(*part, service=service, suffix=str(number), ports=ports, family=Family.IPV4)
        for number, part in enumerate(parts)
    ]


@st.composite
def services(draw: st.DrawFn, name: str = "web", number: int = 10) -> Service:
    """A Service; Services with different numbers share no addresses except node ports and external addresses."""
    ports: list[ServicePort] = [
        builders.service_port(80, name="a", node_port=draw(st.sampled_from([0, 30080]))),
        builders.service_port(53, Protocol.UDP, name="b", node_port=draw(st.sampled_from([0, 30053]))),
    ]
    chosen = draw(st.lists(st.sampled_from(ports), min_size=1, unique=True))
    return builders.service(
        name,
        *chosen,
        kind=ServiceType.LOAD_BALANCER,
        cluster=draw(st.sampled_from([[f"10.96.0.{number}"], [f"10.96.0.{number}", f"fd00:10:96::{number}"]])),
        external=draw(st.lists(st.sampled_from(["192.0.2.1", "192.0.2.2"]), unique=True)),
        load_balancer=draw(st.lists(st.sampled_from(["198.51.100.1", "198.51.100.2"]), unique=True)),
        source_ranges=draw(st.lists(st.sampled_from(["192.168.0.0/16", "203.0.113.0/24", "0.0.0.0/0"]), unique=True)),
        internal_local=draw(st.booleans()),
        external_local=draw(st.booleans()),
        health_check_node_port=draw(st.sampled_from([0, 30000])),
    )
