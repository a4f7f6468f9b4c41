"""Encoding and decoding netlink messages, without a kernel. Templates encode messages; attributes and layouts decode messages."""

import struct

import pytest

from ipvsproxy.kernel.base import message
from tests.support.fake_netlink import attribute

HEAD = bytes(16)


def test_a_template_replaces_its_variable_fields_and_keeps_all_other_bytes() -> None:
    def build(port: int, address: bytes) -> bytes:
        return HEAD + b"100%" + struct.pack(">H", port) + b"%b" + address + b"%"

    encode = message.template(build, {"port": (0, 0xFFFF), "address": (bytes(4), b"\xff" * 4)})
    encoded = encode((b"\x01\xbb", b"\n\0\0\1"))
    assert encoded == HEAD + b"100%" + b"\x01\xbb" + b"%b" + b"\n\0\0\1" + b"%"


def test_the_fields_of_a_template_must_be_named_in_the_order_of_their_positions() -> None:
    def build(first: int, second: int) -> bytes:
        return HEAD + struct.pack("=BB", first, second)

    with pytest.raises(ValueError, match="first lies before"):
        message.template(build, {"second": (0, 0xFF), "first": (0, 0xFF)})


@pytest.mark.parametrize(
    "build",
    [lambda value: HEAD + bytes(value), lambda value: HEAD + bytes((value, 0, value)), lambda value: HEAD],
    ids=["length", "twice", "nowhere"],
)
def test_each_field_of_a_template_must_have_one_fixed_offset(build: object) -> None:
    with pytest.raises(ValueError, match="value is not one field of fixed length"):
        message.template(build, {"value": (1, 2)})  # type: ignore[arg-type]  # each of the functions takes a value


def test_attributes_are_found_whatever_flag_bits_their_types_have() -> None:
    data = attribute(1, b"abc") + attribute(0x8002, b"") + attribute(0x4003, b"\0P")
    found = message.attributes(data, 0, len(data))
    assert {kind: data[start:end] for kind, (start, end) in found.items()} == {1: b"abc", 2: b"", 3: b"\0P"}
    assert message.text(b"rr\0x", (0, 4)) == "rr"


@pytest.mark.parametrize("rest", [b"\3\0\1\0", b"\0\0\1\0", b"\x09\0\1\0four", b"\4\0"])
def test_the_parser_stops_at_an_attribute_with_an_impossible_length(rest: bytes) -> None:
    data = attribute(7, b"good") + rest
    assert message.attributes(data, 0, len(data)) == {7: (4, 8)}


def test_the_last_attribute_and_the_last_message_may_be_empty() -> None:
    assert message.attributes(attribute(7, b"good") + attribute(8, b""), 0, 12) == {7: (4, 8), 8: (12, 12)}
    data = message.HEADER.pack(16, 3, 0, 9, 0)
    assert list(message.messages(data * 2)) == [(3, 0, 9, 0, 16, 16), (3, 0, 9, 0, 32, 32)]


@pytest.mark.parametrize("length", [8, 15, 17])
def test_a_message_of_a_wrong_length_is_malformed(length: int) -> None:
    with pytest.raises(OSError, match="Bad message"):
        list(message.messages(message.HEADER.pack(length, 3, 0, 9, 0)))


def test_reading_an_absent_attribute_fails_unless_a_default_is_given() -> None:
    found = message.Attributes(attribute(1, b"abc\0"), 0, 8)
    assert (found.payload(2, b"-"), found.payload(1, b"-"), found.number(2, 5), found.text(1, "-")) == (b"-", b"abc\0", 5, "abc")
    assert list(found.inside(2).parts(1)) == []
    for read in (found.payload, found.number, found.text):
        with pytest.raises(KeyError):
            read(2)


def test_a_nested_attribute_is_written_with_the_nested_flag() -> None:
    assert message.nested(3, b"abcd") == attribute(0x8003, b"abcd")


FIELDS = (((1, 1), "H"), ((1, 2), "s"), ((3,), "I"))


def sample(number: int, name: bytes, value: int, *, swapped: bool = False) -> bytes:
    inner = [attribute(1, struct.pack("=H", number)), attribute(2, name)]
    if swapped:
        inner.reverse()
    parts = [attribute(0x8001, b"".join(inner)), attribute(3, struct.pack("=I", value))]
    if swapped:
        parts.reverse()
    return b"".join(parts)


def test_a_layout_defines_the_order_in_which_the_fields_of_a_message_are_returned() -> None:
    layout = message.Layout(FIELDS)
    for data in (sample(1, b"rr\0", 2), sample(3, b"wrr\0", 4), sample(5, b"mh\0", 6, swapped=True), sample(7, b"longer\0", 8)):
        number, name, value = layout.read(b"pad." + data, 4, 4 + len(data)) or ()
        assert message.attributes(data, 0, len(data)).keys() == {1, 3}
        assert (number + 1, value) == (value, number + 1)
        assert name.split(b"\0")[0] in (b"rr", b"wrr", b"mh", b"longer")


def test_a_layout_returns_no_fields_of_a_message_if_one_field_is_missing_or_too_short() -> None:
    layout = message.Layout(FIELDS)
    for data in (
        attribute(3, bytes(4)),
        attribute(0x8001, attribute(1, bytes(2))) + attribute(3, bytes(4)),
        attribute(0x8001, attribute(1, b"") + attribute(2, b"rr\0")) + attribute(3, bytes(4)),
        b"",
    ):
        assert layout.read(data, 0, len(data)) is None
