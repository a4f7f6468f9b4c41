"""ipset messages as bytes: to create, list and fill sets. Entries are encoded and decoded many at a time.

This module also finds out what this kernel's ipset supports: the protocol versions, and the revisions of each set type. To
answer, the kernel loads the module of the set type (``ip_set_type`` in net/netfilter/ipset/ip_set_core.c).
"""

import functools
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.message import attribute, integer, nested, string
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.sets import SET_CAPACITY, IpSet, MarkedEntry, SetEntry, SetType

HASH_SIZE = 1024
"""The initial ``hashsize`` of a hash set, as in kube-proxy; the kernel enlarges it as the set fills."""
IPSET_ATTR_PROTOCOL, IPSET_ATTR_SETNAME, IPSET_ATTR_TYPENAME, IPSET_ATTR_REVISION, IPSET_ATTR_FAMILY = 1, 2, 3, 4, 5
IPSET_ATTR_FLAGS, IPSET_ATTR_DATA, IPSET_ATTR_ADT, IPSET_ATTR_LINENO, LOWEST_REVISION = 6, 7, 8, 9, 10
"""Attributes of a message. The attributes have the kernel's names, by which docs/compatibility.md lists them."""
OLDEST_PROTOCOL = LOWEST_REVISION
"""The attribute of the oldest protocol version in the answer about the protocol; same number as above."""
IPSET_ATTR_PORT_FROM, IPSET_ATTR_PORT_TO, IPSET_ATTR_CADT_FLAGS, IPSET_ATTR_HASHSIZE, IPSET_ATTR_MAXELEM = 4, 5, 8, 18, 19
"""Attributes of a set inside ``IPSET_ATTR_DATA``; ``IPSET_ATTR_MAXELEM`` is ``maxelem``."""

SUFFICIENT_REVISIONS: Mapping[SetType, int] = {
    SetType.ADDRESS: 0,
    SetType.ADDRESS_PORT: 1,
    SetType.ADDRESS_PORT_ADDRESS: 1,
    SetType.ADDRESS_PORT_NETWORK: 1,
    SetType.PORT: 0,
}
"""The lowest revision of each set type that holds our entries: types with a protocol take SCTP since revision 1.

Later revisions add features that ipvsproxy does not use: ranges, nomatch, counters, comments, forceadd, skbinfo, bucketsize,
bitmask (the lists at ``IPSET_TYPE_REV_MAX`` in net/netfilter/ipset/ip_set_hash_*.c and ip_set_bitmap_port.c). An ``ipset`` that
is older than the kernel refuses to list a set of a revision that it does not know, and a kube-proxy that runs it stops syncing
that set.
"""
MARK_REVISION = 5
"""The first revision of ``hash:ip,port`` whose entries may carry a mark (``skbinfo``, Linux 3.18)."""
IPSET_PROTOCOL = 6
"""The oldest protocol version, which every kernel speaks.

Version 7 came with Linux 5.0, for commands that ipvsproxy does not use.
"""
OWN_ERRORS = 4096
"""The first of ipset's own error numbers (include/uapi/linux/netfilter/ipset/ip_set.h)."""
NO_SUCH_TYPE = 4098
"""IPSET_ERR_FIND_TYPE."""
_SUBSYSTEM = 6 << 8  # NFNL_SUBSYS_IPSET
_IPSET_CMD_PROTOCOL, _IPSET_CMD_CREATE, _IPSET_CMD_DESTROY, _IPSET_CMD_FLUSH = range(1, 5)
_IPSET_CMD_SWAP, _IPSET_CMD_LIST, _IPSET_CMD_TYPE = 6, 7, 13
_COMMANDS: Mapping[Verb, int] = {Verb.ADD: 9, Verb.REMOVE: 10}
_LIST_HEADER, _WITH_MARKS = 1 << 2, 1 << 6  # IPSET_FLAG_LIST_HEADER, IPSET_FLAG_WITH_SKBINFO
_IN_NETWORK_ORDER = 0x4000  # NLA_F_NET_BYTEORDER
_ALL_PORTS = (0, 65535)
_ANY_FAMILY = 0
_FIELDS: Mapping[SetType, tuple[str, ...]] = {
    SetType.ADDRESS: ("address",),
    SetType.ADDRESS_PORT: ("address", "port", "protocol"),
    SetType.ADDRESS_PORT_ADDRESS: ("address", "port", "protocol", "other"),
    SetType.ADDRESS_PORT_NETWORK: ("address", "port", "protocol", "other", "prefix_length"),
    SetType.PORT: ("port",),
}
_ADDRESSES = ("address", "other")
IPSET_ATTR_IPADDR_IPV4, IPSET_ATTR_IPADDR_IPV6 = 1, 2
_ADDRESS_KINDS: Mapping[Family, int] = {Family.IPV4: IPSET_ATTR_IPADDR_IPV4, Family.IPV6: IPSET_ATTR_IPADDR_IPV6}
IPSET_ATTR_IP, IPSET_ATTR_PORT, IPSET_ATTR_PROTO, IPSET_ATTR_IP2, IPSET_ATTR_CIDR2, IPSET_ATTR_SKBMARK = 1, 4, 7, 20, 21, 27
_NUMBERS = {
    "address": IPSET_ATTR_IP,
    "port": IPSET_ATTR_PORT,
    "protocol": IPSET_ATTR_PROTO,
    "other": IPSET_ATTR_IP2,
    "prefix_length": IPSET_ATTR_CIDR2,
    "skbmark": IPSET_ATTR_SKBMARK,
}
_CODES = {"port": ">H", "protocol": ">B", "prefix_length": ">B", "skbmark": ">Q"}
_WRONG = {
    "address": "the address is not of the set's family",
    "protocol": "the protocol is missing",
    "other": "the second address is not of the set's family",
}
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}


def _whole(command: int, family: int, flags: int, *attributes: bytes, sequence: int = 0) -> bytes:
    payload = b"".join((attribute(IPSET_ATTR_PROTOCOL, bytes((IPSET_PROTOCOL,))), *attributes))
    return message.netfilter(_SUBSYSTEM | command, netlink.REQUEST | flags, family, payload, sequence=sequence)


def _number(kind: int, value: int, code: str = ">I") -> bytes:
    return attribute(kind | _IN_NETWORK_ORDER, struct.pack(code, value))


def creation(ip_set: IpSet, revision: int, *, name: str = "", capacity: int = SET_CAPACITY) -> bytes:
    """The message that creates a set; if ``name`` is empty, it has the set's own name.

    The message fails if a set of that name exists.
    """
    if ip_set.type is SetType.PORT:
        data = [_number(IPSET_ATTR_PORT_FROM, _ALL_PORTS[0], ">H"), _number(IPSET_ATTR_PORT_TO, _ALL_PORTS[1], ">H")]
    else:
        data = [_number(IPSET_ATTR_HASHSIZE, HASH_SIZE), _number(IPSET_ATTR_MAXELEM, capacity)]
        data += [_number(IPSET_ATTR_CADT_FLAGS, _WITH_MARKS)] if ip_set.gives_marks else []
    return _whole(
        _IPSET_CMD_CREATE,
        ip_set.family,
        netlink.CREATE | netlink.EXCLUSIVE,
        string(IPSET_ATTR_SETNAME, name or ip_set.name) + string(IPSET_ATTR_TYPENAME, ip_set.type.value),
        attribute(IPSET_ATTR_REVISION, bytes((revision,))) + _family(ip_set.type, ip_set.family),
        nested(IPSET_ATTR_DATA, *data),
    )


def destruction(name: str) -> bytes:
    """The message that destroys a set. The message fails if the set does not exist."""
    return _whole(_IPSET_CMD_DESTROY, Family.IPV4, netlink.EXCLUSIVE, string(IPSET_ATTR_SETNAME, name))


def flush(name: str) -> bytes:
    """The message that removes all entries of a set."""
    return _whole(_IPSET_CMD_FLUSH, Family.IPV4, netlink.EXCLUSIVE, string(IPSET_ATTR_SETNAME, name))


def swap(name: str, other: str) -> bytes:
    """The message that swaps the contents of two sets of the same type."""
    # The attribute for the type's name holds the second name.
    return _whole(
        _IPSET_CMD_SWAP, Family.IPV4, netlink.EXCLUSIVE, string(IPSET_ATTR_SETNAME, name), string(IPSET_ATTR_TYPENAME, other)
    )


def contents_query(name: str, *, header_only: bool = False) -> bytes:
    """The request for a dump of a set with its entries, or of the set's parameters alone."""
    flags = integer(IPSET_ATTR_FLAGS, _LIST_HEADER) if header_only else b""
    return _whole(_IPSET_CMD_LIST, Family.IPV4, netlink.DUMP, string(IPSET_ATTR_SETNAME, name), flags)


def entries_request(verb: Verb, ip_set: IpSet, encoded: bytes, sequence: int, *, name: str = "") -> bytes:
    """The message that adds or removes encoded entries; if ``name`` is not empty, it is the name of the set's copy.

    The kernel reports no error if an added entry is already present or a removed entry is absent. If a message has several
    entries, the kernel requires a line number, but ignores its value.
    """
    named = string(IPSET_ATTR_SETNAME, name or ip_set.name) + integer(IPSET_ATTR_LINENO, 0)
    return _whole(_COMMANDS[verb], ip_set.family, 0, named, nested(IPSET_ATTR_ADT, encoded), sequence=sequence)


def encode(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry in the form in which a message contains it; all entries of a set have the same length.

    Raises:
        ValueError, struct.error: an address is missing or is not of the set's family, or a number does not fit its field.
    """
    parts: list[bytes] = []
    for field in _fields(ip_set):
        value, number = getattr(entry, field), _NUMBERS[field]
        if value is None or (field in _ADDRESSES and len(value) * 8 != ip_set.family.bits):
            raise ValueError(_WRONG[field])
        if field in _ADDRESSES:
            parts.append(nested(number, attribute(_ADDRESS_KINDS[ip_set.family] | _IN_NETWORK_ORDER, value)))
        else:
            parts.append(_number(number, value, _CODES[field]))
    return nested(IPSET_ATTR_DATA, *parts)


def decode(ip_set: IpSet, data: bytes, start: int, end: int) -> SetEntry | None:
    """The entry whose attributes are between ``start`` and ``end``; None means that ipvsproxy cannot have made the entry."""
    values = _layout(ip_set).read(data, start, end)
    if values is None:
        return None
    found: dict[str, Any] = {
        field: Address(value) if field in _ADDRESSES else int.from_bytes(value, "big")
        for field, value in zip(_fields(ip_set), values, strict=True)
    }
    if "protocol" in found:
        found["protocol"] = _PROTOCOLS.get(found["protocol"])
        if found["protocol"] is None:
            return None
    if ip_set.gives_marks:
        mark, mask = divmod(found.pop("skbmark"), 1 << 32)
        return MarkedEntry(ip_set.name, **found, mark=mark, mask=mask)
    return SetEntry(ip_set.name, **found)


@functools.cache
def _layout(ip_set: IpSet) -> message.Layout:
    return message.Layout(
        [
            message.Field((_NUMBERS[field], _ADDRESS_KINDS[ip_set.family]), f"{ip_set.family.bits // 8}s")
            if field in _ADDRESSES
            else message.Field((_NUMBERS[field],), f"{struct.calcsize(_CODES[field])}s")
            for field in _fields(ip_set)
        ]
    )


def _fields(ip_set: IpSet) -> tuple[str, ...]:
    return (*_FIELDS[ip_set.type], "skbmark") if ip_set.gives_marks else _FIELDS[ip_set.type]


def _family(set_type: SetType, family: Family) -> bytes:
    """The family of a set: a set of ports has none, so that rules of both families can use the set."""
    return attribute(IPSET_ATTR_FAMILY, bytes((_ANY_FAMILY if set_type is SetType.PORT else family,)))


class Range(NamedTuple):
    """Protocol versions or set type revisions, from the oldest to the newest that the kernel supports."""

    oldest: int
    newest: int

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.oldest <= number <= self.newest


def protocols(channel: netlink.Channel) -> Range:
    """The protocol versions of ipset that the kernel supports. Before Linux 5.0, the kernel reports only one version.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = "ask for the protocol of ipset"
    data, start, end = channel.ask(_whole(_IPSET_CMD_PROTOCOL, _ANY_FAMILY, 0), action)
    with netlink.parsing(action):
        found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
        newest = _byte(found.payload(IPSET_ATTR_PROTOCOL))
        return Range(_byte(found.payload(OLDEST_PROTOCOL)) if OLDEST_PROTOCOL in found else newest, newest)


def revisions(channel: netlink.Channel, set_type: SetType, family: Family) -> Range | None:
    """The revisions of a set type; None means that the kernel neither has the type nor can load it.

    Raises:
        KernelError: the kernel has no ipset, or did not answer.
    """
    action = f"find {set_type}"
    try:
        request = _whole(_IPSET_CMD_TYPE, family, 0, string(IPSET_ATTR_TYPENAME, set_type.value), _family(set_type, family))
        data, start, end = channel.ask(request, action)
    except KernelError as error:
        if error.errno < OWN_ERRORS:
            raise
        return None
    with netlink.parsing(action):
        found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
        return Range(_byte(found.payload(LOWEST_REVISION)), _byte(found.payload(IPSET_ATTR_REVISION)))


def _byte(payload: bytes) -> int:
    """An attribute of one byte.

    Raises:
        ValueError: the attribute is not one byte long.
    """
    (value,) = payload
    return value
