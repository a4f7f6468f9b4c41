"""Kernel objects and their owners: virtual and real servers, set entries, addresses, settings."""

import enum
from collections.abc import Collection, KeysView, Mapping
from typing import NamedTuple, Self

import msgspec

from ipvsproxy.model.kind import DriverName, Kind, Stage
from ipvsproxy.model.net import Address, Family, Network, Protocol, host_port
from ipvsproxy.model.real_servers import NO_REAL_SERVERS, NO_THRESHOLDS, RealServerKey, Thresholds, Weights
from ipvsproxy.model.service import ServiceName

DEVICE = "kube-ipvs0"
"""The name of the dummy device, which has every service address unless they are local by routes."""


REMEMBERED_S = 2.0**40
"""Seconds since the epoch, later than the creation of any Service. A float of this size still has parts of a millisecond."""


class Owner(msgspec.Struct, frozen=True, order=True, gc=False):
    """The Service, or the node, that desires a kernel object. The order of owners is that of their Services' creation.

    If several owners of one rank desire one key, the lowest owner gets it. A remembered Service is one that the newest list lacks
    while this list is doubted. It comes after all listed Services: its ``created_s`` is larger by ``REMEMBERED_S``. A field
    for this would take memory.
    """

    created_s: float
    service: ServiceName

    @property
    def is_remembered(self) -> bool:
        """Whether the Service is only remembered: the newest list lacks it."""
        return self.created_s >= REMEMBERED_S

    @property
    def remembered(self) -> "Owner":
        """The same owner while the newest list lacks the Service."""
        return Owner(self.created_s + REMEMBERED_S, self.service)

    def __str__(self) -> str:
        return str(self.service) if self.service.namespace else self.service.name


NODE_OWNER = Owner(-1, ServiceName("", "(node)"))
"""The owner of objects that the node needs with any Services: device, sets, rules, settings."""


class VirtualServerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a virtual server, in the kernel as here."""

    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} {host_port(self.address, self.port)}"


class FirewallMark(VirtualServerKey, frozen=True, gc=False):
    """The name of a virtual server that takes packets by their mark, whatever their destination is; made by ``of``.

    ``protocol`` is TCP, as the kernel notes for each of these (``ip_vs_genl_parse_service`` in
    net/netfilter/ipvs/ip_vs_ctl.c), ``address`` the unspecified one of the family, and ``port`` the mark: 1 to 2**32 - 1.
    """

    @classmethod
    def of(cls, family: Family, mark: int) -> "FirewallMark":
        """The virtual server of a family for packets with this mark."""
        return cls(Protocol.TCP, Address(bytes(family.bits // 8)), mark)

    @property
    def family(self) -> Family:
        """The family of the packets."""
        return self.address.family

    @property
    def mark(self) -> int:
        """The whole mark of the packets."""
        return self.port

    def __str__(self) -> str:
        return f"mark {self.mark:#x} ({self.family.label})"


PERSISTENT = 0x1
"""Virtual-server flag: session affinity."""
HASHED = 0x2
"""Virtual-server flag that the kernel sets for its own use. It is neither sent nor compared."""
SCHEDULER_FALLBACK = 0x8
"""The first scheduler flag. For ``sh`` and ``mh``: a client of a real server that takes no connections goes to another one."""
SCHEDULER_PORT = 0x10
"""The second scheduler flag. For ``sh`` and ``mh``: the hash includes the source port."""
HAS_THRESHOLDS = 0x20
"""The third scheduler flag, which no scheduler reads. It shows that our real servers have thresholds: to ask every virtual server
for these would take a question for each.
"""
SCHEDULER_FLAGS = SCHEDULER_FALLBACK | SCHEDULER_PORT | HAS_THRESHOLDS
"""The flags that ``/proc/net/ip_vs`` does not show."""


_FLAG_NAMES: Mapping[int, str] = {SCHEDULER_FALLBACK: "fallback", SCHEDULER_PORT: "port", HAS_THRESHOLDS: "thresholds"}


class VirtualServerSettings(NamedTuple):
    """The settings of a virtual server.

    ``timeout_s`` is the timeout of session affinity, 0 without it. ``flags`` never include ``HASHED``. Clients of one network of
    ``prefix_length`` share their session affinity; 0 stands for a single address, as in kube-proxy, and without affinity.
    """

    scheduler: str
    flags: int = 0
    timeout_s: int = 0
    prefix_length: int = 0

    @property
    def flag_names(self) -> list[str]:
        """The scheduler flags by name; other flags than affinity as a number."""
        names = [name for flag, name in _FLAG_NAMES.items() if self.flags & flag]
        rest = self.flags & ~(PERSISTENT | SCHEDULER_FLAGS)
        return names + ([f"{rest:#x}"] if rest else [])

    def __str__(self) -> str:
        flags = f" ({', '.join(self.flag_names)})" if self.flag_names else ""
        network = f" by /{self.prefix_length}" if self.prefix_length else ""
        affinity = f", session affinity {self.timeout_s} s{network}" if self.flags & PERSISTENT else ""
        return f"{self.scheduler}{flags}{affinity}"


@Kind(
    "virtual_server",
    DriverName.IPVS,
    one="virtual server",
    add=Stage.SERVERS,
    set=Stage.SERVERS,
    remove=Stage.VIRTUAL_SERVER_REMOVALS,
)
class VirtualServer(msgspec.Struct, frozen=True, gc=False):
    """A desired virtual server, with its owner.

    ``weights`` are in the order in which the real servers are added. Several virtual servers, and observed ones, may share one
    object of weights. ``marked`` is the protocol of the packets of one that is named by a ``FirewallMark``. Each real server has
    the same ``thresholds``.
    """

    key: VirtualServerKey
    settings: VirtualServerSettings
    weights: Weights = NO_REAL_SERVERS
    owner: Owner = NODE_OWNER
    marked: Protocol | None = None
    thresholds: Thresholds = NO_THRESHOLDS

    @property
    def protocol(self) -> Protocol:
        """The protocol of its packets."""
        return self.marked or self.key.protocol

    def with_weights(self, weights: Weights) -> "VirtualServer":
        """The same with these real servers."""
        return msgspec.structs.replace(self, weights=weights)

    @property
    def real_servers(self) -> KeysView[RealServerKey]:
        """The desired real servers."""
        return self.weights.keys()


class ObservedVirtualServer(msgspec.Struct, gc=False):
    """An observed virtual server: its settings, and the weight of each real server, or ``NOT_MASQUERADED``.

    ``thresholds`` has the real servers that have any, and is None or empty without them. ``flags_known`` is false for a reading
    of ``/proc/net/ip_vs``, which shows neither scheduler flags nor thresholds; these then count as equal.
    Do not change an object that another module made: its reader may return it again, and a ``VirtualServer`` may share its
    weights. Change a copy.
    """

    settings: VirtualServerSettings
    real_servers: Mapping[RealServerKey, int]
    flags_known: bool = True
    thresholds: Mapping[RealServerKey, Thresholds] | None = None

    def has(self, real_servers: Mapping[RealServerKey, int]) -> "ObservedVirtualServer":
        """The same with these real servers."""
        return ObservedVirtualServer(self.settings, real_servers, self.flags_known, self.thresholds)


@Kind(
    "real_server",
    DriverName.IPVS,
    one="real server",
    add=Stage.SERVERS,
    set=Stage.SERVERS,
    remove=Stage.REAL_SERVER_REMOVALS,
)
class RealServers(NamedTuple):
    """One or more real servers of one virtual server, with their observed or desired weight (0: no new connections).

    If ``keys`` are all real servers of a new virtual server, all with weight 1 and without thresholds, they are its
    ``EvenWeights`` object, because a start adds very many. ``stays``: a Service desires the real server. With weight 0, it is not
    drained then.
    """

    virtual_server: VirtualServerKey
    keys: Collection[RealServerKey]
    weight: int = 1
    thresholds: Thresholds = NO_THRESHOLDS
    stays: bool = False

    @classmethod
    def of(cls, virtual_server: VirtualServerKey, key: RealServerKey, weight: int = 1) -> "RealServers":
        """One real server."""
        return cls(virtual_server, (key,), weight)

    @property
    def drains(self) -> bool:
        """Whether these get no new connections because nobody desires them any more."""
        return self.weight == 0 and not self.stays

    @property
    def key(self) -> RealServerKey:
        """The key in the table of its kind.

        Raises:
            ValueError: these are several objects.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.virtual_server} -> {', '.join(map(str, self.keys))}"


class Connections(NamedTuple):
    """The connections of a real server as IPVS counts them: ``active`` ones are established, the others ``inactive``."""

    active: int
    inactive: int

    @property
    def is_idle(self) -> bool:
        """Whether there are neither active nor inactive ones."""
        return not (self.active or self.inactive)


class Counters(NamedTuple):
    """The counters of a virtual or real server since it was added. "In" is the direction from client to real server."""

    connections: int = 0
    packets_in: int = 0
    packets_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class SetType(enum.StrEnum):
    """The ipset types of our sets."""

    ADDRESS = "hash:ip"
    ADDRESS_PORT = "hash:ip,port"
    ADDRESS_PORT_ADDRESS = "hash:ip,port,ip"
    ADDRESS_PORT_NETWORK = "hash:ip,port,net"
    PORT = "bitmap:port"


class SetKind(enum.StrEnum):
    """The sets by their IPv4 names: kube-proxy's 17 (pkg/proxy/ipvs/ipset.go in kubernetes/kubernetes), and ``SCOPE_KINDS``.

    ``SCOPE`` gives packets to its addresses and ports their mark, ``NO_LOCAL`` has those without an endpoint on this node, and
    ``MARKS`` has the marks whose virtual servers are ours, each as the last four bytes of an address.
    """

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
    SCOPE = "KUBE-IPVSPROXY-SCOPE"
    NO_LOCAL = "KUBE-IPVSPROXY-NO-LOCAL"
    MARKS = "KUBE-IPVSPROXY-MARKS"


SCOPE_KINDS = frozenset({SetKind.SCOPE, SetKind.NO_LOCAL, SetKind.MARKS})
"""The sets that kube-proxy does not have: they exist only while a Service has an external address with traffic policy Local."""

WITNESS_KINDS = SCOPE_KINDS | {kind for kind in SetKind if kind.startswith("KUBE-NODE-PORT-")}
"""The sets without which nobody knows that a virtual server is ours: by mark, or at a node port."""

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
    SetKind.MARKS: SetType.ADDRESS,
}
SET_NAME_LIMIT = 31
"""The longest set name that the kernel takes (IPSET_MAXNAMELEN less the NUL). IPv6 names are cut to this length."""
SET_CAPACITY = 65536
"""``maxelem`` of every hash set, as in kube-proxy. With another value, each sync of a kube-proxy on this node would fail."""


@Kind("set", DriverName.IPSET, add=Stage.SETS, remove=Stage.SET_REMOVALS)
class IpSet(NamedTuple):
    """One of the sets: a kind of set in one family."""

    kind: SetKind
    family: Family

    @property
    def name(self) -> str:
        """The name in the kernel: ``KUBE-CLUSTER-IP``, ``KUBE-6-CLUSTER-IP``."""
        if self.family is Family.IPV4:
            return self.kind.value
        return self.kind.value.replace("KUBE-", "KUBE-6-", 1)[:SET_NAME_LIMIT]

    @property
    def type(self) -> SetType:
        """The ipset type."""
        return _SET_TYPES.get(self.kind, SetType.ADDRESS_PORT)

    @property
    def gives_marks(self) -> bool:
        """Whether its entries carry a mark (the extension ``skbinfo``): they are ``MarkedEntry`` then."""
        return self.kind is SetKind.SCOPE

    @property
    def key(self) -> "IpSet":
        """The key in the table of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


IP_SETS: Mapping[str, IpSet] = {ip_set.name: ip_set for family in Family for kind in SetKind for ip_set in (IpSet(kind, family),)}
"""Every set by its name in the kernel."""


@Kind("set", DriverName.IPSET, remove=Stage.ADDRESS_REMOVALS)
class SetCopy(NamedTuple):
    """The larger copy of a set, under a name of its own, while the set is being enlarged. No rule names it."""

    name: str

    @property
    def key(self) -> "SetCopy":
        """The key in the table of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


SET_COPY = SetCopy("KUBE-IPVSPROXY-LARGER")
"""The only ``SetCopy``. No set of kube-proxy has its name. If it is observed, a process that was killed has left it."""


class SetEntry(msgspec.Struct, frozen=True, order=True, gc=False):
    """One entry of the set of this name (one of ``IP_SETS``). The type of the set defines which fields are used.

    ``hash:ip``: address. ``hash:ip,port``: address, protocol, port. ``hash:ip,port,ip``: these and ``other``.
    ``hash:ip,port,net``: these, ``other`` and ``prefix_length``. ``bitmap:port``: port. Unused fields have their defaults.
    """

    set: str
    address: Address | None = None
    protocol: Protocol | None = None
    port: int = 0
    other: Address | None = None
    prefix_length: int = 0

    def __str__(self) -> str:
        """The entry as ``ipset save`` prints it: ``10.96.0.1,tcp:443``. A range of one address has no prefix length."""
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


class MarkedEntry(SetEntry, frozen=True, gc=False):
    """An entry that gives its packets a mark: the bits of ``mask`` become those of ``mark``, the others stay.

    A set holds one for each address, protocol and port: another mark replaces the one before.
    """

    mark: int = 0
    mask: int = 0

    @property
    def skbmark(self) -> int:
        """Mark and mask in one number, as the kernel's attribute has them."""
        return self.mark << 32 | self.mask

    def __str__(self) -> str:
        return f"{super().__str__()} skbmark {self.mark:#x}/{self.mask:#x}"


class CatchAll(SetEntry, frozen=True, gc=False):
    """What stands for all keys that a set of nf_tables has no entry of (since Linux 5.13). Only other programs add it.

    It names no address and no port, and is the witness of nothing.
    """

    def __str__(self) -> str:
        """As ``nft`` prints it."""
        return "*"


def mark_entry(key: FirewallMark) -> SetEntry:
    """The entry that shows that the virtual server of a mark is ours."""
    return SetEntry(IpSet(SetKind.MARKS, key.family).name, Address(key.mark.to_bytes(key.family.bits // 8, "big")))


def mark_of(entry: SetEntry) -> FirewallMark | None:
    """The virtual server that an entry of a ``MARKS`` set names; None for an entry of another set."""
    ip_set = IP_SETS[entry.set]
    if ip_set.kind is not SetKind.MARKS or entry.address is None:
        return None
    return FirewallMark.of(ip_set.family, int.from_bytes(entry.address, "big") & 0xFFFFFFFF)


@Kind(
    "set_entry",
    DriverName.IPSET,
    one="set entry",
    several="set entries",
    add=Stage.ENTRIES,
    remove=Stage.ENTRY_REMOVALS,
)
class SetEntries(NamedTuple):
    """One or more entries of one set."""

    set: str
    entries: tuple[SetEntry, ...]

    @classmethod
    def of(cls, *entries: SetEntry) -> "SetEntries":
        """These entries, all of one set."""
        return cls(entries[0].set, entries)

    @property
    def keys(self) -> tuple[SetEntry, ...]:
        """The key of each entry in the table of its set: the entry itself."""
        return self.entries

    @property
    def key(self) -> SetEntry:
        """The key in the table of its kind.

        Raises:
            ValueError: these are several objects.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.set} {', '.join(map(str, self.entries))}"


def network_entry(set_name: str, key: VirtualServerKey, network: Network) -> SetEntry:
    """The ``hash:ip,port,net`` entry of a virtual server and a source range. The kernel refuses a /0 range."""
    return SetEntry(set_name, key.address, key.protocol, key.port, network.address, network.prefix_length)


@Kind("device", DriverName.ADDRESSES, add=Stage.DEVICE)
class Device(NamedTuple):
    """The dummy device, one for both families. It stays down: its addresses are local even so."""

    name: str

    @property
    def key(self) -> "Device":
        """The key in the table of its kind."""
        return self

    def __str__(self) -> str:
        return self.name


class _ServiceAddresses(NamedTuple):
    """One or more objects with one service address each."""

    addresses: tuple[Address, ...]

    @classmethod
    def of(cls, *addresses: Address) -> Self:
        """The objects of these addresses."""
        return cls(addresses)

    @property
    def keys(self) -> tuple[Address, ...]:
        """The key of each object: its address."""
        return self.addresses

    @property
    def key(self) -> Address:
        """The key in the table of its kind.

        Raises:
            ValueError: these are several objects.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses))


@Kind("address", DriverName.ADDRESSES, several="addresses", add=Stage.ADDRESSES, remove=Stage.ADDRESS_REMOVALS)
class BoundAddresses(_ServiceAddresses):
    """One or more service addresses on the dummy device: /32 or /128, global scope."""

    __slots__ = ()


ROUTE_PROTOCOL = 251
"""The protocol number of our routes unless the operator chooses another: unused in the list of iproute2 (``rt_protos``)."""


@Kind("route", DriverName.ROUTES, one="local route", add=Stage.ADDRESSES, remove=Stage.ADDRESS_REMOVALS)
class LocalRoutes(_ServiceAddresses):
    """One or more local routes, each to one service address: with it, the address is local without being on an interface.

    A route is ours by its table (``local``), its protocol number, its device (``lo``) and its metric, which is not that of
    the kernel's own route of an address.
    """

    __slots__ = ()


@Kind("sysctl", DriverName.SYSCTL, set=Stage.SETTINGS)
class Sysctl(NamedTuple):
    """A kernel setting: its path, relative to ``/proc/sys`` or absolute, and its value as text.

    ``at_least``: a larger observed number counts as equal. An administrator has chosen it, or the kernel has rounded ours up.
    """

    path: str
    value: str
    at_least: bool = False

    @property
    def key(self) -> str:
        """The key in the table of its kind."""
        return self.path

    @property
    def in_force(self) -> str:
        """The observed state once it is in force."""
        return self.value

    def is_met_by(self, observed: str) -> bool:
        """Whether this observed value counts as equal."""
        return observed == self.value or (self.at_least and observed.isdecimal() and int(observed) >= int(self.value))

    def __str__(self) -> str:
        return f"{self.path} = {self.value}"


INDISPENSABLE_SETTINGS: Mapping[str, frozenset[Family]] = {
    "net/ipv4/vs/conntrack": frozenset(Family),
    "net/ipv4/ip_forward": frozenset({Family.IPV4}),
}
"""The settings that must be 1, with their families. Else replies to masqueraded packets are lost, or nothing is forwarded."""


TIMEOUTS = "timeouts"
"""The only key in the table of timeouts."""


@Kind("timeouts", DriverName.IPVS, one="IPVS timeouts", several="IPVS timeouts", set=Stage.TIMEOUTS)
class Timeouts(NamedTuple):
    """The IPVS connection timeouts of the network namespace, in seconds. A value of 0 leaves the timeout unchanged."""

    tcp_s: int
    tcp_fin_s: int
    udp_s: int

    @property
    def key(self) -> str:
        """The key in the table of its kind."""
        return TIMEOUTS

    @property
    def in_force(self) -> "Timeouts":
        """The observed state once they are in force."""
        return self

    def __str__(self) -> str:
        return f"timeouts {self.tcp_s} {self.tcp_fin_s} {self.udp_s}"


class HealthListener(NamedTuple):
    """The HTTP listener of a ``healthCheckNodePort``. Load balancers ask it whether this node has endpoints of the Service."""

    family: Family
    port: int
    service: ServiceName

    def __str__(self) -> str:
        return f"health check port {self.port} ({self.family.label}) of {self.service}"


class HealthCheckPort(NamedTuple):
    """A health-check port in one family. It serves one Service, even if several desire it."""

    family: Family
    port: int


class HealthCheck(NamedTuple):
    """The answer of a health-check port: the owner, and the number of its endpoints on this node."""

    owner: Owner
    local_endpoints: int


class Flow(NamedTuple):
    """The tracked UDP or SCTP flows to one frontend."""

    family: Family
    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} flows to {host_port(self.address, self.port)} ({self.family.label})"


@Kind("flow", DriverName.CONNTRACK, one="tracked flow", remove=Stage.FLOWS)
class FlowCleaning(NamedTuple):
    """The deletion of the flows to one frontend, except those with replies from one of the real servers in ``keep``."""

    flow: Flow
    keep: frozenset[RealServerKey]

    @property
    def key(self) -> Flow:
        """The key in the table of its kind."""
        return self.flow

    @property
    def in_force(self) -> frozenset[RealServerKey]:
        """The observed state once it is done: the real servers that may still reply."""
        return self.keep

    def __str__(self) -> str:
        return str(self.flow)


class InterfaceAddress(NamedTuple):
    """An address of this host, and the name of its interface."""

    interface: str
    address: Address
    prefix_length: int


KernelObject = (
    VirtualServer
    | RealServers
    | SetEntries
    | IpSet
    | SetCopy
    | BoundAddresses
    | LocalRoutes
    | Device
    | Sysctl
    | Timeouts
    | FlowCleaning
)
"""Every class with a ``Kind``, except the rules (``Skeleton``)."""
