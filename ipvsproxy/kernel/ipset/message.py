"""ipset messages, as bytes: create, list and fill sets. Entries are encoded and decoded many at once.

Also what this kernel's ipset can do: its protocol, and the revisions of each type of set. The kernel loads the module of a type
to answer (``ip_set_type`` in net/netfilter/ipset/ip_set_core.c).
"""

import functools
import operator
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, IpSet, MarkedEntry, SetEntry, SetType

CONTAINER_LIMIT = 60_000
"""The most bytes of entries in one message; the kernel's limit is 65,535."""
HASH_SIZE = 1024
"""The initial ``hashsize`` of a hash set, as in kube-proxy; the kernel enlarges it as the set fills."""
IPSET_ATTR_PROTOCOL, IPSET_ATTR_SETNAME, IPSET_ATTR_TYPENAME, IPSET_ATTR_REVISION, IPSET_ATTR_FAMILY = range(1, 6)
IPSET_ATTR_FLAGS, IPSET_ATTR_DATA, IPSET_ATTR_ADT, IPSET_ATTR_LINENO, IPSET_ATTR_PROTOCOL_MIN = range(6, 11)
"""Attributes of a message. The last one is the lowest revision in an answer about a type."""
IPSET_ATTR_CADT_FLAGS, IPSET_ATTR_HASHSIZE, IPSET_ATTR_MAXELEM = 8, 18, 19
IPSET_ATTR_PORT_FROM, IPSET_ATTR_PORT_TO = 4, 5
"""Attributes inside ``IPSET_ATTR_DATA`` of a set."""
IPSET_ATTR_IP, IPSET_ATTR_PORT, IPSET_ATTR_PROTO, IPSET_ATTR_IP2, IPSET_ATTR_CIDR2, IPSET_ATTR_SKBMARK = 1, 4, 7, 20, 21, 27
"""Attributes inside ``IPSET_ATTR_DATA`` of an entry."""
IPSET_ATTR_IPADDR_IPV4, IPSET_ATTR_IPADDR_IPV6 = 1, 2
"""Attributes inside an address."""

SUFFICIENT_REVISIONS: Mapping[SetType, int] = {
    SetType.ADDRESS: 0,
    SetType.ADDRESS_PORT: 1,
    SetType.ADDRESS_PORT_ADDRESS: 1,
    SetType.ADDRESS_PORT_NETWORK: 1,
    SetType.PORT: 0,
}
"""The lowest revision of each set type that holds our entries: types with a protocol take SCTP since revision 1.

Later revisions add features that are not used here: ranges, nomatch, counters, comments, forceadd, skbinfo, bucketsize, bitmask
(the lists at ``IPSET_TYPE_REV_MAX`` in net/netfilter/ipset/ip_set_hash_*.c and ip_set_bitmap_port.c). An ``ipset`` that is older
than the kernel refuses to list a set of a revision that it does not know, and a kube-proxy that runs it stops syncing that set.
"""
MARK_REVISION = 5
"""The first revision of ``hash:ip,port`` whose entries may carry a mark (``skbinfo``, Linux 3.18)."""
IPSET_PROTOCOL = 6
"""The oldest protocol version, which every kernel speaks. Version 7 came with Linux 5.0, for commands that are not used here."""
OWN_ERRORS = 4096
"""The first of ipset's own error numbers (include/uapi/linux/netfilter/ipset/ip_set.h)."""
NO_SUCH_TYPE = 4098
"""IPSET_ERR_FIND_TYPE."""
_SUBSYSTEM = 6 << 8
_PROTOCOL, _CREATE, _DESTROY, _FLUSH, _SWAP, _LIST, _ADD, _REMOVE, _TYPE = 1, 2, 3, 4, 6, 7, 9, 10, 13
"""Commands (IPSET_CMD_*)."""
_LIST_HEADER, _WITH_MARKS = 1 << 2, 1 << 6  # IPSET_FLAG_LIST_HEADER, IPSET_FLAG_WITH_SKBINFO
_ALL_PORTS = (0, 65535)
_ANY_FAMILY = 0
_FIELDS: Mapping[SetType, tuple[str, ...]] = {
    SetType.ADDRESS: ("address",),
    SetType.ADDRESS_PORT: ("address", "port", "protocol"),
    SetType.ADDRESS_PORT_ADDRESS: ("address", "port", "protocol", "other"),
    SetType.ADDRESS_PORT_NETWORK: ("address", "port", "protocol", "other", "prefix_length"),
    SetType.PORT: ("port",),
}
_NUMBERS = {
    "address": IPSET_ATTR_IP,
    "port": IPSET_ATTR_PORT,
    "protocol": IPSET_ATTR_PROTO,
    "other": IPSET_ATTR_IP2,
    "prefix_length": IPSET_ATTR_CIDR2,
    "skbmark": IPSET_ATTR_SKBMARK,
}
_CODES = {"port": "2s", "protocol": "B", "prefix_length": "B", "skbmark": "8s"}
_PACK: Mapping[str, Callable[[int], bytes]] = {
    field: struct.Struct(code).pack
    for field, code in (("port", ">H"), ("protocol", "B"), ("prefix_length", "B"), ("skbmark", ">Q"))
}
_WRONG = {
    "port": "the port is missing",
    "prefix_length": "the prefix length is missing",
    "address": "the address is not of the set's family",
    "protocol": "the protocol is missing",
    "other": "the second address is not of the set's family",
}
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}


def _encoded(command: int, family: int, attributes: bytes = b"", flags: int = 0) -> bytes:
    speaks = message.attribute(IPSET_ATTR_PROTOCOL, bytes((IPSET_PROTOCOL,)))
    return message.netfilter(_SUBSYSTEM | command, netlink.REQUEST | flags, family, speaks + attributes)


def _in_order(number: int, payload: bytes) -> bytes:
    """An attribute in network order."""
    return message.attribute(number | message.IN_NETWORK_ORDER, payload)


def protocol_query() -> bytes:
    """The question which versions of the protocol the kernel speaks."""
    return _encoded(_PROTOCOL, _ANY_FAMILY)


def type_query(set_type: SetType, family: Family) -> bytes:
    """The question which revisions of a set type the kernel knows."""
    return _encoded(_TYPE, family, message.string(IPSET_ATTR_TYPENAME, set_type.value) + _family(set_type, family))


def creation(ip_set: IpSet, revision: int, *, name: str = "", capacity: int = SET_CAPACITY) -> bytes:
    """The message that creates a set, with the set's own name if ``name`` is empty. It fails if a set of that name exists."""
    if ip_set.type is SetType.PORT:
        numbers = zip((IPSET_ATTR_PORT_FROM, IPSET_ATTR_PORT_TO), _ALL_PORTS, strict=True)
        data = b"".join(_in_order(number, _PACK["port"](port)) for number, port in numbers)
    else:
        hashed = ((IPSET_ATTR_HASHSIZE, HASH_SIZE), (IPSET_ATTR_MAXELEM, capacity))
        marked = ((IPSET_ATTR_CADT_FLAGS, _WITH_MARKS),) if ip_set.gives_marks else ()
        data = b"".join(message.integer(number | message.IN_NETWORK_ORDER, value) for number, value in (*hashed, *marked))
    attributes = (
        message.string(IPSET_ATTR_SETNAME, name or ip_set.name),
        message.string(IPSET_ATTR_TYPENAME, ip_set.type.value),
        message.attribute(IPSET_ATTR_REVISION, bytes((revision,))),
        _family(ip_set.type, ip_set.family),
        message.nested(IPSET_ATTR_DATA, data),
    )
    return _encoded(_CREATE, ip_set.family, b"".join(attributes), netlink.CREATE | netlink.EXCLUSIVE)


def destruction(name: str) -> bytes:
    """The message that destroys a set. It fails if there is none."""
    return _encoded(_DESTROY, Family.IPV4, message.string(IPSET_ATTR_SETNAME, name), netlink.EXCLUSIVE)


def flush(name: str) -> bytes:
    """The message that removes all entries of a set."""
    return _encoded(_FLUSH, Family.IPV4, message.string(IPSET_ATTR_SETNAME, name), netlink.EXCLUSIVE)


def swap(name: str, other: str) -> bytes:
    """The message that exchanges the contents of two sets of one type."""
    names = message.string(IPSET_ATTR_SETNAME, name) + message.string(IPSET_ATTR_TYPENAME, other)  # that of the second name
    return _encoded(_SWAP, Family.IPV4, names, netlink.EXCLUSIVE)


def contents_query(name: str, *, header_only: bool = False) -> bytes:
    """The request for a dump of a set, or of its parameters alone."""
    flags = message.integer(IPSET_ATTR_FLAGS, _LIST_HEADER) if header_only else b""
    return _encoded(_LIST, Family.IPV4, message.string(IPSET_ATTR_SETNAME, name) + flags, netlink.DUMP)


class EntryCodec:
    """Encodes and decodes the entries of one set, or of a copy of it with another name."""

    def __init__(self, ip_set: IpSet, name: str = "") -> None:
        self._type, self._family, self._name = ip_set.type, ip_set.family, name or ip_set.name
        self._fields = (*_FIELDS[ip_set.type], "skbmark") if ip_set.gives_marks else _FIELDS[ip_set.type]
        self._columns = [(field, operator.attrgetter(field)) for field in self._fields]
        self._size = ip_set.family.bits // 8
        self._encode, self.entry_size = self._pattern()
        self.entries_per_message = CONTAINER_LIMIT // self.entry_size
        self._heads = {verb: self._head(command) for verb, command in _COMMANDS.items()}
        self._layout = message.Layout(self._places()) if len(self._fields) > 1 else None

    def encode(self, entries: Sequence[SetEntry]) -> bytes:
        """Encode entries as in a message: one after the other, each of ``entry_size`` bytes.

        Raises:
            ValueError, struct.error: an address is missing or not of the set's family, or a number does not fit its field.
        """
        columns = [self._column(field, list(map(get, entries))) for field, get in self._columns]
        return b"".join(map(self._encode, zip(*columns, strict=True)))

    def _column(self, field: str, values: Collection[Any]) -> Iterable[bytes]:
        if None in values or (field in ("address", "other") and any(len(one) != self._size for one in values)):
            raise ValueError(_WRONG[field])
        return map(_PACK[field], values) if field in _PACK else values

    def request(self, verb: Verb, entries: bytes, sequence: bytes) -> bytes:
        """The message that adds or removes encoded entries, at most ``entries_per_message``.

        The kernel accepts to add a present entry and to remove an absent one.
        """
        head = self._heads[verb]
        whole = bytearray(head + entries)
        struct.pack_into("=I", whole, 0, len(whole))
        struct.pack_into("=4s", whole, message.SEQUENCE_OFFSET, sequence)
        struct.pack_into("=H", whole, len(head) - 4, 4 + len(entries))
        return bytes(whole)

    def decode(self, data: bytes, start: int, end: int) -> SetEntry | None:
        """The entry whose attributes lie between ``start`` and ``end``; None for an entry that cannot be ours."""
        if self._layout is None:
            return self._decode_single(data, start, end)
        values = self._layout.read(data, start, end)
        if values is None or values[2] not in _PROTOCOLS:
            return None
        address, port, protocol, *rest = values
        if "skbmark" in self._fields:
            mark, mask = struct.unpack(">II", rest[0])
            number = int.from_bytes(port, "big")
            return MarkedEntry(self._name, Address(address), _PROTOCOLS[protocol], number, mark=mark, mask=mask)
        other = Address(rest[0]) if rest else None
        length = rest[1] if len(rest) > 1 else 0
        return SetEntry(self._name, Address(address), _PROTOCOLS[protocol], int.from_bytes(port, "big"), other, length)

    def _decode_single(self, data: bytes, start: int, end: int) -> SetEntry | None:
        at = message.attributes(data, start, end).get(_NUMBERS[self._fields[0]])
        if at is None:
            return None
        if self._type is SetType.PORT:
            return SetEntry(self._name, port=message.unsigned(data, at))
        packed = data[at[0] + 4 : at[1]]
        return SetEntry(self._name, Address(packed)) if len(packed) == self._size else None

    def _places(self) -> list[message.Field]:
        nested = 1 if self._family is Family.IPV4 else 2
        return [
            message.Field((_NUMBERS[field], nested), f"{self._size}s")
            if field in ("address", "other")
            else message.Field((_NUMBERS[field],), _CODES[field])
            for field in self._fields
        ]

    def _pattern(self) -> tuple[Callable[[tuple[bytes, ...]], bytes], int]:
        """A function that fills the contents of an entry's fields into its attributes, and the size of the result.

        Bytes formatting is as fast as a generated ``struct`` call: 0.3 µs for each entry.
        """
        kind = IPSET_ATTR_IPADDR_IPV4 if self._family is Family.IPV4 else IPSET_ATTR_IPADDR_IPV6
        empty, holes = b"", []
        for field in self._fields:
            if field in ("address", "other"):
                size, encoded = self._size, message.nested(_NUMBERS[field], _in_order(kind, bytes(self._size)))
            else:
                size = struct.calcsize(_CODES[field])
                encoded = _in_order(_NUMBERS[field], bytes(size))
            start = 4 + len(empty) + (8 if field in ("address", "other") else 4)
            holes.append((start, start + size))
            empty += encoded
        whole = message.nested(IPSET_ATTR_DATA, empty)
        starts, ends = zip(*holes, strict=True)
        fixed = (whole[start:end] for start, end in zip((0, *ends), (*starts, len(whole)), strict=True))
        return b"%b".join(part.replace(b"%", b"%%") for part in fixed).__mod__, len(whole)

    def _head(self, command: int) -> bytes:
        """The message up to its first entry. Beside several entries the kernel requires a line number, and ignores its value."""
        line, entries = message.integer(IPSET_ATTR_LINENO, 0), message.nested(IPSET_ATTR_ADT)
        return _encoded(command, self._family, message.string(IPSET_ATTR_SETNAME, self._name) + line + entries)


_COMMANDS: Mapping[Verb, int] = {Verb.ADD: _ADD, Verb.REMOVE: _REMOVE}


@functools.cache
def codec(name: str) -> EntryCodec:
    """The codec of a set in ``IP_SETS``.

    Raises:
        KeyError: there is no such set.
    """
    return EntryCodec(IP_SETS[name])


def _family(set_type: SetType, family: Family) -> bytes:
    """The attribute with the family: none for a set of ports, so that rules of both families can look into it."""
    return message.attribute(IPSET_ATTR_FAMILY, bytes((_ANY_FAMILY if set_type is SetType.PORT else family,)))


class Range(NamedTuple):
    """Versions of the protocol, or revisions of a type, from the oldest to the newest that the kernel takes."""

    oldest: int
    newest: int

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.oldest <= number <= self.newest


def protocols(channel: netlink.Channel) -> Range:
    """The versions of the protocol. Before Linux 5.0 the kernel tells one version alone.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = "ask for the protocol of ipset"
    data, start, end = channel.ask(protocol_query(), action)
    with netlink.parsing(action):
        found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
        newest = _byte(found.payload(IPSET_ATTR_PROTOCOL))
        return Range(_byte(found.payload(IPSET_ATTR_PROTOCOL_MIN)) if IPSET_ATTR_PROTOCOL_MIN in found else newest, newest)


def revisions(channel: netlink.Channel, set_type: SetType, family: Family) -> Range | None:
    """The revisions of a type; None if the kernel neither has it nor can load it.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = f"find {set_type}"
    try:
        data, start, end = channel.ask(type_query(set_type, family), action)
    except KernelError as error:
        if error.errno < OWN_ERRORS:
            raise
        return None
    with netlink.parsing(action):
        found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
        return Range(_byte(found.payload(IPSET_ATTR_PROTOCOL_MIN)), _byte(found.payload(IPSET_ATTR_REVISION)))


def _byte(payload: bytes) -> int:
    """An attribute of one byte.

    Raises:
        ValueError: its length is not one byte.
    """
    (value,) = payload
    return value
