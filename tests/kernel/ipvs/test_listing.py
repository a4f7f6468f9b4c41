"""The parser of /proc/net/ip_vs, on the output of Linux 6.1."""

import pathlib
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self, cast

import hypothesis
import pytest
from hypothesis import strategies as st

from ipvsproxy.kernel.ipvs import listing as ipvs_listing
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.real_servers import NOT_MASQUERADED, EvenWeights, RealServerKey
from ipvsproxy.model.virtual_servers import Connections, FirewallMark, VirtualServerKey

TITLE = """\
IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
"""
TABLE = (
    TITLE
    + """\
SCTP  0A000001:0035 wrr \n\
TCP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0050 mh \n\
  -> [fd01:0000:0000:0000:0000:0000:0000:0001]:1F90      Masq    1      0          0         \n\
TCP  0A000001:0050 rr  persistent 60000 FFFFFFFF
  -> 0A010002:0050      Tunnel  1      0          0         \n\
  -> 0A010001:1F90      Masq    0      3          12        \n\
UDP  0A000001:0035 rr ops \n\
FWM  00000064 wlc \n\
  -> 0A010009:0000      Route   1      0          0         \n\
FWM  00000065 wlc persistent 30000 80000000
"""
)


def key(protocol: Protocol, address: str, port: int) -> VirtualServerKey:
    return VirtualServerKey(protocol, parse_address(address), port)


class Server(NamedTuple):
    """A virtual server as the listing shows it."""

    scheduler: str
    one_packet: bool
    timeout_ticks: int
    weights: Mapping[RealServerKey, int]
    connections: Mapping[RealServerKey, Connections]


def read(text: str, folder: pathlib.Path) -> dict[VirtualServerKey | None, Server]:
    """All virtual servers of a file with this text; None stands for one that the file does not name."""
    path = folder / "ip_vs"
    path.write_text(text)
    result: dict[VirtualServerKey | None, Server] = {}
    for piece in ipvs_listing.pieces(path):
        for block in ipvs_listing.blocks(piece):
            heading, real_servers = ipvs_listing.heading(block), block.real_servers
            key, scheduler, one_packet, ticks, _ = heading or (None, "", False, 0, 0)
            weights, connections = ipvs_listing.weights(real_servers), ipvs_listing.connections(real_servers)
            result[key] = Server(scheduler, one_packet, ticks, weights, connections)
    return result


def test_every_kind_of_line_is_read(tmp_path: pathlib.Path) -> None:
    result = read(TABLE, tmp_path)
    none_of_ours = result.pop(None)
    assert none_of_ours == ("", False, 0, {}, {})
    assert {key: server[:3] for key, server in result.items()} == {
        key(Protocol.SCTP, "10.0.0.1", 53): ("wrr", False, 0),
        key(Protocol.TCP, "fd00::1", 80): ("mh", False, 0),
        key(Protocol.TCP, "10.0.0.1", 80): ("rr", False, 60000),
        key(Protocol.UDP, "10.0.0.1", 53): ("rr", True, 0),
        FirewallMark.of(Family.IPV4, 0x64): ("wlc", False, 0),
    }
    server = result[key(Protocol.TCP, "10.0.0.1", 80)]
    assert server.weights == {
        RealServerKey.of(parse_address("10.1.0.2"), 80): NOT_MASQUERADED,
        RealServerKey.of(parse_address("10.1.0.1"), 8080): 0,
    }
    assert server.connections[RealServerKey.of(parse_address("10.1.0.1"), 8080)] == Connections(3, 12)
    assert result[key(Protocol.TCP, "fd00::1", 80)].weights == {RealServerKey.of(parse_address("fd01::1"), 8080): 1}


def test_real_servers_of_a_firewall_mark_belong_to_no_other_virtual_server(tmp_path: pathlib.Path) -> None:
    assert read(TABLE, tmp_path)[key(Protocol.UDP, "10.0.0.1", 53)].weights == {}


def line(address: str, *, port: int = 8080, weight: int = 1, active: int = 0, inactive: int = 0, method: str = "Masq") -> str:
    """A real server as the kernel prints it (``ip_vs_info_seq_show``)."""
    packed = parse_address(address)
    where = packed.hex().upper() if len(packed) == 4 else f"[{packed.hex(':', 2)}]"
    return f"  -> {where}:{port:04X}      {method:<7} {weight:<6} {active:<10} {inactive:<10}\n"


def backend(address: str) -> RealServerKey:
    return RealServerKey.of(parse_address(address), 8080)


@pytest.mark.parametrize(("one", "two"), [("10.1.0.1", "10.1.0.2"), ("fd01::1", "fd01::2")])
def test_real_servers_of_weight_one_are_packed_in_the_order_in_which_they_were_added(
    tmp_path: pathlib.Path, one: str, two: str
) -> None:
    text = TITLE + "TCP  0A000001:0050 rr  \n" + line(two, active=4294967295) + line(one, inactive=7)
    (server,) = read(text, tmp_path).values()
    assert isinstance(server.weights, EvenWeights)
    assert list(server.weights) == [backend(one), backend(two)]
    assert server.connections == {backend(two): (4294967295, 0), backend(one): (0, 7)}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([line("10.1.0.1", weight=0), line("10.1.0.2")], {"10.1.0.1": 0, "10.1.0.2": 1}),
        ([line("10.1.0.1", weight=10), line("10.1.0.2")], {"10.1.0.1": 10, "10.1.0.2": 1}),
        ([line("10.1.0.1", weight=1234567), line("10.1.0.2")], {"10.1.0.1": 1234567, "10.1.0.2": 1}),
        ([line("10.1.0.1"), line("fd01::1", weight=2)], {"10.1.0.1": 1, "fd01::1": 2}),
        ([line("fd01::1"), line("10.1.0.1", weight=2)], {"fd01::1": 1, "10.1.0.1": 2}),
        ([line("10.1.0.1", method="Local"), line("10.1.0.2")], {"10.1.0.1": NOT_MASQUERADED, "10.1.0.2": 1}),
        ([line("10.1.0.1", method="Route"), line("10.1.0.2")], {"10.1.0.1": NOT_MASQUERADED, "10.1.0.2": 1}),
        ([line("fd01::2"), line("fd01::1", method="Tunnel", weight=0)], {"fd01::2": 1, "fd01::1": NOT_MASQUERADED}),
        ([line("10.1.0.1"), line("10.1.0.1")], {"10.1.0.1": 1}),  # one that is added again while the list is walked
    ],
)
def test_irregular_real_servers_are_read_word_by_word(
    tmp_path: pathlib.Path, lines: Sequence[str], expected: Mapping[str, int]
) -> None:
    (server,) = read(TITLE + "TCP  0A000001:0050 rr  \n" + "".join(lines), tmp_path).values()
    assert server.weights == {backend(address): weight for address, weight in expected.items()}


@pytest.mark.parametrize("weight", [1, 1234567, 2147483647])
@pytest.mark.parametrize("address", ["10.1.0.1", "fd01::1"])
def test_connections_are_no_part_of_the_steady_text_and_weights_are(address: str, weight: int) -> None:
    def without_connections(*, weight: int, active: int = 0) -> bytes:
        text = "TCP  0A000001:0050 rr  \n" + line(address) + line(address, port=1, weight=weight, active=active)
        (block,) = ipvs_listing.blocks(text.encode())
        return ipvs_listing.without_connections(block)

    assert (
        without_connections(weight=weight)
        == without_connections(weight=weight, active=3)
        == without_connections(weight=weight, active=4294967295)
    )
    assert without_connections(weight=weight) != without_connections(weight=weight - 1)


@pytest.mark.parametrize("protocol", Protocol)
@pytest.mark.parametrize(("address", "port"), [("10.96.171.1", 65535), ("fd00:96::abcd", 53)])
def test_a_name_is_a_short_form_of_the_line_and_has_the_key(protocol: Protocol, address: str, port: int) -> None:
    shown = key(protocol, address, port)
    name = ipvs_listing.name_of(shown)
    assert ipvs_listing.key_of(name) == shown
    (block,) = ipvs_listing.blocks(f"{protocol.name}  ".encode() + name[1:] + b" rr \n")
    assert block.name == name
    assert ipvs_listing.heading(block) == (shown, "rr", False, 0, 0)


def test_names_are_as_the_kernel_prints_them() -> None:
    blocks = list(ipvs_listing.blocks(TABLE.removeprefix(TITLE).encode()))
    headings = [ipvs_listing.heading(block) for block in blocks]
    assert [ipvs_listing.name_of(heading.key) for heading in headings if heading] == [block.name for block in blocks[:5]]
    assert blocks[5].name == b""


class SequentialFile:
    """A file as the kernel makes it from records, for readers who ask for little at once (fs/seq_file.c, ``seq_read_iter``)."""

    def __init__(self, records: Sequence[bytes], page: int) -> None:
        self._records = list(records)
        self._size = page
        self._filled = b""

    def open(self, *_arguments: object, **_named: object) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def readinto(self, buffer: memoryview) -> int:
        given = self._take(len(buffer))
        if not self._filled and len(given) < len(buffer) and self._records:
            while len(self._records[0]) >= self._size:
                self._size *= 2
            while self._records and len(self._filled) < len(buffer) - len(given):
                if len(self._filled) + len(self._records[0]) >= self._size:
                    break
                self._filled += self._records.pop(0)
            given += self._take(len(buffer) - len(given))
        buffer[: len(given)] = given
        return len(given)

    def _take(self, count: int) -> bytes:
        taken, self._filled = self._filled[:count], self._filled[count:]
        return taken


@hypothesis.given(
    numbers=st.lists(st.integers(0, 40), max_size=30),
    page=st.sampled_from([256, 512]),
    read_size=st.sampled_from([256, 1024]),
    is_ordinary=st.booleans(),
)
def test_pieces_are_whole_virtual_servers_and_not_longer_than_a_read_and_the_largest(
    numbers: Sequence[int], page: int, read_size: int, *, is_ordinary: bool
) -> None:
    records = [
        f"TCP  0A0000{at:02X}:0050 rr  \n{''.join(line(f'10.1.{at}.{number}') for number in range(count))}".encode()
        for at, count in enumerate(numbers)
    ]
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as directory:
        patched.setattr(ipvs_listing, "READ_SIZE", read_size)
        ordinary = pathlib.Path(directory, "ip_vs")
        ordinary.write_bytes(b"".join((TITLE.encode(), *records)))
        file = ordinary if is_ordinary else cast("pathlib.Path", SequentialFile([TITLE.encode(), *records], page))
        result = list(ipvs_listing.pieces(file))
    assert b"".join(result) == b"".join(records)
    assert all(piece.startswith(b"TCP") for piece in result)
    assert max(map(len, result), default=0) <= read_size + max(map(len, records), default=0)


def test_a_first_virtual_server_that_has_no_room_behind_the_title_is_read() -> None:
    record = ("TCP  0A000001:0050 rr  \n" + line("10.1.0.1") * 100).encode()
    file = SequentialFile([TITLE.encode(), record], 4096)
    assert list(ipvs_listing.pieces(cast("pathlib.Path", file))) == [record]


def test_an_empty_table_is_empty(tmp_path: pathlib.Path) -> None:
    assert read(TITLE, tmp_path) == {}


@pytest.mark.parametrize("content", ["", "IP Virtual Server version 1.2.1 (size=4096)\n", "nonsense\n" * 5])
def test_a_listing_without_its_title_is_refused(content: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="title"):
        read(content, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "TCP  0A0001:0050 rr",
        "TCP  0A000001:0050",
        "TCP  0A000001:50 rr",
        "TCP  0A000001 rr",
        "TCP  0A000001:0050 rr persistent",
        "  -> 0A010002:0050      Masq",
        "  -> 0A0100:0050      Masq 1 0 0",
        "  -> 0A01             Masq 1 0 0",
        "  -> [fd01:0000:0000:0000:0000:0000:0001]:1F90 Masq 1 0 0",
        "  -> 0A010002:0050      Masq    x      0          0",
        "  -> 0A0100X2:1F90      Masq    1      0          0         ",
        "",
    ],
)
def test_a_line_that_is_not_understood_is_named(line: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot be parsed") as caught:
        read(f"{TITLE}TCP  0A000001:0050 rr\n{line}\n{line}\n", tmp_path)
    assert repr(line.rstrip()) in str(caught.value)


def test_a_real_server_without_a_virtual_server_cannot_be_parsed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        read(TITLE + line("10.1.0.1"), tmp_path)


@pytest.mark.parametrize(
    ("where", "mask", "length"),
    [
        ("0A000001:0050", "FFFFFFFF", 0),
        ("0A000001:0050", "FFFFFF00", 24),
        ("[fd00:0000:0000:0000:0000:0000:0000:0001]:0050", struct.pack("=I", 128).hex().upper(), 0),
        ("[fd00:0000:0000:0000:0000:0000:0000:0001]:0050", struct.pack("=I", 64).hex().upper(), 64),
    ],
)
def test_the_network_of_session_affinity_is_read(where: str, mask: str, length: int) -> None:
    (block,) = ipvs_listing.blocks(f"TCP  {where} rr persistent 60000 {mask}\n".encode())
    heading = ipvs_listing.heading(block)
    assert heading is not None
    assert (heading.timeout_ticks, heading.prefix_length) == (60000, length)


def test_a_network_that_is_none_is_an_error() -> None:
    (block,) = ipvs_listing.blocks(b"TCP  0A000001:0050 rr persistent 60000 FFFFFFF\n")
    with pytest.raises(ValueError, match="cannot be parsed"):
        ipvs_listing.heading(block)
