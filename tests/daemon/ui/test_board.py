"""Covers which Services a search finds, and how many endpoints a Service has."""

import dataclasses
import types
from typing import Any

import pytest

from ipvsproxy.daemon.ui import board, counters
from ipvsproxy.model.annotations import ServiceAnnotations, WeightRules
from ipvsproxy.model.service import ServiceType
from ipvsproxy.model.state import Clients
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint
from tests.translate.reading import state_of

WEB = builders.service(
    "web",
    builders.service_port(80, name="http", node_port=30080),
    namespace="shop",
    kind=ServiceType.LOAD_BALANCER,
    cluster=["10.96.0.80", "fd00:10:96::80"],
    external=["192.0.2.7"],
    load_balancer=["203.0.113.9"],
)
SLICES = (
    builders.endpoint_slice(endpoint("10.244.1.11"), endpoint("10.244.12.1"), namespace="shop"),
    builders.endpoint_slice(endpoint("fd00:10:244::11"), namespace="shop", suffix="6"),
)


FOUND = """|web|SHOP/W| op/we |10.96.0.80|10.96.|10.2|10.244.1.|10.244.12.1|192.0.2.7|203.0|fd00:10:96::80|fd00:10:244:|80|30080|\
10.96.0.80:80|192.0.2.7:80|[fd00:10:96::80]:80|172.18.0.2:30080|10.244.12.1:8080|[fd00:10:244::11]:8080"""
NOT_FOUND = """shop/x|0.96.0|10.96.0.8:80|10.96.0.80:81|10.244.12.1:80|10.244.12.2:8080|44.1.11.10:8080|8080|8|0300|999999|\
10.244.2.|fd01:|1.2.3:80|<script>|10.96.0.999:80"""
"""Texts that do not match ``WEB`` and ``SLICES``. ``44.1.11.10`` consists of the end of one address in ``SLICES`` and the
beginning of the next address."""


@pytest.mark.parametrize(
    ("text", "is_found"), [(text, texts is FOUND) for texts in (FOUND, NOT_FOUND) for text in texts.split("|")]
)
def test_a_search_finds_services_by_name_address_port_and_pod_address(text: str, *, is_found: bool) -> None:
    assert board.parse_query(text).matches(WEB, SLICES) is is_found


def test_services_can_be_filtered_by_namespace_and_by_type_and_by_node_and_by_problems() -> None:
    def found(*, has_problems: bool = False, text: str = "", **filters: Any) -> bool:
        return board.parse_query(text)._replace(**filters).matches(WEB, SLICES, has_problems=has_problems)

    assert found(namespace="shop", type="LoadBalancer", node=builders.THIS_NODE)
    assert not found(namespace="sho")
    assert not found(type="NodePort")
    assert not found(node=builders.OTHER_NODE)
    assert found(only_problems=True, has_problems=True)
    assert not found(only_problems=True)
    assert found(text="web", namespace="shop")
    assert not found(text="other", namespace="shop")


@pytest.mark.parametrize("weight", [0, 1])
def test_the_ends_of_tunnels_to_other_nodes_are_not_counted_as_endpoints(weight: int) -> None:
    web = builders.service("web", kind=ServiceType.LOAD_BALANCER, load_balancer=["203.0.113.9"])
    annotations = ServiceAnnotations(direct_return=True, weights=WeightRules({OTHER_NODE: weight}))
    item = builders.endpoint_slice(endpoint("10.244.0.5"), endpoint("10.244.1.5", OTHER_NODE))
    view = dataclasses.replace(builders.node_view(), tunnel_ends={OTHER_NODE: builders.addresses("172.18.0.3")})
    settings = Settings(direct_return=True, cluster_networks=builders.networks("10.244.0.0/16"))
    state = state_of(builders.with_options(web, annotations=annotations), item, view=view, settings=settings)
    assert state.rare.scopes
    assert board.count_endpoints([item], state, lambda _: (), ()) == (1 + weight, 0, 1 - weight)
    survey: Any = types.SimpleNamespace(states={web.name: state}, scope=lambda port, _family: port.clients)
    without = counters.keys_of(survey, web.name, outside=False)
    left_out: list[Any] = [key for key in counters.keys_of(survey, web.name) if key not in without]
    assert left_out == [Clients.OUTSIDE], "draining ends of tunnels are not counted, either"
