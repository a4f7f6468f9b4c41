"""Measures the deletion of one UDP endpoint's flows among very many tracked flows, on a kernel that lists all flows.

A fake socket acts as a kernel before 5.8, which cannot filter flows: it answers with recorded messages of a listing, again and
again. The time of the fake socket is subtracted, so that the figures contain only the time of the driver.
"""

import itertools
import struct
import time
from typing import Any

from ipvsproxy.kernel.network import conntrack
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import RealServerKey
from tests.support import fake_netlink

PART_SIZE = 32_000
"""The largest size, in bytes, of one part of a listing. The kernel sends at most 32 KiB at once."""
PARTS = 8
"""The number of recorded parts of a listing. The fake socket sends the parts one after the other, again and again."""
SERVICE, POD, GONE = (parse_address(text) for text in ("10.96.0.10", "10.244.0.5", "10.244.0.6"))
_SEQUENCE = struct.Struct("=I")
_LISTING = 0x101


def clean(flows: int) -> dict[str, float]:
    """The time and memory for the deletion of one endpoint's flows if this number of flows is tracked."""
    played = _Socket(flows)
    keep = frozenset({RealServerKey.of(POD, 53)})
    driver = conntrack.ConntrackDriver(lambda _protocol: played)
    operation = Operation(Verb.REMOVE, FlowCleaning(Flow(Family.IPV4, Protocol.UDP, SERVICE, 53), keep))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    (outcome,) = driver.apply([operation])
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if outcome.error or not outcome.removed:
        raise RuntimeError(outcome.error or "no flow was deleted")
    return {
        "flows": played.listed,
        "removed": outcome.removed,
        "wall_s": wall_s - played.spent_s,
        "cpu_s": cpu_s - played.spent_s,
    }


class _Socket:
    """A fake socket that answers with a listing of at least ``flows`` flows, and acknowledges each deletion.

    ``spent_s`` is the time spent in this class.
    """

    def __init__(self, flows: int) -> None:
        self.listed = 0
        self.spent_s = 0.0
        self._flows = flows
        self._answers: Any = iter(())

    def send(self, data: bytes, /) -> int:
        began_s = time.perf_counter()
        _, kind, _, sequence, _ = fake_netlink.HEADER.unpack_from(data)
        if kind == _LISTING:
            self._listing = self._parts(sequence)
            self._answers = self._listing
        else:
            *_, last = fake_netlink.sequences(data)
            self._answers = itertools.chain([fake_netlink.error(last)], self._listing)
        self.spent_s += time.perf_counter() - began_s
        return len(data)

    def recv_into(self, buffer: bytearray, _nbytes: int, _flags: int, /) -> int:
        began_s = time.perf_counter()
        data = next(self._answers)
        buffer[: len(data)] = data
        self.spent_s += time.perf_counter() - began_s
        return len(data)

    def getsockopt(self, _level: int, _option: int, /) -> int:
        return 8 << 20

    def close(self) -> None:
        pass

    def _parts(self, sequence: int) -> Any:
        recorded = [_part(number, sequence) for number in range(PARTS)]
        for count, part in itertools.cycle(recorded):
            self.listed += count
            yield part
            if self.listed >= self._flows:
                break
        yield fake_netlink.done(sequence)


def _part(number: int, sequence: int) -> tuple[int, bytes]:
    """Returns the number of flows in one part of the listing, and the messages with these flows.

    Only the first flow must be deleted: it goes to a removed real server.
    """
    flows: list[bytes] = []
    size = 0
    for at in itertools.count():
        flow = _flow(number * PART_SIZE + at, sequence, is_stale=at == 0)
        size += len(flow)
        if size > PART_SIZE:
            return len(flows), b"".join(flows)
        flows.append(flow)
    raise AssertionError("it counts for ever")


def _flow(number: int, sequence: int, *, is_stale: bool) -> bytes:
    """A UDP flow with the attributes that Linux 6.1 sends: both tuples, status, timeout, mark, id, use."""
    client = (0x0AF40000 + number % 0xFFFF).to_bytes(4, "big")
    service = SERVICE if is_stale else (0x0A600100 + number % 5000).to_bytes(4, "big")
    ports = (1024 + number % 60_000).to_bytes(2, "big"), (53).to_bytes(2, "big")
    original = _tuple(client, service, *ports)
    reply = _tuple(GONE, client, *reversed(ports))
    rest = b"".join(fake_netlink.attribute(kind, _SEQUENCE.pack(number)) for kind in (3, 7, 8, 12, 11))
    payload = (
        bytes((Family.IPV4, 0, 0, 0)) + fake_netlink.attribute(0x8001, original) + fake_netlink.attribute(0x8002, reply) + rest
    )
    return fake_netlink.message(sequence, payload)


def _tuple(source: bytes, target: bytes, source_port: bytes, target_port: bytes) -> bytes:
    addresses = fake_netlink.attribute(1, source) + fake_netlink.attribute(2, target)
    ports = fake_netlink.attribute(1, b"\x11") + fake_netlink.attribute(2, source_port) + fake_netlink.attribute(3, target_port)
    return fake_netlink.attribute(0x8001, addresses) + fake_netlink.attribute(0x8002, ports)
