"""Encoded attributes and messages, attribute walks and fixed layouts, without a kernel."""

import struct

import pytest

from ipvsproxy.kernel.base import message
from tests.support.fake_netlink import attribute


def test_an_attribute_is_padded_and_its_length_does_not_count_the_padding() -> None:
    assert message.attribute(3, b"abc") == attribute(3, b"abc")
    assert message.string(1, "rr") == attribute(1, b"rr\0")
    assert message.integer(2, -150) == attribute(2, struct.pack(">i", -150))
    assert message.nested(4, message.string(1, "a"), message.integer(2, 5)) == attribute(
        0x8004, attribute(1, b"a\0") + attribute(2, bytes((0, 0, 0, 5)))
    )


def test_the_messages_of_a_datagram_are_read_up_to_a_malformed_one() -> None:
    data = message.whole(20, 5, b"payload", 7) + b"\0" + message.netfilter(0x0A03, 1, 2, b"", sequence=8, resource=10)
    assert list(message.messages(data)) == [(20, 5, 7, 0, 16, 23), (0x0A03, 1, 8, 0, 40, 44)]
    assert data[40:] == bytes((2, 0, 0, 10))
    for broken in (data + b"x", data[:-1], data + struct.pack("=IHHII", 15, 0, 0, 0, 0)):
        with pytest.raises(OSError, match="Bad message"):
            list(message.messages(broken))


def test_a_walk_finds_attributes_whatever_their_marks() -> None:
    data = attribute(1, b"abc") + attribute(0x8002, b"") + attribute(0x4003, b"\0P")
    found = message.attributes(data, 0, len(data))
    assert {kind: data[start:end] for kind, (start, end) in found.items()} == {1: b"abc", 2: b"", 3: b"\0P"}
    assert message.unsigned(data, found[3]) == 80
    assert message.text(b"rr\0x", (0, 4)) == "rr"


@pytest.mark.parametrize("rest", [b"\3\0\1\0", b"\0\0\1\0", b"\x09\0\1\0four", b"\4\0"])
def test_a_walk_stops_at_an_attribute_that_does_not_fit(rest: bytes) -> None:
    data = attribute(7, b"good") + rest
    assert message.attributes(data, 0, len(data)) == {7: (4, 8)}


FIELDS = (message.Field((1, 1), "H"), message.Field((1, 2), "s"), message.Field((3,), "I"))


def sample(number: int, name: bytes, value: int, *, swapped: bool = False) -> bytes:
    inner = [attribute(1, struct.pack("=H", number)), attribute(2, name)]
    if swapped:
        inner.reverse()
    parts = [attribute(0x8001, b"".join(inner)), attribute(3, struct.pack("=I", value))]
    if swapped:
        parts.reverse()
    return b"".join(parts)


def test_a_layout_reads_every_message_in_the_order_of_its_fields() -> None:
    layout = message.Layout(FIELDS)
    for data in (sample(1, b"rr\0", 2), sample(3, b"wrr\0", 4), sample(5, b"mh\0", 6, swapped=True), sample(7, b"longer\0", 8)):
        number, name, value = layout.read(b"pad." + data, 4, 4 + len(data)) or ()
        assert message.attributes(data, 0, len(data)).keys() == {1, 3}
        assert (number + 1, value) == (value, number + 1)
        assert name.split(b"\0")[0] in (b"rr", b"wrr", b"mh", b"longer")


def test_a_layout_returns_none_if_a_field_is_missing_or_too_short() -> None:
    layout = message.Layout(FIELDS)
    for data in (
        attribute(3, bytes(4)),
        attribute(0x8001, attribute(1, bytes(2))) + attribute(3, bytes(4)),
        attribute(0x8001, attribute(1, b"") + attribute(2, b"rr\0")) + attribute(3, bytes(4)),
        b"",
    ):
        assert layout.read(data, 0, len(data)) is None
