"""Virtual and real servers, read by netlink: everything that ``ipvsadm -Ln`` shows, and the counters."""

import contextlib
import dataclasses
import errno
import functools
import pathlib
import time
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pyroute2.netlink import NETLINK_GENERIC

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.kernel.ipvs import ipvs_message
from ipvsproxy.model.net import PROTOCOL_BY_NUMBER, Address, Family
from ipvsproxy.model.real_servers import NOT_MASQUERADED, TUNNELLED, EvenWeights, RealServerKey, Thresholds
from ipvsproxy.model.virtual_servers import (
    HASHED,
    NO_CONNECTIONS,
    PERSISTENT,
    ConnectionCounts,
    Counters,
    FirewallMark,
    ObservedVirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)

ONE_PACKET = 0x4
"""The flag of a virtual server for one-packet scheduling: each packet is scheduled separately."""
SCHEDULER_FLAGS = (0x8, 0x10, 0x20)
"""The three flags whose meaning the scheduler defines."""
PART_S = 0.004
"""The time, in seconds, after which one part of a reading ends. Operations on the kernel may have to wait until the part ends.

For each 32 kB of its answer, the kernel walks its table from the beginning, which takes 8 ms with 100,000 virtual servers.
"""
MASQUERADED, TUNNEL = "Masq", "Tunnel"
METHODS: Mapping[int, str] = {0: MASQUERADED, 1: "Local", 2: TUNNEL, 3: "Route", 4: "Bypass"}
"""The names that ipvsadm prints for forwarding methods, by number (``IP_VS_CONN_F_MASQ`` to ``IP_VS_CONN_F_BYPASS`` in
include/uapi/linux/ip_vs.h)."""

_FLAG_NAMES: Mapping[str, tuple[str, str, str]] = {
    "mh": ("mh-fallback", "mh-port", "flag-3"),
    "sh": ("sh-fallback", "sh-port", "flag-3"),
}

_METHODS = 0x7
"""The bits of a real server's flags that hold its forwarding method (IP_VS_CONN_F_FWD_MASK); 0 is masquerading."""
_SERVICE, _DESTINATION = 1, 2
_TOTALS_LINE = 2
_ENGINE = 11
"""The attribute IPVS_SVC_ATTR_PE_NAME, which only virtual servers with a persistence engine have."""


def _layout(of: int, codes: Mapping[int, str]) -> message.Layout:
    return message.Layout([((of, kind), code) for kind, code in codes.items()])


# All dumps share these layouts, because a new layout walks the attributes of its first message one by one. That takes as long as
# a dump.
_SETTINGS = {6: "s", 7: "I", 8: "I", 9: "4s"}
_BY_ADDRESS = _layout(_SERVICE, {1: "H", 2: "H", 3: "16s", 4: "2s"} | _SETTINGS)
_BY_MARK = _layout(_SERVICE, {1: "H", 5: "I"} | _SETTINGS)
_REAL_SERVER = _layout(_DESTINATION, {11: "H", 1: "16s", 2: "2s", 3: "I", 4: "i", 5: "I", 6: "I", 7: "I", 8: "I"})
_INFORMATION = message.Layout([((kind,), "I") for kind in (1, 2)])
# IPVS_SVC_ATTR_STATS64 and IPVS_DEST_ATTR_STATS64 have connections, packets in and out, and bytes in and out.
_COUNTERS_OF_SERVICE, _COUNTERS_OF_DESTINATION = (
    message.Layout([((of, 12, counter), "Q") for counter in range(1, 6)]) for of in (_SERVICE, _DESTINATION)
)

T = TypeVar("T")
Part = tuple[bytes, int, int]
"""A message of a dump, followed by the offsets at which the attributes of the message start and end."""
NetlinkName = tuple[int, int, bytes, bytes] | tuple[int, int]
"""The name of a virtual server: family, protocol, address and port; or family and mark."""
NetlinkRow = tuple[NetlinkName, bytes, int, int, bytes]
"""The name of a virtual server, and its scheduler, flags, timeout in seconds and netmask."""
RealServerValues = tuple[RealServerKey, int, int, int, int]
"""A real server: its key, its flags (which contain the forwarding method), its weight, and its upper and lower thresholds."""


class RealServerRow(NamedTuple):
    """A real server.

    ``flags`` contains the forwarding method of the real server; ``upper`` and ``lower`` are the real server's connection
    thresholds.
    """

    key: RealServerKey
    flags: int
    weight: int
    upper: int = 0
    lower: int = 0
    connections: ConnectionCounts = NO_CONNECTIONS

    @property
    def method(self) -> str:
        """The name that ipvsadm prints for the forwarding method of the real server."""
        return METHODS.get(self.flags & _METHODS, "unknown")


class VirtualServerRow(NamedTuple):
    """A virtual server.

    For persistence, all clients in one network of ``prefix_length`` count as one client. ``engine`` is the name of the
    persistence engine, and is usually empty.
    """

    key: VirtualServerKey
    settings: VirtualServerSettings
    prefix_length: int
    engine: str = ""
    real_servers: tuple[RealServerRow, ...] = ()

    @property
    def scheduler_flags(self) -> list[str]:
        """The names that ipvsadm prints for the flags of the scheduler."""
        names = _FLAG_NAMES.get(self.settings.scheduler, ("flag-1", "flag-2", "flag-3"))
        return [name for name, flag in zip(names, SCHEDULER_FLAGS, strict=True) if self.settings.flags & flag]


class IpvsTable(NamedTuple):
    """The whole IPVS table, in the order that ipvsadm intends (ipvsadm's own order is wrong if its comparison overflows).

    ``version`` is the version of IPVS, and ``size`` is the number of buckets of the connection table.
    """

    version: str
    size: int
    virtual_servers: tuple[VirtualServerRow, ...]


class NetlinkTable:
    """Queries for the IPVS table over one netlink socket. Only the thread that creates this object may use it.

    ``encoder`` encodes messages with the current number of the generic netlink family of IPVS.

    Raises:
        KernelError: the kernel has no IPVS.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self.channel = netlink.Channel(NETLINK_GENERIC, connect)
        self.encoder = ipvs_message.Encoder(0)
        try:
            self.renew()
        except KernelError:
            self.close()
            raise

    def close(self) -> None:
        """Close the socket."""
        self.channel.close()

    def renew(self) -> None:
        """Look up the number of the generic netlink family of IPVS. The number changes when the IPVS module is loaded again."""
        number = netlink.resolve_family(self.channel, "IPVS", "ip_vs")
        if number != self.encoder.family_number:
            self.encoder = ipvs_message.Encoder(number)

    def rows(self) -> list[NetlinkRow]:
        """The rows of all virtual servers."""
        return self._gather(
            self.encoder.all_services(), "list the virtual servers", lambda parts: filter(None, map(row_of, parts))
        )

    def real_servers(self, key: VirtualServerKey) -> list[RealServerRow]:
        """The real servers of a virtual server; empty if the virtual server does not exist."""
        return self._gather(
            self.encoder.destinations(key), f"list the real servers of {key}", lambda parts: map(real_server_of, parts)
        )

    def counted_real_servers(self, key: VirtualServerKey) -> list[tuple[RealServerRow, Counters]]:
        """The real servers of a virtual server, each with its counters; empty if the virtual server does not exist."""
        return self._gather(
            self.encoder.destinations(key),
            f"read the counters of {key}",
            lambda parts: ((real_server_of(part), _counters(_COUNTERS_OF_DESTINATION, part)) for part in parts),
        )

    def virtual_server(self, key: VirtualServerKey) -> ObservedVirtualServer | None:
        """Read one virtual server; None means that the virtual server does not exist."""
        action = f"read {key}"
        with Tolerated(errno.ESRCH):
            row = row_of(ipvs_message.attributes(self.channel.ask(self.encoder.service(key), action)))
            if row is None:
                raise KernelError(action=action, detail="the answer is incomplete")
            return observed(settings_of(key.address.family, *row[1:]), [one[:5] for one in self.real_servers(key)])
        return None

    def read(self) -> IpvsTable:
        """The whole table. Virtual servers with a protocol that no Service can have are left out."""
        action = "read the version of IPVS"
        values = _INFORMATION.read(*ipvs_message.attributes(self.channel.ask(self.encoder.information(), action)))
        if values is None:
            raise KernelError(action=action, detail="the answer is incomplete")
        version, size = values
        parts = self._gather(self.encoder.all_services(), "list the virtual servers", list)
        rows = [self._with_real_servers(part, row, key) for part in parts if (row := row_of(part)) and (key := key_of(row[0]))]
        return IpvsTable(f"{version >> 16 & 0xFF}.{version >> 8 & 0xFF}.{version & 0xFF}", size, tuple(sorted(rows, key=_order)))

    def _with_real_servers(self, part: Part, row: NetlinkRow, key: VirtualServerKey) -> VirtualServerRow:
        family = key.address.family
        return VirtualServerRow(
            key,
            settings_of(family, *row[1:]),
            ipvs_message.prefix_length(family, row[-1]),
            message.Attributes(*part).inside(_SERVICE).text(_ENGINE, ""),
            tuple(sorted(self.real_servers(key))),
        )

    def _gather(self, request: bytes, action: str, read: Callable[[Iterable[Part]], Iterable[T]]) -> list[T]:
        """Apply ``read`` to the messages of each part of a dump, and return all results."""
        return self.channel.gather(request, action, lambda replies: read(map(ipvs_message.attributes, replies)))


class EndpointTraffic(NamedTuple):
    """The traffic of one real server: its open connections, and its counters."""

    connections: ConnectionCounts
    counters: Counters


@dataclasses.dataclass(eq=False)
class TrafficReader:
    """Reads counters in the network namespace of the calling thread.

    Each read of counters opens a separate socket, so that other requests may be sent between two parts of the read. ``connect``
    is the function that opens a socket.

    ``open_connections`` returns the number of connections of all real servers at the last read; None if no total was computed.
    If ``is_wanted`` is true, every later read of real servers computes the total number of their connections. The total needs
    no additional system call, because the kernel's answers about real servers contain their connections.
    """

    connect: Callable[[int], netlink.Socket]
    clock: Callable[[], float] = time.monotonic
    path: pathlib.Path = pathlib.Path("/proc/thread-self/net/ip_vs_stats")
    open_connections: Callable[..., ConnectionCounts | None] = lambda *, is_wanted: None  # noqa: ARG005 - this default computes no total

    def totals(self) -> Counters:
        """The counters of the whole network namespace, which include the traffic of virtual servers that have been removed.

        Raises:
            KernelError: the counters could not be read.
        """
        try:
            return read_totals(self.path.read_text())
        except (OSError, ValueError) as error:
            raise KernelError(action="read the counters of IPVS", detail=str(error)) from error

    def services(self, always: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        """Read the counters of virtual servers, in parts.

        Virtual servers whose counters are all 0 are left out, except the virtual servers in ``always``. If virtual servers are
        added or removed during the read, the result may lack virtual servers that existed during the whole read.

        Raises:
            KernelError: a part of the table could not be read. The parts of the table that were returned before the error are
                valid.
        """
        with contextlib.closing(NetlinkTable(self.connect)) as table:
            counted: dict[VirtualServerKey, Counters] = {}
            began_s = self.clock()
            for replies in table.channel.dumping(table.encoder.all_services(), "read the counters of virtual servers"):
                services = map(counted_service, map(ipvs_message.attributes, replies))
                counted |= {key: one for key, one in services if key is not None and (any(one) or key in always)}
                if self.clock() - began_s >= PART_S:
                    yield counted
                    counted, began_s = {}, self.clock()
        yield counted

    def endpoints(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]]:
        """The counters of the real servers of each given virtual server; empty for a virtual server that does not exist.

        Raises:
            KernelError: the counters could not be read.
        """
        with contextlib.closing(NetlinkTable(self.connect)) as table:
            return {
                key: {row.key: EndpointTraffic(row.connections, counters) for row, counters in table.counted_real_servers(key)}
                for key in keys
            }


def read_totals(text: str) -> Counters:
    """The counters in ``/proc/net/ip_vs_stats``: hexadecimal numbers in the third line, after two header lines.

    Raises:
        ValueError: the text does not have the form of ``/proc/net/ip_vs_stats``.
    """
    words = "".join(text.splitlines()[_TOTALS_LINE : _TOTALS_LINE + 1]).split()
    if len(words) != len(Counters._fields):
        raise ValueError("unknown format of /proc/net/ip_vs_stats")
    return Counters._make(int(word, 16) for word in words)


def read(connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> IpvsTable:
    """Read the IPVS table of the calling thread's network namespace.

    Virtual servers with a protocol that no Service can have are left out.

    Raises:
        KernelError: a part of the table could not be read.
    """
    with contextlib.closing(NetlinkTable(connect)) as table:
        return table.read()


def row_of(part: Part) -> NetlinkRow | None:
    """The table row of the virtual server in a message; None means that the message does not identify a virtual server."""
    if (values := _BY_ADDRESS.read(*part)) is not None:
        return values[:4], *values[4:]
    if (values := _BY_MARK.read(*part)) is not None:
        return values[:2], *values[2:]
    return None


def real_server_of(part: Part) -> RealServerRow:
    """The real server that a message describes.

    Raises:
        KernelError: the message does not contain the address family of the real server.
    """
    values = _REAL_SERVER.read(*part)
    if values is None:
        raise KernelError(action="read the real servers of IPVS", detail=ipvs_message.NO_ADDRESS_FAMILY)
    family, address, port, flags, weight, upper, lower, active, inactive = values
    key = RealServerKey(address_of(family, address) + port)
    return RealServerRow(key, flags, weight, upper, lower, ConnectionCounts(active, inactive))


def counted_service(part: Part) -> tuple[VirtualServerKey | None, Counters]:
    """The virtual server in a message (None if no Service can have the virtual server's protocol), and the counters.

    Raises:
        KernelError: the kernel has no 64-bit counters.
    """
    row = row_of(part)
    return key_of(row[0]) if row else None, _counters(_COUNTERS_OF_SERVICE, part)


def _counters(layout: message.Layout, part: Part) -> Counters:
    counters = layout.read(*part)
    if counters is None:
        detail = "the kernel's answer lacks counters of 64 bits: use Linux 4.1 or later, which has them"
        raise KernelError(action="read the counters of IPVS", detail=detail)
    return Counters._make(counters)


def _order(row: VirtualServerRow) -> tuple[int, int, int, Address, int]:
    """The sort key of a row: the firewall mark (0 for a row without a mark), then family, protocol, address and port."""
    key = row.key
    mark = key.mark if isinstance(key, FirewallMark) else 0
    return mark, int(key.address.family), int(key.protocol), key.address, key.port


def key_of(name: NetlinkName) -> VirtualServerKey | None:
    """The key of the virtual server that a message identifies; None if no Service can have its protocol."""
    match name:
        case (family, mark):
            return FirewallMark.of(Family(family), mark)
        case (family, number, packed, port):
            protocol = PROTOCOL_BY_NUMBER.get(number)
            return VirtualServerKey(protocol, address_of(family, packed), int.from_bytes(port, "big")) if protocol else None


def address_of(family: int, packed: bytes) -> Address:
    """The address in an attribute of a message; the attribute has 16 bytes for both IP families."""
    return Address(packed[:4] if family == Family.IPV4 else packed)


@functools.lru_cache(maxsize=1024)
def settings_of(family: Family, scheduler: bytes, flags: int, timeout_s: int, netmask: bytes) -> VirtualServerSettings:
    """The settings of the virtual server in a row; virtual servers with equal settings share one object."""
    name = scheduler.split(b"\0", 1)[0].decode(errors="replace")
    length = ipvs_message.prefix_length(family, netmask) if flags & PERSISTENT else family.bits
    return VirtualServerSettings(name, flags & ~HASHED, timeout_s, length % family.bits)  # 0: each address counts as one client


def observed(settings: VirtualServerSettings, real_servers: Sequence[RealServerValues]) -> ObservedVirtualServer:
    """The observed virtual server with the given real servers, in the given order."""
    if all((method & _METHODS, weight, upper, lower) == (0, 1, 0, 0) for _, method, weight, upper, lower in real_servers):
        return ObservedVirtualServer(settings, EvenWeights.of([server[0] for server in real_servers]))
    weights = {key: _with_method(method & _METHODS, weight) for key, method, weight, *_ in real_servers}
    thresholds = {key: Thresholds(upper, lower) for key, _, _, upper, lower in real_servers if upper or lower}
    return ObservedVirtualServer(settings, weights, thresholds=thresholds or None)


def _with_method(method: int, weight: int) -> int:
    if METHODS.get(method) == TUNNEL:
        return TUNNELLED + weight
    return NOT_MASQUERADED if method else weight
