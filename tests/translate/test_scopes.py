"""Covers the second scope of external addresses (``--ipvs-traffic-scopes=api``).

The tests show when a Service gets a second scope, which rules a second scope has, and how a connection passes through these
rules.
"""

import dataclasses
from collections.abc import Set as AbstractSet
from typing import Any

import pytest

from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import ServiceType
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind
from ipvsproxy.model.state import ServiceState
from ipvsproxy.translate import trace
from ipvsproxy.translate.skeleton import SCOPE_CHAINS, build_skeleton
from ipvsproxy.translate.trace import TracedClient
from ipvsproxy.translate.translation_settings import LocalMode, Settings, TrafficScopes
from ipvsproxy.translate.view import NodeView
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint, endpoint_slice
from tests.translate.reading import backends, members, state_of, texts

BALANCER = "192.0.2.80"
API = Settings(scopes=TrafficScopes.API, cluster_networks=builders.networks("10.244.0.0/16"))
OCCUPIED = frozenset({SetKind.SCOPE, SetKind.NO_LOCAL, SetKind.IPVS_IPS})


def _shop(*endpoints: str, affinity_s: int = 0, settings: Settings = API, node_port: int = 30080) -> ServiceState:
    service = builders.service(
        "web",
        builders.service_port(80, node_port=node_port),
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=[BALANCER],
        external_local=True,
        affinity_timeout_s=affinity_s,
    )
    listed = [endpoint(one, OTHER_NODE if one.startswith("10.244.1.") else builders.THIS_NODE) for one in endpoints]
    return state_of(service, endpoint_slice(*listed), settings=settings)


def _chains(settings: Settings, occupied: AbstractSet[SetKind] = OCCUPIED, **view: object) -> dict[str, list[str]]:
    node = dataclasses.replace(builders.node_view(), **view)  # type: ignore[arg-type]  # the keys are names of fields
    skeleton = build_skeleton(Family.IPV4, settings, node, occupied, ())
    return {key.chain: list(texts(skeleton, *key)) for key in SCOPE_CHAINS}


def test_the_second_scope_of_a_port_has_all_external_addresses_and_all_endpoints_of_the_port() -> None:
    (scope,) = _shop("10.244.0.5", "10.244.1.5").rare.scopes
    assert {str(key) for key in scope.virtual_servers} == {f"TCP {BALANCER}:80", f"TCP {builders.NODE_ADDRESS}:30080"}
    assert {str(one) for one in scope.weights} == {"10.244.0.5:8080", "10.244.1.5:8080"}


def test_the_no_local_set_has_the_addresses_of_services_with_endpoints_only_on_other_nodes() -> None:
    assert members(SetKind.NO_LOCAL, _shop("10.244.1.5")) == {f"{BALANCER},tcp:80", f"{builders.NODE_ADDRESS},tcp:30080"}
    assert members(SetKind.NO_LOCAL, _shop("10.244.0.5", "10.244.1.5")) == set()
    assert members(SetKind.NO_LOCAL, _shop()) == set()


def test_a_service_without_external_addresses_has_only_one_scope() -> None:
    assert state_of(builders.service(external_local=True), settings=API).rare.scopes == ()
    assert _shop("10.244.0.5", settings=dataclasses.replace(API, scopes=TrafficScopes.KUBE_PROXY)).rare.scopes == ()


DROPPED = "-m conntrack --ctstate NEW -m set --match-set KUBE-IPVSPROXY-NO-LOCAL dst,dst -m addrtype ! --src-type LOCAL -j DROP"
OF_THE_CLUSTER = "-s 10.244.0.0/16 -j RETURN"


@pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES])
@pytest.mark.parametrize(
    ("mode", "match", "kept"),
    [
        (LocalMode.CLUSTER_CIDR, "-s 10.244.0.0/24", [OF_THE_CLUSTER]),
        (LocalMode.NODE_CIDR, "-s 10.244.0.0/24", []),
        (LocalMode.BRIDGE_INTERFACE, "-i cni0", []),
        (LocalMode.INTERFACE_NAME_PREFIX, "-i cni0+", []),
    ],
)
def test_rules_mark_local_pods_before_a_rule_drops_clients_of_services_without_local_endpoints(
    mode: LocalMode, match: str, kept: list[str], backend: Backend
) -> None:
    settings = dataclasses.replace(API, detect_local=mode, local_interface="cni0", backend=backend)
    own = builders.networks("10.244.0.0/24")
    chains = _chains(settings, pod_networks=own, elsewhere=frozenset({parse_address("10.244.0.1")}))
    assert chains == {
        "KUBE-IPVSPROXY-ARRIVAL": [f"{match} -j KUBE-IPVSPROXY-MARK", f"{match} -j RETURN", *kept, DROPPED],
        "KUBE-IPVSPROXY-MARK": ["-j SET --map-set KUBE-IPVSPROXY-SCOPE dst,dst --map-mark"],
        "KUBE-IPVSPROXY-MASQ": [
            "-m mark --mark 0x0/0x3fff -j RETURN",
            "-m addrtype --src-type LOCAL -j MASQUERADE --random-fully",
        ],
    }


def test_no_client_is_dropped_if_the_rules_cannot_recognise_pods() -> None:
    assert _chains(dataclasses.replace(API, cluster_networks=()))["KUBE-IPVSPROXY-ARRIVAL"] == []


def test_packets_of_pods_are_neither_marked_nor_dropped_if_the_range_of_local_pods_is_unknown() -> None:
    """An address that may belong to a pod of another node is treated like a client outside the cluster.

    Packets from such an address are nevertheless not dropped, because the address may also belong to a local pod.
    """
    assert _chains(API)["KUBE-IPVSPROXY-ARRIVAL"] == [OF_THE_CLUSTER, DROPPED]


@pytest.mark.parametrize(
    ("node", "ranges"),
    [
        ({"connected": builders.networks("192.168.1.0/24", "172.17.0.0/24", "192.168.7.1/32")}, ["192.168.1.0/24"]),
        ({"pod_networks": builders.networks("192.168.1.0/24")}, []),
        (
            {"pod_networks": builders.networks("192.168.1.0/24"), "elsewhere": frozenset({parse_address("192.168.1.1")})},
            ["192.168.1.0/24"],
        ),
        (
            {
                "connected": builders.networks("192.168.0.0/20"),
                "primary_addresses": {**builders.node_view().primary_addresses, Family.IPV4: parse_address("192.168.7.5")},
            },
            [],
        ),
        ({"connected": builders.networks("192.168.0.0/16")}, []),
    ],
    ids=["of a bridge", "unused podCIDRs", "used podCIDRs", "of the nodes", "of the whole cluster"],
)
def test_packets_from_ranges_that_may_contain_pods_of_other_nodes_get_no_mark(node: dict[str, Any], ranges: list[str]) -> None:
    settings = dataclasses.replace(API, cluster_networks=builders.networks("192.168.0.0/16"))
    arrival = _chains(settings, **node)["KUBE-IPVSPROXY-ARRIVAL"]
    assert [rule for rule in arrival if "MARK" in rule] == [f"-s {item} -j KUBE-IPVSPROXY-MARK" for item in ranges]


def test_chains_of_scopes_exist_only_while_they_are_needed() -> None:
    skeleton = build_skeleton(Family.IPV4, API, builders.node_view(), frozenset(), ())
    assert not any(key in skeleton.chains for key in SCOPE_CHAINS)
    assert _chains(API, frozenset({SetKind.NO_LOCAL}))["KUBE-IPVSPROXY-MARK"] == []
    here = builders.networks("10.244.3.0/24")
    assert len(_chains(API, frozenset({SetKind.SCOPE}), connected=here)["KUBE-IPVSPROXY-ARRIVAL"]) == 2


BRIDGED = dataclasses.replace(builders.node_view(), connected=builders.networks("10.244.3.0/24"))


def _trace(
    client: TracedClient, address: str, port: int, *, has_scopes: bool, has_local: bool = True, node: NodeView = BRIDGED
) -> trace.Trace:
    skeleton = build_skeleton(Family.IPV4, API, node, OCCUPIED, ())
    key = builders.frontend(address, port)
    connection = trace.connection_of(client, key, API, node)

    def is_in_set(entry: SetEntry) -> bool:
        if entry.set == IpSet(SetKind.NO_LOCAL, Family.IPV4).name:
            return not has_local
        return entry.set == IpSet(SetKind.IPVS_IPS, Family.IPV4).name and str(entry.address) == BALANCER

    return trace.follow(skeleton, is_in_set, connection, has_scopes=has_scopes)


UNSURE = builders.node_view()
"""A node for which no address range of local pods is known."""


@pytest.mark.parametrize(("address", "port"), [(BALANCER, 80), (builders.NODE_ADDRESS, 30080)])
@pytest.mark.parametrize(
    ("client", "node", "has_local", "expected"),
    [
        (TracedClient.HOST, BRIDGED, True, (True, True, False)),
        (TracedClient.POD, BRIDGED, True, (True, False, False)),
        (TracedClient.POD, UNSURE, True, (False, False, False)),
        (TracedClient.POD, UNSURE, False, (False, False, False)),
        (TracedClient.OUTSIDE, BRIDGED, True, (False, False, False)),
        (TracedClient.OUTSIDE, BRIDGED, False, (False, False, True)),
        (TracedClient.OTHER_POD, BRIDGED, True, (False, False, False)),
        (TracedClient.OTHER_POD, BRIDGED, False, (False, False, False)),
    ],
)
def test_local_clients_use_the_second_scope_and_an_empty_first_scope_drops_only_outside_clients(
    client: TracedClient, node: NodeView, expected: tuple[bool, ...], address: str, port: int, *, has_local: bool
) -> None:
    result = _trace(client, address, port, has_scopes=True, has_local=has_local, node=node)
    assert (result.is_marked, result.is_masqueraded, result.is_dropped) == expected, "marked, masqueraded, dropped"
    assert not _trace(client, address, port, has_scopes=False, node=node).is_marked


@pytest.mark.parametrize("mode", [LocalMode.CLUSTER_CIDR, LocalMode.NODE_CIDR])
def test_rules_of_scopes_contain_only_ranges_of_their_own_family(mode: LocalMode) -> None:
    ranges = builders.networks("10.244.0.0/16", "fd00:10:244::/56")
    settings = dataclasses.replace(API, detect_local=mode, cluster_networks=ranges)
    own = builders.networks("10.244.7.0/24", "fd00:10:244:7::/64")
    elsewhere = frozenset(map(parse_address, ("10.244.7.1", "fd00:10:244:7::1")))
    assert not any(":" in rule for rules in _chains(settings, pod_networks=own, elsewhere=elsewhere).values() for rule in rules)


def test_a_trace_shows_rules_of_scopes_only_if_the_connection_uses_a_second_scope() -> None:
    for client, has_scopes in ((TracedClient.POD, False), (TracedClient.OUTSIDE, True)):
        result = _trace(client, BALANCER, 80, has_scopes=has_scopes)
        assert not result.is_dropped
        assert {one.chain.table for one in result.applied_rules} <= {"nat"}
    scoped = _trace(TracedClient.POD, BALANCER, 80, has_scopes=True).applied_rules
    assert [one.chain.table for one in scoped][:2] == ["mangle", "mangle"]


CLUSTER, ON_NODE = "10.96.0.80", "10.0.0.9"
NODE = builders.NODE_ADDRESS
HERE, ELSEWHERE = "10.244.0.5", "10.244.1.5"
EVERYWHERE_A, EVERYWHERE_B = ({f"{one}:{port}" for one in (HERE, ELSEWHERE)} for port in (8080, 9090))
LOCAL_A, LOCAL_B = ({f"{HERE}:{port}"} for port in (8080, 9090))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("addresses", "role", "contested"),
    [
        pytest.param({"load_balancer": [CLUSTER]}, "CLUSTER_IP", {(CLUSTER, 80): EVERYWHERE_A}, id="balancer, cluster IP"),
        pytest.param({"external": [CLUSTER]}, "CLUSTER_IP", {(CLUSTER, 80): EVERYWHERE_A}, id="external IP, cluster IP"),
        pytest.param({"cluster": [ON_NODE]}, "CLUSTER_IP", {(ON_NODE, 30080): EVERYWHERE_B}, id="node port, cluster IP"),
        pytest.param({"load_balancer": [NODE]}, "", {(NODE, 30080): LOCAL_A}, id="balancer, node port of another port"),
        pytest.param({"external": [NODE]}, "", {(NODE, 30080): LOCAL_A}, id="external IP, node port of another port"),
        pytest.param(
            {"external": [BALANCER], "load_balancer": [BALANCER]},
            "LOAD_BALANCER",
            {(BALANCER, 80): LOCAL_A, (BALANCER, 30080): LOCAL_B},
            id="external IP, balancer",
        ),
    ],
)
def test_a_frontend_has_one_role_and_at_most_one_second_scope_if_a_service_uses_it_twice(
    addresses: dict[str, list[str]], role: str, contested: dict[tuple[str, int], set[str]], *, reverse: bool
) -> None:
    """Port 80 has the node port 30080.

    Another Service port, which has other endpoints, has the port number 30080.
    """
    ports = [builders.service_port(80, name="a", node_port=30080), builders.service_port(30080, name="b", node_port=30081)]
    service = builders.service(
        "web",
        *(reversed(ports) if reverse else ports),
        kind=ServiceType.LOAD_BALANCER,
        external_local=True,
        cluster=addresses.get("cluster", [CLUSTER]),
        external=addresses.get("external", ()),
        load_balancer=addresses.get("load_balancer", ()),
    )
    slices = [
        endpoint_slice(endpoint(HERE), endpoint(ELSEWHERE, OTHER_NODE), service="web", suffix=name, ports=(port,))
        for name, port in (("a", builders.endpoint_port(8080, name="a")), ("b", builders.endpoint_port(9090, name="b")))
    ]
    view = builders.node_view()
    node_addresses = (*view.node_port_addresses[Family.IPV4], *builders.addresses(ON_NODE))
    view = dataclasses.replace(view, node_port_addresses={**view.node_port_addresses, Family.IPV4: node_addresses})
    state = state_of(service, *slices, settings=API, view=view)
    keys = [key for scope in state.rare.scopes for key in scope.virtual_servers]
    assert len(keys) == len(set(keys)), "one mark for each"
    for (address, number), expected in contested.items():
        assert backends(state, address, number) == expected
        scopes = [scope for scope in state.rare.scopes if builders.frontend(address, number) in scope.virtual_servers]
        assert len(scopes) == (0 if role == "CLUSTER_IP" else 1)
        roles = {
            kind.name
            for kind in (SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER)
            if f"{address},tcp:{number}" in members(kind, state)
        }
        assert role in roles or not (role or roles)
        assert role != "CLUSTER_IP" or roles == {role}


def test_source_ranges_restrict_a_load_balancer_address_that_is_also_the_cluster_ip() -> None:
    service = builders.service("web", cluster=[CLUSTER], load_balancer=[CLUSTER], source_ranges=["203.0.113.0/24"])
    assert members(SetKind.LOAD_BALANCER_FIREWALL, state_of(service, settings=API)) == {f"{CLUSTER},tcp:80"}
