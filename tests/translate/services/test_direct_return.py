"""Direct return: the scopes of a Service that requests it, and the rules that lead packets to these scopes."""

import dataclasses
from typing import Any

import pytest

from ipvsproxy.model.annotations import Annotation, ServiceAnnotations, WeightRules
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.rules import Backend, InterfaceMatch, Rule, Verdict
from ipvsproxy.model.service import EndpointSlice, Service, ServiceType
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import Clients, ClusterScope, ServiceState
from ipvsproxy.model.virtual_servers import SCHEDULER_FALLBACK, SCHEDULER_PORT
from ipvsproxy.translate import trace
from ipvsproxy.translate.skeleton import DIRECT_CHAINS, SCOPE_CHAINS, SCOPE_JUMPS, build_skeleton
from ipvsproxy.translate.trace import TracedClient
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES, Settings
from ipvsproxy.translate.view import NodeView, shared_tunnel, view_node
from tests.support import builders
from tests.support.builders import OTHER_NODE, endpoint, endpoint_slice
from tests.translate.reading import members, state_of, texts

BALANCER = "192.0.2.80"
OTHER_ADDRESS = "172.18.0.3"
ON = Settings(direct_return=True, cluster_networks=builders.networks("10.244.0.0/16"))
OCCUPIED = frozenset({SetKind.DIRECT, SetKind.TUNNEL, SetKind.NODES, SetKind.NOT_DIRECT, SetKind.LOAD_BALANCER})
PODS = "-s 10.244.0.0/24"


def _view(**fields: Any) -> NodeView:
    ends = {OTHER_NODE: builders.addresses(OTHER_ADDRESS, "fd00::3")}
    return dataclasses.replace(builders.node_view(), **({"tunnel_ends": ends} | fields))


def _shop(
    *endpoints: str, settings: Settings = ON, view: NodeView | None = None, annotations: Any = None, **options: Any
) -> ServiceState:
    service, listed = _service(*endpoints, annotations=annotations, **options)
    return state_of(service, listed, view=view or _view(), settings=settings)


def _service(*endpoints: str, annotations: Any = None, **options: Any) -> tuple[Service, EndpointSlice]:
    service = builders.service(
        "web",
        builders.service_port(80, node_port=30080),
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=[BALANCER],
        **options,
    )
    given = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True, **(annotations or {}))
    listed = [endpoint(one, OTHER_NODE if one.startswith("10.244.1.") else builders.THIS_NODE) for one in endpoints]
    return builders.with_options(service, annotations=given), endpoint_slice(*listed)


def _weights(scope: ClusterScope) -> dict[str, int]:
    return {str(key): weight for key, weight in scope.weights.items()}


def test_outside_clients_are_sent_to_local_endpoints_or_through_one_tunnel_per_other_node() -> None:
    outside, by_tunnel = _shop("10.244.0.5", "10.244.1.5", "10.244.1.6").rare.scopes
    assert (outside.clients, by_tunnel.clients) == (Clients.OUTSIDE, Clients.BY_TUNNEL)
    assert _weights(outside) == {"10.244.0.5:8080": 1, f"{OTHER_ADDRESS}:80": TUNNELLED + 2}
    assert _weights(by_tunnel) == {"10.244.0.5:8080": 1}
    assert {str(key) for key in outside.virtual_servers} == {f"TCP {BALANCER}:80"}, "node ports have no direct return"


def test_packets_from_a_tunnel_are_refused_if_this_node_has_no_endpoint() -> None:
    _, by_tunnel = _shop("10.244.1.5").rare.scopes
    assert _weights(by_tunnel) == {}


def test_packets_from_a_tunnel_reach_an_unready_endpoint_if_this_node_has_no_other_endpoint() -> None:
    """Another node may have learnt before this node that the endpoint is ready."""
    starting, other = endpoint("10.244.0.5", ready=False), endpoint("10.244.1.5", OTHER_NODE)
    service, _ = _service("10.244.0.5")
    scopes = state_of(service, endpoint_slice(starting, other), view=_view(), settings=ON).rare.scopes
    assert [_weights(one) for one in scopes] == [{f"{OTHER_ADDRESS}:80": TUNNELLED + 1}, {"10.244.0.5:8080": 1}]
    usable = builders.draining("10.244.0.6"), endpoint("10.244.0.7")
    for more in usable:
        scopes = state_of(service, endpoint_slice(starting, other, more), view=_view(), settings=ON).rare.scopes
        assert _weights(scopes[1]) == {f"{more.address}:8080": 1}


def test_packets_from_a_tunnel_reach_endpoints_of_weight_zero_if_this_node_has_no_other_endpoints() -> None:
    """Another node may have sent a new connection by tunnel before that node learnt of the weight 0."""
    service, _ = _service("10.244.0.5")
    listed = [endpoint("10.244.0.5", zone="z1"), endpoint("10.244.0.6", zone="z2"), endpoint("10.244.1.5", OTHER_NODE, zone="z3")]
    for zones, weights, by_tunnel in (({"z1": 0}, (0, 1), (0, 1)), ({"z1": 0, "z2": 0}, (0, 0), (1, 1))):
        rules = WeightRules(zones=zones)
        given = ServiceAnnotations(given=frozenset(Annotation), direct_return=True, weights=rules)
        weighed = builders.with_options(service, annotations=given)
        scopes = state_of(weighed, endpoint_slice(*listed), view=_view(), settings=ON).rare.scopes
        here = [tuple(_weights(scope)[f"10.244.0.{number}:8080"] for number in (5, 6)) for scope in scopes]
        assert here == [weights, by_tunnel]


def test_connections_to_an_endpoint_are_masqueraded_if_its_node_has_no_direct_return() -> None:
    state = _shop("10.244.0.5", "10.244.1.5", view=_view(tunnel_ends={}))
    assert _weights(state.rare.scopes[0]) == {"10.244.0.5:8080": 1, "10.244.1.5:8080": 1}
    assert members(SetKind.NOT_DIRECT, state) == {"10.244.1.5,tcp:8080"}
    assert members(SetKind.NOT_DIRECT, _shop("10.244.0.5", "10.244.1.5")) == set()


def test_direct_return_does_not_change_the_virtual_server_of_a_service_address() -> None:
    with_it, without = _shop("10.244.0.5", "10.244.1.5"), _shop("10.244.0.5", "10.244.1.5", settings=Settings())
    assert (with_it.served, with_it.entries) == (without.served, without.entries)
    assert without.rare.scopes == ()


def test_all_nodes_choose_the_same_endpoint_by_a_hash_unless_the_service_chooses_a_scheduler() -> None:
    outside, by_tunnel = _shop("10.244.0.5").rare.scopes
    assert (outside.settings, by_tunnel.settings.scheduler) == (("mh", SCHEDULER_FALLBACK | SCHEDULER_PORT, 0, 0), "rr")
    assert _shop("10.244.0.5", affinity_timeout_s=600).rare.scopes[0].settings == ("mh", SCHEDULER_FALLBACK, 0, 0)
    assert _shop("10.244.0.5", annotations={"scheduler": "wlc"}).rare.scopes[0].settings.scheduler == "wlc"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"settings": Settings()}, "--ipvs-direct-return (ipvsproxy.directReturn) of this node is off"),
        ({"external_local": True}, "externalTrafficPolicy Local leads to endpoints of this node alone"),
        ({"view": _view(shared_tunnel="tunl0")}, "another program of this node has an address on tunl0"),
    ],
)
def test_the_reason_is_given_if_a_service_that_requests_direct_return_does_not_get_it(
    changed: dict[str, Any], reason: str
) -> None:
    state = _shop("10.244.0.5", "10.244.1.5", **changed)
    assert [one.reason for one in state.rare.skipped] == [reason]
    assert state.rare.scopes == ()


def test_a_tunnel_device_with_an_address_belongs_to_another_program() -> None:
    def carried(device: str, address: str) -> list[InterfaceAddress]:
        return [InterfaceAddress(device, parse_address(address), 32)]

    assert shared_tunnel(carried("tunl0", "10.244.3.0")) == "tunl0"
    assert shared_tunnel(carried("ip6tnl0", "fe80::1")) == ""
    assert shared_tunnel(carried("eth0", "10.0.0.1")) == ""


@pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES])
def test_rules_for_tunnels_come_first_and_rules_for_outside_clients_come_last(backend: Backend) -> None:
    view = _view(pod_networks=builders.networks("10.244.0.0/24"), elsewhere=frozenset(builders.addresses("10.244.0.1")))
    skeleton = build_skeleton(Family.IPV4, dataclasses.replace(ON, backend=backend), view, OCCUPIED, ())
    chains = {key.chain: list(texts(skeleton, *key)) for key in (*SCOPE_CHAINS, *DIRECT_CHAINS)}
    assert chains == {
        "KUBE-IPVSPROXY-ARRIVAL": [
            "-p ipencap -m set --match-set KUBE-IPVSPROXY-NODES src -j RETURN",
            "-p ipencap -m addrtype --dst-type LOCAL -j DROP",
            "-i tunl0 -j SET --map-set KUBE-IPVSPROXY-TUNNEL dst,dst --map-mark",
            "-i tunl0 -m mark ! --mark 0x0/0x3fff -j RETURN",
            "-i tunl0 -j DROP",
            f"{PODS} -j KUBE-IPVSPROXY-MARK",
            f"{PODS} -j RETURN",
            "-s 10.244.0.0/16 -j RETURN",
            "-m addrtype ! --src-type LOCAL -j SET --map-set KUBE-IPVSPROXY-DIRECT dst,dst --map-mark",
        ],
        "KUBE-IPVSPROXY-MARK": [],
        "KUBE-IPVSPROXY-MASQ": [
            "-m mark --mark 0x0/0x3fff -j RETURN",
            "-m set --match-set KUBE-IPVSPROXY-NOT-DIRECT dst,dst -j MASQUERADE --random-fully",
        ],
        "KUBE-IPVSPROXY-ANSWERS": [
            "-p tcp -m set --match-set KUBE-IPVSPROXY-TUNNEL src,src -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1440"
        ],
    }


def test_all_tunnel_packets_are_dropped_if_no_other_node_is_known() -> None:
    skeleton = build_skeleton(Family.IPV6, ON, _view(), OCCUPIED - {SetKind.NODES}, ())
    assert next(iter(texts(skeleton, *SCOPE_CHAINS[0]))) == "-p ipv6 -m addrtype --dst-type LOCAL -j DROP"


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES])
def test_tunnelled_packets_of_unknown_senders_are_dropped_even_if_no_node_is_annotated(family: Family, backend: Backend) -> None:
    skeleton = build_skeleton(family, dataclasses.replace(ON, backend=backend), _view(tunnel_ends={}), frozenset(), ())
    outer = {Family.IPV4: "ipencap", Family.IPV6: "ipv6"}[family]
    dropped = f"-p {outer} -m addrtype --dst-type LOCAL -j DROP"
    assert {dropped, f"-i {TUNNEL_DEVICES[family]} -j DROP"} <= set(texts(skeleton, *SCOPE_CHAINS[0]))
    assert set(SCOPE_JUMPS) <= set(skeleton.jumps)


@pytest.mark.parametrize("device", ["tunl0", "eth0"])
def test_rules_guard_only_leftover_tunnel_devices_without_address_if_direct_return_is_off(device: str) -> None:
    left = Settings(guards_tunnels=True)
    view = view_node(left, builders.THIS_NODE, None, [InterfaceAddress(device, parse_address("10.0.0.1"), 32)], ())
    chains = build_skeleton(Family.IPV4, left, view, frozenset(), ()).chains
    assert chains.get(SCOPE_CHAINS[0]) == (
        (Rule(interface=InterfaceMatch("tunl0"), target=Verdict.DROP),) if device == "eth0" else None
    )
    assert SCOPE_CHAINS[0] not in build_skeleton(Family.IPV4, Settings(), view, frozenset(), ()).chains


def test_a_connection_of_a_pod_to_itself_is_masqueraded_whatever_mark_its_packets_have() -> None:
    skeleton = build_skeleton(Family.IPV4, dataclasses.replace(ON, backend=Backend.NFTABLES), _view(), OCCUPIED, ())
    assert list(texts(skeleton, "nat", "KUBE-POSTROUTING"))[:2] == [
        "-m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
        "-m mark ! --mark 0x0/0x3fff -j RETURN",
    ]


def test_no_rule_drops_packets_of_a_tunnel_device_that_another_program_uses() -> None:
    view = _view(shared_tunnel="tunl0")
    assert SCOPE_CHAINS[0] not in build_skeleton(Family.IPV4, ON, view, frozenset(), ()).chains
    assert not [rule for rule in texts(build_skeleton(Family.IPV4, ON, view, OCCUPIED, ()), *SCOPE_CHAINS[0]) if "DROP" in rule]


def test_no_client_gets_direct_return_if_the_rules_cannot_recognise_pods() -> None:
    skeleton = build_skeleton(Family.IPV4, dataclasses.replace(ON, cluster_networks=()), _view(), OCCUPIED, ())
    assert not [rule for rule in texts(skeleton, *SCOPE_CHAINS[0]) if "DIRECT" in rule]


@pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES])
@pytest.mark.parametrize(
    ("client", "expected"),
    [(TracedClient.OUTSIDE, (True, False)), (TracedClient.POD, (False, True)), (TracedClient.HOST, (False, True))],
)
def test_direct_return_is_only_used_for_clients_outside_the_cluster(
    client: TracedClient, expected: tuple[bool, bool], backend: Backend
) -> None:
    settings = dataclasses.replace(ON, backend=backend)
    view = _view(pod_networks=builders.networks("10.244.0.0/24"), elsewhere=frozenset(builders.addresses("10.244.0.1")))
    state = _shop("10.244.0.5", "10.244.1.5", settings=settings, view=view)
    rules = build_skeleton(Family.IPV4, settings, view, OCCUPIED, ())
    key = state.rare.scopes[0].virtual_servers[0]
    way = trace.follow(
        rules, frozenset(state.entries).__contains__, trace.connection_of(client, key, settings, view), has_scopes=True
    )
    assert (way.is_marked, way.is_masqueraded) == expected, "marked, masqueraded"


@pytest.mark.parametrize("balancer", [[], [builders.CLUSTER_IP]], ids=["no address", "its cluster IP"])
def test_direct_return_needs_an_external_address_other_than_the_cluster_ip(
    balancer: list[str],
) -> None:
    given = ServiceAnnotations(given=frozenset({Annotation.DIRECT_RETURN}), direct_return=True)
    service = builders.service("web", kind=ServiceType.LOAD_BALANCER, load_balancer=balancer)
    slice_ = endpoint_slice(endpoint("10.244.0.5"))
    assert state_of(builders.with_options(service, annotations=given), slice_, view=_view(), settings=ON).rare.scopes == ()


def test_slow_start_is_not_used_with_direct_return() -> None:
    state = _shop("10.244.0.5", annotations={"scheduler": "wlc", "slow_start_s": 30})
    assert state.rare.slow_start_s == 0
    assert [one.field for one in state.rare.skipped] == [Annotation.SLOW_START.field]
