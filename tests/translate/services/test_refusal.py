"""Covers which Service addresses are refused, and which similar addresses are served.

Also covers what is still served if an address of a Service is refused.
"""

import dataclasses
from collections.abc import Sequence

import msgspec
import pytest

from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.service import MOST_SKIPPED, Service, ServiceName
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate.services import refusal
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView
from tests.support import builders

SETTINGS = Settings(cluster_networks=builders.networks("10.244.0.0/16"))
API_SERVER = builders.backend("192.168.0.99", 6443)


def node_view(**changes: object) -> NodeView:
    own = parse_address(builders.NODE_ADDRESS)
    view = dataclasses.replace(builders.node_view(), elsewhere=frozenset({own}), api_servers=frozenset({API_SERVER}))
    return dataclasses.replace(view, **changes)  # type: ignore[arg-type]  # the keys are names of fields


def test_an_address_of_another_node_is_served_unless_the_operator_wants_it_refused() -> None:
    other = parse_address("192.168.0.11")
    view = node_view(other_nodes={other: "node-b"})
    assert other in builders.translate(service("10.96.0.10", "192.168.0.11"), [], view, SETTINGS).addresses
    refusing = dataclasses.replace(SETTINGS, refuses_node_addresses=True)
    state = builders.translate(service("10.96.0.10", "192.168.0.11", "192.168.0.12"), [], view, refusing)
    reason = "spec.externalIPs: 192.168.0.11 is an address of the node node-b (--ipvs-refuse-node-addresses)"
    assert [str(one) for one in state.rare.skipped] == [reason]
    assert state.addresses == (parse_address("10.96.0.10"), parse_address("192.168.0.12"))
    allowing = dataclasses.replace(refusing, allowed_addresses=builders.networks("192.168.0.0/24"))
    assert other in builders.translate(service("10.96.0.10", "192.168.0.11"), [], view, allowing).addresses


def test_the_number_of_reasons_is_bounded_however_many_addresses_are_refused() -> None:
    refused = [f"224.0.0.{number}" for number in range(MOST_SKIPPED + 5)]
    state = builders.translate(service("10.96.0.10", *refused, "203.0.113.5"), [], node_view(), SETTINGS)
    reasons = [f"spec.externalIPs: {address} is an unspecified, multicast or link-local address" for address in refused]
    summary = f"{reasons[MOST_SKIPPED]}; 5 such parts from here on"
    assert [str(one) for one in state.rare.skipped] == [*reasons[:MOST_SKIPPED], summary]
    assert state.addresses == (parse_address("10.96.0.10"), parse_address("203.0.113.5")), "all of them are refused"


def service(cluster: str = "10.96.0.10", *external: str, port: int = 80) -> Service:
    return builders.service("web", builders.service_port(port), cluster=(cluster,), external=external)


@pytest.mark.parametrize(
    ("external", "port", "reason"),
    [
        ("127.0.0.1", 80, ""),
        ("0.0.0.0", 80, "is an unspecified, multicast or link-local address"),
        ("224.0.0.1", 80, "is an unspecified, multicast or link-local address"),
        ("10.244.7.7", 80, "lies in the range of the cluster's pods"),
        ("192.168.0.99", 80, "is the address of an API server"),
        (builders.NODE_ADDRESS, 10250, "is an address of this node, whose port 10250 is its own"),
        (builders.NODE_ADDRESS, 80, ""),
        (builders.NODE_ADDRESS, API_SERVER.port, ""),
        ("203.0.113.5", 6443, ""),
    ],
)
def test_the_reason_is_reported_if_an_external_address_is_refused(external: str, port: int, reason: str) -> None:
    item = service("10.96.0.10", external, port=port)
    state = builders.translate(item, [], node_view(), SETTINGS)
    assert [str(one) for one in state.rare.skipped] == ([f"spec.externalIPs: {external} {reason}"] if reason else [])
    key = VirtualServerKey(Protocol.TCP, parse_address(external), port)
    assert (key in state.virtual_servers) is not bool(reason)
    assert VirtualServerKey(Protocol.TCP, parse_address("10.96.0.10"), port) in state.virtual_servers, "the rest is served"


@pytest.mark.parametrize(
    ("address", "is_refused"),
    [
        ("223.255.255.255", False),
        ("224.0.0.1", True),
        ("239.255.255.255", True),
        ("240.0.0.1", False),
        ("::", True),
        ("::2", False),
        ("fe80::1", True),
        ("feff::1", False),
        ("ff02::1", True),
        ("ffff::1", True),
    ],
)
def test_an_external_ip_is_refused_if_it_is_unspecified_or_a_multicast_or_link_local_address(
    address: str, *, is_refused: bool
) -> None:
    _, why = refusal.admit(service("10.96.0.10", address), node_view(), SETTINGS)
    said = f"spec.externalIPs: {address} is an unspecified, multicast or link-local address"
    assert [str(one) for one in why] == ([said] if is_refused else [])


@pytest.mark.parametrize(("port", "refused"), [(80, ()), (refusal.KUBELET_PORT, ("is its own",))])
def test_an_external_address_on_the_bridge_of_the_pods_counts_as_a_node_address(port: int, refused: Sequence[str]) -> None:
    bridge = parse_address("10.244.0.1")
    view = node_view(elsewhere=frozenset({bridge}), pod_networks=builders.networks("10.244.0.0/24"))
    _, why = refusal.admit(service("10.96.0.10", "10.244.0.1", port=port), view, SETTINGS)
    assert len(why) == len(refused)
    assert all(str(one).endswith(end) for one, end in zip(why, refused, strict=True))
    assert refusal.admit(service("10.96.0.10", "10.244.0.2"), view, SETTINGS)[1], "its neighbour is a pod's"
    assert refusal.admit(service("10.244.0.1"), view, SETTINGS)[1], "a cluster IP would be bound a second time"


@pytest.mark.parametrize("address", ["224.0.0.1", "fe80::1"])
def test_a_cluster_ip_that_no_service_may_use_is_refused(address: str) -> None:
    found, why = refusal.admit(service(address), node_view(), SETTINGS)
    assert found.cluster_addresses == ()
    assert [str(one) for one in why] == [f"spec.clusterIPs: {address} is an unspecified, multicast or link-local address"]


def test_refused_load_balancer_addresses_are_left_out_and_the_remaining_addresses_are_served() -> None:
    item = builders.service(load_balancer=("203.0.113.5", "192.168.0.99"))
    found, why = refusal.admit(item, node_view(), SETTINGS)
    assert found.options.load_balancer_addresses == builders.addresses("203.0.113.5")
    assert [str(one) for one in why] == ["status.loadBalancer: 192.168.0.99 is the address of an API server"]


def test_the_address_of_an_api_server_stays_refused_after_the_api_server_has_disappeared() -> None:
    view = node_view(api_servers=frozenset(), former_api_servers=frozenset({API_SERVER}))
    _, why = refusal.admit(service("10.96.0.10", "192.168.0.99"), view, SETTINGS)
    reason = "was the address of an API server, and is refused until ipvsproxy restarts"
    assert [str(one) for one in why] == [f"spec.externalIPs: 192.168.0.99 {reason}"]
    own = node_view(api_servers=frozenset(), former_api_servers=frozenset({builders.backend(builders.NODE_ADDRESS, 6443)}))
    assert refusal.admit(service("10.96.0.10", builders.NODE_ADDRESS, port=6443), own, SETTINGS)[1]
    assert refusal.admit(service("10.96.0.10", builders.NODE_ADDRESS, port=443), own, SETTINGS)[1] == ()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", builders.NODE_ADDRESS])
def test_only_the_port_of_the_api_server_is_refused_on_an_address_of_this_node(address: str) -> None:
    view = node_view(api_servers=frozenset({builders.backend(address, 6443)}))
    assert refusal.admit(service("10.96.0.10", address, port=6443), view, SETTINGS)[1]
    assert refusal.admit(service("10.96.0.10", address, port=80), view, SETTINGS)[1] == ()


def test_a_service_may_have_the_address_of_an_api_server_only_as_its_cluster_ip() -> None:
    view = node_view(api_servers=frozenset({builders.backend("10.96.0.1", 443)}))
    assert refusal.admit(service("10.96.0.1", port=443), view, SETTINGS)[1] == ()
    assert refusal.admit(service("10.96.0.10", "10.96.0.1"), view, SETTINGS)[1]


def test_no_address_of_a_family_is_served_if_the_cluster_ip_is_an_address_of_the_node() -> None:
    state = builders.translate(service(builders.NODE_ADDRESS, "203.0.113.5"), [], node_view(), SETTINGS)
    assert (state.virtual_servers, state.addresses) == ({}, ())
    assert [str(one) for one in state.rare.skipped] == [f"spec.clusterIPs: {builders.NODE_ADDRESS} is the address of this node"]


def test_a_cluster_ip_inside_the_cluster_cidr_is_served() -> None:
    wide = Settings(cluster_networks=builders.networks("10.0.0.0/8"))
    assert refusal.admit(service(), node_view(), wide)[1] == ()
    assert refusal.admit(service(), node_view(pod_networks=builders.networks("10.96.0.0/24")), wide)[1]


def test_addresses_that_the_operator_allows_are_never_refused() -> None:
    allowing = dataclasses.replace(SETTINGS, allowed_addresses=builders.networks("192.168.0.99/32"))
    assert refusal.admit(service("10.96.0.10", "192.168.0.99"), node_view(), allowing)[1] == ()


def test_addresses_of_the_api_servers_own_service_are_never_refused() -> None:
    item = msgspec.structs.replace(service("10.244.0.1", "192.168.0.99"), name=ServiceName("default", "kubernetes"))
    assert refusal.admit(item, node_view(pod_networks=builders.networks("10.244.0.0/24")), SETTINGS) == (item, ())


def test_the_original_service_object_is_returned_if_no_address_is_refused() -> None:
    item = service("10.96.0.10", "203.0.113.5")
    assert refusal.admit(item, node_view(), SETTINGS)[0] is item


def test_a_field_that_does_not_have_the_refused_address_gets_no_remedy() -> None:
    address = "192.168.0.11"
    balanced, external, both = (
        refusal.ways_out(builders.service("web", load_balancer=one, external=other), parse_address(address)).split("; ")
        for one, other in (([address], []), ([], [address]), ([address], [address]))
    )
    assert (len(balanced), len(external)) == (2, 2), "one for the field, and one for all addresses of nodes"
    assert set(balanced) & set(external) == {balanced[-1]}
    assert both == [balanced[0], *external]
