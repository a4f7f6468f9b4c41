"""How a new process recognises our virtual servers. What a running process remembers is tested in ``test_table``."""

import msgspec
import pytest

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.sets import IP_SETS, ForeignElement, SetKind, mark_entry
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.reconcile.virtual_servers import ownership
from tests.reconcile import examples
from tests.support import builders

KEY = builders.frontend("10.96.0.1", 80)
NODE_PORT = builders.frontend(builders.NODE_ADDRESS, 30080)
HOST = builders.addresses(builders.NODE_ADDRESS)


def test_all_virtual_servers_of_an_address_on_our_device_belong_to_ipvsproxy() -> None:
    is_ours = ownership.owned_virtual_servers({}, {KEY.address}, HOST)
    assert is_ours(KEY)
    assert is_ours(builders.frontend("10.96.0.1", 9))
    assert not is_ours(builders.frontend("10.96.0.2", 80))


@pytest.mark.parametrize(
    "kind",
    [SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER, SetKind.NODE_PORT_SCTP],
)
def test_a_set_entry_proves_ownership_only_of_the_virtual_server_that_it_names(kind: SetKind) -> None:
    entry = examples.entry(kind, KEY)
    is_ours = ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST)
    assert is_ours(KEY)
    assert not is_ours(msgspec.structs.replace(KEY, port=81))
    assert not is_ours(msgspec.structs.replace(KEY, protocol=Protocol.UDP))


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        (SetKind.LOOP_BACK, "10.96.0.1"),
        (SetKind.LOAD_BALANCER_SOURCE_IP, "10.96.0.1"),
        (SetKind.LOAD_BALANCER_FIREWALL, None),
    ],
)
def test_entries_that_name_a_pod_or_name_a_client_or_only_restrict_traffic_prove_no_ownership(
    kind: SetKind, other: str | None
) -> None:
    entry = examples.entry(kind, KEY, other)
    assert not ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST)(KEY)


@pytest.mark.parametrize(("kind", "protocol"), [(SetKind.NODE_PORT_TCP, Protocol.TCP), (SetKind.NODE_PORT_UDP, Protocol.UDP)])
def test_a_node_port_in_our_set_proves_that_its_virtual_servers_on_host_addresses_are_ours(
    kind: SetKind, protocol: Protocol
) -> None:
    entry = examples.port_entry(kind, 30080)
    is_ours = ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST)
    assert is_ours(msgspec.structs.replace(NODE_PORT, protocol=protocol))
    assert not is_ours(msgspec.structs.replace(NODE_PORT, protocol=Protocol.SCTP))
    assert not is_ours(msgspec.structs.replace(NODE_PORT, protocol=protocol, port=30081))
    assert not is_ours(VirtualServerKey(protocol, parse_address("203.0.113.9"), 30080))


def test_a_node_port_entry_does_not_prove_ownership_in_the_other_family() -> None:
    entry = examples.port_entry(SetKind.NODE_PORT_TCP, 30080, Family.IPV6)
    assert not ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST)(NODE_PORT)


POD, OTHER_POD = builders.backend("10.244.0.5", 8080), builders.backend("10.244.1.6", 8080)
LEFT_BEHIND = builders.frontend("203.0.113.9", 30080)
SERVED = examples.observed({POD: 1, OTHER_POD: 1})


@pytest.mark.parametrize(
    ("observed", "is_ours"),
    [
        (SERVED, True),
        (examples.observed({POD: 0, OTHER_POD: 1}), True),
        (examples.observed({POD: 1}), False),
        (examples.observed({builders.backend(builders.NODE_ADDRESS, 30080): 1, POD: 1}), False),
        (examples.observed({POD: 1, OTHER_POD: 1}, settings=VirtualServerSettings("wlc")), False),
        (examples.observed({}), False),
    ],
    ids=["the same", "one drains", "fewer", "hosts", "another scheduler", "none"],
)
def test_a_node_port_on_a_lost_address_is_ours_only_if_it_equals_one_of_our_virtual_servers(
    observed: ObservedVirtualServer, *, is_ours: bool
) -> None:
    entry = examples.port_entry(SetKind.NODE_PORT_TCP, 30080)
    found = {NODE_PORT: SERVED, LEFT_BEHIND: observed}
    assert ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST, found)(LEFT_BEHIND) == is_ours
    assert not ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST)(LEFT_BEHIND)
    assert not ownership.owned_virtual_servers({}, (), HOST, found)(LEFT_BEHIND), "no node port of ours"
    assert not ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST, {LEFT_BEHIND: observed})(LEFT_BEHIND), "no twin"


def test_a_copy_of_our_virtual_server_is_not_ours_if_it_has_no_real_server_or_one_on_this_host() -> None:
    entry = examples.port_entry(SetKind.NODE_PORT_TCP, 30080)
    for alike in (examples.observed({}), examples.observed({builders.backend(builders.NODE_ADDRESS, 443): 1})):
        found = {NODE_PORT: alike, LEFT_BEHIND: alike}
        assert not ownership.owned_virtual_servers({entry.set: {entry}}, (), HOST, found)(LEFT_BEHIND)


KEEPALIVED = builders.frontend("172.18.0.77", 30080)


@pytest.mark.parametrize(
    ("ranges", "address", "is_ours"),
    [
        (["172.18.0.2/32"], "172.18.0.77", False),
        (["172.18.0.0/24"], "172.18.0.77", True),
        (["0.0.0.0/0", "::/0"], "172.18.0.77", True),
        ([], "172.18.0.77", False),
        (["0.0.0.0/0"], "127.0.0.1", False),
        (["::/0"], "fe80::1", False),
        (["fe80::/64"], "fe80::1", True),
    ],
)
def test_a_node_port_proves_ownership_only_on_addresses_that_serve_node_ports(
    ranges: list[str], address: str, *, is_ours: bool
) -> None:
    entries = [examples.port_entry(SetKind.NODE_PORT_TCP, 30080, family) for family in Family]
    sets = {entry.set: {entry} for entry in entries}
    host = {*HOST, parse_address(address)}
    key = builders.frontend(address, 30080)
    found = {key: examples.observed({builders.backend("192.0.2.50"): 1}), NODE_PORT: SERVED}
    known = ownership.owned_virtual_servers(sets, (), host, found, builders.networks(*ranges))
    assert known(key) == is_ours


def test_a_node_port_of_a_former_process_is_ours_if_our_cluster_ip_has_the_same_real_servers() -> None:
    entry = examples.port_entry(SetKind.NODE_PORT_TCP, 30080)
    host = {*HOST, KEEPALIVED.address}
    found = {KEY: SERVED, NODE_PORT: SERVED, KEEPALIVED: examples.observed({POD: 1})}
    is_ours = ownership.owned_virtual_servers({entry.set: {entry}}, {KEY.address}, host, found, ())
    assert is_ours(NODE_PORT)
    assert not is_ours(KEEPALIVED), "it leads elsewhere"
    foreign = {NODE_PORT: SERVED, KEEPALIVED: SERVED}
    is_ours = ownership.owned_virtual_servers({entry.set: {entry}}, (), host, foreign, ())
    assert not is_ours(NODE_PORT), "two of somebody else may well lead to one place"
    assert not is_ours(KEEPALIVED)


def test_a_set_entry_names_a_virtual_server_or_a_node_port_or_neither() -> None:
    health_check = examples.port_entry(SetKind.HEALTH_CHECK_NODE_PORT, 30080)
    node_port = examples.port_entry(SetKind.NODE_PORT_LOCAL_UDP, 30080, Family.IPV6)
    cluster_ip = examples.entry(SetKind.CLUSTER_IP, KEY)
    assert [ownership.virtual_server_of(entry) for entry in (cluster_ip, node_port, health_check)] == [KEY, None, None]
    assert [ownership.node_port_of(entry) for entry in (cluster_ip, node_port, health_check)] == [
        None,
        (Family.IPV6, Protocol.UDP, 30080),
        None,
    ]
    assert ownership.virtual_server_of(examples.bound_entry("10.96.0.1")) is None
    for name in IP_SETS:
        assert (ownership.virtual_server_of(ForeignElement(name)), ownership.node_port_of(ForeignElement(name))) == (None, None)


def test_witnesses_of_an_existing_virtual_server_must_not_be_removed() -> None:
    witnesses = ownership.Witnesses([KEY, NODE_PORT])
    assert witnesses.need(examples.entry(SetKind.CLUSTER_IP, KEY))
    assert witnesses.need(examples.port_entry(SetKind.NODE_PORT_TCP, 30080))
    assert witnesses.need(examples.bound_entry("10.96.0.1"))
    assert witnesses.addresses == {KEY.address, NODE_PORT.address}


def test_entries_without_an_existing_virtual_server_may_be_removed() -> None:
    witnesses = ownership.Witnesses([KEY, NODE_PORT])
    assert not witnesses.need(examples.entry(SetKind.CLUSTER_IP, msgspec.structs.replace(KEY, port=81)))
    assert not witnesses.need(examples.port_entry(SetKind.NODE_PORT_UDP, 30080))
    assert not witnesses.need(examples.port_entry(SetKind.HEALTH_CHECK_NODE_PORT, 30080))
    assert not any(witnesses.need(ForeignElement(name)) for name in IP_SETS)
    assert not witnesses.need(examples.bound_entry("10.96.0.2"))
    assert not ownership.Witnesses([]).need(examples.entry(SetKind.CLUSTER_IP, KEY))


def test_the_only_witness_of_a_virtual_server_by_mark_is_the_entry_with_its_mark_and_family() -> None:
    witnesses = ownership.Witnesses([FirewallMark.of(Family.IPV4, 30080)])
    entries = [mark_entry(FirewallMark.of(family, mark)) for family in Family for mark in (30080, 30081)]
    assert [witnesses.need(entry) for entry in entries] == [True, False, False, False]
    assert not witnesses.need(examples.port_entry(SetKind.NODE_PORT_TCP, 30080))
    assert not witnesses.addresses
