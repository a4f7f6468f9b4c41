"""``/proc/net/ip_vs``: every virtual and real server of a network namespace in one read.

::

    TCP  0A600001:0050 rr persistent 1080000 FFFFFFFF
      -> 0AF40009:1F90      Masq    1      3          12
    TCP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0050 mh
    FWM  00000064 wlc

Numbers behind addresses are hexadecimal ports; the timeout of a persistent virtual server is in ticks of this kernel, whose
rate it does not tell. Scheduler flags are not shown, and one-packet scheduling (``ops``) for IPv4 alone
(net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_show``).
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.model.kernel import Connections, VirtualServerKey
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey

ONE_PACKET = 0x4
"""Virtual-server flag that the listing shows as ``ops``."""

_PROTOCOLS: Mapping[str, Protocol] = {protocol.name: protocol for protocol in Protocol}
_DIGITS = frozenset(family.bits // 4 for family in Family)
_HEADING_LINES = 3
_COUNTS_AT = 39
"""Column at which the connections of a real server begin (weights of seven digits and more reach into it)."""
_COUNTS_AT_IPV6 = 72


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ListedVirtualServer:
    """A virtual server as the listing shows it. ``timeout_ticks`` is 0 where it is not persistent."""

    scheduler: str
    one_packet: bool
    timeout_ticks: int
    weights: dict[RealServerKey, int] = dataclasses.field(default_factory=dict)
    connections: dict[RealServerKey, Connections] = dataclasses.field(default_factory=dict)


class Listing(NamedTuple):
    """What the file shows; ``foreign`` counts virtual servers by firewall mark or of another protocol."""

    virtual_servers: dict[VirtualServerKey, ListedVirtualServer]
    foreign: int


class Block(NamedTuple):
    """The lines of one virtual server, and their text without what changes with every connection."""

    text: str
    lines: list[str]


def blocks(lines: Iterable[str]) -> Iterator[Block]:
    """Cut the file into virtual servers: a reader that knows the text of one need not parse it again.

    Raises:
        ValueError: the heading is missing.
    """
    texts: list[str] = []
    block: list[str] = []
    for line in _behind_heading(lines):
        if line[2:4] == "->":
            texts.append(line[:_COUNTS_AT] if line[5:6] != "[" else line[:_COUNTS_AT_IPV6])
        else:
            if block:
                yield Block("\n".join(texts), block)
            texts, block = [line], []
        block.append(line)
    if block:
        yield Block("\n".join(texts), block)


def _behind_heading(lines: Iterable[str]) -> Iterator[str]:
    heading = list(itertools.islice(lines := iter(lines), _HEADING_LINES))
    if len(heading) < _HEADING_LINES or not heading[0].startswith("IP Virtual Server"):
        raise ValueError("the heading is missing")
    return lines


def parse(lines: Iterable[str]) -> Listing:
    """Read the file, line by line.

    Raises:
        ValueError: a line is not understood; the message holds it.
    """
    return parse_block(_behind_heading(lines))


def parse_block(lines: Iterable[str], *, only_weights: bool = False) -> Listing:
    """As ``parse``, without the heading. ``only_weights`` leaves the connections out.

    Raises:
        ValueError: a line is not understood; the message holds it.
    """
    found: dict[VirtualServerKey, ListedVirtualServer] = {}
    counts: dict[tuple[str, str], Connections] = {}
    weights: dict[RealServerKey, int] = {}
    connections: dict[RealServerKey, Connections] = {}
    foreign = 0
    for line in lines:
        words = line.split()
        try:
            if words[0] == "->":
                where = words[1]
                digits = where[:8] if where[0] != "[" else where[1:40].replace(":", "")
                key = RealServerKey(_packed(digits, where[-4:]))
                weights[key] = int(words[3])
                pair = (words[4], words[5])
                if only_weights:
                    continue
                count = counts.get(pair)
                if count is None:
                    count = counts[pair] = Connections(int(pair[0]), int(pair[1]))
                connections[key] = count
                continue
            protocol = _PROTOCOLS.get(words[0])
            listed = _virtual_server(words)
            weights, connections = listed.weights, listed.connections
            if protocol is None:
                foreign += 1
            else:
                found[VirtualServerKey(protocol, *_endpoint(words[1]))] = listed
        except (ValueError, IndexError) as error:
            raise ValueError(f"the line {line[:120]!r} is not understood") from error
    return Listing(found, foreign)


def _virtual_server(words: list[str]) -> ListedVirtualServer:
    ticks = int(words[words.index("persistent", 3) + 1]) if "persistent" in words[3:] else 0
    return ListedVirtualServer(scheduler=words[2], one_packet="ops" in words[3:], timeout_ticks=ticks)


def _endpoint(where: str) -> tuple[Address, int]:
    address, colon, port = where.rpartition(":")
    if not colon or len(port) != 4:  # noqa: PLR2004 - four hexadecimal digits
        raise ValueError(where)
    if address.startswith("["):
        address = address[1:-1].replace(":", "")
    return _address(address), int(port, 16)


def _address(digits: str) -> Address:
    return Address(_packed(digits))


def _packed(digits: str, port: str = "") -> bytes:
    if len(digits) not in _DIGITS:
        raise ValueError(digits)
    return bytes.fromhex(digits + port)
