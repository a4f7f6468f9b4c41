"""Whether any program has changed the iptables rules, without starting a process.

The nf_tables variant: the kernel numbers the generations of the rules, one for each change. The legacy variant: the kernel
returns a table as it holds it, and all of it except the packet counters is hashed. Layouts:
include/uapi/linux/netfilter/nf_tables.h, and linux/netfilter_ipv4/ip_tables.h and linux/netfilter_ipv6/ip6_tables.h below it.
"""

import errno
import hashlib
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import message, netlink, sockopt
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.net import Family

TABLES = ("nat", "filter", "mangle")
"""The tables of our rules."""
OPTIONAL_TABLES = ("mangle",)
"""The tables that a kernel need not have: without them, external addresses have one scope."""
NO_RULES = (b"",) * len(TABLES)
"""The mark of tables without rules, and without chains except the built-in ones. The nf_tables variant has no such mark."""

_GET_GENERATION = 10 << 8 | 16  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETGEN
_GENERATION_ID = 1
_NETFILTER_HEADER = 4
_GET_INFO, _GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO, IPT_SO_GET_ENTRIES; the same numbers for IPv6
_INFO = struct.Struct("=32sI40xII")  # ipt_getinfo: name, a bit for each hook, number of entries, their size in bytes
_OWN_ENTRIES = 1  # the entries of a table without rules: this one at its end, and the policy of each hook
_ENTRIES_OFFSET = 40
_NAME = 32


class _Layout(NamedTuple):
    """The positions of an entry's length and counters."""

    level: int
    length_at: int
    counters_at: int


_LAYOUTS = {
    Family.IPV4: _Layout(level=socket.IPPROTO_IP, length_at=90, counters_at=96),
    Family.IPV6: _Layout(level=socket.IPPROTO_IPV6, length_at=142, counters_at=152),
}
_COUNTERS = bytes(16)


class RuleChanges:
    """Marks of the state of the rules: two equal marks mean that no rule has changed in between.

    They are marks of the network namespace of the thread that makes this object. Only that thread may use it.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def mark(self, family: Family, variant: str, tables: Sequence[str] = TABLES) -> object:
        """The present mark of a family's rules, possibly ``NO_RULES``. ``variant`` is that of a ``Program``.

        ``tables`` are the legacy tables to read. The kernel creates those that are absent.

        Raises:
            KernelError: the kernel shows no mark.
        """
        return tuple(_mark(family, table) for table in tables) if variant == "legacy" else self._generation()

    def _generation(self) -> int:
        action = "read the generation of nf_tables"
        request = struct.pack("=IHHIIBBH", 20, _GET_GENERATION, netlink.REQUEST, 0, 0, socket.AF_UNSPEC, 0, 0)
        data, start, end = self._channel.ask(request, action)
        attributes = message.attributes(data, start + _NETFILTER_HEADER, end)
        if _GENERATION_ID not in attributes:
            raise KernelError(action=action, detail="the answer is incomplete")
        return int.from_bytes(data[slice(*attributes[_GENERATION_ID])], "big")


def _mark(family: Family, table: str) -> bytes:
    try:
        return _digest(family, table)
    except KernelError:
        if table not in OPTIONAL_TABLES:
            raise
        return b""


def _digest(family: Family, table: str) -> bytes:
    """A hash of a legacy table without its counters; empty without any rules and chains except the built-in ones."""
    layout = _LAYOUTS[family]
    action = f"read the {family.label} table {table}"
    try:
        opened = socket.socket(socket.AF_INET if family is Family.IPV4 else socket.AF_INET6, socket.SOCK_DGRAM)
    except OSError as error:
        raise KernelError(action=action, errno=error.errno or errno.EIO) from error
    with opened as asking:
        name = table.encode().ljust(_NAME, b"\0")
        info = sockopt.ask(asking, layout.level, _GET_INFO, name.ljust(_INFO.size, b"\0"), action)
        _, hooks, count, size = _INFO.unpack(info)
        if count == hooks.bit_count() + _OWN_ENTRIES:
            return b""
        question = struct.pack("=32sI4x", name, size) + bytes(size)
        entries = bytearray(sockopt.ask(asking, layout.level, _GET_ENTRIES, question, action)[_ENTRIES_OFFSET:])
    position = 0
    while position + layout.counters_at + len(_COUNTERS) <= len(entries):
        at = position + layout.counters_at
        entries[at : at + len(_COUNTERS)] = _COUNTERS
        (length,) = struct.unpack_from("=H", entries, position + layout.length_at)
        if not length:
            raise KernelError(action=action, detail="an entry has no length")
        position += length
    return hashlib.blake2b(entries, digest_size=16).digest()
