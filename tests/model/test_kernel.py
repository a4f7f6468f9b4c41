"""The names and texts of kernel objects, as ipset, ipvsadm and iptables-save print them."""

import pytest

from ipvsproxy.model.kernel import (
    IP_SETS,
    NODE_OWNER,
    SCOPE_KINDS,
    SET_NAME_LIMIT,
    BoundAddresses,
    Device,
    FirewallMark,
    Flow,
    FlowCleaning,
    HealthListener,
    IpSet,
    Owner,
    RealServers,
    SetEntry,
    SetKind,
    SetType,
    Sysctl,
    Timeouts,
    VirtualServerKey,
    mark_entry,
    mark_of,
    network_entry,
)
from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.rules import ChainKey, Jump, Skeleton
from ipvsproxy.model.service import ServiceName
from tests.support import builders

FRONTEND, BACKEND = builders.frontend("10.96.0.10", 443), builders.backend("10.244.0.5", 8443)
FRONTEND_V6 = builders.frontend("fd00::10", 53, Protocol.UDP)


def test_there_are_seventeen_sets_of_each_family_and_three_of_our_own_and_their_names_fit_the_kernel() -> None:
    assert len(IP_SETS) == 2 * (17 + len(SCOPE_KINDS))
    assert max(map(len, IP_SETS)) == SET_NAME_LIMIT == 31
    assert all(IP_SETS[ip_set.name] is ip_set for ip_set in IP_SETS.values())


@pytest.mark.parametrize(
    ("kind", "family", "name"),
    [
        (SetKind.CLUSTER_IP, Family.IPV4, "KUBE-CLUSTER-IP"),
        (SetKind.CLUSTER_IP, Family.IPV6, "KUBE-6-CLUSTER-IP"),
        (SetKind.LOAD_BALANCER_SOURCE_CIDR, Family.IPV6, "KUBE-6-LOAD-BALANCER-SOURCE-CID"),
        (SetKind.NODE_PORT_LOCAL_SCTP, Family.IPV6, "KUBE-6-NODE-PORT-LOCAL-SCTP-HAS"),
    ],
)
def test_sets_are_named_as_operators_know_them(kind: SetKind, family: Family, name: str) -> None:
    assert str(IpSet(kind, family)) == name


def test_a_set_has_the_type_that_its_entries_need() -> None:
    types = {kind: IpSet(kind, Family.IPV6).type for kind in SetKind}
    assert {kind for kind in SetKind if types[kind] is SetType.PORT} == {
        SetKind.NODE_PORT_TCP,
        SetKind.NODE_PORT_LOCAL_TCP,
        SetKind.NODE_PORT_UDP,
        SetKind.NODE_PORT_LOCAL_UDP,
        SetKind.HEALTH_CHECK_NODE_PORT,
    }
    assert {kind for kind in SetKind if types[kind] is SetType.ADDRESS_PORT_ADDRESS} == {
        SetKind.LOOP_BACK,
        SetKind.LOAD_BALANCER_SOURCE_IP,
    }
    assert types[SetKind.LOAD_BALANCER_SOURCE_CIDR] is SetType.ADDRESS_PORT_NETWORK
    assert types[SetKind.IPVS_IPS] is SetType.ADDRESS
    assert types[SetKind.NODE_PORT_SCTP] is types[SetKind.CLUSTER_IP] is SetType.ADDRESS_PORT


IP = parse_address("10.0.0.1")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (SetEntry("KUBE-NODE-PORT-TCP", port=30080), "30080"),
        (SetEntry("KUBE-IPVS-IPS", IP), "10.0.0.1"),
        (SetEntry("KUBE-CLUSTER-IP", IP, Protocol.UDP, 53), "10.0.0.1,udp:53"),
        (SetEntry("KUBE-LOOP-BACK", IP, Protocol.SCTP, 80, IP), "10.0.0.1,sctp:80,10.0.0.1"),
        (network_entry("S", FRONTEND, parse_network("192.0.2.0/24")), "10.96.0.10,tcp:443,192.0.2.0/24"),
        (network_entry("S", FRONTEND, parse_network("192.0.2.7/32")), "10.96.0.10,tcp:443,192.0.2.7"),
        (network_entry("S", FRONTEND_V6, parse_network("2001:db8::/32")), "fd00::10,udp:53,2001:db8::/32"),
        (network_entry("S", FRONTEND_V6, parse_network("2001:db8::7/128")), "fd00::10,udp:53,2001:db8::7"),
    ],
)
def test_entries_are_written_as_ipset_prints_them(entry: SetEntry, text: str) -> None:
    assert str(entry) == text


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (FRONTEND, "TCP 10.96.0.10:443"),
        (FRONTEND_V6, "UDP [fd00::10]:53"),
        (BACKEND, "10.244.0.5:8443"),
        (RealServers.of(FRONTEND, BACKEND), "TCP 10.96.0.10:443 -> 10.244.0.5:8443"),
        (Device("kube-ipvs0"), "kube-ipvs0"),
        (BoundAddresses.of(IP), "10.0.0.1"),
        (Sysctl("net/ipv4/ip_forward", "1"), "net/ipv4/ip_forward = 1"),
        (Timeouts(900, 120, 300), "timeouts 900 120 300"),
        (HealthListener(Family.IPV6, 30000, ServiceName("shop", "web")), "health check port 30000 (IPv6) of shop/web"),
        (FlowCleaning(Flow(Family.IPV4, Protocol.UDP, IP, 53), frozenset()), "UDP flows to 10.0.0.1:53 (IPv4)"),
        (ChainKey("nat", "KUBE-SERVICES"), "nat/KUBE-SERVICES"),
        (Jump("nat", "OUTPUT", "KUBE-SERVICES", "portals"), "nat/OUTPUT -> KUBE-SERVICES"),
        (Skeleton(family=Family.IPV6, chains={}, jumps=()), "IPv6 rules"),
        (Owner(7, ServiceName("shop", "web")), "shop/web"),
        (NODE_OWNER, "(node)"),
    ],
)
def test_each_kernel_object_has_a_text_for_operators(item: object, text: str) -> None:
    assert str(item) == text


@pytest.mark.parametrize(
    ("observed", "exactly", "at_least"), [("4", True, True), ("5", False, True), ("3", False, False), ("", False, False)]
)
def test_a_setting_that_is_a_lower_bound_accepts_larger_numbers(observed: str, exactly: bool, at_least: bool) -> None:  # noqa: FBT001 - a table
    assert Sysctl("x", "4").is_met_by(observed) is exactly
    assert Sysctl("x", "4", at_least=True).is_met_by(observed) is at_least


def test_the_older_service_comes_first_then_the_name_and_the_node_before_all() -> None:
    older, younger, namesake = (Owner(age, ServiceName(*name)) for age, name in ((1, "bb"), (2, "aa"), (2, "ab")))
    assert sorted([namesake, younger, older, NODE_OWNER]) == [NODE_OWNER, older, younger, namesake]
    assert older.service == ServiceName("b", "b")


@pytest.mark.parametrize("family", Family)
def test_the_entry_that_shows_whose_a_mark_is_names_it(family: Family) -> None:
    key = FirewallMark.of(family, 0xFFFF3FFF)
    entry = mark_entry(key)
    assert IP_SETS[entry.set] == IpSet(SetKind.MARKS, family)
    assert mark_of(entry) == key
    assert mark_of(SetEntry(IpSet(SetKind.CLUSTER_IP, family).name, entry.address)) is None


def test_a_mark_is_no_address_with_a_port() -> None:
    mark = FirewallMark.of(Family.IPV4, 80)
    assert mark != VirtualServerKey(mark.protocol, mark.address, mark.port)
    assert str(mark) == "mark 0x50 (IPv4)"
