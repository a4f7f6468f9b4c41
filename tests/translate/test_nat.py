"""Masquerading by connection: if the backend supports this method, rules look up the client's original destination in a set.

``test_skeleton`` tests masquerading by mark. The tests in this module and the packets of ``tests/packets`` show that both
methods, by connection and by mark, masquerade the same clients.
"""

import dataclasses
import itertools

import pytest

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.rules import Backend, ChainKey, InvertMark, SetMark
from ipvsproxy.model.sets import SCOPE_KINDS, SetKind
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.trace import TracedClient
from ipvsproxy.translate.translation_settings import Binding, LocalMode, Settings
from tests.support import builders
from tests.translate import reading

PODS = "10.244.0.0/16"
BY_CLUSTER = Settings(backend=Backend.NFTABLES, cluster_networks=builders.networks(PODS))
MASQUERADE = "-j MASQUERADE --random-fully"


def _cluster_rules(settings: Settings, family: Family = Family.IPV4) -> list[str]:
    rules = reading.texts(reading.skeleton_of(family=family, settings=settings), "nat", "KUBE-POSTROUTING")
    return [text for text in rules if "CLUSTER-IP" in text]


def test_the_rules_of_a_node_do_not_depend_on_the_entries_of_its_sets() -> None:
    empty = skeleton.build_skeleton(Family.IPV4, BY_CLUSTER, builders.node_view(), set(), [])
    full = skeleton.build_skeleton(Family.IPV4, BY_CLUSTER, builders.node_view(), set(SetKind) - SCOPE_KINDS, [])
    assert empty == full


@pytest.mark.parametrize("family", Family)
def test_without_scopes_no_rule_reads_or_writes_the_mark_of_a_packet(family: Family) -> None:
    rules = skeleton.build_skeleton(family, BY_CLUSTER, builders.node_view(), set(SetKind) - SCOPE_KINDS, [])
    assert ChainKey("nat", "KUBE-MARK-MASQ") not in rules.chains
    for rule in itertools.chain(*rules.chains.values()):
        assert (rule.mark, rule.not_mark, rule.any_mark, rule.no_mark) == (None,) * 4
        assert not isinstance(rule.target, SetMark | InvertMark)


def test_the_chain_before_ipvs_accepts_connections_to_service_addresses_and_does_nothing_else() -> None:
    assert reading.outline(reading.skeleton_of(settings=BY_CLUSTER), "nat", "KUBE-SERVICES") == [
        ("", "RETURN"),
        ("KUBE-LOAD-BALANCER", "ACCEPT"),
        ("KUBE-CLUSTER-IP", "ACCEPT"),
        ("KUBE-EXTERNAL-IP", "ACCEPT"),
        ("KUBE-EXTERNAL-IP-LOCAL", "ACCEPT"),
        ("KUBE-NODE-PORT-TCP", "ACCEPT"),
        ("KUBE-NODE-PORT-UDP", "ACCEPT"),
        ("KUBE-NODE-PORT-SCTP-HASH", "ACCEPT"),
    ]


def test_postrouting_rules_compare_sets_with_the_destination_that_the_client_chose() -> None:
    rules = reading.skeleton_of(settings=BY_CLUSTER)
    assert [text.split("-m set ")[-1] for text in reading.texts(rules, "nat", "KUBE-POSTROUTING")] == [
        "--match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE",
        "--match-set KUBE-LOAD-BALANCER origdst,origdst -j KUBE-LOAD-BALANCER",
        f"--match-set KUBE-CLUSTER-IP origdst,origdst {MASQUERADE}",
        f"--match-set KUBE-EXTERNAL-IP origdst,origdst {MASQUERADE}",
        f"-m conntrack --ctorigdst {builders.NODE_ADDRESS} -j KUBE-NODE-PORT",
    ]
    assert [text.split("-m set ")[-1] for text in reading.texts(rules, "nat", "KUBE-NODE-PORT")] == [
        "--match-set KUBE-NODE-PORT-LOCAL-TCP origdst -j RETURN",
        f"--match-set KUBE-NODE-PORT-TCP origdst {MASQUERADE}",
        "--match-set KUBE-NODE-PORT-LOCAL-UDP origdst -j RETURN",
        f"--match-set KUBE-NODE-PORT-UDP origdst {MASQUERADE}",
        "--match-set KUBE-NODE-PORT-LOCAL-SCTP-HASH origdst,origdst -j RETURN",
        f"--match-set KUBE-NODE-PORT-SCTP-HASH origdst,origdst {MASQUERADE}",
    ]
    assert [text.split("-m set ")[-1] for text in reading.texts(rules, "nat", "KUBE-LOAD-BALANCER")] == [
        "--match-set KUBE-LOAD-BALANCER-LOCAL origdst,origdst -j RETURN",
        MASQUERADE,
    ]


def test_connections_to_node_ports_are_accepted_only_on_addresses_with_node_ports() -> None:
    texts = reading.texts(reading.skeleton_of(settings=BY_CLUSTER), "nat", "KUBE-SERVICES")
    kept = [text for text in texts if "NODE-PORT" in text]
    assert len(kept) == 3
    assert all(f"--ctorigdst {builders.NODE_ADDRESS} " in text for text in kept)
    assert [text.rpartition("--match-set ")[2] for text in kept] == [
        "KUBE-NODE-PORT-TCP dst -j ACCEPT",
        "KUBE-NODE-PORT-UDP dst -j ACCEPT",
        "KUBE-NODE-PORT-SCTP-HASH dst,dst -j ACCEPT",
    ]


def test_each_address_with_node_ports_has_a_jump_to_the_node_port_chain() -> None:
    view = builders.node_view()
    addresses = builders.addresses("192.0.2.10", "192.0.2.11")
    view = dataclasses.replace(view, node_port_addresses={**view.node_port_addresses, Family.IPV4: addresses})
    texts = reading.texts(reading.skeleton_of(settings=BY_CLUSTER, view=view), "nat", "KUBE-POSTROUTING")
    assert [text for text in texts if "NODE-PORT" in text] == [
        f"-m conntrack --ctorigdst {address} -j KUBE-NODE-PORT" for address in addresses
    ]


@pytest.mark.parametrize("masquerade_all", [False, True])
def test_detecting_pods_by_interface_adds_a_rule_for_this_host_unless_masquerade_all_is_set(*, masquerade_all: bool) -> None:
    settings = Settings(detect_local=LocalMode.BRIDGE_INTERFACE, local_interface="cbr0", masquerade_all=masquerade_all)
    of_cluster_ips = "-m set --match-set KUBE-CLUSTER-IP origdst,origdst"
    assert _cluster_rules(dataclasses.replace(settings, backend=Backend.NFTABLES)) == (
        [f"{of_cluster_ips} {MASQUERADE}"]
        if masquerade_all
        else [f"! -i cbr0 {of_cluster_ips} {MASQUERADE}", f"{of_cluster_ips} -m addrtype --src-type LOCAL {MASQUERADE}"]
    )


def test_a_rule_masquerades_ipv6_connections_from_local_addresses_if_service_addresses_have_routes() -> None:
    settings = dataclasses.replace(BY_CLUSTER, binding=Binding.ROUTES)
    *_, last = _cluster_rules(settings, Family.IPV6)
    assert last == f"-m set --match-set KUBE-6-CLUSTER-IP origdst,origdst -m addrtype --src-type LOCAL {MASQUERADE}"


@pytest.mark.parametrize("client", TracedClient)
@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        BY_CLUSTER,
        Settings(),
        Settings(masquerade_all=True),
        Settings(detect_local=LocalMode.NODE_CIDR),
        Settings(detect_local=LocalMode.BRIDGE_INTERFACE, local_interface="cbr0"),
        Settings(detect_local=LocalMode.INTERFACE_NAME_PREFIX, local_interface="veth"),
    ],
)
@pytest.mark.parametrize("protocol", Protocol)
def test_both_bindings_masquerade_the_same_clients_for_every_kind_of_address(
    client: TracedClient, settings: Settings, protocol: Protocol, *, is_local: bool
) -> None:
    service = reading.exposed(protocol, is_local=is_local)
    for address, port in (
        (builders.CLUSTER_IP, 80),
        (builders.NODE_ADDRESS, 30080),
        ("192.0.2.80", 80),
        ("192.0.2.90", 80),
    ):
        key = builders.frontend(address, port, protocol)
        by_mark, by_connection = (
            reading.traced(service, key, client, dataclasses.replace(settings, backend=backend)).is_masqueraded
            for backend in (Backend.IPTABLES, Backend.NFTABLES)
        )
        assert by_connection == by_mark, key
