"""Encodes and decodes the ipset messages that create, list and fill sets. Many entries are encoded or decoded at a time.

This module also finds out which revisions of a set type this kernel's ipset supports. To answer a query for revisions, the kernel
loads the module of the set type (``ip_set_type`` in net/netfilter/ipset/ip_set_core.c).
"""

import functools
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from pyroute2.netlink.nfnetlink import NFNL_SUBSYS_IPSET, ipset

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets_driver import EncodedEntry
from ipvsproxy.model.net import PROTOCOL_BY_NUMBER, Address, Family
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, IpSet, MarkedEntry, SetEntry, SetType

HASH_SIZE = 1024
"""The initial ``hashsize`` of a hash set, as in kube-proxy; the kernel enlarges it as the set fills."""
TYPE_NAME, REVISION, FAMILY, DATA, ENTRIES, LOWEST_REVISION = 3, 4, 5, 7, 8, 10
"""The numbers of the attributes in a message of ipset."""
CAPACITY = 19
"""The attribute ``maxelem`` inside ``DATA``."""

PROTOCOL_REVISION = 1
"""The lowest revision that accepts SCTP, for set types whose entries have a protocol. All other set types accept our entries in
every revision.

Later revisions add features that ipvsproxy does not use: ranges, nomatch, counters, comments, forceadd, skbinfo, bucketsize,
bitmask (the lists at ``IPSET_TYPE_REV_MAX`` in net/netfilter/ipset/ip_set_hash_*.c and ip_set_bitmap_port.c). An ``ipset``
program that is older than the kernel refuses to list a set whose revision is unknown to the program, and a kube-proxy that runs
this program stops syncing the set.
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
_SUBSYSTEM = NFNL_SUBSYS_IPSET << 8
_ALL_PORTS = (0, 65535)
_ANY_FAMILY = 0
FIELDS: Mapping[SetType, tuple[str, ...]] = {
    SetType.ADDRESS: ("address",),
    SetType.ADDRESS_PORT: ("address", "port", "protocol"),
    SetType.ADDRESS_PORT_ADDRESS: ("address", "port", "protocol", "other"),
    SetType.ADDRESS_PORT_NETWORK: ("address", "port", "protocol", "other", "prefix_length"),
    SetType.PORT: ("port",),
}
_NUMBERS = {"address": 1, "port": 4, "protocol": 7, "other": 20, "prefix_length": 21, "skbmark": 27}
_CODES = {"port": "2s", "protocol": "B", "prefix_length": "B", "skbmark": "8s"}
_PACK: Mapping[str, Callable[[int], bytes]] = {
    field: struct.Struct(code).pack
    for field, code in (("port", ">H"), ("protocol", "B"), ("prefix_length", "B"), ("skbmark", ">Q"))
}
_NAMES = {
    "port": "IPSET_ATTR_PORT",
    "protocol": "IPSET_ATTR_PROTO",
    "prefix_length": "IPSET_ATTR_CIDR2",
    "skbmark": "IPSET_ATTR_SKBMARK",
}
_WRONG = {
    "port": "the port is missing",
    "prefix_length": "the prefix length is missing",
    "address": "the address is not of the set's family",
    "protocol": "the protocol is missing",
    "other": "the second address is not of the set's family",
}


def _encoded(command: int, family: int, attributes: list[Any], flags: int) -> bytes:
    request = ipset.ipset_msg()
    request["nfgen_family"] = family
    request["attrs"] = [["IPSET_ATTR_PROTOCOL", IPSET_PROTOCOL], *attributes]
    return message.encode(request, _SUBSYSTEM | command, netlink.REQUEST | flags)


def creation(ip_set: IpSet, revision: int, *, name: str = "", capacity: int = SET_CAPACITY) -> bytes:
    """The message that creates a set; if ``name`` is empty, the created set has the name of ``ip_set``.

    Creating a set fails if a set with the same name exists.
    """
    if ip_set.type is SetType.PORT:
        data = [["IPSET_ATTR_PORT_FROM", _ALL_PORTS[0]], ["IPSET_ATTR_PORT_TO", _ALL_PORTS[1]]]
    else:
        data = [["IPSET_ATTR_HASHSIZE", HASH_SIZE], ["IPSET_ATTR_MAXELEM", capacity]]
        if ip_set.gives_marks:
            data.append(["IPSET_ATTR_CADT_FLAGS", ipset.IPSET_FLAG_WITH_SKBINFO])
    attributes = [
        ["IPSET_ATTR_SETNAME", name or ip_set.name],
        ["IPSET_ATTR_TYPENAME", ip_set.type.value],
        ["IPSET_ATTR_REVISION", revision],
        ["IPSET_ATTR_FAMILY", _family(ip_set.type, ip_set.family)],
        ["IPSET_ATTR_DATA", {"attrs": data}],
    ]
    return _encoded(ipset.IPSET_CMD_CREATE, ip_set.family, attributes, netlink.CREATE | netlink.EXCLUSIVE)


def destruction(name: str) -> bytes:
    """The message that destroys a set. Destroying a set fails if the set does not exist."""
    return _encoded(ipset.IPSET_CMD_DESTROY, Family.IPV4, [["IPSET_ATTR_SETNAME", name]], netlink.EXCLUSIVE)


def flush(name: str) -> bytes:
    """The message that removes all entries of a set."""
    return _encoded(ipset.IPSET_CMD_FLUSH, Family.IPV4, [["IPSET_ATTR_SETNAME", name]], netlink.EXCLUSIVE)


def swap(name: str, other: str) -> bytes:
    """The message that swaps the contents of two sets of the same type."""
    attributes = [["IPSET_ATTR_SETNAME", name], ["IPSET_ATTR_TYPENAME", other]]  # IPSET_ATTR_TYPENAME holds the second set's name
    return _encoded(ipset.IPSET_CMD_SWAP, Family.IPV4, attributes, netlink.EXCLUSIVE)


def contents_query(name: str, *, header_only: bool = False) -> bytes:
    """The request for a dump of a set with its entries, or of the set's parameters alone."""
    attributes: list[Any] = [["IPSET_ATTR_SETNAME", name]]
    if header_only:
        attributes.append(["IPSET_ATTR_FLAGS", ipset.IPSET_FLAG_LIST_HEADER])
    return _encoded(ipset.IPSET_CMD_LIST, Family.IPV4, attributes, netlink.DUMP)


class EntryCodec:
    """Encodes and decodes the entries of one set or of the set's copy; the copy has another name."""

    def __init__(self, ip_set: IpSet, name: str = "") -> None:
        self._type, self._family, self._name = ip_set.type, ip_set.family, name or ip_set.name
        self._fields = (*FIELDS[ip_set.type], "skbmark") if ip_set.gives_marks else FIELDS[ip_set.type]
        self._size = ip_set.family.bits // 8
        samples = {
            "address": message.ADDRESSES[ip_set.family],
            "port": (0, 0xFFFF),
            "protocol": (0, 0xFF),
            "other": message.ADDRESSES[ip_set.family],
            "prefix_length": (0, 0xFF),
            "skbmark": (0, 0xFFFFFFFFFFFFFFFF),
        }
        chosen = {field: samples[field] for field in self._fields}
        self._template = message.template(self._element, chosen)
        self._heads = {verb: self._head(command) for verb, command in _COMMANDS.items()}
        self._layout = message.Layout(self._places())

    def encode(self, entry: SetEntry) -> bytes:
        """The bytes of an entry in a message.

        Raises:
            ValueError, struct.error: an address is missing or is not of the set's family, or a number is too large for its field.
        """
        return self._template(tuple(self._pack(field, getattr(entry, field)) for field in self._fields))

    def _pack(self, field: str, value: Any) -> bytes:
        if value is None or (field in ("address", "other") and len(value) != self._size):
            raise ValueError(_WRONG[field])
        return _PACK[field](value) if field in _PACK else value

    def request(self, verb: Verb, entries: Iterable[EncodedEntry]) -> bytes:
        """The message that adds or removes entries; ``sets_driver.in_messages`` must have put these entries into one message.

        The kernel reports no error if an added entry is already present or a removed entry is absent.
        """
        head = self._heads[verb]
        whole = bytearray(head + b"".join(one.encoded for one in entries))
        struct.pack_into("=I", whole, 0, len(whole))
        struct.pack_into("=H", whole, len(head) - 4, 4 + len(whole) - len(head))
        return bytes(whole)

    def decode(self, data: bytes, start: int, end: int) -> SetEntry | None:
        """The entry with the attributes from ``start`` to ``end``; None for an entry that only another program can have added."""
        values = self._layout.read(data, start, end)
        if values is None:
            return None
        found = dict(zip(self._fields, values, strict=True))
        protocol = PROTOCOL_BY_NUMBER.get(found.get("protocol", 0))
        if protocol is None and "protocol" in found:
            return None
        address, other = (Address(found[field]) if field in found else None for field in ("address", "other"))
        port = int.from_bytes(found.get("port", b""), "big")
        if "skbmark" in found:
            mark, mask = struct.unpack(">II", found["skbmark"])
            return MarkedEntry(self._name, address, protocol, port, mark=mark, mask=mask)
        return SetEntry(self._name, address, protocol, port, other, found.get("prefix_length", 0))

    def _places(self) -> list[message.Field]:
        nested = 1 if self._family is Family.IPV4 else 2
        return [
            ((_NUMBERS[field], nested), f"{self._size}s")
            if field in ("address", "other")
            else ((_NUMBERS[field],), _CODES[field])
            for field in self._fields
        ]

    def _element(self, **values: Any) -> bytes:
        """The bytes of one entry, taken from a message that pyroute2 has encoded."""
        kind = "IPSET_ATTR_IPADDR_IPV4" if self._family is Family.IPV4 else "IPSET_ATTR_IPADDR_IPV6"
        attributes: list[list[Any]] = []
        for field, value in values.items():
            if field in ("address", "other"):
                name = "IPSET_ATTR_IP" if field == "address" else "IPSET_ATTR_IP2"
                attributes.append([name, {"attrs": [[kind, value]]}])
            else:
                attributes.append([_NAMES[field], divmod(value, 1 << 32) if field == "skbmark" else value])
        entry = ["IPSET_ATTR_DATA", {"attrs": attributes}]
        data = _encoded(ipset.IPSET_CMD_ADD, self._family, [["IPSET_ATTR_ADT", {"attrs": [entry]}]], 0)
        start, end = message.attributes(data, message.HEADER.size + message.NETFILTER_HEADER, len(data))[ENTRIES]
        return data[start:end]

    def _head(self, command: int) -> bytes:
        """The bytes of the message before its first entry.

        If a message has several entries, the kernel requires a line number, but ignores the number's value.
        """
        attributes = [["IPSET_ATTR_SETNAME", self._name], ["IPSET_ATTR_LINENO", 0], ["IPSET_ATTR_ADT", {"attrs": []}]]
        return _encoded(command, self._family, attributes, 0)


_COMMANDS: Mapping[Verb, int] = {Verb.ADD: ipset.IPSET_CMD_ADD, Verb.REMOVE: ipset.IPSET_CMD_DEL}


@functools.cache
def codec(name: str) -> EntryCodec:
    """The encoder and decoder for a set in ``IP_SETS``.

    Raises:
        KeyError: no set in ``IP_SETS`` has this name.
    """
    return EntryCodec(IP_SETS[name])


def _family(set_type: SetType, family: Family) -> int:
    """The family field of a message about the set. A set of ports has no family, so rules of both families can use the set."""
    return _ANY_FAMILY if set_type is SetType.PORT else int(family)


class Range(NamedTuple):
    """The revisions of a set type, from the oldest to the newest that the kernel supports."""

    oldest: int
    newest: int


def revisions(channel: netlink.Channel, set_type: SetType, family: Family) -> Range | None:
    """The revisions of a set type; None if the kernel can neither find nor load it, or has another protocol version.

    Raises:
        KernelError: the kernel has no ipset, or the kernel did not answer.
    """
    action = f"find {set_type}"
    attributes = [["IPSET_ATTR_TYPENAME", set_type.value], ["IPSET_ATTR_FAMILY", _family(set_type, family)]]
    try:
        data, start, end = channel.ask(_encoded(ipset.IPSET_CMD_TYPE, family, attributes, 0), action)
    except KernelError as error:
        if error.errno < OWN_ERRORS:
            raise
        return None
    with netlink.parsing(action):
        found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
        (oldest,), (newest,) = map(found.payload, (LOWEST_REVISION, REVISION))  # one byte each
        return Range(oldest, newest)
