"""Addresses and ranges as Kubernetes parses them, compared with Python's ``ipaddress`` where Kubernetes and Python agree."""

import ipaddress

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.model.net import (
    Address,
    Family,
    Network,
    Protocol,
    host_port,
    network,
    parse_address,
    parse_host_port,
    parse_network,
)

IPV4 = st.ip_addresses(v=4)
IPV6 = st.ip_addresses(v=6).filter(lambda address: getattr(address, "ipv4_mapped", None) is None)
ADDRESSES = IPV4 | IPV6


@hypothesis.given(ADDRESSES)
def test_every_address_is_parsed_to_its_bytes(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    parsed = parse_address(str(address))
    assert parsed == address.packed
    assert parse_address(str(parsed)) == parsed
    assert parsed.family is (Family.IPV4 if address.version == 4 else Family.IPV6)
    assert len(parsed) * 8 == parsed.family.bits == address.max_prefixlen
    assert parsed.is_loopback == address.is_loopback
    assert parsed.is_unspecified == address.is_unspecified
    assert parsed.is_link_local_v6 == (address.version == 6 and address.is_link_local)


@hypothesis.given(st.ip_addresses(v=6))
def test_long_and_upper_case_forms_parse_to_the_same_ipv6_address(address: ipaddress.IPv6Address) -> None:
    assert parse_address(address.exploded) == parse_address(address.compressed.upper()) == parse_address(str(address))


@hypothesis.given(IPV4, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_leading_zeros_of_ipv4_octets_are_read_as_decimal_numbers(address: ipaddress.IPv4Address, zeros: list[int]) -> None:
    octets = str(address).split(".")
    assert parse_address(".".join("0" * count + octet for count, octet in zip(zeros, octets, strict=True))) == address.packed


@hypothesis.given(IPV4)
def test_an_ipv4_mapped_address_is_an_ipv4_address(address: ipaddress.IPv4Address) -> None:
    groups = address.packed.hex()
    assert parse_address(f"::ffff:{address}") == parse_address(f"0:0:0:0:0:FFFF:{groups[:4]}:{groups[4:]}") == address.packed


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1", "1.2.3", "1.2.3.4.5", "1.2.3.256", "1.2.3.-4", "1.2.3.4 ", "1..2.3", "1.2.3.4/8", "0x1.2.3.4"),
        *(":", ":::", "1::2::3", "12345::", "fe80::1%eth0", "[::1]", "::1.2.3.256", "1.2.3.4:80", "1.2.3.4\x00", "\ud800"),
        *("\u0661.2.3.4", "1.2.3.²", "9" * 5000 + ".2.3.4", "0" * 5000 + "999.2.3.4"),
    ],
)
def test_an_invalid_address_is_rejected_and_quoted_in_shortened_form(text: str) -> None:
    with pytest.raises(ValueError, match="is not an IP address") as raised:
        parse_address(text)
    assert len(str(raised.value)) < 400


@hypothesis.given(st.text(max_size=24) | st.text("0123456789abcdef.:/", max_size=24))
def test_parsing_any_text_as_an_address_or_range_raises_no_error_except_value_error(text: str) -> None:
    for read in (parse_address, parse_network):
        try:
            read(text)
        except ValueError as error:
            assert type(error) is ValueError  # noqa: PT017 - the assertion is that no other error is raised


@hypothesis.given(ADDRESSES, st.data())
def test_every_range_is_parsed_and_its_host_bits_are_cleared(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, data: st.DataObject
) -> None:
    length = data.draw(st.integers(0, address.max_prefixlen))
    expected = ipaddress.ip_network((address, length), strict=False)
    parsed = parse_network(f"{address}/{length}")
    assert (parsed.address, parsed.prefix_length) == (expected.network_address.packed, expected.prefixlen)
    assert parsed.family is parsed.address.family
    assert parse_network(str(parsed)) == parsed == network(parse_address(str(address)), length)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("010.020.030.040/08", "10.0.0.0/8"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
        ("::ffff:10.1.2.3/96", "0.0.0.0/0"),
        ("2001:DB8::1/032", "2001:db8::/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
        ("::/0", "::/0"),
    ],
)
def test_cidr_ranges_in_unusual_notation_are_accepted(text: str, canonical: str) -> None:
    assert str(parse_network(text)) == canonical


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "is not a CIDR range") for text in ("", "10.0.0.0", "10.0.0.0/", "/8", "10.0.0.0/8/8", "10.0.0.0/-1")),
        *(
            (text, "is not a CIDR range")
            for text in ("10.0.0/8", "10.0.0.0/255.0.0.0", "10.0.0.0/\u0668", "10.0.0.0/0008", "x" * 999)
        ),
        *((text, "has a prefix length outside 0..32") for text in ("10.0.0.0/33", "::ffff:10.0.0.0/95", "::ffff:10.0.0.0/129")),
        ("2001:db8::/129", "has a prefix length outside 0..128"),
    ],
)
def test_an_invalid_range_is_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as raised:
        parse_network(text)
    assert len(str(raised.value)) < 200


@hypothesis.given(ADDRESSES, ADDRESSES, st.data())
def test_a_range_contains_the_same_addresses_as_pythons_ip_network(
    inside: ipaddress.IPv4Address | ipaddress.IPv6Address,
    other: ipaddress.IPv4Address | ipaddress.IPv6Address,
    data: st.DataObject,
) -> None:
    one = ipaddress.ip_network((inside, data.draw(st.integers(0, inside.max_prefixlen))), strict=False)
    ours = parse_network(str(one))
    assert ours.contains(parse_address(str(inside)))
    assert ours.contains(parse_address(str(other))) == (other in one)


def test_addresses_and_ranges_of_different_families_never_match() -> None:
    assert parse_address("0.0.0.0") != parse_address("::")
    assert not parse_network("0.0.0.0/0").contains(parse_address("::1"))


def test_an_address_is_printed_in_the_form_that_operators_write() -> None:
    address = parse_address("2001:0db8:0::1")
    assert (str(address), repr(address)) == ("2001:db8::1", "Address('2001:db8::1')")
    assert host_port(address, 80) == "[2001:db8::1]:80"
    assert host_port(parse_address("10.0.0.1"), 80) == "10.0.0.1:80"
    for text in ("[2001:db8::1]:80", "10.0.0.1:80"):
        assert host_port(*parse_host_port(text)) == text
    assert parse_host_port("2001:db8::1", 7) == (address, 7)
    for text in ("10.0.0.1:", "10.0.0:80", "[2001:db8::1]", "2001:db8::1:x"):
        with pytest.raises(ValueError, match="is not an IP address"):
            parse_host_port(text)
    assert str(Network(Address(bytes(4)), 0)) == "0.0.0.0/0"


def test_families_are_named_as_in_the_api_and_protocols_as_in_ipset_and_both_have_kernel_numbers() -> None:
    assert [(int(family), family.label, family.bits) for family in Family] == [(2, "IPv4", 32), (10, "IPv6", 128)]
    assert [(int(protocol), protocol.label) for protocol in Protocol] == [(6, "tcp"), (17, "udp"), (132, "sctp")]
