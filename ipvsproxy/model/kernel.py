"""Addresses, local routes, sysctls, tracked flows and health-check ports as values, and a union type for all kernel objects."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from ipvsproxy.model.kind import DriverName, KernelKind
from ipvsproxy.model.net import Address, Family, Protocol, host_port
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import IpSet, SetCopy, SetEntries
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer

DEVICE = "kube-ipvs0"
"""The name of the dummy device, which holds all service addresses unless local routes make the addresses local."""


@KernelKind("device", DriverName.ADDRESSES)
class Device(NamedTuple):
    """The dummy device, which holds the service addresses of both IP families.

    Although the device stays down, its addresses are local to this host.
    """

    name: str

    @property
    def key(self) -> "Device":
        """The key that identifies this object among the objects of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


class _ServiceAddresses(NamedTuple):
    """One or more kernel objects, each of which has one service address as its key."""

    keys: tuple[Address, ...]

    @classmethod
    def of(cls, *addresses: Address) -> Self:
        """Makes one object of this class for all these addresses."""
        return cls(addresses)

    def only(self, key: Address) -> Self:
        """Makes an object of this class for this address alone."""
        return type(self)((key,))

    @property
    def key(self) -> Address:
        """The key that identifies this object among the objects of its kind.

        Raises:
            ValueError: this object stands for several kernel objects, which have different keys.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return ", ".join(map(str, self.keys))


@KernelKind("address", DriverName.ADDRESSES, several="addresses")
class BoundAddresses(_ServiceAddresses):
    """One or more service addresses on the dummy device, each with prefix length /32 or /128 and global scope."""

    __slots__ = ()


ROUTE_PROTOCOL = 251
"""The default protocol number of our routes; no protocol in the list of iproute2 (``rt_protos``) has this number."""


@KernelKind("route", DriverName.ROUTES, one="local route")
class LocalRoutes(_ServiceAddresses):
    """One or more local routes. Each route makes one service address local although no interface has that address.

    The combination of table (``local``), protocol number, device (``lo``) and metric shows that a route belongs to ipvsproxy. The
    kernel's own route to an address has another metric.
    """

    __slots__ = ()


TUNNEL_RECORD = "/sys/class/net/tunl0/ifalias"
"""The file with the alias of the IPv4 tunnel device. The alias records the former value of each sysctl that direct return has
changed.

The kernel keeps the alias when ipvsproxy restarts. A reboot removes the alias, and also resets the sysctls.
"""
_RECORD_HEAD = "ipvsproxy found"


def render_record(former: Mapping[str, str]) -> str:
    """The alias that records former values of sysctls by path; empty if ``former`` is empty."""
    return " ".join([_RECORD_HEAD, *(f"{path}={value}" for path, value in former.items())]) if former else ""


def parse_record(alias: str) -> dict[str, str]:
    """The former values of sysctls, read from an alias; the keys are the paths of the sysctls.

    Empty if the alias is empty or belongs to another program.
    """
    values = alias.removeprefix(_RECORD_HEAD).split() if alias.startswith(_RECORD_HEAD) else []
    return {path: value for path, _, value in (one.partition("=") for one in values)}


@KernelKind("sysctl", DriverName.SYSCTL)
class Sysctl(NamedTuple):
    """A sysctl: its path, relative to ``/proc/sys`` or absolute, and its value as text.

    ``at_least`` means that a larger observed number counts as equal to ``value``. If the observed number is larger, either an
    administrator has chosen the number, or the kernel has rounded our value up. ``for_tunnels`` means that the sysctl lets in
    packets that arrive by tunnel. Rules that drop tunnel packets from unknown hosts are written before a sysctl with
    ``for_tunnels``. The former value of a sysctl with ``for_tunnels`` is recorded in ``TUNNEL_RECORD``.
    """

    path: str
    value: str
    at_least: bool = False
    for_tunnels: bool = False

    @property
    def key(self) -> str:
        """The key that identifies this object among the objects of its kind."""
        return self.path

    @property
    def in_force(self) -> str:
        """The observed state after the sysctl has been written."""
        return self.value

    def is_met_by(self, observed: str) -> bool:
        """Whether this observed value counts as equal to the desired value."""
        return observed == self.value or (self.at_least and observed.isdecimal() and int(observed) >= int(self.value))

    def __str__(self) -> str:
        return f"{self.path} = {self.value}"


INDISPENSABLE_SETTINGS: Mapping[str, frozenset[Family]] = {
    "net/ipv4/vs/conntrack": frozenset(Family),
    "net/ipv4/ip_forward": frozenset({Family.IPV4}),
}
"""The settings that must be 1, with their families.

If one of these settings is not 1, replies to masqueraded packets are lost, or no packet is forwarded.
"""


TIMEOUTS = "timeouts"
"""The only key in the table of timeouts."""


@KernelKind("timeouts", DriverName.IPVS, one="group of IPVS timeouts", several="groups of IPVS timeouts")
class Timeouts(NamedTuple):
    """The IPVS connection timeouts of the network namespace, in seconds. A value of 0 leaves the kernel's timeout unchanged."""

    tcp_s: int
    tcp_fin_s: int
    udp_s: int

    @property
    def key(self) -> str:
        """The key that identifies this object among the objects of its kind."""
        return TIMEOUTS

    @property
    def in_force(self) -> "Timeouts":
        """The observed state after the timeouts have been set."""
        return self

    def __str__(self) -> str:
        return f"timeouts {self.tcp_s} {self.tcp_fin_s} {self.udp_s}"


class HealthCheckPort(NamedTuple):
    """A health-check node port in one IP family. A port serves only one Service, even if several Services desire the port."""

    family: Family
    port: int


class HealthCheck(NamedTuple):
    """The answer of a health-check node port: the port's Service, and the number of the Service's endpoints on this node."""

    owner: Owner
    local_endpoints: int


class Flow(NamedTuple):
    """The UDP or SCTP flows in connection tracking that go to one frontend."""

    family: Family
    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} flows to {host_port(self.address, self.port)} ({self.family.label})"


@KernelKind("flow", DriverName.CONNTRACK, one="tracked flow")
class FlowCleaning(NamedTuple):
    """The deletion of the tracked flows to one frontend, except flows whose replies come from a real server in ``keep``."""

    flow: Flow
    keep: frozenset[RealServerKey]

    @property
    def key(self) -> Flow:
        """The key that identifies this object among the objects of its kind."""
        return self.flow

    @property
    def in_force(self) -> frozenset[RealServerKey]:
        """The observed state after the deletion: a set of real servers.

        In each flow that remains, one of these real servers sends the replies.
        """
        return self.keep

    def __str__(self) -> str:
        return str(self.flow)


class InterfaceAddress(NamedTuple):
    """An address of this host, and the name of the interface that has the address."""

    interface: str
    address: Address
    prefix_length: int


PROMPT_REUSE = (5, 9)
"""The first Linux version in which ``conn_reuse_mode`` 1 does not drop a new connection's first packet (commit f0a5e4d7a594)."""

Several = RealServers | SetEntries | BoundAddresses | LocalRoutes
"""Every class whose values may stand for several kernel objects."""
KernelObject = VirtualServer | Several | IpSet | SetCopy | Device | Sysctl | Timeouts | FlowCleaning
"""Every class with a ``KernelKind``, except the rules (``Skeleton``)."""
