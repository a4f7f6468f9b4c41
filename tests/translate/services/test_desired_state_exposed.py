"""Node ports, external and load balancer addresses, source ranges and health checks.

All of these concern access to a Service from outside the cluster.
"""

import pytest

from ipvsproxy.model.kernel import HealthCheckPort
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.service import Service, ServiceType
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.translate.translation_settings import Binding, Settings
from ipvsproxy.translate.view import NodeView
from tests.support import builders
from tests.support.builders import (
    CLUSTER_IP,
    OTHER_NODE,
    draining,
    endpoint,
    endpoint_port,
    endpoint_slice,
    service,
    service_port,
)
from tests.translate.reading import backends, frontends, members, outline, skeleton_of, state_of, texts

DUAL_NODE = {"eth0": ["100.101.102.103", "2001:db8::1:1"], "lo": ["127.0.0.1", "::1"]}
MANY = {"eth0": ["100.101.102.103", "100.101.102.104", "2001:db8::1:1"], "eth1": ["100.101.102.105", "2001:db8::1:2"]}
CLUSTER_IP_V6 = "2020::1"
ONLY_V4, ONLY_V6 = (Settings(families=frozenset({family})) for family in Family)
BOTH_SLICES = (
    endpoint_slice(endpoint("10.180.0.1", OTHER_NODE), ports=[endpoint_port(80)]),
    endpoint_slice(endpoint("1002:ab8::2:10", OTHER_NODE), suffix="v6", ports=[endpoint_port(80)]),
)
LOCAL_AND_REMOTE = endpoint_slice(endpoint("10.180.0.1"), endpoint("10.180.1.1", OTHER_NODE))


def _node_port(
    protocol: Protocol = Protocol.TCP, *, cluster: str = CLUSTER_IP, external_local: bool = False, number: int = 3001
) -> Service:
    port = service_port(80, protocol, node_port=number)
    return service("np", port, kind=ServiceType.NODE_PORT, cluster=[cluster], external_local=external_local)


@pytest.mark.checklist(13, 15, 19, 21)
@pytest.mark.parametrize(
    ("cluster", "node", "backend"),
    [(CLUSTER_IP, "100.101.102.103", "10.180.0.1:80"), (CLUSTER_IP_V6, "2001:db8::1:1", "[1002:ab8::2:10]:80")],
)
def test_a_node_port_service_has_virtual_servers_at_its_cluster_ip_and_at_the_node_address(
    cluster: str, node: str, backend: str
) -> None:
    view = builders.node_view(DUAL_NODE)
    for slices, expected in ((BOTH_SLICES, {backend}), ((), set())):
        state = state_of(_node_port(cluster=cluster), *slices, view=view)
        assert frontends(state) == {str(builders.frontend(cluster, 80)), str(builders.frontend(node, 3001))}
        assert backends(state, cluster) == backends(state, node, 3001) == expected
        assert {server.settings.scheduler for server in state.virtual_servers.values()} == {"rr"}


@pytest.mark.parametrize("cluster", [[CLUSTER_IP], [CLUSTER_IP_V6], [CLUSTER_IP, CLUSTER_IP_V6]])
def test_the_binding_decides_whether_a_service_address_is_on_the_device_or_has_a_route(cluster: list[str]) -> None:
    external = ["50.60.70.81", "2012::51"]
    made = service("web", service_port(80), cluster=cluster, external=external)
    by_address, by_route = (state_of(made, *BOTH_SLICES, settings=Settings(binding=binding)) for binding in Binding)
    served = {address.family for address in builders.addresses(*cluster)}
    expected = {address for address in builders.addresses(*cluster, *external) if address.family in served}
    assert (set(by_address.addresses), by_address.routes) == (expected, ())
    assert (by_route.addresses, set(by_route.routes)) == ((), expected)
    assert (by_address.served, by_address.entries) == (by_route.served, by_route.entries)


def test_no_local_route_is_desired_for_an_address_of_the_node() -> None:
    made = service("web", service_port(80), cluster=[CLUSTER_IP], external=["100.101.102.103"])
    state = state_of(made, view=builders.node_view(DUAL_NODE), settings=Settings(binding=Binding.ROUTES))
    assert state.routes == builders.addresses(CLUSTER_IP)


@pytest.mark.checklist(14)
def test_connections_to_a_udp_node_port_are_masqueraded() -> None:
    settings = Settings(node_port_networks=builders.networks("0.0.0.0/0"))
    state = state_of(_node_port(Protocol.UDP), view=builders.node_view(DUAL_NODE, settings=settings), settings=settings)
    assert members(SetKind.NODE_PORT_UDP, state) == {"3001"}
    skeleton = skeleton_of(state)
    assert outline(skeleton, "nat", "KUBE-NODE-PORT") == [("KUBE-NODE-PORT-UDP", "KUBE-MARK-MASQ")]
    assert outline(skeleton, "filter", "KUBE-NODE-PORT") == [("KUBE-HEALTH-CHECK-NODE-PORT", "ACCEPT")]
    assert outline(skeleton, "nat", "KUBE-SERVICES") == [
        ("", "RETURN"),
        ("KUBE-CLUSTER-IP", "KUBE-MARK-MASQ"),
        ("", "KUBE-NODE-PORT"),
        ("KUBE-CLUSTER-IP", "ACCEPT"),
    ]


@pytest.mark.checklist(16, 22)
@pytest.mark.parametrize("cluster", [CLUSTER_IP, CLUSTER_IP_V6])
def test_an_sctp_node_port_has_a_set_entry_for_each_node_address(cluster: str) -> None:
    family = Family.IPV4 if cluster == CLUSTER_IP else Family.IPV6
    state = state_of(_node_port(Protocol.SCTP, cluster=cluster), view=builders.node_view(MANY))
    nodes = [address for texts in MANY.values() for address in texts if (":" in address) is (family is Family.IPV6)]
    keys = [builders.frontend(cluster, 80, Protocol.SCTP), *(builders.frontend(one, 3001, Protocol.SCTP) for one in nodes)]
    assert frontends(state) == set(map(str, keys))
    assert members(SetKind.NODE_PORT_SCTP, state, family=family) == {f"{address},sctp:3001" for address in nodes}


@pytest.mark.checklist(17, 41)
def test_an_sctp_node_port_with_policy_local_has_entries_in_two_sets_and_leads_to_local_endpoints() -> None:
    slices = endpoint_slice(endpoint("10.180.0.1"), endpoint("10.180.1.1", OTHER_NODE), ports=[endpoint_port(80, Protocol.SCTP)])
    state = state_of(_node_port(Protocol.SCTP, external_local=True), slices, view=builders.node_view(DUAL_NODE))
    assert backends(state, CLUSTER_IP, 80, Protocol.SCTP) == {"10.180.0.1:80", "10.180.1.1:80"}
    assert backends(state, "100.101.102.103", 3001, Protocol.SCTP) == {"10.180.0.1:80"}
    for kind in (SetKind.NODE_PORT_SCTP, SetKind.NODE_PORT_LOCAL_SCTP):
        assert members(kind, state) == {"100.101.102.103,sctp:3001"}
    skeleton = skeleton_of(state)
    assert outline(skeleton, "nat", "KUBE-NODE-PORT") == [
        ("KUBE-NODE-PORT-LOCAL-SCTP-HASH", "RETURN"),
        ("KUBE-NODE-PORT-SCTP-HASH", "KUBE-MARK-MASQ"),
    ]
    assert outline(skeleton, "filter", "KUBE-NODE-PORT") == [("KUBE-HEALTH-CHECK-NODE-PORT", "ACCEPT")]
    first, _ = texts(skeleton, "nat", "KUBE-NODE-PORT")
    assert first == (
        '-p sctp -m comment --comment "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type'
        r""" \'hash ip:port\'" -m set --match-set KUBE-NODE-PORT-LOCAL-SCTP-HASH dst,dst -j RETURN"""
    )


@pytest.mark.checklist(18)
def test_a_node_port_with_policy_local_is_served_only_on_the_configured_addresses() -> None:
    settings = Settings(node_port_networks=builders.networks("100.101.102.0/24"))
    view = builders.node_view(DUAL_NODE | {"eth1": ["192.168.1.1"]}, settings=settings)
    state = state_of(_node_port(external_local=True), LOCAL_AND_REMOTE, view=view)
    assert frontends(state) == {f"TCP {CLUSTER_IP}:80", "TCP 100.101.102.103:3001"}
    assert backends(state, "100.101.102.103", 3001) == {"10.180.0.1:8080"}
    assert members(SetKind.NODE_PORT_TCP, state) == members(SetKind.NODE_PORT_LOCAL_TCP, state) == {"3001"}
    assert outline(skeleton_of(state), "nat", "KUBE-NODE-PORT") == [
        ("KUBE-NODE-PORT-LOCAL-TCP", "RETURN"),
        ("KUBE-NODE-PORT-TCP", "KUBE-MARK-MASQ"),
    ]


@pytest.mark.parametrize("protocol", Protocol)
def test_a_node_port_has_no_virtual_server_and_no_set_entry_if_the_node_has_no_address(protocol: Protocol) -> None:
    state = state_of(_node_port(protocol, external_local=True), view=builders.node_view({}))
    assert frontends(state) == {f"{protocol.name} {CLUSTER_IP}:80"}
    assert {entry.set for entry in state.entries} == {"KUBE-CLUSTER-IP", "KUBE-IPVS-IPS"}


@pytest.mark.checklist(31, 32)
def test_external_addresses_including_loopback_are_served_only_in_the_families_of_the_cluster_ips() -> None:
    state = state_of(service(external=["50.60.70.81", "2012::51", "127.0.0.1"]), settings=ONLY_V4)
    assert frontends(state) == {f"TCP {CLUSTER_IP}:80", "TCP 50.60.70.81:80", "TCP 127.0.0.1:80"}
    assert not any(server.real_servers for server in state.served), "there are no endpoints"
    assert members(SetKind.EXTERNAL_IP, state) == {"50.60.70.81,tcp:80", "127.0.0.1,tcp:80"}
    assert state.addresses == builders.addresses(CLUSTER_IP, "50.60.70.81", "127.0.0.1")


@pytest.mark.checklist(34)
def test_an_external_address_with_policy_local_leads_only_to_local_endpoints() -> None:
    port = service_port(node_port=3001)
    external = service("ext", port, kind=ServiceType.NODE_PORT, external=["50.60.70.81", "50.60.70.82"], external_local=True)
    state = state_of(external, LOCAL_AND_REMOTE, view=builders.node_view({}))
    assert len(state.virtual_servers) == 3
    assert backends(state, "50.60.70.81") == backends(state, "50.60.70.82") == {"10.180.0.1:8080"}
    assert members(SetKind.EXTERNAL_IP_LOCAL, state) == {"50.60.70.81,tcp:80", "50.60.70.82,tcp:80"}
    assert members(SetKind.EXTERNAL_IP, state) == set()


def test_a_lack_of_local_endpoints_is_counted_even_if_external_addresses_are_not_served() -> None:
    remote = endpoint_slice(endpoint("10.180.1.1", OTHER_NODE))
    desired = service(external=["50.60.70.81"], external_local=True)
    state = state_of(desired, remote, settings=Settings(external_addresses=False))
    assert frontends(state) == {f"TCP {CLUSTER_IP}:80"}
    assert members(SetKind.EXTERNAL_IP, state) == set()
    assert state.rare.without_local == {("external", Family.IPV4)}


def test_an_external_address_that_another_interface_has_is_served_but_not_bound_again() -> None:
    view = builders.node_view({"eth0": ["192.168.0.10", "192.0.2.1", "198.51.100.1"]})
    state = state_of(service(external=["192.0.2.1"], load_balancer=["198.51.100.1"]), view=view)
    assert frontends(state) == {f"TCP {CLUSTER_IP}:80", "TCP 192.0.2.1:80", "TCP 198.51.100.1:80"}
    assert state.addresses == builders.addresses(CLUSTER_IP)
    assert members(SetKind.IPVS_IPS, state) == {CLUSTER_IP}


def test_a_cluster_ip_is_bound_even_if_another_interface_has_it() -> None:
    assert state_of(service(), view=builders.node_view({"eth0": [CLUSTER_IP]})).addresses == builders.addresses(CLUSTER_IP)


def _load_balancer(*source_ranges: str, external_local: bool = False, health_port: int = 0) -> Service:
    return service(
        "lb",
        service_port(node_port=3001),
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=["1.2.3.4"],
        source_ranges=source_ranges,
        external_local=external_local,
        health_check_node_port=health_port,
    )


def _on_a_node_without_addresses(desired: Service, view: NodeView | None = None) -> ServiceState:
    return state_of(desired, LOCAL_AND_REMOTE, view=view or builders.node_view({}))


@pytest.mark.checklist(35)
def test_connections_to_the_virtual_server_of_a_load_balancer_address_are_masqueraded() -> None:
    state = _on_a_node_without_addresses(_load_balancer())
    assert frontends(state) == {f"TCP {CLUSTER_IP}:80", "TCP 1.2.3.4:80"}
    assert members(SetKind.LOAD_BALANCER, state) == {"1.2.3.4,tcp:80"}
    assert members(SetKind.LOAD_BALANCER_LOCAL, state) == set()
    assert outline(skeleton_of(state), "nat", "KUBE-LOAD-BALANCER") == [("", "KUBE-MARK-MASQ")]


@pytest.mark.checklist(37)
def test_policy_local_gives_a_load_balancer_address_only_local_endpoints_and_no_masquerading() -> None:
    state = _on_a_node_without_addresses(_load_balancer(external_local=True))
    assert backends(state, "1.2.3.4") == {"10.180.0.1:8080"}
    assert backends(state, CLUSTER_IP) == {"10.180.0.1:8080", "10.180.1.1:8080"}
    assert members(SetKind.LOAD_BALANCER, state) == members(SetKind.LOAD_BALANCER_LOCAL, state) == {"1.2.3.4,tcp:80"}
    assert outline(skeleton_of(state), "nat", "KUBE-LOAD-BALANCER") == [
        ("KUBE-LOAD-BALANCER-LOCAL", "RETURN"),
        ("", "KUBE-MARK-MASQ"),
    ]


@pytest.mark.checklist(38)
def test_clients_inside_the_source_ranges_are_admitted_and_all_other_clients_are_dropped() -> None:
    state = _on_a_node_without_addresses(_load_balancer("10.0.0.0/8"))
    assert members(SetKind.LOAD_BALANCER, state) == members(SetKind.LOAD_BALANCER_FIREWALL, state) == {"1.2.3.4,tcp:80"}
    assert members(SetKind.LOAD_BALANCER_SOURCE_CIDR, state) == {"1.2.3.4,tcp:80,10.0.0.0/8"}
    skeleton = skeleton_of(state)
    assert outline(skeleton, "filter", "KUBE-PROXY-FIREWALL") == [("KUBE-LOAD-BALANCER-FW", "KUBE-SOURCE-RANGES-FIREWALL")]
    assert outline(skeleton, "filter", "KUBE-SOURCE-RANGES-FIREWALL") == [
        ("KUBE-LOAD-BALANCER-SOURCE-CIDR", "RETURN"),
        ("", "DROP"),
    ]


def test_a_node_inside_the_source_ranges_may_itself_use_the_load_balancer_address() -> None:
    view = builders.node_view(node_object=builders.node("10.1.2.3"))
    state = _on_a_node_without_addresses(_load_balancer("10.0.0.0/8", "192.0.2.0/24"), view)
    assert members(SetKind.LOAD_BALANCER_SOURCE_IP, state) == {"1.2.3.4,tcp:80,1.2.3.4"}
    assert state.rare.refused == ()
    assert outline(skeleton_of(state), "filter", "KUBE-SOURCE-RANGES-FIREWALL") == [
        ("KUBE-LOAD-BALANCER-SOURCE-CIDR", "RETURN"),
        ("KUBE-LOAD-BALANCER-SOURCE-IP", "RETURN"),
        ("", "DROP"),
    ]


def test_a_node_outside_the_source_ranges_cannot_use_the_load_balancer_address() -> None:
    view = builders.node_view(node_object=builders.node("172.16.0.1"))
    state = _on_a_node_without_addresses(_load_balancer("10.0.0.0/8"), view)
    assert members(SetKind.LOAD_BALANCER_SOURCE_IP, state) == set()
    assert state.rare.refused == (builders.frontend("1.2.3.4", 80),)


@pytest.mark.parametrize("ranges", [("10.0.0.0/8", "0.0.0.0/0"), ("2001:db8::/32",), ()])
def test_all_clients_are_admitted_if_one_range_has_all_addresses_or_no_range_is_of_their_family(ranges: tuple[str, ...]) -> None:
    state = _on_a_node_without_addresses(_load_balancer(*ranges))
    assert members(SetKind.LOAD_BALANCER, state) == {"1.2.3.4,tcp:80"}
    for kind in (SetKind.LOAD_BALANCER_FIREWALL, SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP):
        assert members(kind, state) == set()
    assert state.rare.refused == ()


def test_a_load_balancer_address_whose_source_ranges_are_all_invalid_admits_no_client() -> None:
    desired = builders.with_options(_load_balancer(), admits_nobody=True)
    state = _on_a_node_without_addresses(desired)
    assert members(SetKind.LOAD_BALANCER_FIREWALL, state) == {"1.2.3.4,tcp:80"}
    assert members(SetKind.LOAD_BALANCER_SOURCE_CIDR, state) == members(SetKind.LOAD_BALANCER_SOURCE_IP, state) == set()
    assert state.rare.refused == (builders.frontend("1.2.3.4", 80),)
    assert outline(skeleton_of(state), "filter", "KUBE-SOURCE-RANGES-FIREWALL") == [("", "DROP")]


def test_source_ranges_do_not_restrict_node_ports_and_external_addresses() -> None:
    desired = service(
        "lb",
        service_port(node_port=3001),
        kind=ServiceType.LOAD_BALANCER,
        external=["50.60.70.81"],
        load_balancer=["1.2.3.4"],
        source_ranges=["10.0.0.0/8"],
    )
    assert members(SetKind.LOAD_BALANCER_FIREWALL, state_of(desired)) == {"1.2.3.4,tcp:80"}


@pytest.mark.checklist(43, 44)
def test_a_health_check_counts_only_ready_endpoints_of_this_node() -> None:
    unready = draining("10.180.0.2"), endpoint("10.180.0.3", ready=False)
    ready = endpoint("10.180.0.1"), endpoint("10.180.0.4")
    desired = _load_balancer(external_local=True, health_port=30000)
    for usable in ((), ready):
        slices = endpoint_slice(*usable, *unready, endpoint("10.180.1.1", OTHER_NODE))
        assert state_of(desired, slices).rare.local_endpoints == {HealthCheckPort(Family.IPV4, 30000): len(usable)}
    assert state_of(_load_balancer(), endpoint_slice(*ready)).rare.local_endpoints == {}


def test_a_dual_stack_load_balancer_has_a_health_check_in_each_family() -> None:
    desired = service(
        "lb",
        kind=ServiceType.LOAD_BALANCER,
        cluster=[CLUSTER_IP, CLUSTER_IP_V6],
        external_local=True,
        health_check_node_port=30000,
    )
    state = state_of(desired, LOCAL_AND_REMOTE)
    assert state.rare.local_endpoints == {
        HealthCheckPort(Family.IPV4, 30000): 1,
        HealthCheckPort(Family.IPV6, 30000): 0,
    }
    assert [members(SetKind.HEALTH_CHECK_NODE_PORT, state, family=family) for family in Family] == [{"30000"}] * 2
