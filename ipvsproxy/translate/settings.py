"""The operator's choices that change desired state."""

import dataclasses
import enum
from collections.abc import Mapping

from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation
from ipvsproxy.model.net import Address, Family, Network
from ipvsproxy.model.rules import Backend


class LocalMode(enum.StrEnum):
    """How rules recognise traffic of this node's pods; ``detectLocalMode`` of KubeProxyConfiguration."""

    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE_INTERFACE = "BridgeInterface"
    INTERFACE_NAME_PREFIX = "InterfaceNamePrefix"

    @property
    def is_by_interface(self) -> bool:
        """Whether rules tell pods by the interface of arrival."""
        return self in (LocalMode.BRIDGE_INTERFACE, LocalMode.INTERFACE_NAME_PREFIX)


class TrafficScopes(enum.StrEnum):
    """Which endpoints clients of this node get at external addresses with externalTrafficPolicy Local.

    ``API``: those of the whole cluster, as the Service API has it. ``KUBE_PROXY``: those of all other clients, as kube-proxy's
    IPVS mode has it.
    """

    API = "api"
    KUBE_PROXY = "kube-proxy"


class Binding(enum.StrEnum):
    """The way by which service addresses become local, so that this node takes their packets in.

    ``ADDRESSES``: they are on our dummy device, as with kube-proxy. ``ROUTES``: a local route on ``lo`` leads to each.
    """

    ADDRESSES = "addresses"
    ROUTES = "routes"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The operator's choices that change desired state.

    ``node_port_networks`` empty means every address of the node. ``node_port_primary`` means its primary addresses only.
    ``local_interface`` is the bridge or the name prefix of the two interface modes. ``bind_address``, unless it is
    unspecified, is the node's primary address whatever its Node object says. ``external_addresses`` is the feature gate
    AllowServiceExternalIPs. ``allowed_addresses`` are served even where ``refusal`` would not. ``scope_bits`` are the bits of
    packet marks that ``scopes`` uses. ``hash_scheduler`` sends a client to one endpoint for as long as the endpoints stay.
    ``annotations`` are those that count. ``missing_schedulers`` has the reason for each scheduler of an annotation that cannot be
    used. ``backend`` (never ``AUTO``) holds the rules.
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
    scopes: TrafficScopes = TrafficScopes.API
    scope_bits: int = 0x3FFF
    hash_scheduler: str = "mh"
    annotations: frozenset[Annotation] = ALL_ANNOTATIONS
    missing_schedulers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    binding: Binding = Binding.ADDRESSES
    backend: Backend = Backend.IPTABLES

    @property
    def mark(self) -> int:
        """The packet mark with which rules request masquerading."""
        return 1 << self.masquerade_bit
