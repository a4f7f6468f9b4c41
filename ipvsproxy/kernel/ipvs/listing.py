"""The format of ``/proc/net/ip_vs``: every virtual and real server of a network namespace.

::

    TCP  0A600001:0050 rr persistent 1080000 FFFFFFFF
      -> 0AF40009:1F90      Masq    1      3          12
    TCP  [fd00:0000:0000:0000:0000:0000:0000:0001]:0050 mh
    FWM  00000064 wlc

The number behind an address is a hexadecimal port. The timeout of a persistent virtual server is in ticks of this kernel, whose
rate the file does not show. The family of a virtual server by firewall mark (``FWM``, with the mark) only shows in its real
servers. Nor does the file show scheduler flags, and it shows one-packet scheduling (``ops``) for IPv4 alone
(net/netfilter/ipvs/ip_vs_ctl.c, ``ip_vs_info_seq_show``).

A file of a hundred thousand lines is common, and nearly all are like the second one. So structs cut the lines of real servers,
and only irregular lines are split into words. Before, 10,000 virtual servers took 480 ms, not 220.
"""

import binascii
import contextlib
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import NOT_MASQUERADED, EvenWeights, RealServerKey
from ipvsproxy.model.virtual_servers import Connections, FirewallMark, VirtualServerKey

ONE_PACKET = 0x4
"""The virtual-server flag that the file shows as ``ops``."""
READ_SIZE = 1 << 15
"""The bytes of one read; the title is shorter. Mostly the kernel returns a page (4 kB).

A buffer of a megabyte would be mapped for each reading, and filled with zeros while no other thread runs: 15 ms on the test
kernel.
"""

_PROTOCOLS: Mapping[bytes, Protocol] = {protocol.name.encode(): protocol for protocol in Protocol}
_BY_LETTER: Mapping[bytes, Protocol] = {name[:1]: protocol for name, protocol in _PROTOCOLS.items()}
_DIGITS = frozenset(family.bits // 4 for family in Family)
_TITLE = re.compile(rb"IP Virtual Server[^\n]*\n[^\n]*\n[^\n]*\n")
_ADDRESS_AT = 6
"""A column at which the address of a virtual server has begun, whatever its protocol."""
_FORWARDED_AT = -8
"""The column of the forwarding method, relative to that of the weight."""
_MASQUERADED = b"Masq"
"""The forwarding method of all of our real servers. Since Linux 2.6.37 the file shows it for an address of this node as well, and
Local only for a real server that was added with that method.
"""
_MARKED = b"FWM "
"""The beginning of the line of a virtual server by firewall mark."""
_MARK_NAMES: Mapping[bool, bytes] = {False: b"F4:", True: b"F6:"}
"""The beginning of its name, by whether addresses are in brackets."""
_ARROW, _MARK = b"\n  -> ", b"\0"
"""The beginning of a real server's line, and its replacement where a virtual server becomes one line."""


class _Columns(NamedTuple):
    """The layout of the real servers of one family, each with its mark, if no number is wider than its column."""

    width: int
    without_connections: struct.Struct
    """All columns but the connections."""
    keys: struct.Struct
    """Address and port."""
    weight: int
    """The column of the weight."""


_COLUMNS: Mapping[bool, _Columns] = {
    False: _Columns(56, struct.Struct("35s21x"), struct.Struct("1x8sx4s42x"), 28),
    True: _Columns(89, struct.Struct("68s21x"), struct.Struct("2x39s2x4s42x"), 61),
}
"""By whether addresses are in brackets."""


class Block(NamedTuple):
    """A virtual server: its line, and the lines of its real servers, each of which begins with a mark."""

    heading: bytes
    real_servers: bytes

    @property
    def name(self) -> bytes:
        """The name that identifies this virtual server; see ``name_of``. Empty for one by mark without real servers."""
        heading = self.heading
        where = heading[_ADDRESS_AT - 1 : heading.find(b" ", _ADDRESS_AT)].lstrip()
        if heading.startswith(_MARKED):
            return _MARK_NAMES[self.real_servers[1:2] == b"["] + where if self.real_servers else b""
        return heading[:1] + where


class Heading(NamedTuple):
    """The line of a virtual server. ``timeout_ticks`` is 0 if it is not persistent.

    ``prefix_length`` is that of the networks whose clients share their affinity, 0 for a single address.
    """

    key: VirtualServerKey
    scheduler: str
    one_packet: bool
    timeout_ticks: int
    prefix_length: int = 0


def pieces(path: pathlib.Path) -> Iterator[bytes]:
    """The file without its title, in pieces of whole virtual servers. Each piece is the state of the kernel at one moment.

    A piece is at most as long as ``READ_SIZE`` and the largest virtual server together. A read that is not full ends at the end
    of a virtual server; a full one may end anywhere. The kernel's buffer grows to the size of the largest virtual server so far,
    and does not shrink: then nearly all later reads are full (fs/seq_file.c, ``seq_read_iter``).

    Raises:
        OSError: the file could not be read.
        ValueError: the title is missing.
    """
    buffer = memoryview(bytearray(READ_SIZE))
    with path.open("rb", buffering=0) as file:
        size = file.readinto(buffer)
        title = _TITLE.match(buffer[:size])
        if title is None:
            raise ValueError("the title is missing")
        text = bytes(buffer[title.end() : size])  # empty if the first virtual server does not fit in behind the title
        while size:
            end = _begin_of_last(text) if size == READ_SIZE else len(text)
            if end:
                yield text[:end]
            size = file.readinto(buffer)
            text = text[end:] + buffer[:size]
        if text:
            yield text


def _begin_of_last(text: bytes) -> int:
    """The start of the last virtual server of a text, as far as it shows; 0 if the text has only one."""
    newline = text.rfind(b"\n")
    while newline >= 0 and text[newline + 1 : newline + 2] in (b"", b" "):  # the end, or the line of a real server
        newline = text.rfind(b"\n", 0, newline)
    return newline + 1


def blocks(piece: bytes) -> Iterator[Block]:
    """The virtual servers of a piece."""
    for line in piece.removesuffix(b"\n").replace(_ARROW, _MARK).split(b"\n"):
        end = line.find(_MARK)
        yield Block(line, b"") if end < 0 else Block(line[:end], line[end:])


def name_of(key: VirtualServerKey) -> bytes:
    """The name of a virtual server: the first letter of its protocol, and its address as in the file; or its family and mark.

    It is short because there may be a hundred thousand names: whole protocols would take 1.6 MB more.
    """
    if isinstance(key, FirewallMark):
        return _MARK_NAMES[key.family is Family.IPV6] + f"{key.mark:08X}".encode()
    digits = key.address.hex().upper() if key.address.family is Family.IPV4 else f"[{key.address.hex(':', 2)}]"
    return f"{key.protocol.name[0]}{digits}:{key.port:04X}".encode()


def key_of(name: bytes) -> VirtualServerKey:
    """The key of the virtual server with a name of ``name_of``.

    Raises:
        ValueError: there can be no such name.
    """
    for is_bracketed, begin in _MARK_NAMES.items():
        if name.startswith(begin):
            return FirewallMark.of(Family.IPV6 if is_bracketed else Family.IPV4, int(name[len(begin) :], 16))
    where = name[1:]
    return VirtualServerKey(_BY_LETTER[name[:1]], Address(_packed(where)), _port(where))


def without_connections(block: Block) -> bytes:
    """The text of a virtual server without its connections, which change all the time."""
    heading, text = block
    columns = _columns(text)
    if columns is not None:
        return heading + b"".join([part for (part,) in columns.without_connections.iter_unpack(text)])
    return heading + b"".join([_MARK + b" ".join(line.split()[:-2]) for line in _lines(text)])


def _columns(text: bytes) -> _Columns | None:
    """The layout of these real servers; None if they have no common one."""
    columns = _COLUMNS[text[1:2] == b"["]
    count, rest = divmod(len(text), columns.width)
    is_regular = not rest and text[:: columns.width] == _MARK * count and text.count(_MARK) == count
    return columns if is_regular else None


def _lines(text: bytes) -> list[bytes]:
    return text.split(_MARK)[1:]


def heading(block: Block) -> Heading | None:
    """Parse the line of a virtual server; None for one by firewall mark without real servers, or of another protocol.

    Raises:
        ValueError: the line cannot be parsed; the message contains it.
    """
    line = block.heading
    if line.startswith(_ARROW[1:]):
        raise _unparsable(line)
    words = line.split()
    try:
        where, scheduler, flags = words[1], words[2].decode("ascii"), words[3:]
        at = flags.index(b"persistent") if b"persistent" in flags else None
        ticks, mask = (0, b"") if at is None else (int(flags[at + 1]), binascii.unhexlify(flags[at + 2]))
        protocol = _PROTOCOLS.get(words[0])
        if line.startswith(_MARKED) and block.name:
            key = key_of(block.name)
        elif protocol is None:
            return None
        else:
            key = VirtualServerKey(protocol, Address(_packed(where)), _port(where))
    except (ValueError, IndexError) as error:
        raise _unparsable(line) from error
    return Heading(key, scheduler, b"ops" in flags, ticks, ipvs_message.network_length(key.address.family, mask))


def weights(text: bytes) -> Mapping[RealServerKey, int]:
    """The weights of a block's real servers, in the order in which they were added. The file has the reverse order.

    ``NOT_MASQUERADED`` is the weight of a real server with another forwarding method.

    Raises:
        ValueError: a line cannot be parsed; the message contains it.
    """
    columns = _columns(text)
    if columns is not None and text:
        keys = [address + port for address, port in columns.keys.iter_unpack(text)]
        letters = tuple(text[columns.weight + at :: columns.width] for at in (_FORWARDED_AT, 0, 1))
        if letters == tuple(letter * len(keys) for letter in (b"M", b"1", b" ")) and len(set(keys)) == len(keys):
            with contextlib.suppress(ValueError):  # the words below show which line it is
                packed = binascii.unhexlify(b"".join(keys[::-1]).replace(b":", b""))
                return EvenWeights(packed, len(packed) // len(keys))
    return {key: weight for key, weight, _ in reversed(list(_words(text)))}


def connections(text: bytes) -> Mapping[RealServerKey, Connections]:
    """The connections of a block's real servers.

    Raises:
        ValueError: a line cannot be parsed; the message contains it.
    """
    return {key: counts for key, _, counts in _words(text)}


def _words(text: bytes) -> Iterator[tuple[RealServerKey, int, Connections]]:
    for line in _lines(text):
        try:
            where, method, weight, active, inactive = line.split()
            key = RealServerKey.of(Address(_packed(where)), _port(where))
            yield key, int(weight) if method == _MASQUERADED else NOT_MASQUERADED, Connections(int(active), int(inactive))
        except ValueError as error:
            raise _unparsable(_ARROW[1:] + line) from error


def _packed(where: bytes) -> bytes:
    """The packed address before a port: eight digits, or 32 in groups of four between brackets."""
    digits = where[1:-6].replace(b":", b"") if where.startswith(b"[") else where[:-5]
    if len(digits) not in _DIGITS:
        raise ValueError(where)
    return binascii.unhexlify(digits)


def _port(where: bytes) -> int:
    """The port: four digits after the colon at the end."""
    if where[-5:-4] != b":":
        raise ValueError(where)
    return int.from_bytes(binascii.unhexlify(where[-4:]), "big")


def _unparsable(line: bytes) -> ValueError:
    return ValueError(f"the line {line[:120].decode('ascii', 'replace').rstrip()!r} cannot be parsed")
