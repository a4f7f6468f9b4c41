"""What IPVS counts, read from dumps of virtual and of real servers: connections, packets and bytes, in 64 bits."""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from ipvsproxy.kernel import message
from ipvsproxy.model.kernel import Connections, Counters, VirtualServerKey
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey

Part = tuple[bytes, int, int]
"""A message of a dump, with start and end of its attributes."""

_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}
_SERVICE, _DESTINATION = 1, 2
# IPVS_SVC_ATTR_STATS64 and IPVS_DEST_ATTR_STATS64: connections, packets in and out, bytes in and out.
_COUNTERS = tuple(((12, counter), "Q") for counter in range(1, 6))
_OF_SERVICE = message.Layout(
    [message.Field((_SERVICE, *path), code) for path, code in (((1,), "H"), ((2,), "H"), ((3,), "16s"), ((4,), "2s"), *_COUNTERS)]
)
_OF_DESTINATION = message.Layout(
    [
        message.Field((_DESTINATION, *path), code)
        for path, code in (((1,), "16s"), ((2,), "2s"), ((7,), "I"), ((8,), "I"), *_COUNTERS)
    ]
)


class EndpointTraffic(NamedTuple):
    """One real server: what it has open, and what it has counted."""

    connections: Connections
    counters: Counters


def read_services(parts: Iterable[Part], always: Container[VirtualServerKey]) -> dict[VirtualServerKey, Counters]:
    """The counters of the virtual servers in a dump that have counted something, and of ``always``; none by firewall mark."""
    found: dict[VirtualServerKey, Counters] = {}
    for part in parts:
        values = _OF_SERVICE.read(*part)
        if values is not None and values[1] in _PROTOCOLS:
            family, protocol, address, port, *counters = values
            key = VirtualServerKey(_PROTOCOLS[protocol], _address(family, address), int.from_bytes(port, "big"))
            if any(counters) or key in always:
                found[key] = Counters._make(counters)
    return found


def read_endpoints(parts: Iterable[Part], family: Family) -> dict[RealServerKey, EndpointTraffic]:
    """All real servers in a dump of those of one virtual server."""
    found: dict[RealServerKey, EndpointTraffic] = {}
    for part in parts:
        values = _OF_DESTINATION.read(*part)
        if values is not None:
            address, port, active, inactive, *counters = values
            key = RealServerKey(_address(family, address) + port)
            found[key] = EndpointTraffic(Connections(active, inactive), Counters._make(counters))
    return found


def _address(family: int, packed: bytes) -> Address:
    return Address(packed[:4] if family == Family.IPV4 else packed)
