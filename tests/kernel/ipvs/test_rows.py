"""Covers counters and the rows of ``ipvsadm -Ln``. Rare rows come from a fake socket, all other rows from a real kernel."""

import functools
import itertools
import pathlib
import struct
from collections.abc import Callable, Iterator

import pytest

from ipvsproxy.commands import list as listing
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.model.virtual_servers import Counters, VirtualServerKey
from tests.kernel.ipvs.examples import ipvsadm
from tests.support import builders, fake_netlink

TABLE = """
-A -t 10.0.0.1:80 -s rr -p 300
-a -t 10.0.0.1:80 -r 10.1.1.1:8080 -m
-a -t 10.0.0.1:80 -r 10.1.1.2:80 -g -w 5
-a -t 10.0.0.1:80 -r 10.1.1.3:80 -i -w 0
-A -t 10.0.0.1:443 -s wlc
-A -t 9.0.0.1:443 -s wlc
-A -u 10.0.0.1:53 -s sh -b sh-fallback,sh-port -o -p 100 -M 255.255.255.0
-A --sctp-service 10.0.0.1:9999 -s rr
-A -t [fd00::2]:80 -s wrr -b flag-1,flag-3 -p 20 -M 64
-A -t [fd00::1]:80 -s mh -b mh-port
-a -t [fd00::1]:80 -r [fd00::9]:8080 -m -w 65535
-a -t [fd00::1]:80 -r [fd00:1111:2222:3333:4444:5555:6666:7777]:65535 -m
-A -f 8 -6 -s wlc
-a -f 8 -6 -r [fd00::9]:0 -m
-A -f 7 -s wlc
-a -f 7 -r 10.1.1.3 -m
"""


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
def test_the_rows_equal_the_output_of_ipvsadm_with_numeric_addresses() -> None:
    for command in TABLE.strip().splitlines():
        ipvsadm(*command.split())
    assert list(listing.render(listing.table("node", ipvs_rows.read()))) == ipvsadm("-Ln").splitlines()


def _service(*attributes: tuple[int, bytes]) -> bytes:
    usual = {1: struct.pack("=H", 2), 6: b"rr\0", 7: struct.pack("=I", 3), 8: struct.pack("=I", 300), 9: b"\xff\xff\xff\xff"}
    by_kind = usual | dict(attributes)
    return fake_netlink.attribute(1, b"".join(fake_netlink.attribute(kind, value) for kind, value in sorted(by_kind.items())))


ADDRESS = ((2, struct.pack("=H", 6)), (3, bytes((10, 0, 0, 1)).ljust(16, b"\0")), (4, struct.pack("!H", 5060)))
DUMP = (
    _service(*ADDRESS, (11, b"sip\0")),
    _service(*ADDRESS, (2, struct.pack("=H", 51))),
    _service((2, struct.pack("=H", 6))),
    _service((5, struct.pack("=I", 7))),
)
"""Four virtual servers: one with a persistence engine, one of another protocol, one without an address, and one with a mark."""
INFORMATION = fake_netlink.attribute(1, struct.pack("=I", 0x10201)) + fake_netlink.attribute(2, struct.pack("=I", 4096))


class Kernel:
    """A fake kernel.

    ``listing`` makes the datagrams that answer a listing. ``information`` answers a request for information about IPVS.
    """

    def __init__(self, *listing: Callable[[int], fake_netlink.Answer], information: bytes = INFORMATION) -> None:
        self._listing = listing
        self._information = information
        self.sockets: list[fake_netlink.FakeSocket] = []

    def connect(self, _protocol: int) -> fake_netlink.FakeSocket:
        self.sockets.append(fake_netlink.FakeSocket(self._answer))
        return self.sockets[-1]

    def _answer(self, data: bytes) -> Iterator[fake_netlink.Answer]:
        _, kind, _, sequence, payload = fake_netlink.split(data)[-1]
        if kind == 16:
            yield fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", 33)))
        elif payload[0] == 15:
            yield fake_netlink.message(sequence, bytes(4) + self._information)
        else:
            yield from (one(sequence) for one in self._listing if payload[0] == 4)
            yield fake_netlink.done(sequence)


def test_the_rows_show_a_persistence_engine_and_omit_a_virtual_server_of_ip_protocol_51() -> None:
    kernel = Kernel(*(functools.partial(fake_netlink.message, payload=bytes(4) + one) for one in DUMP))
    rows = ipvs_rows.read(kernel.connect)
    assert (rows.version, rows.size) == ("1.2.1", 4096)
    lines = list(listing.render(listing.table("node", rows)))
    assert lines[3:] == ["TCP  10.0.0.1:5060 rr persistent 300 pe sip", "FWM  7 rr persistent 300"]
    assert [one.closed for one in kernel.sockets] == [True]


def test_an_incomplete_answer_is_an_error() -> None:
    kernel = Kernel(information=fake_netlink.attribute(1, struct.pack("=I", 0x10201)))
    with pytest.raises(KernelError, match="incomplete"):
        ipvs_rows.read(kernel.connect)
    assert [one.closed for one in kernel.sockets] == [True]


KEYS = [builders.frontend("10.96.0.1", port) for port in range(1, 5)]
COUNTED = Counters(1, 2, 3, 4, 1 << 40)
COUNTERS = b"".join(fake_netlink.attribute(number, struct.pack("=Q", value)) for number, value in enumerate(COUNTED, 1))


def _virtual_server(sequence: int, key: VirtualServerKey, counters: bytes = COUNTERS) -> bytes:
    family, protocol = struct.pack("=H", key.address.family), struct.pack("=H", key.protocol)
    name = (1, family), (2, protocol), (3, key.address.ljust(16, b"\0")), (4, key.port.to_bytes(2, "big"))
    return fake_netlink.message(sequence, bytes(4) + _service(*name, (12, counters)))


def counting(*, loses: bool = False) -> Kernel:
    """A kernel that sends each virtual server in a separate datagram.

    If ``loses`` is true, the second-to-last datagram is lost.
    """
    each = [functools.partial(_virtual_server, key=key) for key in KEYS]
    return Kernel(*each[:-1], *([lambda _: fake_netlink.OVERRUN] if loses else []), each[-1])


@pytest.mark.parametrize(("tick", "sizes"), [(0.0, [4]), (0.5, [2, 2]), (1.0, [1, 1, 1, 1])])
def test_traffic_counters_are_returned_in_several_parts_if_the_reading_takes_long(tick: float, sizes: list[int]) -> None:
    kernel = counting()
    ticks = itertools.count()
    reader = ipvs_rows.TrafficReader(kernel.connect, lambda: next(ticks) * ipvs_rows.PART_S * tick)
    parts = list(reader.services(()))
    assert [len(part) for part in parts if part] == sizes
    assert {key: counted for part in parts for key, counted in part.items()} == dict.fromkeys(KEYS, COUNTED)
    assert [one.closed for one in kernel.sockets] == [True]


def test_the_socket_is_closed_if_an_answer_is_lost_or_a_read_is_abandoned() -> None:
    kernel = counting(loses=True)
    ticks = itertools.count()
    parts = ipvs_rows.TrafficReader(kernel.connect, lambda: float(next(ticks))).services(())
    assert [len(next(parts)) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(KernelError, match="No buffer space"):
        next(parts)
    left = ipvs_rows.TrafficReader(kernel.connect, lambda: float(next(ticks))).services(())
    next(left)
    del left
    assert [one.closed for one in kernel.sockets] == [True, True]


STATS = """   Total Incoming Outgoing         Incoming         Outgoing
   Conns  Packets  Packets            Bytes            Bytes
       A       14       1E        100000000               20

 Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s
       0        0        0                0                0
"""


def test_the_counters_of_the_whole_node_are_parsed_as_hexadecimal_numbers() -> None:
    assert ipvs_rows.read_totals(STATS) == Counters(10, 20, 30, 1 << 32, 32)


@pytest.mark.parametrize("text", ["", "a\nb\n", "a\nb\nx\n", "a\nb\n1 2 3\n", "a\nb\n1 2 3 4 5 6"])
def test_counters_in_an_unknown_format_are_an_error(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ip_vs_stats"
    path.write_text(text)
    reader = ipvs_rows.TrafficReader(counting().connect, path=path)
    with pytest.raises(KernelError, match="read the counters of IPVS"):
        reader.totals()


def test_missing_counters_of_the_node_are_reported(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KernelError, match="No such file"):
        ipvs_rows.TrafficReader(counting().connect, path=tmp_path / "none").totals()


def test_a_kernel_error_is_raised_if_the_kernel_has_no_64_bit_counters() -> None:
    message = _virtual_server(1, KEYS[0], b"")
    part = (message, fake_netlink.HEADER.size + 4, len(message))
    with pytest.raises(KernelError, match=r"lacks counters of 64 bits: use Linux 4\.1 or later"):
        ipvs_rows.counted_service(part)
