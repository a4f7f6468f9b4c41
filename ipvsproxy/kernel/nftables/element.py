"""One entry of a set as an element of nf_tables, and back. A native set of our table takes the place of each ipset.

An address, a protocol and a port are fields of one key. A mark is what a key is mapped to.
"""

import re
import struct
from collections.abc import Mapping

from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.nft_message import Shape
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.sets import ForeignElement, IpSet, MarkedEntry, SetEntry, SetType

_ADDRESS_TYPES: Mapping[Family, int] = {Family.IPV4: 7, Family.IPV6: 8}
_PROTOCOL_TYPE, _PORT_TYPE, _MARK_TYPE = 12, 13, 19
_MASK = "mask "
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}
_NUMBER = struct.Struct("=I")
"""A mark, and a prefix length, which is kept as one: ``nft`` can neither print nor read a key with a constant of another type."""


def shape(ip_set: IpSet) -> Shape:
    """The parameters of a set of ours. Each field of a key takes a multiple of four bytes."""
    address, size = _ADDRESS_TYPES[ip_set.family], ip_set.family.bits // 8
    fields: Mapping[SetType, tuple[tuple[int, int], ...]] = {
        SetType.ADDRESS: ((address, size),),
        SetType.PORT: ((_PORT_TYPE, 2),),
        SetType.ADDRESS_PORT: ((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4)),
        SetType.ADDRESS_PORT_ADDRESS: ((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4), (address, size)),
        # The last field is the prefix length.
        SetType.ADDRESS_PORT_NETWORK: (
            *((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4)),
            *((address, size), (_MARK_TYPE, 4)),
        ),
    }
    kind = 0
    for number, _ in fields[ip_set.type]:
        kind = kind << 6 | number
    length = sum(length for _, length in fields[ip_set.type])
    return Shape(kind, length, _MARK_TYPE, _NUMBER.size) if ip_set.gives_marks else Shape(kind, length)


def encode(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry as an element; a ``ForeignElement`` only to remove it.

    Raises:
        ValueError: an address is missing or not of the set's family, or a number does not fit its field.
    """
    if isinstance(entry, ForeignElement):
        return nft.element(entry.raw) if entry.raw else nft.element_for_all_others()
    key = _key(ip_set, entry)
    if not isinstance(entry, MarkedEntry):
        return nft.element(key)
    # The rule that looks up the mark writes all of it. The mask only shows which bits the entry was made for.
    return nft.element(key, _NUMBER.pack(entry.mark), f"{_MASK}{entry.mask:#x}")


def bare(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry as an element without what it is mapped to.

    Raises:
        ValueError: as ``encode``.
    """
    return encode(ip_set, entry) if isinstance(entry, ForeignElement) else nft.element(_key(ip_set, entry))


def _key(ip_set: IpSet, entry: SetEntry) -> bytes:
    try:
        port = struct.pack(">H", entry.port)
        if ip_set.type is SetType.PORT:
            return port
        key = _address(ip_set, entry.address)
        if ip_set.type is SetType.ADDRESS:
            return key
        if entry.protocol is None:
            raise ValueError("the protocol is missing")
        key += bytes((entry.protocol, 0, 0, 0)) + port + bytes(2)
        if ip_set.type is SetType.ADDRESS_PORT:
            return key
        other = _address(ip_set, entry.other)
        if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
            return key + other
        if not 0 < entry.prefix_length <= ip_set.family.bits:
            raise ValueError("a set takes no /0 range; two /1 ranges are the same")
        return key + _network(other, entry.prefix_length) + _NUMBER.pack(entry.prefix_length)
    except struct.error as error:
        raise ValueError(str(error)) from error


def _address(ip_set: IpSet, address: Address | None) -> bytes:
    if address is None or len(address) * 8 != ip_set.family.bits:
        raise ValueError(f"the address is not of the set's family {ip_set.family.label}")
    return bytes(address)


def _network(address: bytes, prefix_length: int) -> bytes:
    """The first address of a range, which is what the kernel keeps of it."""
    shift = len(address) * 8 - prefix_length
    return (int.from_bytes(address, "big") >> shift << shift).to_bytes(len(address), "big")


def decode(ip_set: IpSet, key: bytes, data: bytes, comment: str) -> SetEntry:
    """The entry of an element: the one that ``encode`` makes this key of, or a ``ForeignElement`` if there is none."""
    if ip_set.type is SetType.PORT:
        return SetEntry(ip_set.name, port=int.from_bytes(key[:2], "big"))
    address = Address(key[: ip_set.family.bits // 8])
    if ip_set.type is SetType.ADDRESS:
        return SetEntry(ip_set.name, address)
    return _of_service(ip_set, address, key, data, comment) or ForeignElement(ip_set.name, raw=key)


def _of_service(ip_set: IpSet, address: Address, key: bytes, data: bytes, comment: str) -> SetEntry | None:
    """The entry with an address, a protocol and a port; None if none of ours has this key."""
    name, size = ip_set.name, len(address)
    protocol, port = _PROTOCOLS.get(key[size]), int.from_bytes(key[size + 4 : size + 6], "big")
    if protocol is None or any(key[size + 1 : size + 4]) or any(key[size + 6 : size + 8]):
        return None
    if ip_set.gives_marks:
        (mark,) = _NUMBER.unpack(data)
        written = re.fullmatch(f"{_MASK}(0x[0-9a-f]{{1,8}})", comment)
        return MarkedEntry(name, address, protocol, port, mark=mark, mask=int(written[1], 16) if written else 0)
    if ip_set.type is SetType.ADDRESS_PORT:
        return SetEntry(name, address, protocol, port)
    other = Address(key[size + 8 : 2 * size + 8])
    if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
        return SetEntry(name, address, protocol, port, other)
    (prefix_length,) = _NUMBER.unpack(key[-_NUMBER.size :])
    if not 0 < prefix_length <= ip_set.family.bits or _network(other, prefix_length) != other:
        return None
    return SetEntry(name, address, protocol, port, other, prefix_length)
