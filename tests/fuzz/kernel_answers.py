"""Fuzz targets that read answers of the kernel or of iptables: netlink messages, and the output of ``iptables-save``."""

import errno
import itertools
import socket
import struct
from collections.abc import Callable, Iterator
from unittest import mock

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.kernel.network import addresses, conntrack, notify
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.kernel import Flow, FlowCleaning
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import Settings
from tests.fuzz import restore_text
from tests.fuzz.chooser import Chooser
from tests.support import builders, fake_netlink

LONGEST_REASON = 600
"""The maximum length of the text of an error, in characters; the text becomes part of a log line."""
_IPVS_NUMBER = 33
_NETFILTER = 12
_HEADER_SIZES = (0, 4, 8, 16)
_VIRTUAL_SERVER = builders.frontend("10.96.0.10", 80)


def netlink_answers(data: bytes) -> None:
    """A fake kernel gives arbitrary answers to the requests of a driver.

    The drivers may raise only ``KernelError``, and every address that they return must be valid.
    """
    chooser = Chooser(data)
    with mock.patch.object(netlink, "DUMP_PAUSES_S", (0.0,)):
        try:
            chooser.one(_READERS)(chooser)
        except KernelError as error:
            _check_reason(error)


def iptables_save(data: bytes) -> None:
    """For any output of ``iptables-save``, the lines that the driver then writes must have known shapes."""
    try:
        listing = iptables_syntax.parse_save(data.decode(errors="replace"), skeleton.CHAINS, skeleton.JUMPS)
    except ValueError as error:
        _check_reason(error)
        return
    built = skeleton.build_skeleton(Family.IPV4, Settings(), builders.node_view(), frozenset(), ())
    restore_text.check(iptables_syntax.render_restore(built, listing))
    restore_text.check(iptables_syntax.render_removal(built, listing))


def _check(address: Address) -> None:
    assert len(address) in (4, 16), address.hex()
    str(address)


def _check_reason(error: Exception) -> None:
    assert 0 < len(str(error)) <= LONGEST_REASON


def _payload(chooser: Chooser, depth: int = 0) -> bytes:
    made = b""
    for _ in range(chooser.integer(0, 12)):
        kind = chooser.integer(0, 24) | (0x8000 if depth < 3 and chooser.chance(3) else 0)
        content = _payload(chooser, depth + 1) if kind & 0x8000 else chooser.take(chooser.one((4, 2, 1, 16, 8, 0, 3, 20)))
        made += fake_netlink.attribute(kind, content)
        if chooser.chance(24):
            made += chooser.take(chooser.integer(0, 5))
    return made


def _answers(chooser: Chooser) -> Callable[[bytes], Iterator[bytes]]:
    """A socket's answers to any request: raw bytes, or a dump of messages."""

    def answer(sent: bytes) -> Iterator[bytes]:
        sequence = fake_netlink.sequences(sent)[-1]
        if chooser.chance(4):
            raw = bytearray(chooser.take(chooser.integer(0, 200)))
            if len(raw) >= message.HEADER.size and not chooser.chance(4):
                struct.pack_into("=I", raw, message.SEQUENCE_OFFSET, sequence)
            yield bytes(raw)
        for _ in range(chooser.integer(0, 4)):
            header = chooser.take(chooser.one(_HEADER_SIZES)) if chooser.chance(8) else None
            head = header if header is not None else bytes(chooser.one(_HEADER_SIZES))
            yield fake_netlink.message(sequence, head + _payload(chooser))
        yield fake_netlink.done(sequence) if not chooser.chance(8) else fake_netlink.error(sequence, chooser.integer(0, 140))

    return answer


def _connect(chooser: Chooser) -> Callable[[int], netlink.Socket]:
    return lambda _protocol: fake_netlink.FakeSocket(_answers(chooser))


def _number() -> bytes:
    return fake_netlink.attribute(1, struct.pack("=H", _IPVS_NUMBER))


def _read_ipvs(chooser: Chooser) -> None:
    answer = _answers(chooser)
    first = [True]

    def reply(sent: bytes) -> Iterator[bytes]:
        if first.pop() if first else False:
            yield fake_netlink.message(fake_netlink.sequences(sent)[-1], bytes(4) + _number())
        else:
            yield from answer(sent)

    driver = ipvs.IpvsDriver(lambda _protocol: fake_netlink.FakeSocket(reply), ask=_refuse)
    for key in driver.observe():
        _check(key.address)


def _refuse(_asking: socket.socket, _level: int, _option: int, _question: bytearray, action: str) -> int:
    raise KernelError(action=action, errno=errno.ENOPROTOOPT)


def _read_ipvs_number(chooser: Chooser) -> None:
    ipvs.IpvsDriver(_connect(chooser))


def _read_traffic(chooser: Chooser) -> None:
    parts = [(data, 0, len(data)) for data in (_payload(chooser) for _ in range(3))]
    for part in parts:
        service, _ = ipvs_rows.counted_service(part)
        if service is not None:
            _check(service.address)
        _check(ipvs_rows.real_server_of(part).key.address)


def _read_sets(chooser: Chooser) -> None:
    name = chooser.one(tuple(IP_SETS))
    for observed in ipset.IpsetDriver(_connect(chooser)).observe([name]).values():
        for entry in observed.entries:
            str(entry)
            for address in (entry.address, entry.other):
                if address is not None:
                    _check(address)


def _create_set(chooser: Chooser) -> None:
    outcomes = ipset.IpsetDriver(_connect(chooser)).apply([Operation(Verb.ADD, IP_SETS["KUBE-CLUSTER-IP"])])
    assert len(outcomes) == 1


def _read_addresses(chooser: Chooser) -> None:
    observed = addresses.AddressDriver(_connect(chooser)).observe()
    for address in (*observed.addresses, *(other.address for other in observed.interface_addresses)):
        _check(address)


def _clean_flows(chooser: Chooser) -> None:
    flow = Flow(Family.IPV4, Protocol.UDP, _VIRTUAL_SERVER.address, 53)
    (outcome,) = conntrack.ConntrackDriver(_connect(chooser)).apply([Operation(Verb.REMOVE, FlowCleaning(flow, frozenset()))])
    assert outcome.removed >= 0


def _read_foreign_tables(chooser: Chooser) -> None:
    channel = netlink.Channel(_NETFILTER, _connect(chooser), lambda _s: None)
    for name in nft_tables.names(channel):
        table = nft_tables.read(channel, name)
        assert table is None or set(table.closed) <= set(table.chains)


def _read_changes(chooser: Chooser) -> None:
    one_datagram = itertools.chain([chooser.rest()], itertools.repeat(BlockingIOError()))
    listener = notify.ChangeListener(connect=lambda: mock.Mock(recv=mock.Mock(side_effect=one_datagram)))
    assert all(isinstance(change, notify.Change) for change in listener.read())


def _walk(chooser: Chooser) -> None:
    data = chooser.rest()
    for _, start, end in message.walk(data, 0, len(data)):
        assert 0 <= start <= end <= len(data)
    layout = message.Layout([((1, 1), "4s"), ((2,), "H"), ((3,), "s")])
    half = len(data) // 2
    for start, end in ((0, half), (half, len(data)), (0, half)):
        layout.read(data, start, end)


_READERS = (
    _walk,
    _read_ipvs,
    _read_ipvs_number,
    _read_traffic,
    _read_sets,
    _create_set,
    _read_addresses,
    _clean_flows,
    _read_foreign_tables,
    _read_changes,
)
