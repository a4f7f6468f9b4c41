"""The counters of IPVS, from dumps of virtual and of real servers: connections, packets and bytes, in 64 bits."""

import contextlib
import pathlib
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import NamedTuple

from pyroute2.netlink import NETLINK_GENERIC

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import Connections, Counters, FirewallMark, VirtualServerKey

COUNTED_AT_ONCE = 400
"""The virtual servers of one part: a few milliseconds, during which programming may have to wait."""
PART_S = 0.004
"""The longest time of a part: for each 32 kB the kernel walks its table from the beginning, which takes 8 ms with 100,000 virtual
servers.
"""
Part = tuple[bytes, int, int]
"""A message of a dump, with start and end of its attributes."""

_TOTALS_LINE = 2
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}
_SERVICE, _DESTINATION = 1, 2
# IPVS_SVC_ATTR_STATS64 and IPVS_DEST_ATTR_STATS64: connections, packets in and out, bytes in and out.
_COUNTERS = tuple(((12, counter), "Q") for counter in range(1, 6))
_OF_SERVICE = message.Layout(
    [message.Field((_SERVICE, *path), code) for path, code in (((1,), "H"), ((2,), "H"), ((3,), "16s"), ((4,), "2s"), *_COUNTERS)]
)
_OF_MARKED_SERVICE = message.Layout(
    [message.Field((_SERVICE, *path), code) for path, code in (((1,), "H"), ((5,), "I"), *_COUNTERS)]
)
_OF_DESTINATION = message.Layout(
    [
        message.Field((_DESTINATION, *path), code)
        for path, code in (((1,), "16s"), ((2,), "2s"), ((7,), "I"), ((8,), "I"), *_COUNTERS)
    ]
)


class EndpointTraffic(NamedTuple):
    """One real server: its open connections, and its counters."""

    connections: Connections
    counters: Counters


class TrafficReader:
    """Reads counters in the network namespace of the calling thread.

    Each reading has a socket of its own, so that other requests may come between its parts. ``connect`` opens a socket.
    """

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket],
        clock: Callable[[], float] = time.monotonic,
        totals: pathlib.Path = pathlib.Path("/proc/thread-self/net/ip_vs_stats"),
    ) -> None:
        self._connect = connect
        self._totals = totals
        self._clock = clock

    def totals(self) -> Counters:
        """The counters of the whole network namespace, also of virtual servers that are gone.

        Raises:
            KernelError: they could not be read.
        """
        try:
            return read_totals(self._totals.read_text())
        except (OSError, ValueError) as error:
            raise KernelError(action="read the counters of IPVS", detail=str(error)) from error

    def services(self, always: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        """Read the counters of virtual servers, part by part.

        Virtual servers that have counted nothing are left out, except those in ``always``. If virtual servers come and go
        meanwhile, others may be missing.

        Raises:
            KernelError: a part could not be read. The parts before it are valid.
        """
        replies: list[netlink.Reply] = []
        with self._channel() as (channel, encoder):
            began_s = self._clock()
            for part in channel.dumping(encoder.all_services(), "read the counters of virtual servers"):
                replies += part
                if len(replies) >= COUNTED_AT_ONCE or self._clock() - began_s >= PART_S:
                    yield read_services(map(ipvs_message.attributes, replies), always)
                    replies.clear()
                    began_s = self._clock()
        yield read_services(map(ipvs_message.attributes, replies), always)

    def endpoints(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]]:
        """The counters of each real server of these virtual servers; empty for a virtual server that does not exist.

        Raises:
            KernelError: the counters could not be read.
        """
        traffic: dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]] = {}
        with self._channel() as (channel, encoder):
            for key in keys:
                replies = channel.dump(encoder.destinations(key), f"read the counters of {key}")
                traffic[key] = read_endpoints(map(ipvs_message.attributes, replies), key.address.family)
        return traffic

    @contextlib.contextmanager
    def _channel(self) -> Iterator[tuple[netlink.Channel, ipvs_message.Encoder]]:
        with contextlib.closing(netlink.Channel(NETLINK_GENERIC, self._connect)) as channel:
            yield channel, ipvs_message.Encoder(netlink.resolve_family(channel, "IPVS", "ip_vs"))


def read_totals(text: str) -> Counters:
    """The counters in ``/proc/net/ip_vs_stats``: hexadecimal numbers in its third line, behind two of titles.

    Raises:
        ValueError: the text is something else.
    """
    words = "".join(text.splitlines()[_TOTALS_LINE : _TOTALS_LINE + 1]).split()
    if len(words) != len(Counters._fields):
        raise ValueError("unknown format of /proc/net/ip_vs_stats")
    return Counters._make(int(word, 16) for word in words)


def read_services(parts: Iterable[Part], always: Container[VirtualServerKey]) -> dict[VirtualServerKey, Counters]:
    """The counters in a dump of virtual servers, without zeros, except for those in ``always``.

    Raises:
        KernelError: the kernel has no counters of 64 bits.
    """
    result: dict[VirtualServerKey, Counters] = {}
    for part in parts:
        if (values := _OF_SERVICE.read(*part)) is not None:
            family, protocol, address, port, *counters = values
            if protocol not in _PROTOCOLS:
                continue
            key = VirtualServerKey(_PROTOCOLS[protocol], _address(family, address), int.from_bytes(port, "big"))
        elif (values := _OF_MARKED_SERVICE.read(*part)) is not None:
            family, mark, *counters = values
            key = FirewallMark.of(Family(family), mark)
        else:
            raise _no_counters()
        if any(counters) or key in always:
            result[key] = Counters._make(counters)
    return result


def read_endpoints(parts: Iterable[Part], family: Family) -> dict[RealServerKey, EndpointTraffic]:
    """All real servers in a dump of one virtual server.

    Raises:
        KernelError: the kernel has no counters of 64 bits.
    """
    result: dict[RealServerKey, EndpointTraffic] = {}
    for part in parts:
        values = _OF_DESTINATION.read(*part)
        if values is None:
            raise _no_counters()
        address, port, active, inactive, *counters = values
        key = RealServerKey(_address(family, address) + port)
        result[key] = EndpointTraffic(Connections(active, inactive), Counters._make(counters))
    return result


def _no_counters() -> KernelError:
    detail = "the kernel's answer lacks counters of 64 bits: use Linux 4.1 or later, which has them"
    return KernelError(action="read the counters of IPVS", detail=detail)


def _address(family: int, packed: bytes) -> Address:
    return Address(packed[:4] if family == Family.IPV4 else packed)
