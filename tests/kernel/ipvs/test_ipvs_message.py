"""IPVS messages: a template encodes the same bytes as pyroute2 does for the same values."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.generic import ipvs

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Address, Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb, one_by_one
from ipvsproxy.model.real_servers import NO_THRESHOLDS, EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.virtual_servers import PERSISTENT, RealServers, VirtualServer, VirtualServerKey, VirtualServerSettings

FAMILY_NUMBER = 33
ENCODER = ipvs_message.Encoder(FAMILY_NUMBER)
NETMASKS = {0: "255.255.255.255", 1: "128.0.0.0", 24: "255.255.255.0", 32: "255.255.255.255"}
PORTS = st.integers(0, 65535)
U32 = st.integers(0, 0xFFFFFFFF)


def addresses(family: Family) -> st.SearchStrategy[Address]:
    size = family.bits // 8
    return st.binary(min_size=size, max_size=size).map(Address)


@st.composite
def real_servers(draw: st.DrawFn) -> RealServers:
    family = draw(st.sampled_from(Family))
    key = VirtualServerKey(draw(st.sampled_from(Protocol)), draw(addresses(family)), draw(PORTS))
    real_server = RealServers.of(key, RealServerKey.of(draw(addresses(family)), draw(PORTS)), draw(U32))
    return real_server._replace(thresholds=draw(st.sampled_from([NO_THRESHOLDS, Thresholds(7), Thresholds(1_000_000, 65536)])))


@st.composite
def virtual_servers(draw: st.DrawFn) -> VirtualServer:
    key = draw(real_servers()).virtual_server
    scheduler = draw(st.sampled_from(["rr", "wrr", "mh", "a%b", "x" * 15]))
    prefix_length = draw(st.sampled_from([0, 1, 24, 32]))
    return VirtualServer(key, VirtualServerSettings(scheduler, draw(U32) & ~2, draw(U32), prefix_length))


def plain(command: int, attributes: list[object]) -> bytes:
    """The message as pyroute2 encodes it."""
    expected = ipvs.ipvsmsg()
    expected["cmd"] = command
    expected["version"] = 1
    expected["attrs"] = attributes
    return message.encode(expected, FAMILY_NUMBER, netlink.REQUEST)


def service(key: VirtualServerKey) -> list[list[object]]:
    return [
        ["IPVS_SVC_ATTR_AF", int(key.address.family)],
        ["IPVS_SVC_ATTR_PROTOCOL", int(key.protocol)],
        ["IPVS_SVC_ATTR_ADDR", str(key.address)],
        ["IPVS_SVC_ATTR_PORT", key.port],
    ]


def destination(item: RealServers, *, whole: bool) -> list[object]:
    attributes: list[list[object]] = [
        ["IPVS_DEST_ATTR_ADDR_FAMILY", int(item.key.address.family)],
        ["IPVS_DEST_ATTR_ADDR", str(item.key.address)],
        ["IPVS_DEST_ATTR_PORT", item.key.port],
    ]
    if whole:
        attributes += [
            ["IPVS_DEST_ATTR_FWD_METHOD", 0],
            ["IPVS_DEST_ATTR_WEIGHT", item.weight],
            ["IPVS_DEST_ATTR_U_THRESH", item.thresholds.upper],
            ["IPVS_DEST_ATTR_L_THRESH", item.thresholds.lower],
        ]
    return [["IPVS_CMD_ATTR_SERVICE", {"attrs": service(item.virtual_server)}], ["IPVS_CMD_ATTR_DEST", {"attrs": attributes}]]


def encode(*operations: Operation) -> list[bytes]:
    return ENCODER.encode(operations)


@given(real_servers(), st.sampled_from([(Verb.ADD, ipvs.IPVS_CMD_NEW_DEST), (Verb.SET, ipvs.IPVS_CMD_SET_DEST)]))
def test_a_real_server_is_encoded_to_the_same_bytes_as_with_pyroute2(item: RealServers, verb: tuple[Verb, int]) -> None:
    assert encode(Operation(verb[0], item)) == [plain(verb[1], destination(item, whole=True))]
    removal = plain(ipvs.IPVS_CMD_DEL_DEST, destination(item, whole=False))
    assert encode(Operation(Verb.REMOVE, item)) == [removal]


@given(virtual_servers(), st.sampled_from([(Verb.ADD, ipvs.IPVS_CMD_NEW_SERVICE), (Verb.SET, ipvs.IPVS_CMD_SET_SERVICE)]))
def test_a_virtual_server_is_encoded_to_the_same_bytes_as_with_pyroute2(item: VirtualServer, verb: tuple[Verb, int]) -> None:
    settings = [
        ["IPVS_SVC_ATTR_SCHED_NAME", item.settings.scheduler],
        ["IPVS_SVC_ATTR_FLAGS", {"flags": item.settings.flags, "mask": 0xFFFFFFFF}],
        ["IPVS_SVC_ATTR_TIMEOUT", item.settings.timeout_s],
        ["IPVS_SVC_ATTR_NETMASK", NETMASKS[item.settings.prefix_length]],
    ]
    expected = plain(verb[1], [["IPVS_CMD_ATTR_SERVICE", {"attrs": [*service(item.key), *settings]}]])
    if item.key.address.family is Family.IPV6:
        expected = expected[:-4] + struct.pack("=I", item.settings.prefix_length or 128)
    assert encode(Operation(verb[0], item)) == [expected]
    removal = plain(ipvs.IPVS_CMD_DEL_SERVICE, [["IPVS_CMD_ATTR_SERVICE", {"attrs": service(item.key)}]])
    assert encode(Operation(Verb.REMOVE, item)) == [removal]


def test_the_hashed_flag_is_never_sent_because_only_the_kernel_may_set_it() -> None:
    key = VirtualServerKey(Protocol.TCP, parse_address("10.0.0.1"), 80)
    one, other = (VirtualServer(key, VirtualServerSettings("rr", flags)) for flags in (0x11, 0x13))
    assert encode(Operation(Verb.SET, one)) == encode(Operation(Verb.SET, other))


@given(st.lists(real_servers() | virtual_servers(), max_size=8))
def test_encoding_operations_of_several_kinds_together_gives_the_same_messages_as_encoding_each_operation_alone(
    items: list[RealServers | VirtualServer],
) -> None:
    operations = [Operation(Verb.ADD, item) for item in items]
    alone = [encode(operation)[0] for operation in operations]
    assert encode(*operations) == alone


@given(st.lists(real_servers(), min_size=1, max_size=8, unique_by=lambda item: item.key), virtual_servers())
def test_encoding_several_real_servers_together_gives_the_same_messages_as_encoding_each_real_server_alone(
    items: list[RealServers], last: VirtualServer
) -> None:
    key = items[0].virtual_server
    several = RealServers(key, EvenWeights.of([item.key for item in items if item.key.address.family is key.address.family]))
    alone = [*one_by_one([Operation(Verb.ADD, several)]), Operation(Verb.ADD, last)]
    assert encode(Operation(Verb.ADD, several), Operation(Verb.ADD, last)) == encode(*alone)


@pytest.mark.parametrize(
    ("family", "prefix_length", "packed"),
    [(Family.IPV4, 24, b"\xff\xff\xff\0"), (Family.IPV6, 64, struct.pack("=I", 64)), (Family.IPV6, 127, struct.pack("=I", 127))],
)
def test_the_netmask_of_affinity_is_a_mask_for_ipv4_and_a_prefix_length_for_ipv6(
    family: Family, prefix_length: int, packed: bytes
) -> None:
    key = VirtualServerKey(Protocol.TCP, Address(bytes(family.bits // 8)), 80)
    settings = VirtualServerSettings("rr", PERSISTENT, 300, prefix_length)
    (sent,) = encode(Operation(Verb.ADD, VirtualServer(key, settings)))
    assert sent.endswith(packed)
    assert ipvs_rows.settings_of(family, b"rr\0", PERSISTENT, 300, packed) == settings


def test_a_timeout_of_zero_is_not_encoded() -> None:
    (data,) = encode(Operation(Verb.SET, Timeouts(900, 0, 300)))
    found = message.attributes(data, 20, len(data))
    assert {kind: struct.unpack_from("=I", data, at[0])[0] for kind, at in found.items()} == {4: 900, 6: 300}


VIRTUAL = VirtualServerKey(Protocol.TCP, parse_address("10.0.0.1"), 80)


@pytest.mark.parametrize(
    "item",
    [
        RealServers.of(VIRTUAL, RealServerKey.of(parse_address("10.1.0.1"), 80), -1),
        VirtualServer(VIRTUAL, VirtualServerSettings("")),
        VirtualServer(VIRTUAL, VirtualServerSettings("x" * 16)),
    ],
)
def test_a_value_that_is_too_long_for_its_field_is_an_error_and_is_not_truncated(item: RealServers | VirtualServer) -> None:
    with pytest.raises((ValueError, struct.error)):
        encode(Operation(Verb.ADD, item))


def test_the_number_of_cached_templates_is_limited_even_if_many_different_thresholds_occur() -> None:
    encoder = ipvs_message.Encoder(FAMILY_NUMBER)
    item = RealServers.of(VIRTUAL, RealServerKey.of(parse_address("10.1.0.1"), 80))
    for number in range(ipvs_message.TEMPLATES_KEPT + 9):
        encoder.encode([Operation(Verb.SET, item._replace(thresholds=Thresholds(number + 1)))])
    assert encoder._destination.cache_info().currsize == ipvs_message.TEMPLATES_KEPT
