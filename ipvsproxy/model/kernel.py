"""What the kernel holds: virtual and real servers, set entries, addresses, sysctls, and who wants them."""

import enum
from collections.abc import Collection, KeysView, Mapping
from typing import NamedTuple

import msgspec

from ipvsproxy.model.kind import DriverName, Kind, Stage
from ipvsproxy.model.net import Address, Family, Network, Protocol, host_port
from ipvsproxy.model.real_servers import NO_REAL_SERVERS, EvenWeights, RealServerKey
from ipvsproxy.model.service import ServiceName

DEVICE = "kube-ipvs0"
"""The dummy device that carries every service address."""


REMEMBERED_S = 2.0**40
"""Later than any Service is created, in seconds since the epoch; a float still tells less than a millisecond there."""


class Owner(msgspec.Struct, frozen=True, order=True, gc=False):
    """Who wants a kernel object. Owners are ordered: where two want one key by the same right, the lower one gets it.

    That is the older Service. One that is only remembered, because the newest list lacks it and is doubted, stands behind all
    that have been seen: ``created_s`` is ``REMEMBERED_S`` more, so that it costs no memory.
    """

    created_s: float
    service: ServiceName

    @property
    def is_remembered(self) -> bool:
        """Whether the newest list lacks the Service."""
        return self.created_s >= REMEMBERED_S

    @property
    def remembered(self) -> "Owner":
        """The owner while the newest list lacks the Service."""
        return Owner(self.created_s + REMEMBERED_S, self.service)

    def __str__(self) -> str:
        return str(self.service) if self.service.namespace else self.service.name


NODE_OWNER = Owner(-1, ServiceName("", "(node)"))
"""Owner of what the node needs whatever the Services are: device, sets, rules, sysctls."""


class VirtualServerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """What names a virtual server in the kernel."""

    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} {host_port(self.address, self.port)}"


PERSISTENT = 0x1
"""Virtual-server flag: session affinity."""
HASHED = 0x2
"""Virtual-server flag that the kernel sets for itself; never sent, never compared."""
SCHEDULER_PORT = 0x10
"""Second scheduler flag; for ``mh`` it is mh-port: the source port takes part in the hash."""


class VirtualServerSettings(NamedTuple):
    """All of a virtual server but its real servers.

    ``timeout_s`` is that of session affinity, 0 without it. ``flags`` never hold ``HASHED``. The netmask is not among them:
    it is always that of a single address (255.255.255.255 or 128), as kube-proxy sets it.
    """

    scheduler: str
    flags: int = 0
    timeout_s: int = 0


@Kind(
    "virtual_server",
    DriverName.IPVS,
    one="virtual server",
    add=Stage.SERVERS,
    set=Stage.SERVERS,
    remove=Stage.VIRTUAL_SERVER_REMOVALS,
)
class VirtualServer(msgspec.Struct, frozen=True, gc=False):
    """A virtual server as one owner wants it.

    ``weights`` are in the order in which its real servers are to be added. Several virtual servers may share them, and so may
    what is believed to be in force.
    """

    key: VirtualServerKey
    settings: VirtualServerSettings
    weights: EvenWeights = NO_REAL_SERVERS
    owner: Owner = NODE_OWNER

    @property
    def real_servers(self) -> KeysView[RealServerKey]:
        """The real servers that it wants."""
        return self.weights.keys()


class ObservedVirtualServer(msgspec.Struct, gc=False):
    """A virtual server as the kernel holds it: its settings, and the weight of each real server, or ``NOT_MASQUERADED``.

    ``flags_known`` is false for a listing that does not show the scheduler's flags (``/proc/net/ip_vs``): they then count as
    equal. Who has read it may show the same object again, and its weights may be those of a ``VirtualServer``: others copy it
    before they change anything.
    """

    settings: VirtualServerSettings
    real_servers: Mapping[RealServerKey, int]
    flags_known: bool = True


@Kind(
    "real_server",
    DriverName.IPVS,
    one="real server",
    add=Stage.SERVERS,
    set=Stage.SERVERS,
    remove=Stage.REAL_SERVER_REMOVALS,
)
class RealServers(NamedTuple):
    """Real servers of one virtual server, one or more, with the weight that they have or should get (0: no new connections).

    All those of a new virtual server are its ``EvenWeights`` themselves, in this order: a start adds very many.
    """

    virtual_server: VirtualServerKey
    keys: Collection[RealServerKey]
    weight: int = 1

    @classmethod
    def of(cls, virtual_server: VirtualServerKey, key: RealServerKey, weight: int = 1) -> "RealServers":
        """One."""
        return cls(virtual_server, (key,), weight)

    @property
    def key(self) -> RealServerKey:
        """What names it among those of its kind, where it is one.

        Raises:
            ValueError: these are several.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.virtual_server} -> {', '.join(map(str, self.keys))}"


class Connections(NamedTuple):
    """Connections of a real server as IPVS counts them: established ones, and those that are closing."""

    active: int
    inactive: int


class Counters(NamedTuple):
    """What IPVS has counted since the virtual server, or the real server in it, was made. "In" is from client to real server."""

    connections: int = 0
    packets_in: int = 0
    packets_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class SetType(enum.StrEnum):
    """The ipset types in use."""

    ADDRESS = "hash:ip"
    ADDRESS_PORT = "hash:ip,port"
    ADDRESS_PORT_ADDRESS = "hash:ip,port,ip"
    ADDRESS_PORT_NETWORK = "hash:ip,port,net"
    PORT = "bitmap:port"


class SetKind(enum.StrEnum):
    """The 17 sets, by their IPv4 names (pkg/proxy/ipvs/ipset.go in kubernetes/kubernetes)."""

    LOOP_BACK = "KUBE-LOOP-BACK"
    CLUSTER_IP = "KUBE-CLUSTER-IP"
    EXTERNAL_IP = "KUBE-EXTERNAL-IP"
    EXTERNAL_IP_LOCAL = "KUBE-EXTERNAL-IP-LOCAL"
    LOAD_BALANCER = "KUBE-LOAD-BALANCER"
    LOAD_BALANCER_FIREWALL = "KUBE-LOAD-BALANCER-FW"
    LOAD_BALANCER_LOCAL = "KUBE-LOAD-BALANCER-LOCAL"
    LOAD_BALANCER_SOURCE_IP = "KUBE-LOAD-BALANCER-SOURCE-IP"
    LOAD_BALANCER_SOURCE_CIDR = "KUBE-LOAD-BALANCER-SOURCE-CIDR"
    NODE_PORT_TCP = "KUBE-NODE-PORT-TCP"
    NODE_PORT_LOCAL_TCP = "KUBE-NODE-PORT-LOCAL-TCP"
    NODE_PORT_UDP = "KUBE-NODE-PORT-UDP"
    NODE_PORT_LOCAL_UDP = "KUBE-NODE-PORT-LOCAL-UDP"
    NODE_PORT_SCTP = "KUBE-NODE-PORT-SCTP-HASH"
    NODE_PORT_LOCAL_SCTP = "KUBE-NODE-PORT-LOCAL-SCTP-HASH"
    HEALTH_CHECK_NODE_PORT = "KUBE-HEALTH-CHECK-NODE-PORT"
    IPVS_IPS = "KUBE-IPVS-IPS"


_SET_TYPES: Mapping[SetKind, SetType] = {
    SetKind.LOOP_BACK: SetType.ADDRESS_PORT_ADDRESS,
    SetKind.LOAD_BALANCER_SOURCE_IP: SetType.ADDRESS_PORT_ADDRESS,
    SetKind.LOAD_BALANCER_SOURCE_CIDR: SetType.ADDRESS_PORT_NETWORK,
    SetKind.NODE_PORT_TCP: SetType.PORT,
    SetKind.NODE_PORT_LOCAL_TCP: SetType.PORT,
    SetKind.NODE_PORT_UDP: SetType.PORT,
    SetKind.NODE_PORT_LOCAL_UDP: SetType.PORT,
    SetKind.HEALTH_CHECK_NODE_PORT: SetType.PORT,
    SetKind.IPVS_IPS: SetType.ADDRESS,
}
SET_NAME_LIMIT = 31
"""Longest set name that the kernel takes (IPSET_MAXNAMELEN less the NUL); IPv6 names are cut to it."""
SET_CAPACITY = 65536
"""``maxelem`` of every hash set. Another value would make a returning kube-proxy abort each sync."""


@Kind("set", DriverName.IPSET, add=Stage.SETS)
class IpSet(NamedTuple):
    """One of the 34 sets: a kind in a family."""

    kind: SetKind
    family: Family

    @property
    def name(self) -> str:
        """Its name in the kernel: ``KUBE-CLUSTER-IP``, ``KUBE-6-CLUSTER-IP``."""
        if self.family is Family.IPV4:
            return self.kind.value
        return self.kind.value.replace("KUBE-", "KUBE-6-", 1)[:SET_NAME_LIMIT]

    @property
    def type(self) -> SetType:
        """Its ipset type."""
        return _SET_TYPES.get(self.kind, SetType.ADDRESS_PORT)

    @property
    def key(self) -> "IpSet":
        """What names it among those of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


IP_SETS: Mapping[str, IpSet] = {ip_set.name: ip_set for family in Family for kind in SetKind for ip_set in (IpSet(kind, family),)}
"""Every set by its name in the kernel."""


@Kind("set", DriverName.IPSET, remove=Stage.ADDRESS_REMOVALS)
class SetCopy(NamedTuple):
    """The copy of a set that is being enlarged, under a name of its own. No rule names it."""

    name: str

    @property
    def key(self) -> "SetCopy":
        """What names it among those of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


SET_COPY = SetCopy("KUBE-IPVSPROXY-LARGER")
"""The only one there can be; no set of kube-proxy's has its name. One that is observed was left by a process that was killed."""


class SetEntry(msgspec.Struct, frozen=True, order=True, gc=False):
    """One entry of a set, named by the set's name (one of ``IP_SETS``). Which fields count follows from the set's type.

    ``hash:ip``: address. ``hash:ip,port``: address, protocol, port. ``hash:ip,port,ip``: those and ``other``.
    ``hash:ip,port,net``: those, ``other`` and ``prefix_length``. ``bitmap:port``: port. What does not count keeps its default.
    """

    set: str
    address: Address | None = None
    protocol: Protocol | None = None
    port: int = 0
    other: Address | None = None
    prefix_length: int = 0

    def __str__(self) -> str:
        """The entry as ``ipset save`` prints it: ``10.96.0.1,tcp:443``; a range of one address has no length."""
        if self.address is None:
            return str(self.port)
        text = str(self.address)
        if self.protocol is not None:
            text += f",{self.protocol.label}:{self.port}"
        if self.other is not None:
            text += f",{self.other}"
            if self.prefix_length and self.prefix_length != self.other.family.bits:
                text += f"/{self.prefix_length}"
        return text


@Kind(
    "set_entry",
    DriverName.IPSET,
    one="set entry",
    several="set entries",
    add=Stage.ENTRIES,
    remove=Stage.ENTRY_REMOVALS,
)
class SetEntries(NamedTuple):
    """Entries of one set, one or more."""

    set: str
    entries: tuple[SetEntry, ...]

    @classmethod
    def of(cls, *entries: SetEntry) -> "SetEntries":
        """Of these, which belong to one set."""
        return cls(entries[0].set, entries)

    @property
    def keys(self) -> tuple[SetEntry, ...]:
        """What names each of them among those of their set."""
        return self.entries

    @property
    def key(self) -> SetEntry:
        """What names it among those of its kind, where it is one.

        Raises:
            ValueError: these are several.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.set} {', '.join(map(str, self.entries))}"


def network_entry(set_name: str, key: VirtualServerKey, network: Network) -> SetEntry:
    """The ``hash:ip,port,net`` entry for a virtual server and a source range (a /0 range is refused by the kernel)."""
    return SetEntry(set_name, key.address, key.protocol, key.port, network.address, network.prefix_length)


@Kind("device", DriverName.ADDRESSES, add=Stage.DEVICE)
class Device(NamedTuple):
    """The dummy device. One serves both families; it is never set up (down, its addresses are local all the same)."""

    name: str

    @property
    def key(self) -> "Device":
        """What names it among those of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


@Kind("address", DriverName.ADDRESSES, several="addresses", add=Stage.ADDRESSES, remove=Stage.ADDRESS_REMOVALS)
class BoundAddresses(NamedTuple):
    """Service addresses on the dummy device, one or more: /32 or /128, global scope."""

    addresses: tuple[Address, ...]

    @classmethod
    def of(cls, *addresses: Address) -> "BoundAddresses":
        """Of these."""
        return cls(addresses)

    @property
    def keys(self) -> tuple[Address, ...]:
        """What names each of them."""
        return self.addresses

    @property
    def key(self) -> Address:
        """What names it among those of its kind, where it is one.

        Raises:
            ValueError: these are several.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))


@Kind("sysctl", DriverName.SYSCTL, set=Stage.SETTINGS)
class Sysctl(NamedTuple):
    """A kernel setting: its path below ``/proc/sys`` or an absolute one, and its value as text.

    ``at_least``: a larger number will do as well. Somebody has chosen it, or the kernel has rounded ours up.
    """

    path: str
    value: str
    at_least: bool = False

    @property
    def key(self) -> str:
        """What names it among those of its kind."""
        return self.path

    @property
    def in_force(self) -> str:
        """The observed state once it is in force."""
        return self.value

    def is_met_by(self, observed: str) -> bool:
        """Whether this value will do."""
        return observed == self.value or (self.at_least and observed.isdecimal() and int(observed) >= int(self.value))

    def __str__(self) -> str:
        return f"{self.path} = {self.value}"


INDISPENSABLE_SETTINGS: Mapping[str, frozenset[Family]] = {
    "net/ipv4/vs/conntrack": frozenset(Family),
    "net/ipv4/ip_forward": frozenset({Family.IPV4}),
}
"""Settings, each for these families, without which masqueraded packets do not come back, or none is forwarded. Each must be 1."""


TIMEOUTS = "timeouts"
"""The key of the timeouts, of which a node has one set."""


@Kind("timeouts", DriverName.IPVS, one="IPVS timeouts", several="IPVS timeouts", set=Stage.TIMEOUTS)
class Timeouts(NamedTuple):
    """The IPVS connection timeouts in seconds, for the whole network namespace. 0 leaves one as it is."""

    tcp_s: int
    tcp_fin_s: int
    udp_s: int

    @property
    def key(self) -> str:
        """What names it among those of its kind."""
        return TIMEOUTS

    @property
    def in_force(self) -> "Timeouts":
        """The observed state once they are in force."""
        return self

    def __str__(self) -> str:
        return f"timeouts {self.tcp_s} {self.tcp_fin_s} {self.udp_s}"


class HealthListener(NamedTuple):
    """The HTTP listener of a ``healthCheckNodePort``, which a load balancer asks whether this node has endpoints."""

    family: Family
    port: int
    service: ServiceName

    def __str__(self) -> str:
        return f"health check port {self.port} ({self.family.label}) of {self.service}"


class HealthCheckPort(NamedTuple):
    """A port of a family that answers for one Service; several may desire the same."""

    family: Family
    port: int


class HealthCheck(NamedTuple):
    """What a health-check port answers: its Service, and how many endpoints that has on this node."""

    owner: Owner
    local_endpoints: int


class Flow(NamedTuple):
    """Tracked UDP or SCTP flows to one frontend."""

    family: Family
    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} flows to {host_port(self.address, self.port)} ({self.family.label})"


@Kind("flow", DriverName.CONNTRACK, one="tracked flow", remove=Stage.FLOWS)
class FlowCleaning(NamedTuple):
    """Flows to one frontend are to be deleted unless their replies come from one of these real servers."""

    flow: Flow
    keep: frozenset[RealServerKey]

    @property
    def key(self) -> Flow:
        """What names it among those of its kind."""
        return self.flow

    @property
    def in_force(self) -> frozenset[RealServerKey]:
        """The observed state once it is done: the real servers that may still answer."""
        return self.keep

    def __str__(self) -> str:
        return str(self.flow)


class InterfaceAddress(NamedTuple):
    """An address of this host, with the name of the interface that carries it."""

    interface: str
    address: Address
    prefix_length: int


KernelObject = (
    VirtualServer | RealServers | SetEntries | IpSet | SetCopy | BoundAddresses | Device | Sysctl | Timeouts | FlowCleaning
)
"""Every class of which a ``Kind`` is known, but for the rules."""
