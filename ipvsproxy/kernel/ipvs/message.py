"""IPVS messages about virtual and real servers, as bytes."""

import functools
import struct
import sys
from collections.abc import Mapping, Sequence

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NO_THRESHOLDS, PORT_SIZE, EvenWeights, Thresholds
from ipvsproxy.model.virtual_servers import HASHED, FirewallMark, RealServers, VirtualServer, VirtualServerKey

GENERIC_HEADER = 4
"""The bytes before the attributes of a message: command, version, and two unused ones."""

NO_ADDRESS_FAMILY = "the kernel's answer lacks an attribute: use Linux 3.18 or later, which tells the address family of each"
"""Why a real server cannot be read. It must not count as absent."""

SCHEDULER_NAME_LIMIT = 15
"""The longest scheduler name that the kernel takes (IP_VS_SCHEDNAME_MAXLEN less the NUL)."""

IPVS_CMD_NEW_SERVICE, IPVS_CMD_SET_SERVICE, IPVS_CMD_DEL_SERVICE, IPVS_CMD_GET_SERVICE = range(1, 5)
IPVS_CMD_NEW_DEST, IPVS_CMD_SET_DEST, IPVS_CMD_DEL_DEST, IPVS_CMD_GET_DEST = range(5, 9)
IPVS_CMD_SET_CONFIG, IPVS_CMD_GET_CONFIG, IPVS_CMD_GET_INFO = 12, 13, 15
IPVS_CMD_ATTR_SERVICE, IPVS_CMD_ATTR_DEST = 1, 2
IPVS_CMD_ATTR_TIMEOUT_TCP, IPVS_CMD_ATTR_TIMEOUT_TCP_FIN, IPVS_CMD_ATTR_TIMEOUT_UDP = TIMEOUTS = (4, 5, 6)
IPVS_SVC_ATTR_AF, IPVS_SVC_ATTR_PROTOCOL, IPVS_SVC_ATTR_ADDR, IPVS_SVC_ATTR_PORT, IPVS_SVC_ATTR_FWMARK = range(1, 6)
IPVS_SVC_ATTR_SCHED_NAME, IPVS_SVC_ATTR_FLAGS, IPVS_SVC_ATTR_TIMEOUT, IPVS_SVC_ATTR_NETMASK = range(6, 10)
IPVS_DEST_ATTR_ADDR, IPVS_DEST_ATTR_PORT, IPVS_DEST_ATTR_ADDR_FAMILY = 1, 2, 11
IPVS_DEST_ATTR_FWD_METHOD, IPVS_DEST_ATTR_WEIGHT, IPVS_DEST_ATTR_U_THRESH, IPVS_DEST_ATTR_L_THRESH = range(3, 7)
"""Commands and attributes (include/uapi/linux/ip_vs.h)."""

_VERSION = 1
_ALL_FLAGS = 0xFFFFFFFF
_ALL_ONES = 0xFFFFFFFF
_MASQUERADE = 0
_FAMILIES: Mapping[int, Family] = {family.bits // 8: family for family in Family}
"""By the size of an address."""
_DESTINATION_COMMANDS: Mapping[Verb, int] = {
    Verb.ADD: IPVS_CMD_NEW_DEST,
    Verb.SET: IPVS_CMD_SET_DEST,
    Verb.REMOVE: IPVS_CMD_DEL_DEST,
}
_SEQUENCE = message.SEQUENCE_OFFSET
_NAMES: Mapping[Family, struct.Struct] = {family: struct.Struct(f"=HHHxxHHHxxHH{family.bits // 8}sHH2sxx") for family in Family}
"""Four attributes that name a virtual server. One structure takes a third of the time of four."""
_DESCRIBED = struct.Struct("=HHIHHIHHIHHI")
_pack_command = struct.Struct("=BBxx").pack
_pack_port = struct.Struct(">H").pack
_pack_u32 = struct.Struct("=I").pack


def attributes(reply: netlink.Reply) -> tuple[bytes, int, int]:
    """The data of a message, with start and end of its attributes behind the generic header."""
    return reply.data, reply.start + GENERIC_HEADER, reply.end


class Encoder:
    """Encodes operations for one number of the IPVS family. The number changes when the module is loaded again."""

    def __init__(self, family_number: int) -> None:
        self._number = family_number

    def encode(self, operations: Sequence[Operation], sequences: range) -> list[bytes]:
        """Encode one message for each operation, or for each of its real servers, with as many sequence numbers.

        Raises:
            ValueError, struct.error: a real server that is not removed has an address of another family than its virtual
                server, or a value does not fit its field.
        """
        messages = [b""] * len(sequences)
        last: tuple[VirtualServerKey | None, Verb | None, int, Thresholds] = (None, None, 0, NO_THRESHOLDS)
        head = middle = between = tail = b""
        position = size = 0
        for verb, item in operations:
            if not isinstance(item, RealServers):
                messages[position] = self._encode_other(verb, item, sequences[position])
                position += 1
                continue
            key, keys, weight, thresholds, _ = item
            # Operations on one virtual server follow each other. To join their common bytes anew takes 0.6 µs for each.
            if key is not last[0] or verb is not last[1] or weight != last[2] or thresholds is not last[3]:
                head, middle, between, tail = self._around_real_server(key, verb, weight, thresholds)
                size = len(key.address)
                last = key, verb, weight, thresholds
            for real_server in keys.plain() if isinstance(keys, EvenWeights) else keys:
                sequence = _pack_u32(sequences[position])
                if len(real_server) == size + PORT_SIZE:
                    parts = head, sequence, middle, real_server[:size], between, real_server[size:], tail
                    messages[position] = b"".join(parts)
                elif verb is Verb.REMOVE and len(real_server) - PORT_SIZE in _FAMILIES:
                    # Another program may tunnel to it.
                    messages[position] = self._destination(verb, key, real_server, sequence=sequences[position])
                else:
                    raise ValueError("the real server's address is not of the virtual server's family")
                position += 1
        return messages

    def _around_real_server(
        self, key: VirtualServerKey, verb: Verb, weight: int, thresholds: Thresholds
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """The bytes before the sequence number, before a real server's address, after it, and after its port."""
        size = len(key.address)
        described = b"" if verb is Verb.REMOVE else _described(weight, thresholds)
        whole = self._destination(verb, key, bytes(size + PORT_SIZE), described)
        port = len(whole) - len(described) - 4  # the port is padded to four bytes
        address = port - 4 - size
        return whole[:_SEQUENCE], whole[_SEQUENCE + 4 : address], whole[address + size : port], whole[port + PORT_SIZE :]

    def _destination(
        self, verb: Verb, key: VirtualServerKey, real_server: bytes, described: bytes = b"", sequence: int = 0
    ) -> bytes:
        """A message about a real server, whose attributes behind its address and port are ``described``."""
        address, port = real_server[:-PORT_SIZE], real_server[-PORT_SIZE:]
        destination = (
            _u16(IPVS_DEST_ATTR_ADDR_FAMILY, _FAMILIES[len(address)])
            + message.attribute(IPVS_DEST_ATTR_ADDR, address)
            + message.attribute(IPVS_DEST_ATTR_PORT, port)
            + described
        )
        attributes = _service(key) + message.attribute(IPVS_CMD_ATTR_DEST, destination)
        return self._message(_DESTINATION_COMMANDS[verb], attributes, sequence=sequence)

    def all_services(self) -> bytes:
        """The request for a dump of all virtual servers."""
        return self._message(IPVS_CMD_GET_SERVICE, flags=netlink.DUMP)

    def configuration(self) -> bytes:
        """The request for the connection timeouts."""
        return self._message(IPVS_CMD_GET_CONFIG)

    def information(self) -> bytes:
        """The request for IPVS's version and the size of its connection table."""
        return self._message(IPVS_CMD_GET_INFO)

    def unacceptable_service(self, scheduler: str) -> bytes:
        """A virtual server that every kernel refuses: of IPv6, with a prefix length of 0."""
        key = VirtualServerKey(Protocol.TCP, Address(bytes(16)), 1)
        return self._message(IPVS_CMD_NEW_SERVICE, _service(key, _settings(scheduler, 0, 0, bytes(4))))

    def destinations(self, key: VirtualServerKey) -> bytes:
        """The request for a dump of one virtual server's real servers."""
        return self._message(IPVS_CMD_GET_DEST, _service(key), netlink.DUMP)

    def service(self, key: VirtualServerKey) -> bytes:
        """The request for one virtual server."""
        return self._message(IPVS_CMD_GET_SERVICE, _service(key))

    def _encode_other(self, verb: Verb, item: object, sequence: int) -> bytes:
        if isinstance(item, VirtualServer):
            if verb is Verb.REMOVE:
                return self._message(IPVS_CMD_DEL_SERVICE, _service(item.key), sequence=sequence)
            scheduler, flags, timeout_s, prefix_length = item.settings
            if not 0 < len(scheduler) <= SCHEDULER_NAME_LIMIT:
                raise ValueError(f"the name of a scheduler has 1 to {SCHEDULER_NAME_LIMIT} characters")
            settings = _settings(scheduler, flags & ~HASHED, timeout_s, _netmask(item.key.address.family, prefix_length))
            command = IPVS_CMD_NEW_SERVICE if verb is Verb.ADD else IPVS_CMD_SET_SERVICE
            return self._message(command, _service(item.key, settings), sequence=sequence)
        if isinstance(item, Timeouts):
            values = zip(TIMEOUTS, item, strict=True)
            return self._message(
                IPVS_CMD_SET_CONFIG, b"".join(_u32(number, value) for number, value in values if value), sequence=sequence
            )
        raise TypeError(f"not an IPVS object: {item}")

    def _message(self, command: int, attributes: bytes = b"", flags: int = 0, sequence: int = 0) -> bytes:
        return message.whole(self._number, netlink.REQUEST | flags, _pack_command(command, _VERSION) + attributes, sequence)


def _u16(number: int, value: int) -> bytes:
    return message.attribute(number, struct.pack("=H", value))


def _u32(number: int, value: int) -> bytes:
    return message.attribute(number, _pack_u32(value))


def _service(key: VirtualServerKey, settings: bytes = b"") -> bytes:
    """The attribute that names a virtual server, with its settings if it is to get them."""
    family = key.address.family
    if isinstance(key, FirewallMark):
        name = _u16(IPVS_SVC_ATTR_AF, family) + _u32(IPVS_SVC_ATTR_FWMARK, key.mark)
    else:
        name = _NAMES[family].pack(
            *(6, IPVS_SVC_ATTR_AF, family, 6, IPVS_SVC_ATTR_PROTOCOL, key.protocol),
            *(4 + len(key.address), IPVS_SVC_ATTR_ADDR, key.address, 6, IPVS_SVC_ATTR_PORT, _pack_port(key.port)),
        )
    return message.attribute(IPVS_CMD_ATTR_SERVICE, name + settings)


@functools.lru_cache(maxsize=256)
def _settings(scheduler: str, flags: int, timeout_s: int, netmask: bytes) -> bytes:
    """The attributes with the settings of a virtual server."""
    return (
        message.string(IPVS_SVC_ATTR_SCHED_NAME, scheduler)
        + message.attribute(IPVS_SVC_ATTR_FLAGS, struct.pack("=II", flags, _ALL_FLAGS))
        + _u32(IPVS_SVC_ATTR_TIMEOUT, timeout_s)
        + message.attribute(IPVS_SVC_ATTR_NETMASK, netmask)
    )


def _described(weight: int, thresholds: Thresholds) -> bytes:
    """The attributes of a real server besides its address and port."""
    return _DESCRIBED.pack(
        *(8, IPVS_DEST_ATTR_FWD_METHOD, _MASQUERADE, 8, IPVS_DEST_ATTR_WEIGHT, weight),
        *(8, IPVS_DEST_ATTR_U_THRESH, thresholds.upper, 8, IPVS_DEST_ATTR_L_THRESH, thresholds.lower),
    )


def _netmask(family: Family, prefix_length: int) -> bytes:
    """The netmask of session affinity, as ``prefix_length`` reads it; 0 is that of a single address."""
    length = prefix_length or family.bits
    return _pack_u32(length) if family is Family.IPV6 else struct.pack(">I", _ALL_ONES ^ (_ALL_ONES >> length))


def prefix_length(family: Family, netmask: bytes) -> int:
    """The prefix length of a netmask as the kernel sends it: a mask for IPv4, and for IPv6 a number in host order."""
    if family is Family.IPV6:
        return int.from_bytes(netmask, sys.byteorder)
    return int.from_bytes(netmask, "big").bit_count()


def network_length(family: Family, netmask: bytes) -> int:
    """As ``prefix_length``; 0 for a single address."""
    length = prefix_length(family, netmask)
    return 0 if length == family.bits else length
