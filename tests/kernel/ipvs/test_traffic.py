"""The dump of counters on a fake socket: the longest time of a part, and the end of the socket."""

import itertools
import pathlib
import struct
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.kernel.ipvs import traffic as ipvs_traffic
from ipvsproxy.model.virtual_servers import Counters, VirtualServerKey
from tests.support import builders, fake_netlink

KEYS = [builders.frontend("10.96.0.1", port) for port in range(1, 5)]
COUNTED = Counters(1, 2, 3, 4, 1 << 40)


COUNTERS = b"".join(fake_netlink.attribute(number, struct.pack("=Q", value)) for number, value in enumerate(COUNTED, 1))


def _virtual_server(sequence: int, key: VirtualServerKey, counters: bytes = COUNTERS) -> bytes:
    values = (
        (1, struct.pack("=H", key.address.family)),
        (2, struct.pack("=H", key.protocol)),
        (3, key.address.ljust(16, b"\0")),
        (4, key.port.to_bytes(2, "big")),
        (6, b"rr\0\0"),
        (7, struct.pack("=I", 0)),
        (8, struct.pack("=I", 0)),
        (9, bytes(4)),
        (12, counters),
    )
    service = b"".join(fake_netlink.attribute(kind, value) for kind, value in values)
    return fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, service))


class Kernel:
    """Sends each virtual server in a datagram of its own; ``loses`` the one before the last."""

    def __init__(self, *, loses: bool = False) -> None:
        self.sockets: list[fake_netlink.FakeSocket] = []
        self._loses = loses

    def connect(self, _protocol: int) -> fake_netlink.FakeSocket:
        self.sockets.append(fake_netlink.FakeSocket(self._answer))
        return self.sockets[-1]

    def _answer(self, data: bytes) -> Iterator[fake_netlink.Answer]:
        _, kind, _, sequence, _ = fake_netlink.split(data)[-1]
        if kind == 16:
            yield fake_netlink.message(sequence, bytes(4) + fake_netlink.attribute(1, struct.pack("=H", 33)))
            return
        for key in KEYS[:-1]:
            yield _virtual_server(sequence, key)
        if self._loses:
            yield fake_netlink.OVERRUN
        yield _virtual_server(sequence, KEYS[-1])
        yield fake_netlink.done(sequence)


@pytest.mark.parametrize(("tick", "sizes"), [(0.0, [4]), (0.5, [2, 2]), (1.0, [1, 1, 1, 1])])
def test_a_part_ends_when_its_time_is_over(tick: float, sizes: list[int]) -> None:
    kernel = Kernel()
    ticks = itertools.count()
    reader = ipvs_traffic.TrafficReader(kernel.connect, lambda: next(ticks) * ipvs_traffic.PART_S * tick)
    parts = list(reader.services(()))
    assert [len(part) for part in parts if part] == sizes
    assert {key: counted for part in parts for key, counted in part.items()} == dict.fromkeys(KEYS, COUNTED)
    assert [one.closed for one in kernel.sockets] == [True]


def test_a_part_ends_when_it_has_enough_virtual_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipvs_traffic, "COUNTED_AT_ONCE", 3)
    reader = ipvs_traffic.TrafficReader(Kernel().connect, lambda: 0.0)
    assert [len(part) for part in reader.services(())] == [3, 1]


def test_a_reading_that_loses_an_answer_or_is_abandoned_closes_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipvs_traffic, "COUNTED_AT_ONCE", 3)
    kernel = Kernel(loses=True)
    parts = ipvs_traffic.TrafficReader(kernel.connect, lambda: 0.0).services(())
    assert len(next(parts)) == 3
    with pytest.raises(KernelError, match="No buffer space"):
        next(parts)
    left = ipvs_traffic.TrafficReader(kernel.connect, lambda: 0.0).services(())
    next(left)
    del left
    assert [one.closed for one in kernel.sockets] == [True, True]


STATS = """   Total Incoming Outgoing         Incoming         Outgoing
   Conns  Packets  Packets            Bytes            Bytes
       A       14       1E        100000000               20

 Conns/s   Pkts/s   Pkts/s          Bytes/s          Bytes/s
       0        0        0                0                0
"""


def test_the_counters_of_the_whole_node_are_hexadecimal() -> None:
    assert ipvs_traffic.read_totals(STATS) == Counters(10, 20, 30, 1 << 32, 32)


@pytest.mark.parametrize("text", ["", "a\nb\n", "a\nb\nx\n", "a\nb\n1 2 3\n", "a\nb\n1 2 3 4 5 6"])
def test_another_format_is_told(text: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ip_vs_stats"
    path.write_text(text)
    reader = ipvs_traffic.TrafficReader(Kernel().connect, totals=path)
    with pytest.raises(KernelError, match="read the counters of IPVS"):
        reader.totals()


def test_counters_of_the_node_that_are_not_there_are_told(tmp_path: pathlib.Path) -> None:
    with pytest.raises(KernelError, match="No such file"):
        ipvs_traffic.TrafficReader(Kernel().connect, totals=tmp_path / "none").totals()


def test_a_kernel_without_counters_of_64_bits_is_an_error_and_not_a_node_without_traffic() -> None:
    message = _virtual_server(1, KEYS[0], b"")
    part = (message, fake_netlink.HEADER.size + 4, len(message))
    with pytest.raises(KernelError, match=r"lacks counters of 64 bits: use Linux 4\.1 or later"):
        ipvs_rows.counted_service(part)
