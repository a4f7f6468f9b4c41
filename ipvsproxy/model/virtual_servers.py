"""Virtual servers, desired and observed, and the real servers that belong to them."""

import enum
from collections.abc import Collection, KeysView, Mapping
from typing import NamedTuple

import msgspec

from ipvsproxy.model.kind import DriverName, KernelKind
from ipvsproxy.model.net import Address, Family, Protocol, host_port
from ipvsproxy.model.real_servers import NO_REAL_SERVERS, NO_THRESHOLDS, RealServerKey, Thresholds, Weights, without_method
from ipvsproxy.model.service import NODE_OWNER, Owner


class VirtualServerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a virtual server; the kernel identifies a virtual server by the same fields."""

    protocol: Protocol
    address: Address
    port: int

    def __str__(self) -> str:
        return f"{self.protocol.name} {host_port(self.address, self.port)}"


class FirewallMark(VirtualServerKey, frozen=True, gc=False):
    """The key of a virtual server that takes all packets with this mark, to any destination.

    Use ``FirewallMark.of`` to create the key. ``protocol`` is TCP, because the kernel stores TCP for each virtual server by mark
    (``ip_vs_genl_parse_service`` in net/netfilter/ipvs/ip_vs_ctl.c). ``address`` is the unspecified address of the IP family, and
    ``port`` is the mark, from 1 to 2**32 - 1.
    """

    @classmethod
    def of(cls, family: Family, mark: int) -> "FirewallMark":
        """The key of the virtual server that takes packets of an IP family with this mark."""
        return cls(Protocol.TCP, Address(bytes(family.bits // 8)), mark)

    @property
    def family(self) -> Family:
        """The IP family of the packets."""
        return self.address.family

    @property
    def mark(self) -> int:
        """The mark of the packets; the kernel compares all 32 bits."""
        return self.port

    def __str__(self) -> str:
        return f"mark {self.mark:#x} ({self.family.label})"


PERSISTENT = 0x1
"""Virtual-server flag: session affinity."""
HASHED = 0x2
"""Virtual-server flag that the kernel sets for its own use. The flag is neither sent nor compared."""
SCHEDULER_FALLBACK = 0x8
"""The bit of IPVS's first scheduler flag (IP_VS_SVC_F_SCHED1).

With this flag, ``sh`` and ``mh`` choose another real server for a client if the client's real server takes no connections.
"""
SCHEDULER_PORT = 0x10
"""The second scheduler flag. For ``sh`` and ``mh``: the hash includes the source port."""
SCHEDULER_FLAGS = SCHEDULER_FALLBACK | SCHEDULER_PORT | 0x20
"""The three flags whose meaning depends on the scheduler. No scheduler uses the third flag."""


_FLAG_NAMES: Mapping[int, str] = {SCHEDULER_FALLBACK: "fallback", SCHEDULER_PORT: "port"}


class VirtualServerSettings(NamedTuple):
    """The settings of a virtual server.

    ``timeout_s`` is the timeout of session affinity, or 0 without session affinity. ``flags`` never include ``HASHED``. All
    clients whose addresses have the same first ``prefix_length`` bits share one session affinity. A ``prefix_length`` of 0 means
    session affinity for single addresses, as in kube-proxy, or no session affinity.
    """

    scheduler: str
    flags: int = 0
    timeout_s: int = 0
    prefix_length: int = 0

    @property
    def flag_names(self) -> list[str]:
        """The names of the scheduler flags, then a number that combines all other flags except that of session affinity."""
        names = [name for flag, name in _FLAG_NAMES.items() if self.flags & flag]
        rest = self.flags & ~(PERSISTENT | SCHEDULER_FLAGS)
        return names + ([f"{rest:#x}"] if rest else [])

    def __str__(self) -> str:
        flags = f" ({', '.join(self.flag_names)})" if self.flag_names else ""
        network = f" by /{self.prefix_length}" if self.prefix_length else ""
        affinity = f", session affinity {self.timeout_s} s{network}" if self.flags & PERSISTENT else ""
        return f"{self.scheduler}{flags}{affinity}"


class Role(enum.StrEnum):
    """The role of a virtual server's address for its Service, such as the Service's cluster IP."""

    CLUSTER_IP = "cluster IP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER_IP = "load balancer IP"
    NODE_PORT = "node port"


@KernelKind("virtual_server", DriverName.IPVS, one="virtual server")
class VirtualServer(msgspec.Struct, frozen=True, gc=False):
    """A desired virtual server, with its owner.

    ``weights`` are in the order in which the real servers are added to the kernel. Several virtual servers, desired or observed,
    may share one ``weights`` object. ``marked`` is the protocol of the packets if the virtual server's key is a ``FirewallMark``.
    All real servers of the virtual server have the same ``thresholds``. If several Services desire the same virtual server,
    ``role`` decides which Service gets the virtual server.
    """

    key: VirtualServerKey
    settings: VirtualServerSettings
    weights: Weights = NO_REAL_SERVERS
    owner: Owner = NODE_OWNER
    marked: Protocol | None = None
    thresholds: Thresholds = NO_THRESHOLDS
    role: Role = Role.CLUSTER_IP

    @property
    def protocol(self) -> Protocol:
        """The protocol of the virtual server's packets."""
        return self.marked or self.key.protocol

    def with_weights(self, weights: Weights) -> "VirtualServer":
        """A copy of the virtual server with these real servers."""
        return msgspec.structs.replace(self, weights=weights)

    @property
    def real_servers(self) -> KeysView[RealServerKey]:
        """The desired real servers of the virtual server."""
        return self.weights.keys()

    def __str__(self) -> str:
        return str(self.key)


class ObservedVirtualServer(msgspec.Struct, gc=False):
    """An observed virtual server, with its settings and the weight of each real server (or ``NOT_MASQUERADED``).

    ``thresholds`` maps real servers to their thresholds; None or empty means that no real server has thresholds. Never change an
    object that another module made; change a copy instead. The module that reads the kernel may return the same object again, and
    a ``VirtualServer`` may share the object's weights.
    """

    settings: VirtualServerSettings
    real_servers: Mapping[RealServerKey, int]
    thresholds: Mapping[RealServerKey, Thresholds] | None = None

    def has(self, real_servers: Mapping[RealServerKey, int]) -> "ObservedVirtualServer":
        """A copy of the virtual server with these real servers."""
        return ObservedVirtualServer(self.settings, real_servers, self.thresholds)


@KernelKind("real_server", DriverName.IPVS, one="real server")
class RealServers(NamedTuple):
    """One or more real servers of the same virtual server, all with the same observed or desired weight (0: no new connections).

    If all real servers of a new virtual server have weight 1 and no thresholds, ``keys`` is the virtual server's
    ``EvenWeights`` object. Sharing this object saves time when ipvsproxy starts and adds very many real servers. ``stays`` means
    that a Service still desires the real servers, so a weight of 0 does not drain them. The bit ``TUNNELLED`` in the weight gives
    the forwarding method of the real servers.
    """

    virtual_server: VirtualServerKey
    keys: Collection[RealServerKey]
    weight: int = 1
    thresholds: Thresholds = NO_THRESHOLDS
    stays: bool = False

    @classmethod
    def of(cls, virtual_server: VirtualServerKey, key: RealServerKey, weight: int = 1) -> "RealServers":
        """Makes a ``RealServers`` object with one real server."""
        return cls(virtual_server, (key,), weight)

    def only(self, key: RealServerKey) -> "RealServers":
        """Makes a ``RealServers`` object with only this real server."""
        return self._replace(keys=(key,))

    @property
    def drains(self) -> bool:
        """Whether these real servers drain: their weight is 0, and no Service desires them any more."""
        return without_method(self.weight) == 0 and not self.stays

    @property
    def key(self) -> RealServerKey:
        """The key that identifies this object among the objects of its kind.

        Raises:
            ValueError: this object has several real servers, which have different keys.
        """
        (key,) = self.keys
        return key

    def __str__(self) -> str:
        return f"{self.virtual_server} -> {', '.join(map(str, self.keys))}"


class ConnectionCounts(NamedTuple):
    """The numbers of connections that IPVS counts for a real server.

    ``active`` counts established connections, and ``inactive`` counts all other connections.
    """

    active: int = 0
    inactive: int = 0

    def plus(self, other: "ConnectionCounts") -> "ConnectionCounts":
        """The sum of these connection counts and of ``other``."""
        return ConnectionCounts(self.active + other.active, self.inactive + other.inactive)


NO_CONNECTIONS = ConnectionCounts()


class Counters(NamedTuple):
    """The counters of a virtual or real server, counted since the server was added to the kernel.

    "In" means from the client to the server.
    """

    connections: int = 0
    packets_in: int = 0
    packets_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
