"""IPVS messages about virtual servers and real servers, as bytes."""

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.message import attribute, string
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import PORT_SIZE, TUNNELLED, EvenWeights, without_method
from ipvsproxy.model.virtual_servers import HASHED, FirewallMark, RealServers, VirtualServer, VirtualServerKey

GENERIC_HEADER = 4
"""The number of bytes before the attributes of a message: command, version, and two unused bytes."""

NO_ADDRESS_FAMILY = "the kernel's answer lacks an attribute: use Linux 3.18 or later, which tells the address family of each"
"""Why a real server cannot be read. An unreadable real server must not count as absent."""

SCHEDULER_NAME_LIMIT = 15
"""The longest scheduler name that the kernel takes (IP_VS_SCHEDNAME_MAXLEN less the NUL)."""

_NEW_SERVICE, _SET_SERVICE, _DEL_SERVICE, _GET_SERVICE = range(1, 5)
_GET_DEST, _SET_CONFIG, _GET_CONFIG, _GET_INFO = 8, 12, 13, 15
_DESTINATION_COMMANDS: Mapping[Verb, int] = {Verb.ADD: 5, Verb.SET: 6, Verb.REMOVE: 7}
"""Commands and, below, attributes, as in include/uapi/linux/ip_vs.h (IPVS_CMD_*, IPVS_CMD_ATTR_*, IPVS_SVC_ATTR_* and others)."""
_SERVICE, _DESTINATION = 1, 2
_TIMEOUTS = (4, 5, 6)
_FAMILY, _PROTOCOL, _ADDRESS, _PORT, _MARK, _SCHEDULER, _FLAGS, _TIMEOUT, _NETMASK = range(1, 10)
_REAL_ADDRESS, _REAL_PORT, _METHOD, _WEIGHT, _UPPER, _LOWER = range(1, 7)
_REAL_FAMILY = 11
_VERSION = 1

_ALL_FLAGS = 0xFFFFFFFF
_ALL_ONES = 0xFFFFFFFF
_MASQUERADE, _TUNNEL = 0, 2
"""Forwarding methods (IP_VS_CONN_F_MASQ, IP_VS_CONN_F_TUNNEL); the kernel's default type of tunnel is IP in IP."""
_GENERIC = struct.Struct("=BBxx")
_pack_u16 = struct.Struct("=H").pack
_pack_u32 = struct.Struct("=I").pack
_BEFORE_ADDRESS: Mapping[int, bytes] = {
    size + PORT_SIZE: attribute(_REAL_FAMILY, _pack_u16(family)) + attribute(_REAL_ADDRESS, bytes(size))[:-size]
    for family, size in ((family, family.bits // 8) for family in Family)
}
"""The attributes of a real server up to its address, by the size of its key."""


def attributes(reply: netlink.Reply) -> tuple[bytes, int, int]:
    """The data of a message, and where its attributes, which follow the generic netlink header, start and end."""
    return reply.data, reply.start + GENERIC_HEADER, reply.end


class Encoder:
    """Encodes operations as messages for one number of the generic netlink family of IPVS.

    The number of the family changes when the IPVS module is loaded again.
    """

    def __init__(self, family_number: int) -> None:
        self._number = family_number

    def encode(self, operations: Sequence[Operation], sequences: range) -> list[bytes]:
        """Encode one message for each operation, or for each of its real servers; one sequence number is needed for each message.

        Raises:
            ValueError, struct.error: a real server to add or set has an address of another family than its virtual server, or a
            value does not fit its field.
        """
        numbers = iter(sequences)
        messages: list[bytes] = []
        for verb, item in operations:
            if isinstance(item, RealServers):
                messages += self._real_servers(verb, item, numbers)
            elif isinstance(item, VirtualServer):
                messages.append(self._virtual_server(verb, item, next(numbers)))
            elif isinstance(item, Timeouts):
                timeouts = (attribute(kind, _pack_u32(value)) for kind, value in zip(_TIMEOUTS, item, strict=True) if value)
                messages.append(self._message(_SET_CONFIG, b"".join(timeouts), sequence=next(numbers)))
            else:
                raise TypeError(f"not an IPVS object: {item}")
        return messages

    def _real_servers(self, verb: Verb, item: RealServers, numbers: Iterator[int]) -> Iterator[bytes]:
        key, keys, weight, thresholds, _ = item
        before, values = _GENERIC.pack(_DESTINATION_COMMANDS[verb], _VERSION) + _service(key), b""
        if verb is not Verb.REMOVE:
            values += attribute(_METHOD, _pack_u32(_TUNNEL if weight >= TUNNELLED else _MASQUERADE))
            values += attribute(_WEIGHT, _pack_u32(without_method(weight)))
            values += attribute(_UPPER, _pack_u32(thresholds.upper)) + attribute(_LOWER, _pack_u32(thresholds.lower))
        for one, number in zip(keys.plain() if isinstance(keys, EvenWeights) else keys, numbers, strict=False):
            # Another program may have added a real server that is reached by a tunnel and has an address of the other family.
            if len(one) not in _BEFORE_ADDRESS or (len(one) != len(key.address) + PORT_SIZE and verb is not Verb.REMOVE):
                raise ValueError("the real server's address is not of the virtual server's family")
            name = _BEFORE_ADDRESS[len(one)] + one[:-PORT_SIZE] + attribute(_REAL_PORT, one[-PORT_SIZE:])
            destination = attribute(_DESTINATION, name + values)
            yield message.whole(self._number, netlink.REQUEST, before + destination, number)

    def _virtual_server(self, verb: Verb, item: VirtualServer, sequence: int) -> bytes:
        if verb is Verb.REMOVE:
            return self._message(_DEL_SERVICE, _service(item.key), sequence=sequence)
        scheduler, flags, timeout_s, prefix_length = item.settings
        if not 0 < len(scheduler) <= SCHEDULER_NAME_LIMIT:
            raise ValueError(f"the name of a scheduler has 1 to {SCHEDULER_NAME_LIMIT} characters")
        netmask = _netmask(item.key.address.family, prefix_length)
        service = _service(item.key, _settings(scheduler, flags & ~HASHED, timeout_s, netmask))
        return self._message(_NEW_SERVICE if verb is Verb.ADD else _SET_SERVICE, service, sequence=sequence)

    def all_services(self) -> bytes:
        """The request for a dump of all virtual servers."""
        return self._message(_GET_SERVICE, flags=netlink.DUMP)

    def configuration(self) -> bytes:
        """The request for the connection timeouts."""
        return self._message(_GET_CONFIG)

    def information(self) -> bytes:
        """The request for the version of IPVS and the size of its connection table."""
        return self._message(_GET_INFO)

    def unacceptable_service(self, scheduler: str) -> bytes:
        """A virtual server that every kernel refuses: it has an IPv6 address and the prefix length 0."""
        key = VirtualServerKey(Protocol.TCP, Address(bytes(16)), 1)
        return self._message(_NEW_SERVICE, _service(key, _settings(scheduler, 0, 0, bytes(4))))

    def destinations(self, key: VirtualServerKey) -> bytes:
        """The request for a dump of one virtual server's real servers."""
        return self._message(_GET_DEST, _service(key), netlink.DUMP)

    def service(self, key: VirtualServerKey) -> bytes:
        """The request for one virtual server."""
        return self._message(_GET_SERVICE, _service(key))

    def _message(self, command: int, payload: bytes = b"", flags: int = 0, sequence: int = 0) -> bytes:
        return message.whole(self._number, netlink.REQUEST | flags, _GENERIC.pack(command, _VERSION) + payload, sequence)


def _service(key: VirtualServerKey, settings: bytes = b"") -> bytes:
    """The identity of a virtual server, and its settings."""
    family = attribute(_FAMILY, _pack_u16(key.address.family))
    if isinstance(key, FirewallMark):
        return attribute(_SERVICE, family + attribute(_MARK, _pack_u32(key.mark)) + settings)
    name = attribute(_PROTOCOL, _pack_u16(key.protocol)) + attribute(_ADDRESS, key.address)
    return attribute(_SERVICE, family + name + attribute(_PORT, struct.pack(">H", key.port)) + settings)


def _settings(scheduler: str, flags: int, timeout_s: int, netmask: bytes) -> bytes:
    changed = attribute(_FLAGS, struct.pack("=II", flags, _ALL_FLAGS)) + attribute(_TIMEOUT, _pack_u32(timeout_s))
    return string(_SCHEDULER, scheduler) + changed + attribute(_NETMASK, netmask)


def _netmask(family: Family, length: int) -> bytes:
    """The netmask of session affinity; a length of 0 means a single address.

    In IPv6, it is a prefix length in host byte order.
    """
    if family is Family.IPV6:
        return _pack_u32(length or family.bits)
    return struct.pack(">I", _ALL_ONES ^ (_ALL_ONES >> (length or family.bits)))


def prefix_length(family: Family, netmask: bytes) -> int:
    """The prefix length of a netmask as sent by the kernel: for IPv4 a mask, and for IPv6 a number in host byte order."""
    if family is Family.IPV6:
        return int.from_bytes(netmask, sys.byteorder)
    return int.from_bytes(netmask, "big").bit_count()
