"""Covers the names and types of sets, and the text of an entry, which equals the text that ipset prints."""

import pytest

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.sets import (
    IP_SETS,
    SCOPE_KINDS,
    SET_NAME_LIMIT,
    IpSet,
    SetEntry,
    SetKind,
    SetType,
    mark_entry,
    mark_of,
)
from ipvsproxy.model.virtual_servers import FirewallMark

IP, IP_V6 = parse_address("10.0.0.1"), parse_address("fd00::10")


def test_each_family_has_seventeen_sets_of_kube_proxy_and_no_set_name_exceeds_31_characters() -> None:
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
def test_sets_have_the_names_that_operators_know_from_kube_proxy(kind: SetKind, family: Family, name: str) -> None:
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


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (SetEntry("KUBE-NODE-PORT-TCP", port=30080), "30080"),
        (SetEntry("KUBE-IPVS-IPS", IP), "10.0.0.1"),
        (SetEntry("KUBE-CLUSTER-IP", IP, Protocol.UDP, 53), "10.0.0.1,udp:53"),
        (SetEntry("KUBE-LOOP-BACK", IP, Protocol.SCTP, 80, IP), "10.0.0.1,sctp:80,10.0.0.1"),
        (SetEntry("S", IP, Protocol.TCP, 443, parse_address("192.0.2.0"), 24), "10.0.0.1,tcp:443,192.0.2.0/24"),
        (SetEntry("S", IP, Protocol.TCP, 443, IP, 32), "10.0.0.1,tcp:443,10.0.0.1"),
        (SetEntry("S", IP_V6, Protocol.UDP, 53, parse_address("2001:db8::"), 32), "fd00::10,udp:53,2001:db8::/32"),
        (SetEntry("S", IP_V6, Protocol.UDP, 53, IP_V6, 128), "fd00::10,udp:53,fd00::10"),
    ],
)
def test_entries_are_written_as_ipset_prints_them(entry: SetEntry, text: str) -> None:
    assert str(entry) == text


@pytest.mark.parametrize("family", Family)
def test_a_firewall_mark_can_be_read_from_its_set_entry(family: Family) -> None:
    key = FirewallMark.of(family, 0xFFFF3FFF)
    entry = mark_entry(key)
    assert IP_SETS[entry.set] == IpSet(SetKind.MARKS, family)
    assert mark_of(entry) == key
    assert mark_of(SetEntry(IpSet(SetKind.CLUSTER_IP, family).name, entry.address)) is None
