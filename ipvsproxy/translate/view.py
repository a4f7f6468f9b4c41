"""The properties of this node that affect Services: name, zone, and addresses.

Addresses that the node lost a moment ago are included.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from ipvsproxy.model.kernel import DEVICE, TUNNEL_RECORD, InterfaceAddress, parse_record
from ipvsproxy.model.net import Address, Family, Network, network, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Node
from ipvsproxy.model.state import Observation
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES, LocalMode, Settings, device_flags, direct_return_sysctls

LOOPBACK: Mapping[Family, Address] = {Family.IPV4: parse_address("127.0.0.1"), Family.IPV6: parse_address("::1")}
"""For each IP family, the primary address of a node whose own address is not known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The properties of this node that affect Services.

    ``primary_addresses`` has the node's own address for each family, or a loopback address if the node's own address is unknown.
    ``node_port_addresses`` are the addresses on which node ports answer. ``health_check_addresses`` are the addresses on which
    health-check ports listen; the unspecified address means all addresses. ``elsewhere`` are the addresses on all interfaces
    except ``kube-ipvs0``. A service address that another interface already has is served, but is not bound a second time.
    ``api_servers`` are the API servers that are known now; ``former_api_servers`` are all API servers that were known before.
    A key of ``other_nodes`` is an external or load-balancer address; the value is the name of the other node that is known to
    have this address. ``tunnel_ends`` maps the name of every remote node that accepts packets of direct return to the node's
    addresses. ``pod_networks`` are the Node's ``spec.podCIDRs``. ``connected`` are the networks of all interfaces except
    ``kube-ipvs0``.
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

    ``lingering`` are addresses that the node has lost. Node ports and health-check ports are still served on them for a grace
    period.
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
        shared_tunnel=shared_tunnel(carried_here) if settings.direct_return or settings.guards_tunnels else "",
    )


def shared_tunnel(addresses: Iterable[InterfaceAddress]) -> str:
    """The name of a tunnel device that has an address and therefore belongs to another program, such as Calico.

    The name is empty if there is no such device.
    """
    devices = TUNNEL_DEVICES.values()
    return next((one.interface for one in addresses if one.interface in devices and not one.address.is_link_local_v6), "")


def without_direct_return(observed: Observation) -> tuple[Operation, ...]:
    """The operations that restore what direct return has changed (see ``TUNNEL_RECORD``). The tunnel devices are restored first.

    Returns no operations while another program uses, or may use, a tunnel device.
    """
    addresses, record = observed.interface_addresses, parse_record((observed.sysctls or {}).get(TUNNEL_RECORD, ""))
    if addresses is None or shared_tunnel(addresses):
        return ()
    return tuple(Operation(Verb.REMOVE, one) for one in direct_return_sysctls(frozenset(Family)) if one.path in record)


def knows_direct_return(observed: Observation) -> bool:
    """Whether a reading of the kernel has everything that ``without_direct_return`` needs.

    If the reading is incomplete, ``without_direct_return`` may miss an operation.
    """
    if observed.sysctls is None:
        return False
    return observed.interface_addresses is not None or not parse_record(observed.sysctls.get(TUNNEL_RECORD, ""))


def are_tunnels_down(restored: Iterable[Outcome]) -> bool:
    """Whether the outcomes of ``without_direct_return`` show that every tunnel device has been restored."""
    devices = set(map(device_flags, Family))
    return not any(outcome.error and outcome.operation.item.key in devices for outcome in restored)


def node_port_ranges(settings: Settings, node: Node | None) -> tuple[Network, ...]:
    """The address ranges of both families in which node ports answer; a /0 range means every address."""
    primary = _primary_addresses(settings, node)
    return tuple(
        item
        for family in Family
        for item in _node_port_networks(settings, family, primary) or (network(Address(bytes(family.bits // 8)), 0),)
    )


def known_node_port_ranges(settings: Settings) -> tuple[Network, ...]:
    """The address ranges in which node ports answer; none if they depend on a Node from the API server."""
    bind_address = settings.bind_address
    if settings.node_port_primary and (bind_address is None or bind_address.is_unspecified):
        return ()
    return node_port_ranges(settings, None)


def _primary_addresses(settings: Settings, node: Node | None) -> Mapping[Family, Address]:
    """The first InternalIP of each family, or the first ExternalIP if the family has no InternalIP.

    A bind address takes precedence over the addresses of the Node object, unless it is the unspecified address.
    """
    addresses = dict(LOOPBACK)
    for address in reversed(node.addresses if node else ()):
        addresses[address.family] = address
    if settings.bind_address and not settings.bind_address.is_unspecified:
        addresses[settings.bind_address.family] = settings.bind_address
    return addresses


def without_local_pods(settings: Settings, pod_networks: Sequence[Network]) -> frozenset[Family]:
    """The served families in which rules cannot recognise this node's pods, because only other families have pod ranges.

    In these families, traffic to cluster IPs is masqueraded by the same rules as if there were no local detection.
    ``pod_networks`` are the Node's ``spec.podCIDRs``.
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
    """The primary family, which a node must be able to serve.

    The primary family is the family of the bind address or, if that is the unspecified address, the family of the Node's first
    address. The result is None if no address is known. The rule is the same as in ``detectNodeIPs`` in
    cmd/kube-proxy/app/server.go of kubernetes/kubernetes.
    """
    if settings.bind_address and not settings.bind_address.is_unspecified:
        return settings.bind_address.family
    return node.addresses[0].family if node and node.addresses else None


def _node_port_networks(settings: Settings, family: Family, primary: Mapping[Family, Address]) -> tuple[Network, ...]:
    """The ranges in which node ports answer; if there are no ranges or a /0 range, node ports answer on every address.

    The rule is the same as in pkg/proxy/util/nodeport_addresses.go in kubernetes/kubernetes.
    """
    networks = tuple(item for item in settings.node_port_networks if item.family is family)
    if settings.node_port_primary and not primary[family].is_loopback:
        networks += (network(primary[family], family.bits),)
    return () if any(item.prefix_length == 0 for item in networks) else networks


def _node_port_addresses(networks: Sequence[Network], ours: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses inside the ranges; without ranges, all addresses except IPv6 link-local addresses.

    Never loopback addresses.
    """
    candidates = dict.fromkeys(address for address in ours if not address.is_loopback)
    if not networks:
        return tuple(address for address in candidates if not address.is_link_local_v6)
    return tuple(address for address in candidates if any(item.contains(address) for item in networks))


def _health_check_addresses(family: Family, networks: Sequence[Network], ours: Iterable[Address]) -> tuple[Address, ...]:
    """The addresses inside the ranges.

    Loopback addresses are included; link-local addresses are left out, because a listener on a link-local address would need the
    interface.
    """
    if not networks:
        return (Address(bytes(family.bits // 8)),)
    candidates = dict.fromkeys(address for address in ours if not address.is_link_local_v6)
    return tuple(address for address in candidates if any(item.contains(address) for item in networks))


GRACE_S = 8.0
"""The grace period: the time for which node ports are still served on an address that the host has lost. Within this time, a
restarted DHCP client can add the address again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lingering:
    """The addresses that this host lost a moment ago, and on which node ports are still served.

    Rule 1: most lost addresses come back soon, because ``netplan apply``, a DHCP client or keepalived remove an address only for
    a moment. The removal of a lost address's virtual servers would end their connections (``expire_nodest_conn``), so the virtual
    servers stay for a grace period.
    Rule 2: node ports on a lost address end only after a successful reading that does not find the address. A failed reading
    begins the grace period again.

    ``present`` are the addresses of the last reading. ``until_s`` has the end of the grace period for each lost address.
    """

    present: frozenset[Address] = frozenset()
    until_s: Mapping[Address, float] = dataclasses.field(default_factory=dict)

    @property
    def addresses(self) -> Collection[Address]:
        """The lost addresses whose grace period has not ended."""
        return self.until_s.keys()

    @property
    def next_s(self) -> float | None:
        """The time at which the next grace period ends; None if there is no grace period."""
        return min(self.until_s.values(), default=None)

    def is_due(self, now: float) -> bool:
        """Whether a grace period has ended. If one has ended, the caller must read the addresses."""
        return any(until_s <= now for until_s in self.until_s.values())

    def after(self, addresses: Iterable[Address], now: float) -> "Lingering":
        """Returns the object to use after a reading that has found exactly the given addresses."""
        present = frozenset(addresses)
        staying = {one: until_s for one, until_s in self.until_s.items() if one not in present and now < until_s}
        return Lingering(present, staying | dict.fromkeys(sorted(self.present - present), now + GRACE_S))

    def postponed(self, now: float) -> "Lingering":
        """Returns the object to use after a failed reading; in this object, each grace period begins again."""
        return Lingering(self.present, dict.fromkeys(self.until_s, now + GRACE_S))
