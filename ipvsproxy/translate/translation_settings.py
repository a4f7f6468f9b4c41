"""The operator's choices that change the desired state, and the kernel settings that these choices require."""

import dataclasses
import enum
from collections.abc import Iterator, Mapping

from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation
from ipvsproxy.model.kernel import PROMPT_REUSE, Sysctl
from ipvsproxy.model.net import Address, Family, Network
from ipvsproxy.model.rules import Backend


class LocalMode(enum.StrEnum):
    """The method by which rules recognise traffic from this node's pods (``detectLocalMode`` of KubeProxyConfiguration)."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"

    @property
    def is_by_interface(self) -> bool:
        """Whether rules recognise pods by the interface on which packets arrive."""
        return self in (LocalMode.BRIDGE_INTERFACE, LocalMode.INTERFACE_NAME_PREFIX)


class TrafficScopes(enum.StrEnum):
    """Decides which endpoints serve this node's clients at external addresses with externalTrafficPolicy Local.

    With ``API``, clients of this node reach the endpoints of the whole cluster, as in the Service API. With ``KUBE_PROXY``,
    clients of this node reach the same endpoints as all other clients, as in kube-proxy's IPVS mode.
    """

    API = "api"
    KUBE_PROXY = "kube-proxy"


class DirectReturn(enum.StrEnum):
    """Whether this node takes part in direct return.

    A node that takes part sends the packets of clients outside the cluster through tunnels to nodes with endpoints. It also
    accepts such packets from other nodes.
    """

    OFF = "off"
    ON = "on"


class Binding(enum.StrEnum):
    """The method by which service addresses become local, so that this node accepts packets to these addresses.

    With ``ADDRESSES``, ipvsproxy adds service addresses to its dummy device, as kube-proxy does. With ``ROUTES``, a local route
    on ``lo`` leads to each service address.
    """

    ADDRESSES = "addresses"
    ROUTES = "routes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's choices that change the desired state.

    Node ports answer on the addresses in ``node_port_networks``, and, with ``node_port_primary``, on the node's primary
    addresses. If a family has neither of these two settings, node ports answer on all addresses of the family.
    ``local_interface`` is used if pods of this node are recognised by their interface. It is the name of the bridge, or the
    prefix of the names of the interfaces. ``bind_address``, unless it is the unspecified address, is the node's primary address,
    and takes precedence over the Node object. ``external_addresses`` is the value of the feature gate AllowServiceExternalIPs.
    ``allowed_addresses`` are served even if ``refusal`` would refuse them. ``refuses_node_addresses`` means that no Service gets
    an external address that is known to belong to another node. ``scope_bits`` are the bits of packet marks that are used for
    ``scopes``. ``hash_scheduler`` is a scheduler that sends a client to one endpoint for as long as the endpoints do not change.
    ``annotations`` are the annotations that this node obeys. ``missing_schedulers`` maps each unusable scheduler that an
    annotation names to the reason why it is unusable. ``direct_return`` means that this node takes part in direct return. With
    ``guards_tunnels``, rules drop tunnel packets from unknown hosts although this node takes no part in direct return, because an
    earlier process may have left a tunnel device up. ``backend`` (never ``AUTO``) is the backend that holds the rules.
    """

    scheduler: str = "rr"
    masquerade_all: bool = False
    masquerade_bit: int = 14
    random_fully: Mapping[Family, bool] = dataclasses.field(default_factory=dict)
    detect_local: LocalMode = LocalMode.CLUSTER_CIDR
    cluster_networks: tuple[Network, ...] = ()
    local_interface: str = ""
    node_port_networks: tuple[Network, ...] = ()
    node_port_primary: bool = False
    bind_address: Address | None = None
    external_addresses: bool = True
    families: frozenset[Family] = frozenset(Family)
    allowed_addresses: tuple[Network, ...] = ()
    refuses_node_addresses: bool = False
    scopes: TrafficScopes = TrafficScopes.KUBE_PROXY
    scope_bits: int = 0x3FFF
    hash_scheduler: str = "mh"
    annotations: frozenset[Annotation] = ALL_ANNOTATIONS
    missing_schedulers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    binding: Binding = Binding.ADDRESSES
    direct_return: bool = False
    guards_tunnels: bool = False
    backend: Backend = Backend.IPTABLES

    @property
    def mark(self) -> int:
        """The packet mark by which rules request masquerading."""
        return 1 << self.masquerade_bit


TUNNEL_DEVICES: Mapping[Family, str] = {Family.IPV4: "tunl0", Family.IPV6: "ip6tnl0"}
"""The kernel's own tunnel devices, through which the packets of other nodes arrive (modules ``ipip`` and ``ip6_tunnel``)."""
TUNNEL_MODULES: Mapping[Family, str] = {Family.IPV4: "ipip", Family.IPV6: "ip6_tunnel"}

_TUNNEL_UP = "0x81"
"""The flags of a tunnel device that is up: IFF_UP and IFF_NOARP."""


def device_flags(family: Family) -> str:
    """The path of the kernel setting that brings the tunnel device of a family up or down."""
    return f"/sys/class/net/{TUNNEL_DEVICES[family]}/flags"


def direct_return_sysctls(families: frozenset[Family]) -> Iterator[Sysctl]:
    """The settings that a node needs in order to take part in direct return.

    The tunnel has no address, and the route to a client uses another interface. Therefore, even a loose ``rp_filter`` would drop
    packets from the tunnel (``__fib_validate_source`` in net/ipv4/fib_frontend.c). The kernel applies the larger of two
    ``rp_filter`` values: the interface's value and the value of ``all``. ``sloppy_tcp`` and ``sloppy_sctp`` let this node
    continue a connection whose first packets arrived at another node.
    """
    for family in sorted(families):
        yield Sysctl(device_flags(family), _TUNNEL_UP, for_tunnels=True)
    if Family.IPV4 in families:
        yield Sysctl("net/ipv4/conf/all/rp_filter", "0", for_tunnels=True)
        yield Sysctl("net/ipv4/conf/tunl0/rp_filter", "0", for_tunnels=True)
    for protocol in ("tcp", "sctp"):
        yield Sysctl(f"net/ipv4/vs/sloppy_{protocol}", "1", for_tunnels=True)


CONNTRACK_CEILING = 1024 * 1024
"""The upper limit, in flows, of the conntrack maximum that is computed from the number of processors
(cmd/kube-proxy/app/conntrack.go).
"""
CONNTRACK_BUCKETS = "/sys/module/nf_conntrack/parameters/hashsize"
"""The size of conntrack's hash table.

The whole host has one such table, and only the host's first network namespace can set its size.
"""
FLOWS_PER_BUCKET = 4
"""The number of flows for each bucket of conntrack's hash table, as in kube-proxy."""
_REUSE_MODE = (4, 1)
"""The Linux version that introduced ``conn_reuse_mode``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConntrackChoices:
    """The operator's settings of connection tracking; a value of 0 leaves the kernel's setting unchanged.

    Times are in seconds.
    """

    max_per_core: int = 0
    minimum: int = 0
    tcp_established_timeout_s: float = 0
    tcp_close_wait_timeout_s: float = 0
    tcp_be_liberal: bool = False
    udp_timeout_s: float = 0
    udp_stream_timeout_s: float = 0


def ipvs_sysctls(kernel_version: tuple[int, int], *, strict_arp: bool) -> Iterator[Sysctl]:
    """The kernel settings that kube-proxy makes in IPVS mode (pkg/proxy/ipvs/proxier.go in kubernetes/kubernetes).

    The kernel setting of IPv4 forwarding applies to both families.
    """
    yield Sysctl("net/ipv4/vs/conntrack", "1")
    if _REUSE_MODE <= kernel_version < PROMPT_REUSE:
        # With the value 1, each connection from a reused source port would take a second (kubernetes/kubernetes #81775).
        yield Sysctl("net/ipv4/vs/conn_reuse_mode", "0")
    yield Sysctl("net/ipv4/vs/expire_nodest_conn", "1")
    yield Sysctl("net/ipv4/vs/expire_quiescent_template", "1")
    yield Sysctl("net/ipv4/ip_forward", "1")
    if strict_arp:
        yield Sysctl("net/ipv4/conf/all/arp_ignore", "1")
        yield Sysctl("net/ipv4/conf/all/arp_announce", "2")


def conntrack_sysctls(choices: ConntrackChoices, processors: int) -> Iterator[Sysctl]:
    """The settings of connection tracking.

    If the kernel allows more tracked flows than desired, the kernel's maximum is kept, because an administrator has chosen it.
    """
    if scaled := choices.max_per_core * processors:
        maximum = CONNTRACK_CEILING if scaled > CONNTRACK_CEILING else max(scaled, choices.minimum)
        yield Sysctl("net/netfilter/nf_conntrack_max", str(maximum), at_least=True)
        yield Sysctl(CONNTRACK_BUCKETS, str(maximum // FLOWS_PER_BUCKET), at_least=True)
    settings = (
        ("nf_conntrack_tcp_timeout_established", choices.tcp_established_timeout_s),
        ("nf_conntrack_tcp_timeout_close_wait", choices.tcp_close_wait_timeout_s),
        ("nf_conntrack_tcp_be_liberal", choices.tcp_be_liberal),
        ("nf_conntrack_udp_timeout", choices.udp_timeout_s),
        ("nf_conntrack_udp_timeout_stream", choices.udp_stream_timeout_s),
    )
    for name, value in settings:
        if int(value):
            yield Sysctl(f"net/netfilter/{name}", str(int(value)))
