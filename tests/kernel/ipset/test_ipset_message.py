"""Messages with set entries: decoding an encoded entry gives the same entry, and one message carries many entries."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipvsproxy.kernel.base import message, sets_driver
from ipvsproxy.kernel.base.sets_driver import EncodedEntry
from ipvsproxy.kernel.ipset import ipset_message
from ipvsproxy.model.net import Address, Family, Protocol, parse_address
from ipvsproxy.model.sets import IP_SETS, IpSet, MarkedEntry, SetEntry, SetKind, SetType

PORTS = st.integers(0, 65535)


@st.composite
def entries(draw: st.DrawFn) -> SetEntry:
    ip_set = draw(st.sampled_from(list(IP_SETS.values())))
    size = ip_set.family.bits // 8
    addresses = st.binary(min_size=size, max_size=size).map(Address)
    if ip_set.type is SetType.PORT:
        return SetEntry(ip_set.name, port=draw(PORTS))
    if ip_set.type is SetType.ADDRESS:
        return SetEntry(ip_set.name, draw(addresses))
    entry = SetEntry(ip_set.name, draw(addresses), draw(st.sampled_from(Protocol)), draw(PORTS))
    if ip_set.gives_marks:
        marks = st.integers(0, 0xFFFFFFFF)
        return MarkedEntry(entry.set, entry.address, entry.protocol, entry.port, mark=draw(marks), mask=draw(marks))
    if ip_set.type is SetType.ADDRESS_PORT:
        return entry
    entry = msgspec.structs.replace(entry, other=draw(addresses))
    if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
        return entry
    return msgspec.structs.replace(entry, prefix_length=draw(st.integers(0, ip_set.family.bits)))


@given(entries())
def test_decoding_an_encoded_entry_gives_the_same_entry(entry: SetEntry) -> None:
    codec = ipset_message.codec(entry.set)
    data = codec.encode(entry)
    assert codec.decode(data, 4, len(data)) == entry


def test_a_message_with_the_maximum_number_of_entries_is_shorter_than_the_limit_of_a_netlink_attribute() -> None:
    for ip_set in IP_SETS.values():
        entry = entry_of(ip_set)
        encoded = EncodedEntry(entry, ipset_message.codec(ip_set.name).encode(entry))
        first, *_ = sets_driver.in_messages([encoded] * 10_000)
        assert 50_000 < len(first) * len(encoded.encoded) <= sets_driver.MESSAGE_LIMIT < 1 << 16


def entry_of(ip_set: IpSet) -> SetEntry:
    address = Address(bytes(ip_set.family.bits // 8))
    if ip_set.gives_marks:
        return MarkedEntry(ip_set.name, address, Protocol.TCP, 80, mark=0x12, mask=0x3FFF)
    return SetEntry(ip_set.name, address, Protocol.TCP, 80, address, 24)


@pytest.mark.parametrize(
    "entry",
    [
        SetEntry("KUBE-CLUSTER-IP"),
        SetEntry("KUBE-CLUSTER-IP", parse_address("fd00::1"), Protocol.TCP, 80),
        SetEntry("KUBE-CLUSTER-IP", parse_address("10.0.0.1"), None, 80),
        SetEntry("KUBE-CLUSTER-IP", parse_address("10.0.0.1"), Protocol.TCP, 65536),
        SetEntry("KUBE-LOOP-BACK", parse_address("10.0.0.1"), Protocol.TCP, 80),
        SetEntry("KUBE-LOOP-BACK", parse_address("10.0.0.1"), Protocol.TCP, 80, parse_address("fd00::1")),
        SetEntry("KUBE-NODE-PORT-TCP", port=65536),
    ],
)
def test_an_entry_that_does_not_fit_its_set_is_refused(entry: SetEntry) -> None:
    with pytest.raises((ValueError, struct.error)):
        ipset_message.codec(entry.set).encode(entry)


@pytest.mark.parametrize("family", Family)
def test_an_entry_with_an_unknown_protocol_or_format_is_ignored(family: Family) -> None:
    codec = ipset_message.codec(IpSet(SetKind.CLUSTER_IP, family).name)
    data = codec.encode(entry_of(IpSet(SetKind.CLUSTER_IP, family)))
    (at,) = [place for kind, place, _ in message.walk(data, 4, len(data)) if kind == 7]
    icmp = data[:at] + b"\x01" + data[at + 1 :]
    assert codec.decode(icmp, 4, len(icmp)) is None
    assert codec.decode(data, 4, 20) is None
