"""The properties of this node that matter for Services: name, zone, and addresses, including those that it lost a moment ago."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from ipvsproxy.model.kernel import DEVICE, InterfaceAddress
from ipvsproxy.model.net import Address, Family, Network, network, parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Node
from ipvsproxy.translate.settings import TUNNEL_DEVICES, LocalMode, Settings

LOOPBACK: Mapping[Family, Address] = {Family.IPV4: parse_address("127.0.0.1"), Family.IPV6: parse_address("::1")}
"""Stands for an unknown address of the node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The properties of this node that matter for Services.

    ``primary_addresses`` is the node's own address per family, or a loopback address if it is unknown. ``node_port_addresses``
    are the addresses on which node ports answer, ``health_check_addresses`` the addresses on which health-check ports listen
    (the unspecified address stands for all). ``elsewhere`` are the addresses on all interfaces except our dummy device: a
    service address among them is served, but not bound a second time. ``api_servers`` are the known API servers,
    ``former_api_servers`` all that were known before. ``other_nodes`` has the node of each external or load-balancer address
    that is known to belong to another node. ``tunnel_ends`` has the addresses of each other node that takes packets of direct
    return. ``pod_networks`` are the Node's ``spec.podCIDRs``, ``connected`` the networks that other interfaces than our device
    are in.
    """

    name: str
    zone: str
    primary_addresses: Mapping[Family, Address]
    node_port_addresses: Mapping[Family, tuple[Address, ...]]
    health_check_addresses: Mapping[Family, tuple[Address, ...]]
    elsewhere: frozenset[Address]
    pod_networks: tuple[Network, ...] = ()
    connected: tuple[Network, ...] = ()
    api_servers: frozenset[RealServerKey] = frozenset()
    former_api_servers: frozenset[RealServerKey] = frozenset()
    other_nodes: Mapping[Address, str] = dataclasses.field(default_factory=dict)
    tunnel_ends: Mapping[str, tuple[Address, ...]] = dataclasses.field(default_factory=dict)
    shared_tunnel: str = ""


def view_node(
    settings: Settings,
    name: str,
    node: Node | None,
    addresses: Iterable[InterfaceAddress],
    api_servers: Iterable[RealServerKey],
    *,
    former_api_servers: Iterable[RealServerKey] = (),
    other_nodes: Mapping[Address, str] | None = None,
    tunnel_ends: Mapping[str, tuple[Address, ...]] | None = None,
    lingering: Iterable[Address] = (),
) -> NodeView:
    """Make the view from the Node object, the host's interfaces, and the present and former API servers.

    ``lingering`` are lost addresses on which node ports and health-check ports stay for a while.
    """
    carried_here = [item for item in addresses if item.interface != DEVICE]
    ours = [item.address for item in carried_here]
    primary = _primary_addresses(settings, node)
    answering = (*ours, *lingering)
    carried = {family: [address for address in answering if address.family is family] for family in Family}
    networks = {family: _node_port_networks(settings, family, primary) for family in Family}
    return NodeView(
        name=name,
        zone=node.zone if node else "",
        primary_addresses=primary,
        node_port_addresses={family: _node_port_addresses(networks[family], carried[family]) for family in Family},
        health_check_addresses={family: _health_check_addresses(family, networks[family], carried[family]) for family in Family},
        elsewhere=frozenset(address for address in ours if not address.is_loopback and not address.is_link_local_v6),
        pod_networks=node.pod_networks if node else (),
        connected=tuple(dict.fromkeys(network(item.address, item.prefix_length) for item in carried_here)),
        api_servers=frozenset(api_servers),
        former_api_servers=frozenset(former_api_servers),
        other_nodes=other_nodes or {},
        tunnel_ends=tunnel_ends or {},
        shared_tunnel=shared_tunnel(carried_here) if settings.direct_return else "",
    )


def shared_tunnel(addresses: Iterable[InterfaceAddress]) -> str:
    """The tunnel device that carries an address, and so belongs to another program, such as Calico; empty without one."""
    devices = TUNNEL_DEVICES.values()
    return next((one.interface for one in addresses if one.interface in devices and not one.address.is_link_local_v6), "")


def node_port_ranges(settings: Settings, node: Node | None) -> tuple[Network, ...]:
    """The ranges whose addresses answer on node ports, of both families; a /0 range if every address does."""
    primary = _primary_addresses(settings, node)
    return tuple(
        item
        for family in Family
        for item in _node_port_networks(settings, family, primary) or (network(Address(bytes(family.bits // 8)), 0),)
    )


def known_node_port_ranges(settings: Settings) -> tuple[Network, ...]:
    """The ranges that are known without an API server; no ranges if they depend on the Node object."""
    bind_address = settings.bind_address
    if settings.node_port_primary and (bind_address is None or bind_address.is_unspecified):
        return ()
    return node_port_ranges(settings, None)


def _primary_addresses(settings: Settings, node: Node | None) -> Mapping[Family, Address]:
    """The first InternalIP of each family, else the first ExternalIP; a concrete bind address beats both."""
    addresses = dict(LOOPBACK)
    for address in reversed(node.addresses if node else ()):
        addresses[address.family] = address
    if settings.bind_address and not settings.bind_address.is_unspecified:
        addresses[settings.bind_address.family] = settings.bind_address
    return addresses


def without_local_pods(settings: Settings, pod_networks: Sequence[Network]) -> frozenset[Family]:
    """The served families in which rules cannot recognise this node's pods, because only other families have ranges.

    Their traffic to cluster IPs is masqueraded as without local detection. ``pod_networks`` are the Node's
    ``spec.podCIDRs``.
    """
    match settings.detect_local:
        case LocalMode.CLUSTER_CIDR:
            networks: Sequence[Network] = settings.cluster_networks
        case LocalMode.NODE_CIDR:
            networks = pod_networks
        case _:
            return frozenset()
    return settings.families - {network.family for network in networks} if networks else frozenset()


def primary_family(settings: Settings, node: Node | None) -> Family | None:
    """The family that a node needs: the family of a concrete bind address, else of the Node's first address.

    None if no address is known. The rule is that of ``detectNodeIPs`` in cmd/kube-proxy/app/server.go of kubernetes/kubernetes.
    """
    if settings.bind_address and not settings.bind_address.is_unspecified:
        return settings.bind_address.family
    return node.addresses[0].family if node and node.addresses else None


def _node_port_networks(settings: Settings, family: Family, primary: Mapping[Family, Address]) -> tuple[Network, ...]:
    """The ranges whose addresses answer on node ports; none means every address, as does a /0 range.

    The rule is that of pkg/proxy/util/nodeport_addresses.go in kubernetes/kubernetes.
    """
    networks = tuple(item for item in settings.node_port_networks if item.family is family)
    if settings.node_port_primary and not primary[family].is_loopback:
        networks += (network(primary[family], family.bits),)
    return () if any(item.prefix_length == 0 for item in networks) else networks


def _node_port_addresses(networks: Sequence[Network], ours: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses inside the ranges; without ranges, all except IPv6 link-local ones. Never loopback addresses."""
    candidates = dict.fromkeys(address for address in ours if not address.is_loopback)
    if not networks:
        return tuple(address for address in candidates if not address.is_link_local_v6)
    return tuple(address for address in candidates if any(item.contains(address) for item in networks))


def _health_check_addresses(family: Family, networks: Sequence[Network], ours: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses inside the ranges, with loopback, but without link-local ones: a listener there would need the interface."""
    if not networks:
        return (Address(bytes(family.bits // 8)),)
    candidates = dict.fromkeys(address for address in ours if not address.is_link_local_v6)
    return tuple(address for address in candidates if any(item.contains(address) for item in networks))


GRACE_S = 8.0
"""The grace period, for which node ports outlive their address. A DHCP client takes some seconds to restart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lingering:
    """Addresses that this host lost a moment ago, on which node ports are still served.

    Rule 1: most lost addresses come back: ``netplan apply``, a DHCP client or keepalived remove an address for a moment. Removing
    the virtual servers of a lost address would end their connections (``expire_nodest_conn``), so they stay for a grace period.
    Rule 2: only a successful reading without the address ends its grace period.

    ``present`` are the addresses of the last reading; ``until_s`` has the end of the grace period of each lost address.
    """

    present: frozenset[Address] = frozenset()
    until_s: Mapping[Address, float] = dataclasses.field(default_factory=dict)

    @property
    def addresses(self) -> Collection[Address]:
        """The lost addresses in their grace period."""
        return self.until_s.keys()

    @property
    def next_s(self) -> float | None:
        """When the first grace period ends; None if there is none."""
        return min(self.until_s.values(), default=None)

    def is_due(self, now: float) -> bool:
        """Whether a grace period has ended, so that the addresses must be read."""
        return any(until_s <= now for until_s in self.until_s.values())

    def after(self, addresses: Iterable[Address], now: float) -> "Lingering":
        """The next value, after a reading with exactly these addresses."""
        present = frozenset(addresses)
        staying = {one: until_s for one, until_s in self.until_s.items() if one not in present and now < until_s}
        return Lingering(present, staying | dict.fromkeys(sorted(self.present - present), now + GRACE_S))

    def postponed(self, now: float) -> "Lingering":
        """The next value, after a reading that failed: each grace period begins anew."""
        return Lingering(self.present, dict.fromkeys(self.until_s, now + GRACE_S))
