"""Reads the tables of both variants of iptables directly from the kernel, and finds out whether their rules have changed.

The functions of this module start no process. Legacy tables are read by ``getsockopt``, and the hash of a legacy table excludes
the packet counters. Tables of nf_tables are read by netlink. The kernel has one generation number for all of these tables, and
increases the number with each change.

The layouts of answers are from include/uapi/linux/netfilter_ipv4/ip_tables.h and include/uapi/linux/netfilter_ipv6/ip6_tables.h.
"""

import contextlib
import errno
import functools
import hashlib
import pathlib
import re
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import modules, netlink, sockets
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey

TABLES = ("nat", "filter", "mangle")
"""The tables of our rules."""
OPTIONAL_TABLES = ("mangle",)
"""The tables that a kernel may lack. Without these tables, every address has only one scope, as with kube-proxy
(docs/scopes.md)."""

TRIED_TABLE = "nat"
"""The table on which ipvsproxy tests whether the kernel accepts rules. The table is chosen because every iptables program writes
rules there."""

_GET_INFO, _GET_ENTRIES = 64, 65  # IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES; the numbers for IPv6 are the same.
_INFO = struct.Struct("=80xI")  # The field of ipt_getinfo that holds the size of the entries in bytes.
_ENTRIES_OFFSET = 40
_COUNTERS = bytes(16)
_CHAIN_HEAD = re.compile(re.escape(struct.pack("=H30s", 64, b"ERROR")) + rb"([^\0]+)")
"""The head of a chain that is not built in: a target that contains the chain's name (xt_error_target)."""

_HOST_PORTS = re.compile(r"CNI-(HOSTPORT|DN)-|KUBE-(HOSTPORTS$|HP-)")
"""The chains of ``nat`` for hostPorts of pods, as made by the CNI plug-in portmap, cri-o and dockershim."""
_HOST_PORTS_TABLE = "cni_hostport"  # the table that the portmap plugin makes with its nftables backend
HOST_PORTS_REMEDY = (
    "let the network plug-in write them with the variant of iptables that holds our rules, or start with --rules-backend=nftables"
)


class _Layout(NamedTuple):
    """The socket family and level for reading the entries of legacy tables, and the offsets of an entry's length and counters."""

    domain: socket.AddressFamily
    level: int
    length_at: int
    counters_at: int


_LAYOUTS: Mapping[Family, _Layout] = {
    Family.IPV4: _Layout(socket.AF_INET, level=socket.IPPROTO_IP, length_at=90, counters_at=96),
    Family.IPV6: _Layout(socket.AF_INET6, level=socket.IPPROTO_IPV6, length_at=142, counters_at=152),
}


def names(family: Family, proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[str, ...]:
    """The names of the legacy tables in this network namespace. This function loads no module and creates no table.

    Raises:
        KernelError: the list of tables cannot be read.
    """
    path = proc / "thread-self/net" / ("ip_tables_names" if family is Family.IPV4 else "ip6_tables_names")
    try:
        return tuple(path.read_text().split())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise KernelError(action=f"read {path}", errno=error.errno or errno.EIO) from error


def digest(family: Family, table: str) -> bytes:
    """A hash of a table, without the packet counters of the table.

    If the table is absent, reading its entries makes the kernel create the table.

    Raises:
        KernelError: the kernel did not return the entries of the table.
    """
    layout = _LAYOUTS[family]
    entries = _entries(family, table)
    position = 0
    while position + layout.counters_at + len(_COUNTERS) <= len(entries):
        at = position + layout.counters_at
        entries[at : at + len(_COUNTERS)] = _COUNTERS
        (length,) = struct.unpack_from("=H", entries, position + layout.length_at)
        if not length:
            raise KernelError(action=_action(family, table), detail="an entry has no length")
        position += length
    return hashlib.blake2b(entries, digest_size=16).digest()


def _entries(family: Family, table: str) -> bytearray:
    action, layout = _action(family, table), _LAYOUTS[family]
    try:
        opened = socket.socket(layout.domain, socket.SOCK_DGRAM)
    except OSError as error:
        raise KernelError(action=action, errno=error.errno or errno.EIO) from error
    with opened:
        answer = sockets.ask(opened, layout.level, _GET_INFO, table.encode().ljust(_INFO.size, b"\0"), action)
        if len(answer) != _INFO.size:
            raise KernelError(action=action, detail="the answer is incomplete")
        (size,) = _INFO.unpack(answer)
        question = struct.pack("=32sI4x", table.encode(), size) + bytes(size)
        return bytearray(sockets.ask(opened, layout.level, _GET_ENTRIES, question, action)[_ENTRIES_OFFSET:])


def _action(family: Family, table: str) -> str:
    return f"read the {family.label} table {table}"


def take_rules(family: Family, variant: str) -> bool:
    """Whether the kernel certainly accepts rules of the given IP family and variant. The check does not change any rule.

    ``variant`` has the same values as ``Program.variant``. For nf_tables, the check is a transaction that the kernel refuses at
    its end. Reading is not enough, because missing tables would look like empty tables. If the legacy table ``nat`` does not
    exist yet, the kernel creates the table during the check.
    """
    try:
        if variant == "legacy":
            digest(family, TRIED_TABLE)
            return True
        with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
            messages = nft.trial(family, TRIED_TABLE)
            return nft.run(channel, messages) == {len(messages) - 1: errno.ENOENT}
    except KernelError:
        return False


def has_chain(family: Family, concerns: Callable[[ChainKey], bool]) -> bool:
    """Whether nf_tables has a chain of the given family for which ``concerns`` returns true.

    Raises:
        KernelError: the chains could not be read.
    """
    action = f"read the chains of {family.label}"
    with (
        Tolerated(errno.EINVAL),
        contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel,
        netlink.parsing(action),
    ):
        found = map(nft.read, channel.dump(nft.chains_query(family), action))
        return any(concerns(ChainKey(one.text(nft.NFTA_CHAIN_TABLE), one.text(nft.NFTA_CHAIN_NAME))) for one in found)
    modules.note_no_nf_tables()
    return False


def host_ports_before_services(variants: Mapping[Family, str]) -> tuple[str, ...]:
    """The places where hostPort rules redirect packets that our rules have accepted.

    An ``ACCEPT`` of our rules does not end the evaluation in other tables.

    ``variants`` are the variants of the programs that write our rules. If our rules are in nftables, hostPort rules redirect no
    packets that our rules have accepted.

    Raises:
        KernelError: the kernel's chains could not be read.
    """
    found = ((family, _host_ports_beside(family, variant)) for family, variant in variants.items() if variant != "nftables")
    return tuple(f"{place} {family.label}" for family, place in found if place)


def _host_ports_beside(family: Family, variant: str) -> str:
    """Returns the place of hostPort rules that our variant of iptables does not show; empty if there are none."""
    is_unseen = functools.partial(_is_unseen, is_legacy=variant == "legacy")
    if modules.may_have_nf_tables() and has_chain(family, is_unseen):
        return "nf_tables"
    if variant != "legacy" and "nat" in names(family):
        chains = _CHAIN_HEAD.findall(_entries(family, "nat"))
        return "legacy" if any(_HOST_PORTS.match(chain.decode(errors="replace")) for chain in chains) else ""
    return ""


def _is_unseen(chain: ChainKey, *, is_legacy: bool) -> bool:
    """Whether a chain in nf_tables is for hostPorts and is not shown by our variant of iptables."""
    return chain.table == _HOST_PORTS_TABLE or (is_legacy and chain.table == "nat" and bool(_HOST_PORTS.match(chain.chain)))


class RuleChanges:
    """Fingerprints of rules: while the fingerprint of an IP family stays the same, no rule of the family has changed.

    The fingerprints describe the rules in the network namespace of the thread that creates this object. Only the thread that
    creates this object may use it.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def fingerprint(self, family: Family, variant: str, tables: Sequence[str] = TABLES) -> object:
        """The current fingerprint of the rules of an IP family. ``variant`` has the same values as ``Program.variant``.

        ``tables`` are the legacy tables to read. If one of these tables is absent, the kernel creates the table.

        Raises:
            KernelError: the kernel does not show the state of the rules.
        """
        return tuple(_fingerprint(family, table) for table in tables) if variant == "legacy" else nft.generation(self._channel)


def _fingerprint(family: Family, table: str) -> bytes:
    with Tolerated(*([errno.ENOENT] if table in OPTIONAL_TABLES else [])):
        return digest(family, table)
    return b""
