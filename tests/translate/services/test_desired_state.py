"""The cluster IPs of a Service: families, endpoints, hairpin entries, internal traffic, affinity.

``test_desired_state_exposed.py`` tests node ports, external addresses and load balancer addresses.
``test_desired_state_changes.py`` tests the effects of changed objects.
"""

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from ipvsproxy.model.kernel import Flow
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.service import Endpoint, EndpointSlice, Owner, Service, ServiceName, Skipped
from ipvsproxy.model.sets import SetEntry, SetKind
from ipvsproxy.model.state import NO_RARITIES, Rarities, ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import PERSISTENT, VirtualServerSettings
from ipvsproxy.translate.services import desired_state
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders
from tests.support.builders import (
    CLUSTER_IP,
    OTHER_NODE,
    dead,
    draining,
    endpoint,
    endpoint_port,
    endpoint_slice,
    service,
    service_port,
)
from tests.translate import strategies
from tests.translate.reading import backends, frontends, members, state_of

CLUSTER_IP_V6 = "fd00:10:96::10"
DUAL = (CLUSTER_IP, CLUSTER_IP_V6)


def test_a_cluster_ip_needs_a_virtual_server_and_an_address_and_two_set_entries() -> None:
    state = state_of(service(), endpoint_slice(endpoint("10.244.1.5", OTHER_NODE)))
    assert frontends(state) == {"TCP 10.96.0.10:80"}
    assert backends(state, CLUSTER_IP) == {"10.244.1.5:8080"}
    assert state.addresses == builders.addresses(CLUSTER_IP)
    assert members(SetKind.CLUSTER_IP, state) == {"10.96.0.10,tcp:80"}
    assert members(SetKind.IPVS_IPS, state) == {"10.96.0.10"}
    assert len(state.entries) == 2


def test_a_remembered_service_is_ordered_after_all_listed_services() -> None:
    view = builders.node_view()
    owner, remembered = (
        builders.translate(service(), (), view, Settings(), remembered=is_remembered).owner for is_remembered in (False, True)
    )
    youngest = Owner(4e9, owner.service)
    assert owner < youngest < remembered
    assert (owner.is_remembered, remembered.is_remembered) == (False, True)
    assert remembered == owner.remembered


def test_a_set_entry_has_only_the_fields_that_the_type_of_its_set_requires() -> None:
    state = state_of(service("web", builders.service_port(80, node_port=30080)))
    assert state.entries == (
        SetEntry("KUBE-CLUSTER-IP", parse_address(CLUSTER_IP), Protocol.TCP, 80),
        SetEntry("KUBE-IPVS-IPS", parse_address(CLUSTER_IP)),
        SetEntry("KUBE-NODE-PORT-TCP", port=30080),
    ), "or it never equals what the kernel lists"


def test_a_service_owns_its_desired_state_and_all_virtual_servers_in_it() -> None:
    state = state_of(service("web", namespace="shop", created_s=7))
    owner = Owner(7, ServiceName("shop", "web"))
    assert state.owner == owner
    assert {server.owner for server in state.virtual_servers.values()} == {owner}


def test_a_service_that_is_not_served_has_an_empty_desired_state_with_a_reason() -> None:
    headless = Skipped("spec.clusterIP", "headless", invalid=False)
    detail = Skipped("spec.type", "is not known")
    unserved = builders.with_options(service(), not_served=headless, skipped=(detail,))
    state = state_of(unserved, endpoint_slice(endpoint("10.244.0.5")))
    assert state == ServiceState(
        owner=Owner(builders.CREATED_S, ServiceName("default", "web")), rare=Rarities(skipped=(headless, detail))
    )


@pytest.mark.parametrize("cluster", [DUAL[:1], DUAL[1:], DUAL])
def test_services_without_rare_fields_share_one_empty_object_for_these_fields(cluster: tuple[str, ...]) -> None:
    assert state_of(service(cluster=cluster), endpoint_slice(endpoint("10.244.0.5"))).rare is NO_RARITIES


def test_the_desired_state_of_a_service_lists_the_invalid_parts_of_the_service() -> None:
    detail = Skipped("spec.externalIPs", "'x' is not an IP address")
    assert state_of(builders.with_options(service(), skipped=(detail,))).rare.skipped == (detail,)


def test_an_address_of_an_unserved_family_is_reported_as_skipped_but_not_as_invalid() -> None:
    given = state_of(service(cluster=["10.96.0.10", "fd00:10:96::10"]), settings=Settings(families=frozenset({Family.IPV4})))
    reason = "fd00:10:96::10: this node does not serve IPv6, so nothing of that family is served"
    assert given.rare.skipped == (Skipped("spec.clusterIPs", reason, invalid=False),)


@pytest.mark.checklist(20, 23, 24)
@pytest.mark.parametrize(
    ("family", "address", "backend"), [*zip(Family, DUAL, ("10.244.1.5:8080", "[fd00::5]:8080"), strict=True)]
)
def test_a_node_with_only_one_ip_family_serves_only_services_of_that_family(family: Family, address: str, backend: str) -> None:
    settings = Settings(families=frozenset({family}))
    states = (
        state_of(service("four"), endpoint_slice(endpoint("10.244.1.5", OTHER_NODE)), settings=settings),
        state_of(service("six", cluster=[CLUSTER_IP_V6]), endpoint_slice(endpoint("fd00::5")), settings=settings),
    )
    assert frontends(*states) == {str(builders.frontend(address, 80))}
    assert backends(states[family is Family.IPV6], address) == {backend}


@pytest.mark.checklist(33)
def test_an_endpoint_port_is_not_used_if_its_protocol_differs_from_that_of_the_service_port() -> None:
    udp = endpoint_slice(endpoint("10.244.0.5"), ports=[endpoint_port(8080, Protocol.UDP)])
    assert backends(state_of(service(external=["192.0.2.1"]), udp), "192.0.2.1") == set()


def test_an_endpoint_port_belongs_to_the_service_port_with_the_same_name() -> None:
    slices = endpoint_slice(endpoint("10.244.0.5"), ports=[endpoint_port(8080, name="http"), endpoint_port(9090, name="metrics")])
    state = state_of(service("web", service_port(80, name="metrics"), service_port(81, name="gone")), slices)
    assert backends(state, CLUSTER_IP, 80) == {"10.244.0.5:9090"}
    assert backends(state, CLUSTER_IP, 81) == set()


def test_endpoint_slices_may_have_different_numbers_for_one_port_name() -> None:
    old = endpoint_slice(endpoint("10.244.0.5"), suffix="old", ports=[endpoint_port(8080)])
    new = endpoint_slice(endpoint("10.244.0.6"), suffix="new", ports=[endpoint_port(9090)])
    assert backends(state_of(service(), old, new), CLUSTER_IP) == {"10.244.0.5:8080", "10.244.0.6:9090"}


def test_a_running_pod_takes_precedence_over_a_terminating_pod_with_the_same_address() -> None:
    was, now = draining("10.244.0.5", OTHER_NODE), endpoint("10.244.0.5")
    local = service(internal_local=True)
    for slices in (
        [endpoint_slice(was, now)],
        [endpoint_slice(now, was)],
        [endpoint_slice(now), endpoint_slice(was, suffix="2")],
    ):
        assert backends(state_of(local, *slices), CLUSTER_IP) == {"10.244.0.5:8080"}


def test_slice_names_not_delivery_order_decide_which_of_two_contradictory_slices_counts() -> None:
    one, two = (endpoint_slice(endpoint("10.244.0.5", node), suffix=node) for node in (builders.THIS_NODE, OTHER_NODE))
    local = service(internal_local=True)
    assert backends(state_of(local, one, two), CLUSTER_IP) == backends(state_of(local, two, one), CLUSTER_IP) == set()


@pytest.mark.checklist(76)
def test_all_ready_endpoints_are_real_servers_but_only_local_endpoints_are_in_the_hairpin_set() -> None:
    slices = endpoint_slice(
        endpoint("10.0.1.1"),
        endpoint("10.0.1.2", OTHER_NODE),
        endpoint("10.0.1.3", OTHER_NODE),
        endpoint("10.0.1.4", OTHER_NODE, ready=False),
        ports=[endpoint_port(80)],
    )
    state = state_of(service(), slices)
    assert backends(state, CLUSTER_IP) == {"10.0.1.1:80", "10.0.1.2:80", "10.0.1.3:80"}
    assert members(SetKind.LOOP_BACK, state) == {"10.0.1.1,tcp:80,10.0.1.1"}


TWO = ("10.0.1.2", "10.0.1.3")
READY_AND_DRAINING = [*map(endpoint, TWO), draining("10.0.1.4"), dead("10.0.1.5"), endpoint("10.0.1.6", OTHER_NODE)]
LEAVING = [*map(draining, TWO), dead("10.0.1.4"), draining("10.0.1.5", OTHER_NODE), dead("10.0.1.6", OTHER_NODE)]
BETTER_ELSEWHERE = [*map(draining, TWO), endpoint("10.0.1.4", OTHER_NODE)]


@pytest.mark.checklist(78, 79, 80, 81, 82, 83, 100)
@pytest.mark.parametrize(
    ("policy", "endpoints", "internal", "external"),
    [
        ({}, READY_AND_DRAINING, {2, 3, 6}, {2, 3, 6}),
        ({"external_local": True}, READY_AND_DRAINING, {2, 3, 6}, {2, 3}),
        ({"internal_local": True}, READY_AND_DRAINING, {2, 3}, {2, 3, 6}),
        ({"internal_local": True}, [endpoint("10.0.1.6", OTHER_NODE)], set(), {6}),
        ({}, LEAVING, {2, 3, 5}, {2, 3, 5}),
        ({"external_local": True}, BETTER_ELSEWHERE, {4}, {2, 3}),
    ],
)
def test_traffic_goes_to_terminating_endpoints_only_if_no_endpoint_allowed_by_the_policy_is_ready(
    policy: dict[str, bool], endpoints: list[Endpoint], internal: set[int], external: set[int]
) -> None:
    web = service("web", service_port(node_port=30080), external=["192.0.2.1"], **policy)  # type: ignore[arg-type]  # names of policies
    state = state_of(web, endpoint_slice(*endpoints))
    assert backends(state, CLUSTER_IP) == {f"10.0.1.{number}:8080" for number in internal}
    exposed = {f"10.0.1.{number}:8080" for number in external}
    assert backends(state, "192.0.2.1") == backends(state, builders.NODE_ADDRESS, 30080) == exposed
    here = [one.address for one in endpoints if one.conditions.node_name == builders.THIS_NODE]
    assert members(SetKind.LOOP_BACK, state) == {f"{address},tcp:8080,{address}" for address in here}


def _without_local(state: ServiceState) -> tuple[int, int]:
    """For the internal and the external traffic policy Local: the number of families with endpoints only on other nodes."""
    policies = [policy for policy, _ in state.rare.without_local]
    return policies.count("internal"), policies.count("external")


HERE = endpoint_slice(endpoint("10.244.0.5"))
ELSEWHERE = endpoint_slice(endpoint("10.244.1.5", OTHER_NODE))


def _local(*, internal: bool, external: bool) -> Service:
    return service("web", service_port(node_port=30080), internal_local=internal, external_local=external)


@pytest.mark.checklist(84, 85, 86, 87, 88)
@pytest.mark.parametrize(("internal", "external"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("slices", "is_counted"), [([HERE], False), ([ELSEWHERE], True), ([], False)])
def test_a_local_traffic_policy_is_counted_if_only_other_nodes_have_endpoints(
    slices: list[EndpointSlice], *, internal: bool, external: bool, is_counted: bool
) -> None:
    counted = _without_local(state_of(_local(internal=internal, external=external), *slices))
    assert counted == (internal and is_counted, external and is_counted)


def test_the_lack_of_local_endpoints_is_counted_separately_for_each_family() -> None:
    dual = service("web", service_port(node_port=30080), cluster=DUAL, internal_local=True, external_local=True)
    state = state_of(dual, ELSEWHERE, endpoint_slice(endpoint("fd00::5"), suffix="2"))
    assert state.rare.without_local == {("internal", Family.IPV4), ("external", Family.IPV4)}


@pytest.mark.checklist(100)
def test_external_traffic_is_not_counted_for_a_family_without_external_addresses() -> None:
    dual = service(cluster=DUAL, external=["192.0.2.1"], external_local=True)
    state = state_of(dual, ELSEWHERE, endpoint_slice(endpoint("fd00::5", OTHER_NODE), suffix="2"))
    assert state.rare.without_local == {("external", Family.IPV4)}


@pytest.mark.checklist(52)
def test_every_virtual_server_of_a_service_has_the_session_affinity_and_timeout_of_the_service() -> None:
    sticky = service("web", service_port(node_port=30080), external=["192.0.2.1"], affinity_timeout_s=10800)
    state = state_of(sticky)
    assert len(state.virtual_servers) == 3
    assert {server.settings for server in state.virtual_servers.values()} == {VirtualServerSettings("rr", PERSISTENT, 10800)}


def _flows(state: ServiceState) -> dict[tuple[str, int], set[str]]:
    return {(str(flow.address), flow.port): {str(key) for key in keep} for flow, keep in state.rare.flows.items()}


@pytest.mark.parametrize("protocol", [Protocol.UDP, Protocol.SCTP])
def test_tracked_flows_may_continue_to_every_serving_endpoint_whatever_the_traffic_policies(protocol: Protocol) -> None:
    slices = endpoint_slice(
        endpoint("10.244.1.5", OTHER_NODE),
        draining("10.244.1.6", OTHER_NODE),
        endpoint("10.244.1.7", OTHER_NODE, ready=False),
        dead("10.244.1.8", OTHER_NODE),
        ports=[endpoint_port(5353, protocol)],
    )
    port = service_port(53, protocol, node_port=30053)
    dns = service("dns", port, internal_local=True, external=["192.0.2.1"], load_balancer=["198.51.100.1"])
    state = state_of(dns, slices)
    serving = {"10.244.1.5:5353", "10.244.1.6:5353", "10.244.1.7:5353"}
    places = [(CLUSTER_IP, 53), ("192.0.2.1", 53), ("198.51.100.1", 53), (builders.NODE_ADDRESS, 30053)]
    assert _flows(state) == dict.fromkeys(places, serving)
    assert Flow(Family.IPV4, protocol, parse_address(CLUSTER_IP), 53) in state.rare.flows


def test_tracked_flows_are_not_cleaned_if_no_endpoint_serves_or_the_protocol_is_tcp() -> None:
    assert state_of(service("dns", service_port(53, Protocol.UDP)), endpoint_slice(dead("10.244.0.5"))).rare.flows == {}
    assert state_of(service(), endpoint_slice(endpoint("10.244.0.5"))).rare.flows == {}


def _as_sets(state: ServiceState) -> tuple[object, ...]:
    """The contents of a state without the order of its objects."""
    return (
        state.virtual_servers,
        frozenset(state.entries),
        frozenset(state.addresses),
        frozenset(state.rare.refused),
        state.rare.flows,
        state.rare.local_endpoints,
        state.rare.without_local,
    )


def _shuffled_endpoints(item: EndpointSlice) -> st.SearchStrategy[EndpointSlice]:
    def with_endpoints(endpoints: list[Endpoint]) -> EndpointSlice:
        addresses = b"".join(one.address for one in endpoints)
        return msgspec.structs.replace(item, addresses=addresses, conditions=tuple(one.conditions for one in endpoints))

    return st.permutations(item.endpoints).map(with_endpoints)


@hypothesis.given(st.data(), strategies.services(), strategies.slice_lists())
def test_the_order_of_endpoint_slices_and_endpoints_does_not_change_the_state(
    data: st.DataObject, given: Service, slices: list[EndpointSlice]
) -> None:
    reordered = [data.draw(_shuffled_endpoints(item)) for item in data.draw(st.permutations(slices))]
    assert _as_sets(state_of(given, *reordered)) == _as_sets(state_of(given, *slices))


@hypothesis.given(st.data(), strategies.services(), strategies.slice_lists())
def test_the_order_of_ports_and_addresses_in_a_service_does_not_change_the_state(
    data: st.DataObject, given: Service, slices: list[EndpointSlice]
) -> None:
    permuted = msgspec.structs.replace(
        given,
        ports=tuple(data.draw(st.permutations(given.ports))),
        cluster_addresses=tuple(data.draw(st.permutations(given.cluster_addresses))),
    )
    permuted = builders.with_options(
        permuted,
        external_addresses=tuple(data.draw(st.permutations(given.options.external_addresses))),
        load_balancer_addresses=tuple(data.draw(st.permutations(given.options.load_balancer_addresses))),
        source_ranges=tuple(data.draw(st.permutations(given.options.source_ranges))),
    )
    assert _as_sets(state_of(permuted, *slices)) == _as_sets(state_of(given, *slices))


@hypothesis.given(strategies.services(), strategies.slice_lists())
def test_every_bound_address_has_a_virtual_server_and_an_entry_in_the_set_of_addresses(
    given: Service, slices: list[EndpointSlice]
) -> None:
    state = state_of(given, *slices)
    in_sets = {entry.address for entry in state.entries if entry.set.endswith("IPVS-IPS")}
    assert in_sets == set(state.addresses) <= {key.address for key in state.virtual_servers}
    assert set(state.rare.refused) <= state.virtual_servers.keys()


def test_a_very_large_service_keeps_all_addresses_when_it_is_translated_in_several_steps() -> None:
    many = [f"192.0.{number >> 8}.{number & 255}" for number in range(2, 2 + 3 * ITEMS_AT_ONCE)]
    large = service(external=many)
    assert 3 <= len(list(desired_state.translating(large, (HERE,), builders.node_view(), Settings()))) <= 10
    assert {str(item.key.address) for item in state_of(large, HERE).served} >= set(many)
