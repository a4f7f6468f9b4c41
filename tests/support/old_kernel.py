"""Simulates an older kernel: each answer that the older kernel would give differently is replaced.

The answers of older kernels are taken from their source code, because none of these kernels runs here. ``OldSocket`` wraps a fake
socket or a socket of the real kernel, and passes on the answers that it does not replace. ``old_program`` runs the program with
sockets of this class.
"""

import errno
import os
import socket
import struct
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from ipvsproxy.kernel.base import message, netlink
from tests.support import fake_netlink

_SOL_NETLINK, _GET_STRICT_CHK = 270, 12
_IPSET, _CONNECTIONS, _NF_TABLES = 6 << 8, 1 << 8, 10 << 8
_PROTOCOL = _IPSET | 1
_LIST_CONNECTIONS = _CONNECTIONS | 1
_FILTER = 25  # CTA_FILTER
_NEW_CHAIN, _NEW_RULE = _NF_TABLES | 3, _NF_TABLES | 6
_INET = 1
_ARRIVAL = fake_netlink.attribute(2, struct.pack(">I", 6))  # NFTA_META_KEY, NFT_META_IIFNAME
_NO_ARRIVAL = fake_netlink.attribute(2, struct.pack(">I", 26))  # NFT_META_IIFKIND, for example "bridge"
_HEADER, _NETFILTER_HEADER = fake_netlink.HEADER, 4


class OldKernel(NamedTuple):
    """The answers that a kernel of one Linux version gives to the program.

    ``protocols`` holds ipset's answer to the request for its protocol version: it maps the number of each netlink attribute to
    the version in that attribute. The other fields say whether the kernel version has a feature that docs/compatibility.md lists.
    The revisions of ipset are the revisions of the test kernel, because the driver asks for the lowest revision that it can use.
    """

    version: str
    protocols: Mapping[int, int]
    filters_routes: bool
    filters_connections: bool
    has_nat_in_inet: bool
    has_arrival_behind_ipvs: bool


OLD_KERNELS: Mapping[str, OldKernel] = {
    one.version: one
    for one in (
        OldKernel(
            "4.18",
            # ip_set_protocol in net/netfilter/ipset/ip_set_core.c: IPSET_ATTR_PROTOCOL_MIN came with protocol 7 (23c42a403a9c).
            protocols={1: 6},
            filters_routes=False,  # NETLINK_GET_STRICT_CHK: 89d35528d17d, Linux 4.20
            filters_connections=False,  # CTA_FILTER: cb8aa9a3affb, Linux 5.8
            has_nat_in_inet=False,  # d164385ec572, Linux 5.2
            has_arrival_behind_ipvs=False,  # 28f8bfd1ac94, Linux 5.5
        ),
        OldKernel(
            "5.4",
            protocols={1: 7, 10: 6},
            filters_routes=True,
            filters_connections=False,
            has_nat_in_inet=True,
            has_arrival_behind_ipvs=False,
        ),
    )
}


class OldSocket:
    """A netlink socket of an old kernel. ``inner`` is the wrapped socket."""

    def __init__(self, inner: Any, kernel: OldKernel) -> None:
        self._inner = inner
        self._kernel = kernel
        self._answers: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        # An old kernel refuses an option that it does not know (netlink_setsockopt in net/netlink/af_netlink.c).
        if (level, option) == (_SOL_NETLINK, _GET_STRICT_CHK) and not self._kernel.filters_routes:
            raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
        self._inner.setsockopt(level, option, value)

    def send(self, data: bytes, /) -> int:
        messages = fake_netlink.messages(bytes(data))
        if not self._kernel.has_nat_in_inet and any(map(_is_nat_in_inet, messages)):
            self._answers += _refused_transaction(messages)
            return len(data)
        self._inner.send(b"".join(map(self._pass, messages)))
        return len(data)

    def _pass(self, whole: bytes) -> bytes:
        """The bytes of a message, changed so that the real kernel treats the message as the old kernel would."""
        _, kind, _, _, _ = _HEADER.unpack_from(whole)
        if kind == _LIST_CONNECTIONS and not self._kernel.filters_connections:
            return _without(whole, _FILTER)  # nfnetlink_rcv_msg ignores attributes with numbers that it does not know
        if kind == _NEW_RULE and not self._kernel.has_arrival_behind_ipvs:
            return whole.replace(_ARRIVAL, _NO_ARRIVAL)  # net/ipv4/ip_output.c calls NF_HOOK without the interface of arrival
        return whole

    def recv_into(self, buffer: bytearray, nbytes: int, flags: int, /) -> int:
        if self._answers:
            answer = self._answers.pop(0)
        else:
            size = int(self._inner.recv_into(buffer, nbytes, flags))
            if size > nbytes:
                return size
            answer = b"".join(map(self._as_older, fake_netlink.messages(bytes(buffer[:size]))))
        buffer[: len(answer)] = answer
        return len(answer)

    def _as_older(self, whole: bytes) -> bytes:
        _, kind, flags, sequence, port = _HEADER.unpack_from(whole)
        if kind == _NEW_RULE:
            return whole.replace(_NO_ARRIVAL, _ARRIVAL)
        if kind == _PROTOCOL:
            told = b"".join(fake_netlink.attribute(at, bytes([number])) for at, number in self._kernel.protocols.items())
            payload = whole[_HEADER.size :][:_NETFILTER_HEADER] + told
            return _HEADER.pack(_HEADER.size + len(payload), kind, flags, sequence, port) + payload
        return whole


def _attributes(whole: bytes) -> Mapping[int, tuple[int, int]]:
    return message.attributes(whole, _HEADER.size + _NETFILTER_HEADER, len(whole))


def _without(whole: bytes, number: int) -> bytes:
    """Returns the message without the given attribute."""
    at = _attributes(whole).get(number)
    if at is None:
        return whole
    start, end = at[0] - 4, (at[1] + 3) & ~3
    changed = bytearray(whole[:start] + whole[end:])
    struct.pack_into("=I", changed, 0, len(changed))
    return bytes(changed)


def _is_nat_in_inet(whole: bytes) -> bool:
    _, kind, _, _, _ = _HEADER.unpack_from(whole)
    if kind != _NEW_CHAIN or whole[_HEADER.size] != _INET:
        return False
    parts = _attributes(whole)
    return 7 in parts and message.text(whole, parts[7]) == "nat"


def _refused_transaction(messages: Sequence[bytes]) -> list[bytes]:
    """The answers to a transaction with a chain that cannot exist, namely ENOENT for the chain and for each rule in it.

    In an old kernel, the function nf_tables_chain_type_lookup in net/netfilter/nf_tables_api.c finds no type for the chain. The
    function nfnetlink_rcv_batch continues to the end, reports all errors, and applies nothing.
    """
    refused: set[str] = set()
    answers = []
    for whole in messages:
        _, kind, flags, sequence, _ = _HEADER.unpack_from(whole)
        name = _attributes(whole).get({_NEW_CHAIN: 3, _NEW_RULE: 2}.get(kind, 0))
        chain = message.text(whole, name) if name else ""
        if _is_nat_in_inet(whole):
            refused.add(chain)
        if chain in refused:
            answers.append(fake_netlink.error(sequence, errno.ENOENT))
        elif flags & netlink.ACKNOWLEDGE:
            answers.append(fake_netlink.error(sequence, errno.ENOENT if kind == _NF_TABLES | 5 else 0))
    return answers


def sockets(kernel: OldKernel, make: Callable[..., socket.socket] = socket.socket) -> types.SimpleNamespace:
    """A substitute for the module ``socket``.

    Its sockets give the answers of an old kernel; all its other names are those of the module.
    """
    names = {name: getattr(socket, name) for name in dir(socket)}
    return types.SimpleNamespace(**{**names, "socket": lambda *arguments: OldSocket(make(*arguments), kernel)})


def speak_as(version: str) -> None:
    """Make all drivers of this process receive the answers that a kernel of this version gives."""
    vars(netlink)["socket"] = sockets(OLD_KERNELS[version])
