"""Encodes IPVS messages about virtual servers and real servers as bytes, and helps to read such messages."""

import functools
import itertools
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pyroute2.netlink.generic import ipvs

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import FAMILY_BY_LENGTH, Family, Protocol
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import PORT_SIZE, TUNNELLED, Thresholds, without_method
from ipvsproxy.model.virtual_servers import HASHED, FirewallMark, RealServers, VirtualServer, VirtualServerKey

GENERIC_HEADER = 4
"""The number of bytes before the attributes of a message: command, version, and two unused bytes."""

NO_ADDRESS_FAMILY = "the kernel's answer lacks an attribute: use Linux 3.18 or later, which tells the address family of each"
"""The error if the kernel does not tell the address family of a real server. Without an error, this real server would count as
absent."""

SCHEDULER_NAME_LIMIT = 15
"""The largest number of characters in a scheduler name that the kernel takes (IP_VS_SCHEDNAME_MAXLEN without the NUL)."""

TEMPLATES_KEPT = 256
"""The encoder keeps at most this number of templates for messages about real servers. Each combination of shape, forwarding
method and thresholds needs a separate template."""

_ALL_FLAGS = 0xFFFFFFFF
_ALL_ONES = 0xFFFFFFFF
_MASQUERADE, _TUNNEL = 0, 2
"""Forwarding methods (IP_VS_CONN_F_MASQ, IP_VS_CONN_F_TUNNEL); the kernel's default type of tunnel is IP in IP."""
_U16 = (0, 0xFFFF)
_U32 = (0, 0xFFFFFFFF)
_DESTINATION_COMMANDS: Mapping[Verb, int] = {
    Verb.ADD: ipvs.IPVS_CMD_NEW_DEST,
    Verb.SET: ipvs.IPVS_CMD_SET_DEST,
    Verb.REMOVE: ipvs.IPVS_CMD_DEL_DEST,
}
_pack_port = struct.Struct(">H").pack
_pack_u16 = struct.Struct("=H").pack
_pack_u32 = struct.Struct("=I").pack


def attributes(reply: netlink.Reply) -> tuple[bytes, int, int]:
    """The data of a message, and the start and end of its attributes, which follow the generic netlink header."""
    return reply.data, reply.start + GENERIC_HEADER, reply.end


class Shape(NamedTuple):
    """How a message identifies a virtual server: by address family, and by either a firewall mark or an address and port."""

    family: Family
    by_mark: bool = False


class Encoder:
    """Encodes operations as messages of the generic netlink family of IPVS; each message contains the given family number.

    The number of the family changes when the IPVS module is loaded again.
    """

    def __init__(self, family_number: int) -> None:
        self.family_number = family_number
        self._service = functools.cache(self._service_template)
        self._named = functools.cache(self._named_template)
        # The number of cached templates is limited, because everybody who may write a Service can choose its thresholds.
        self._destination = functools.lru_cache(maxsize=TEMPLATES_KEPT)(self._destination_template)

    def encode(self, operations: Iterable[Operation]) -> list[bytes]:
        """Encode one message for each operation; for an operation on real servers, encode one message for each real server.

        Raises:
            ValueError, struct.error: a value is too large for its field of the message.
        """
        messages: list[bytes] = []
        for verb, item in operations:
            if isinstance(item, RealServers):
                messages += self._encode_real_servers(verb, item)
            else:
                messages.append(self._encode_other(verb, item))
        return messages

    def _encode_real_servers(self, verb: Verb, item: RealServers) -> Iterator[bytes]:
        key, keys, weight, thresholds, _ = item
        method = _TUNNEL if weight >= TUNNELLED else _MASQUERADE
        name = _holes(key)
        values = () if verb is Verb.REMOVE else (_pack_u32(without_method(weight)),)
        # another program may have added a real server whose IP family is not the virtual server's
        for size, alike in itertools.groupby(keys, len):
            encode = self._destination(verb, _shape(key), FAMILY_BY_LENGTH[size - PORT_SIZE], thresholds, method)
            yield from (encode((*name, one[:-PORT_SIZE], one[-PORT_SIZE:], *values)) for one in alike)

    def all_services(self) -> bytes:
        """The request for a dump of all virtual servers."""
        return self._message(ipvs.IPVS_CMD_GET_SERVICE, [], netlink.REQUEST | netlink.DUMP)

    def configuration(self) -> bytes:
        """The request for the connection timeouts."""
        return self._message(ipvs.IPVS_CMD_GET_CONFIG, [], netlink.REQUEST)

    def information(self) -> bytes:
        """The request for the version of IPVS and the size of its connection table."""
        return self._message(ipvs.IPVS_CMD_GET_INFO, [], netlink.REQUEST)

    def unacceptable_service(self, scheduler: str) -> bytes:
        """A request that every kernel refuses: to add a virtual server with an IPv6 address and the prefix length 0."""
        service = [
            *_key(Shape(Family.IPV6), protocol=Protocol.TCP, address="::", port=1),
            ["IPVS_SVC_ATTR_SCHED_NAME", scheduler],
            ["IPVS_SVC_ATTR_FLAGS", {"flags": 0, "mask": _ALL_FLAGS}],
            ["IPVS_SVC_ATTR_TIMEOUT", 0],
            ["IPVS_SVC_ATTR_NETMASK", "0.0.0.0"],  # noqa: S104 - the value is a netmask, not an address
        ]
        return self._message(ipvs.IPVS_CMD_NEW_SERVICE, [["IPVS_CMD_ATTR_SERVICE", {"attrs": service}]])

    def destinations(self, key: VirtualServerKey) -> bytes:
        """The request for a dump of one virtual server's real servers."""
        return self._named(ipvs.IPVS_CMD_GET_DEST, _shape(key), netlink.DUMP)(_holes(key))

    def service(self, key: VirtualServerKey) -> bytes:
        """The request that reads one virtual server."""
        return self._named(ipvs.IPVS_CMD_GET_SERVICE, _shape(key))(_holes(key))

    def _encode_other(self, verb: Verb, item: object) -> bytes:
        if isinstance(item, VirtualServer):
            key, shape = _holes(item.key), _shape(item.key)
            if verb is Verb.REMOVE:
                return self._named(ipvs.IPVS_CMD_DEL_SERVICE, shape)(key)
            scheduler, flags, timeout_s, prefix_length = item.settings
            if not 0 < len(scheduler) <= SCHEDULER_NAME_LIMIT:
                raise ValueError(f"the name of a scheduler has 1 to {SCHEDULER_NAME_LIMIT} characters")
            encode = self._service(verb, shape, scheduler, prefix_length)
            return encode((*key, _pack_u32(flags & ~HASHED), _pack_u32(timeout_s)))
        if isinstance(item, Timeouts):
            named = zip(("TCP", "TCP_FIN", "UDP"), item, strict=True)
            values = [[f"IPVS_CMD_ATTR_TIMEOUT_{name}", _pack_u32(value)] for name, value in named if value]
            return self._message(ipvs.IPVS_CMD_SET_CONFIG, values)
        raise TypeError(f"not an IPVS object: {item}")

    def _service_template(self, verb: Verb, shape: Shape, scheduler: str, prefix_length: int) -> message.Encode:
        netmask = _netmask(shape.family, prefix_length or shape.family.bits)
        command = ipvs.IPVS_CMD_NEW_SERVICE if verb is Verb.ADD else ipvs.IPVS_CMD_SET_SERVICE

        def build(flags: int, timeout: int, **key: Any) -> bytes:
            service = [
                *_key(shape, **key),
                ["IPVS_SVC_ATTR_SCHED_NAME", scheduler],
                ["IPVS_SVC_ATTR_FLAGS", {"flags": flags, "mask": _ALL_FLAGS}],
                ["IPVS_SVC_ATTR_TIMEOUT", timeout],
                ["IPVS_SVC_ATTR_NETMASK", netmask],
            ]
            return self._message(command, [["IPVS_CMD_ATTR_SERVICE", {"attrs": service}]])

        return message.template(build, {**_key_samples(shape), "flags": _U32, "timeout": _U32})

    def _named_template(self, command: int, shape: Shape, flags: int = 0) -> message.Encode:
        """A message whose only content is the identity of a virtual server."""

        def build(**key: Any) -> bytes:
            return self._message(command, [["IPVS_CMD_ATTR_SERVICE", {"attrs": _key(shape, **key)}]], netlink.REQUEST | flags)

        return message.template(build, _key_samples(shape))

    def _destination_template(
        self, verb: Verb, shape: Shape, family: Family, thresholds: Thresholds, method: int
    ) -> message.Encode:
        samples: dict[str, message.Sample] = {
            **_key_samples(shape),
            "real_address": message.ADDRESSES[family],
            "real_port": _U16,
        }

        def build(real_address: str, real_port: int, weight: int | None = None, **key: Any) -> bytes:
            service = _key(shape, **key)
            destination = [
                ["IPVS_DEST_ATTR_ADDR_FAMILY", int(family)],
                ["IPVS_DEST_ATTR_ADDR", real_address],
                ["IPVS_DEST_ATTR_PORT", real_port],
            ]
            if weight is not None:
                destination += [
                    ["IPVS_DEST_ATTR_FWD_METHOD", method],
                    ["IPVS_DEST_ATTR_WEIGHT", weight],
                    ["IPVS_DEST_ATTR_U_THRESH", thresholds.upper],
                    ["IPVS_DEST_ATTR_L_THRESH", thresholds.lower],
                ]
            attributes = [["IPVS_CMD_ATTR_SERVICE", {"attrs": service}], ["IPVS_CMD_ATTR_DEST", {"attrs": destination}]]
            return self._message(_DESTINATION_COMMANDS[verb], attributes)

        return message.template(build, samples if verb is Verb.REMOVE else samples | {"weight": _U32})

    def _message(self, command: int, attributes: list[Any], flags: int = netlink.REQUEST) -> bytes:
        encoded = ipvs.ipvsmsg()
        encoded["cmd"] = command
        encoded["version"] = ipvs.GENL_VERSION
        encoded["attrs"] = attributes
        return message.encode(encoded, self.family_number, flags)


def _netmask(family: Family, prefix_length: int) -> str:
    """The netmask of session affinity in the form of an IPv4 address, which is the form that pyroute2 accepts.

    For IPv6, the kernel expects the prefix length in host byte order as the netmask.
    """
    if family is Family.IPV6:
        return socket.inet_ntoa(struct.pack("=I", prefix_length))
    return socket.inet_ntoa(struct.pack(">I", _ALL_ONES ^ (_ALL_ONES >> prefix_length)))


def prefix_length(family: Family, netmask: bytes) -> int:
    """The prefix length of a netmask from the kernel.

    An IPv4 netmask is a bit mask; an IPv6 netmask is the prefix length in host byte order.
    """
    if family is Family.IPV6:
        return int.from_bytes(netmask, sys.byteorder)
    return int.from_bytes(netmask, "big").bit_count()


def _shape(key: VirtualServerKey) -> Shape:
    return Shape(key.address.family, by_mark=type(key) is FirewallMark)


def _holes(key: VirtualServerKey) -> tuple[bytes, ...]:
    """The values that identify a virtual server in a message, as bytes: the mark, or the protocol, address and port."""
    if type(key) is FirewallMark:
        return (_pack_u32(key.mark),)
    return _pack_u16(key.protocol), key.address, _pack_port(key.port)


def _key_samples(shape: Shape) -> dict[str, message.Sample]:
    if shape.by_mark:
        return {"mark": _U32}
    return {"protocol": _U16, "address": message.ADDRESSES[shape.family], "port": _U16}


def _key(shape: Shape, *, mark: int = 0, protocol: int = 0, address: str = "", port: int = 0) -> list[list[Any]]:
    family = ["IPVS_SVC_ATTR_AF", int(shape.family)]
    if shape.by_mark:
        return [family, ["IPVS_SVC_ATTR_FWMARK", mark]]
    return [
        family,
        ["IPVS_SVC_ATTR_PROTOCOL", int(protocol)],
        ["IPVS_SVC_ATTR_ADDR", address],
        ["IPVS_SVC_ATTR_PORT", port],
    ]
