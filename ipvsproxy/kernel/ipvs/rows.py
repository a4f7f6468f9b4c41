"""Every virtual and real server with all that ``ipvsadm -Ln`` shows. ``driver`` reads only what is compared."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pyroute2.netlink import NETLINK_GENERIC

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs import message as ipvs_message
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.virtual_servers import HASHED, PERSISTENT, Connections, FirewallMark, VirtualServerKey, VirtualServerSettings

ONE_PACKET = 0x4
"""Virtual-server flag: each packet is scheduled by itself."""
SCHEDULER_FLAGS = (0x8, 0x10, 0x20)
"""The three flags whose meaning the scheduler defines."""
MASQUERADED = "Masq"
METHODS: Mapping[int, str] = {0: MASQUERADED, 1: "Local", 2: "Tunnel", 3: "Route", 4: "Bypass"}
"""ipvsadm's names of forwarding methods, by number (include/uapi/linux/ip_vs.h, ``IP_VS_CONN_F_MASQ`` and those after it)."""

_FLAG_NAMES: Mapping[str, tuple[str, str, str]] = {
    "mh": ("mh-fallback", "mh-port", "flag-3"),
    "sh": ("sh-fallback", "sh-port", "flag-3"),
}
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}
_METHODS = 0x7
"""The bits of a real server's flags that are its forwarding method."""
_SERVICE, _DESTINATION = 1, 2
_ENGINE = 11
"""IPVS_SVC_ATTR_PE_NAME, which a virtual server has only with a persistence engine."""
_SETTINGS = [message.Field((_SERVICE, kind), code) for kind, code in ((6, "s"), (7, "I"), (8, "I"), (9, "4s"))]
_BY_ADDRESS = message.Layout(
    [message.Field((_SERVICE, kind), code) for kind, code in ((1, "H"), (2, "H"), (3, "16s"), (4, "2s"))] + _SETTINGS
)
_BY_MARK = message.Layout([message.Field((_SERVICE, kind), code) for kind, code in ((1, "H"), (5, "I"))] + _SETTINGS)
_REAL_SERVER = message.Layout(
    [
        message.Field((_DESTINATION, kind), code)
        for kind, code in ((11, "H"), (1, "16s"), (2, "2s"), (3, "I"), (4, "i"), (7, "I"), (8, "I"))
    ]
)
_INFORMATION = message.Layout([message.Field((kind,), "I") for kind in (1, 2)])


class RealServerRow(NamedTuple):
    """A real server; ``method`` is one of the names in ``METHODS``."""

    key: RealServerKey
    method: str
    weight: int
    connections: Connections


class VirtualServerRow(NamedTuple):
    """A virtual server. ``prefix_length`` is that of the clients that count as one for persistence.

    ``engine`` is the name of its persistence engine, mostly empty.
    """

    key: VirtualServerKey
    settings: VirtualServerSettings
    prefix_length: int
    engine: str = ""
    real_servers: tuple[RealServerRow, ...] = ()

    @property
    def scheduler_flags(self) -> list[str]:
        """The flags of its scheduler, by ipvsadm's names."""
        names = _FLAG_NAMES.get(self.settings.scheduler, ("flag-1", "flag-2", "flag-3"))
        return [name for name, flag in zip(names, SCHEDULER_FLAGS, strict=True) if self.settings.flags & flag]

    @property
    def is_one_packet(self) -> bool:
        """Whether each packet is scheduled by itself."""
        return bool(self.settings.flags & ONE_PACKET)

    @property
    def is_persistent(self) -> bool:
        """Whether it has session affinity."""
        return bool(self.settings.flags & PERSISTENT)


class Rows(NamedTuple):
    """The whole table, in the order that ipvsadm means (its comparison overflows).

    ``version`` is that of IPVS, ``size`` the number of buckets of its connection table.
    """

    version: str
    size: int
    virtual_servers: tuple[VirtualServerRow, ...]


def read(connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> Rows:
    """Read the table of the calling thread's network namespace. Virtual servers of protocols other than ours are left out.

    Raises:
        KernelError: the table could not be read.
    """
    with contextlib.closing(netlink.Channel(NETLINK_GENERIC, connect)) as channel:
        encoder = ipvs_message.Encoder(netlink.resolve_family(channel, "IPVS", "ip_vs"))
        version, size = _information(channel, encoder)
        headings = _headings(channel, encoder)
        rows = (one._replace(real_servers=_real_servers(channel, encoder, one.key)) for one in headings)
        return Rows(version, size, tuple(sorted(rows, key=_order)))


def _information(channel: netlink.Channel, encoder: ipvs_message.Encoder) -> tuple[str, int]:
    action = "read the version of IPVS"
    data, start, end = channel.ask(encoder.information(), action)
    values = _INFORMATION.read(data, start + ipvs_message.GENERIC_HEADER, end)
    if values is None:
        raise KernelError(action=action, detail="the answer is incomplete")
    version, size = values
    return f"{version >> 16 & 0xFF}.{version >> 8 & 0xFF}.{version & 0xFF}", size


def _headings(channel: netlink.Channel, encoder: ipvs_message.Encoder) -> Iterator[VirtualServerRow]:
    replies = channel.dump(encoder.all_services(), "list the virtual servers")
    for data, start, end in map(ipvs_message.attributes, replies):
        if (values := _BY_ADDRESS.read(data, start, end)) is not None:
            family, protocol, address, port, *settings = values
            if protocol not in _PROTOCOLS:
                continue
            key = VirtualServerKey(_PROTOCOLS[protocol], _address(family, address), int.from_bytes(port, "big"))
        elif (values := _BY_MARK.read(data, start, end)) is not None:
            family, mark, *settings = values
            key = FirewallMark.of(Family(family), mark)
        else:
            continue
        scheduler, flags, timeout_s, netmask = settings
        name = scheduler.split(b"\0", 1)[0].decode(errors="replace")
        yield VirtualServerRow(
            key,
            VirtualServerSettings(name, flags & ~HASHED, timeout_s),
            ipvs_message.prefix_length(key.address.family, netmask),
            _engine(data, start, end),
        )


def _engine(data: bytes, start: int, end: int) -> str:
    inside = message.attributes(data, *message.attributes(data, start, end)[_SERVICE])
    return message.text(data, inside[_ENGINE]) if _ENGINE in inside else ""


def _real_servers(channel: netlink.Channel, encoder: ipvs_message.Encoder, key: VirtualServerKey) -> tuple[RealServerRow, ...]:
    """Those of one virtual server; none if it does not exist any more."""
    rows = []
    action = f"list the real servers of {key}"
    for part in map(ipvs_message.attributes, channel.dump(encoder.destinations(key), action)):
        values = _REAL_SERVER.read(*part)
        if values is None:
            raise KernelError(action=action, detail=ipvs_message.NO_ADDRESS_FAMILY)
        family, address, port, method, weight, active, inactive = values
        name = METHODS.get(method & _METHODS, "unknown")
        rows.append(RealServerRow(RealServerKey(_address(family, address) + port), name, weight, Connections(active, inactive)))
    return tuple(sorted(rows))


def _order(row: VirtualServerRow) -> tuple[int, int, int, Address, int]:
    """By mark, none first; then by family, protocol, address and port."""
    key = row.key
    mark = key.mark if isinstance(key, FirewallMark) else 0
    return mark, int(key.address.family), int(key.protocol), key.address, key.port


def _address(family: int, packed: bytes) -> Address:
    return Address(packed[:4] if family == Family.IPV4 else packed)
