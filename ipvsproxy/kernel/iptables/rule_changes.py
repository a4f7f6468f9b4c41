"""Whether any program has changed the iptables rules, without starting a process.

The nf_tables variant: the kernel numbers the generations of the rules, one for each change. The legacy variant: the kernel
returns a table as it holds it, and all of it except the packet counters is hashed. Layout:
include/uapi/linux/netfilter/nf_tables.h.
"""

import errno
import socket
import struct
from collections.abc import Callable, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import tables as iptables_tables
from ipvsproxy.model.net import Family

TABLES = ("nat", "filter", "mangle")
"""The tables of our rules."""
OPTIONAL_TABLES = ("mangle",)
"""The tables that a kernel need not have: without them, external addresses have one scope."""

_GET_GENERATION = 10 << 8 | 16  # NFNL_SUBSYS_NFTABLES, NFT_MSG_GETGEN
_GENERATION_ID = 1
_NETFILTER_HEADER = 4


class RuleChanges:
    """Fingerprints of the state of the rules: two equal fingerprints mean that no rule has changed in between.

    They are those of the network namespace of the thread that makes this object. Only that thread may use it.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def fingerprint(self, family: Family, variant: str, tables: Sequence[str] = TABLES) -> object:
        """The present fingerprint of a family's rules. ``variant`` is that of a ``Program``.

        ``tables`` are the legacy tables to read. The kernel creates those that are absent.

        Raises:
            KernelError: the kernel shows no fingerprint.
        """
        return tuple(_fingerprint(family, table) for table in tables) if variant == "legacy" else self._generation()

    def _generation(self) -> int:
        action = "read the generation of nf_tables"
        request = struct.pack("=IHHIIBBH", 20, _GET_GENERATION, netlink.REQUEST, 0, 0, socket.AF_UNSPEC, 0, 0)
        data, start, end = self._channel.ask(request, action)
        attributes = message.attributes(data, start + _NETFILTER_HEADER, end)
        if _GENERATION_ID not in attributes:
            raise KernelError(action=action, detail="the answer is incomplete")
        return int.from_bytes(data[slice(*attributes[_GENERATION_ID])], "big")


def _fingerprint(family: Family, table: str) -> bytes:
    try:
        return iptables_tables.digest(family, table)
    except KernelError as error:
        if table not in OPTIONAL_TABLES or error.errno != errno.ENOENT:
            raise
        return b""
