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

IPVS_CMD_NEW_SERVICE, IPVS_CMD_SET_SERVICE, IPVS_CMD_DEL_SERVICE, IPVS_CMD_GET_SERVICE = range(1, 5)
IPVS_CMD_NEW_DEST, IPVS_CMD_SET_DEST, IPVS_CMD_DEL_DEST, IPVS_CMD_GET_DEST = range(5, 9)
IPVS_CMD_SET_CONFIG, IPVS_CMD_GET_CONFIG, IPVS_CMD_GET_INFO = 12, 13, 15
IPVS_CMD_ATTR_SERVICE, IPVS_CMD_ATTR_DEST = 1, 2
IPVS_CMD_ATTR_TIMEOUT_TCP, IPVS_CMD_ATTR_TIMEOUT_TCP_FIN, IPVS_CMD_ATTR_TIMEOUT_UDP = 4, 5, 6
IPVS_SVC_ATTR_AF, IPVS_SVC_ATTR_PROTOCOL, IPVS_SVC_ATTR_ADDR, IPVS_SVC_ATTR_PORT, IPVS_SVC_ATTR_FWMARK = 1, 2, 3, 4, 5
IPVS_SVC_ATTR_SCHED_NAME, IPVS_SVC_ATTR_FLAGS, IPVS_SVC_ATTR_TIMEOUT, IPVS_SVC_ATTR_NETMASK = 6, 7, 8, 9
IPVS_DEST_ATTR_ADDR, IPVS_DEST_ATTR_PORT, IPVS_DEST_ATTR_FWD_METHOD, IPVS_DEST_ATTR_WEIGHT = 1, 2, 3, 4
IPVS_DEST_ATTR_U_THRESH, IPVS_DEST_ATTR_L_THRESH, IPVS_DEST_ATTR_ADDR_FAMILY = 5, 6, 11
"""Commands and attributes. They have the kernel's names, by which docs/compatibility.md lists them."""
_DESTINATION_COMMANDS: Mapping[Verb, int] = {
    Verb.ADD: IPVS_CMD_NEW_DEST,
    Verb.SET: IPVS_CMD_SET_DEST,
    Verb.REMOVE: IPVS_CMD_DEL_DEST,
}
_TIMEOUTS = (IPVS_CMD_ATTR_TIMEOUT_TCP, IPVS_CMD_ATTR_TIMEOUT_TCP_FIN, IPVS_CMD_ATTR_TIMEOUT_UDP)
_VERSION = 1

_ALL_FLAGS = 0xFFFFFFFF
_ALL_ONES = 0xFFFFFFFF
_MASQUERADE, _TUNNEL = 0, 2
"""Forwarding methods (IP_VS_CONN_F_MASQ, IP_VS_CONN_F_TUNNEL); the kernel's default type of tunnel is IP in IP."""
_GENERIC = struct.Struct("=BBxx")
_pack_u16 = struct.Struct("=H").pack
_pack_u32 = struct.Struct("=I").pack
_BEFORE_ADDRESS: Mapping[int, bytes] = {
    size + PORT_SIZE: attribute(IPVS_DEST_ATTR_ADDR_FAMILY, _pack_u16(family))
    + attribute(IPVS_DEST_ATTR_ADDR, bytes(size))[:-size]
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
                messages.append(self._message(IPVS_CMD_SET_CONFIG, b"".join(timeouts), sequence=next(numbers)))
            else:
                raise TypeError(f"not an IPVS object: {item}")
        return messages

    def _real_servers(self, verb: Verb, item: RealServers, numbers: Iterator[int]) -> Iterator[bytes]:
        key, keys, weight, thresholds, _ = item
        before, values = _GENERIC.pack(_DESTINATION_COMMANDS[verb], _VERSION) + _service(key), b""
        if verb is not Verb.REMOVE:
            values += attribute(IPVS_DEST_ATTR_FWD_METHOD, _pack_u32(_TUNNEL if weight >= TUNNELLED else _MASQUERADE))
            values += attribute(IPVS_DEST_ATTR_WEIGHT, _pack_u32(without_method(weight)))
            values += attribute(IPVS_DEST_ATTR_U_THRESH, _pack_u32(thresholds.upper)) + attribute(
                IPVS_DEST_ATTR_L_THRESH, _pack_u32(thresholds.lower)
            )
        for one, number in zip(keys.plain() if isinstance(keys, EvenWeights) else keys, numbers, strict=False):
            # Another program may have added a real server that is reached by a tunnel and has an address of the other family.
            if len(one) not in _BEFORE_ADDRESS or (len(one) != len(key.address) + PORT_SIZE and verb is not Verb.REMOVE):
                raise ValueError("the real server's address is not of the virtual server's family")
            name = _BEFORE_ADDRESS[len(one)] + one[:-PORT_SIZE] + attribute(IPVS_DEST_ATTR_PORT, one[-PORT_SIZE:])
            destination = attribute(IPVS_CMD_ATTR_DEST, name + values)
            yield message.whole(self._number, netlink.REQUEST, before + destination, number)

    def _virtual_server(self, verb: Verb, item: VirtualServer, sequence: int) -> bytes:
        if verb is Verb.REMOVE:
            return self._message(IPVS_CMD_DEL_SERVICE, _service(item.key), sequence=sequence)
        scheduler, flags, timeout_s, prefix_length = item.settings
        if not 0 < len(scheduler) <= SCHEDULER_NAME_LIMIT:
            raise ValueError(f"the name of a scheduler has 1 to {SCHEDULER_NAME_LIMIT} characters")
        netmask = _netmask(item.key.address.family, prefix_length)
        service = _service(item.key, _settings(scheduler, flags & ~HASHED, timeout_s, netmask))
        return self._message(IPVS_CMD_NEW_SERVICE if verb is Verb.ADD else IPVS_CMD_SET_SERVICE, service, sequence=sequence)

    def all_services(self) -> bytes:
        """The request for a dump of all virtual servers."""
        return self._message(IPVS_CMD_GET_SERVICE, flags=netlink.DUMP)

    def configuration(self) -> bytes:
        """The request for the connection timeouts."""
        return self._message(IPVS_CMD_GET_CONFIG)

    def information(self) -> bytes:
        """The request for the version of IPVS and the size of its connection table."""
        return self._message(IPVS_CMD_GET_INFO)

    def unacceptable_service(self, scheduler: str) -> bytes:
        """A virtual server that every kernel refuses: it has an IPv6 address and the prefix length 0."""
        key = VirtualServerKey(Protocol.TCP, Address(bytes(16)), 1)
        return self._message(IPVS_CMD_NEW_SERVICE, _service(key, _settings(scheduler, 0, 0, bytes(4))))

    def destinations(self, key: VirtualServerKey) -> bytes:
        """The request for a dump of one virtual server's real servers."""
        return self._message(IPVS_CMD_GET_DEST, _service(key), netlink.DUMP)

    def service(self, key: VirtualServerKey) -> bytes:
        """The request for one virtual server."""
        return self._message(IPVS_CMD_GET_SERVICE, _service(key))

    def _message(self, command: int, payload: bytes = b"", flags: int = 0, sequence: int = 0) -> bytes:
        return message.whole(self._number, netlink.REQUEST | flags, _GENERIC.pack(command, _VERSION) + payload, sequence)


def _service(key: VirtualServerKey, settings: bytes = b"") -> bytes:
    """The identity of a virtual server, and its settings."""
    family = attribute(IPVS_SVC_ATTR_AF, _pack_u16(key.address.family))
    if isinstance(key, FirewallMark):
        return attribute(IPVS_CMD_ATTR_SERVICE, family + attribute(IPVS_SVC_ATTR_FWMARK, _pack_u32(key.mark)) + settings)
    name = attribute(IPVS_SVC_ATTR_PROTOCOL, _pack_u16(key.protocol)) + attribute(IPVS_SVC_ATTR_ADDR, key.address)
    return attribute(IPVS_CMD_ATTR_SERVICE, family + name + attribute(IPVS_SVC_ATTR_PORT, struct.pack(">H", key.port)) + settings)


def _settings(scheduler: str, flags: int, timeout_s: int, netmask: bytes) -> bytes:
    changed = attribute(IPVS_SVC_ATTR_FLAGS, struct.pack("=II", flags, _ALL_FLAGS)) + attribute(
        IPVS_SVC_ATTR_TIMEOUT, _pack_u32(timeout_s)
    )
    return string(IPVS_SVC_ATTR_SCHED_NAME, scheduler) + changed + attribute(IPVS_SVC_ATTR_NETMASK, netmask)


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
