"""The fixed rules: masquerading in the table ``nat``, source ranges and closed host ports in the table ``filter``.

The number of rules does not grow with the number of Services. A Service adds a rule only if its source ranges keep this node
itself from using the Service's load balancer address. Names, order and conditions are the same as in pkg/proxy/ipvs/proxier.go
(kubernetes/kubernetes), except for the chains of traffic scopes. ipvsproxy uses kube-proxy's rules for two reasons: operators
know these rules, and kube-proxy must be able to replace ipvsproxy at any time.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import assert_never

from ipvsproxy.model.net import Family, Network, Protocol
from ipvsproxy.model.rules import (
    Backend,
    ChainKey,
    ConnectionState,
    InterfaceMatch,
    Jump,
    JumpTo,
    LimitSegments,
    Rule,
    Side,
    Skeleton,
    TakeMark,
    Verdict,
)
from ipvsproxy.model.sets import SCOPE_KINDS, SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate.nat import (
    LOAD_BALANCER,
    MARK_MASQUERADE,
    NODE_PORT,
    POSTROUTING,
    SERVICES,
    TO,
    TO_PORT,
    TO_PORT_FROM,
    by_connection,
    by_mark,
    masquerade,
    match,
    on_set,
)
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES, LocalMode, Settings
from ipvsproxy.translate.view import NodeView

FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
SCOPE_ARRIVAL = "KUBE-IPVSPROXY-ARRIVAL"
SCOPE_MARK = "KUBE-IPVSPROXY-MARK"
SCOPE_MASQUERADE = "KUBE-IPVSPROXY-MASQ"
DIRECT_ANSWERS = "KUBE-IPVSPROXY-ANSWERS"

KUBE_PROXY_CHAINS: tuple[ChainKey, ...] = (
    *(ChainKey("nat", chain) for chain in (SERVICES, POSTROUTING, NODE_PORT, LOAD_BALANCER, MARK_MASQUERADE)),
    *(
        ChainKey("filter", chain)
        for chain in (FORWARD, NODE_PORT, PROXY_FIREWALL, SOURCE_RANGES_FIREWALL, IPVS_FILTER, IPVS_OUT_FILTER)
    ),
)
"""The chains that kube-proxy also has, in the order of their declaration."""
SCOPE_CHAINS: tuple[ChainKey, ...] = (
    ChainKey("mangle", SCOPE_ARRIVAL),
    ChainKey("mangle", SCOPE_MARK),
    ChainKey("nat", SCOPE_MASQUERADE),
)
"""The chains of traffic scopes. They exist only while an external address has two scopes, or while rules guard a tunnel
device."""
DIRECT_CHAINS: tuple[ChainKey, ...] = (ChainKey("mangle", DIRECT_ANSWERS),)
"""The chains that exist only while an external address has direct return."""
CHAINS: tuple[ChainKey, ...] = (*KUBE_PROXY_CHAINS, *SCOPE_CHAINS, *DIRECT_CHAINS)
"""Our chains."""

KUBE_PROXY_JUMPS: tuple[Jump, ...] = (
    Jump("nat", "OUTPUT", SERVICES, "kubernetes service portals"),
    Jump("nat", "PREROUTING", SERVICES, "kubernetes service portals"),
    Jump("nat", "POSTROUTING", POSTROUTING, "kubernetes postrouting rules"),
    Jump("filter", "FORWARD", FORWARD, "kubernetes forwarding rules"),
    Jump("filter", "INPUT", NODE_PORT, "kubernetes health check rules"),
    Jump("filter", "INPUT", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump("filter", "FORWARD", PROXY_FIREWALL, "kube-proxy firewall rules"),
    Jump("filter", "INPUT", IPVS_FILTER, "kubernetes ipvs access filter"),
    Jump("filter", "OUTPUT", IPVS_OUT_FILTER, "kubernetes ipvs access filter"),
)
"""The jumps from built-in chains to chains in ``KUBE_PROXY_CHAINS``."""
SCOPE_JUMPS: tuple[Jump, ...] = (
    Jump("mangle", "PREROUTING", SCOPE_ARRIVAL, "ipvsproxy traffic scopes"),
    Jump("mangle", "OUTPUT", SCOPE_MARK, "ipvsproxy traffic scopes"),
    Jump("nat", "POSTROUTING", SCOPE_MASQUERADE, "ipvsproxy traffic scopes"),
)
DIRECT_JUMPS: tuple[Jump, ...] = (Jump("mangle", "POSTROUTING", DIRECT_ANSWERS, "ipvsproxy direct return"),)
JUMPS: tuple[Jump, ...] = (*KUBE_PROXY_JUMPS, *SCOPE_JUMPS, *DIRECT_JUMPS)
"""The jumps to our chains. Absent jumps are inserted in this order, each at the head of its chain."""


_OF_KNOWN_CONNECTIONS = (ConnectionState.RELATED, ConnectionState.ESTABLISHED)


def build_skeleton(
    family: Family,
    settings: Settings,
    view: NodeView,
    occupied: AbstractSet[SetKind],
    refused: Iterable[VirtualServerKey],
    *,
    routed: AbstractSet[VirtualServerKey] = frozenset(),
) -> Skeleton:
    """All rules of a family.

    ``occupied`` has the kinds of sets that have an entry; most rules exist only while their set is not empty. ``refused`` has the
    virtual servers whose source ranges do not include this node, so that the node's own connections are refused. ``routed`` has
    each virtual server in ``refused`` whose address has, or will soon have, a local route on this node.
    """
    is_by_connection = settings.backend is not Backend.IPTABLES
    if is_by_connection:  # empty sets also get rules, except empty sets of scopes, whose rules every packet would traverse
        occupied = occupied | (frozenset(SetKind) - SCOPE_KINDS)
        nat_chains = by_connection(family, settings, view)
    else:
        nat_chains = by_mark(family, settings, view, occupied)
    rules = {ChainKey("nat", chain): list(one) for chain, one in nat_chains.items()}
    rules |= {key: [] for key in KUBE_PROXY_CHAINS if key.table == "filter"}

    forward = rules[ChainKey("filter", FORWARD)]
    if not is_by_connection:
        forward.append(Rule(comment="kubernetes forwarding rules", mark=settings.mark, target=Verdict.ACCEPT))
    comment = "kubernetes forwarding conntrack rule"
    forward.append(Rule(comment=comment, connection_states=_OF_KNOWN_CONNECTIONS, target=Verdict.ACCEPT))
    rules[ChainKey("filter", NODE_PORT)].append(on_set(SetKind.HEALTH_CHECK_NODE_PORT, family, TO, Verdict.ACCEPT))
    if SetKind.LOAD_BALANCER_FIREWALL in occupied:
        jump = on_set(SetKind.LOAD_BALANCER_FIREWALL, family, TO_PORT, JumpTo(SOURCE_RANGES_FIREWALL))
        rules[ChainKey("filter", PROXY_FIREWALL)].append(jump)
    rules[ChainKey("filter", SOURCE_RANGES_FIREWALL)] += _source_range_rules(family, occupied)
    rules[ChainKey("filter", IPVS_FILTER)] += _closed_port_rules(family)
    rules[ChainKey("filter", IPVS_OUT_FILTER)] += (
        _drop_own_packets(key, family, by_route=key in routed) for key in sorted(refused) if key.address.family is family
    )
    if SetKind.DIRECT in occupied:  # direct return keeps the client's address, unless the endpoint cannot answer the client
        chosen = Rule(any_mark=settings.scope_bits, target=Verdict.RETURN if is_by_connection else Verdict.ACCEPT)
        if is_by_connection:  # the first rule, which masquerades a pod that connects to itself, stays first
            rules[ChainKey("nat", POSTROUTING)].insert(1, chosen)
        else:
            rules[ChainKey("nat", SERVICES)].insert(0, chosen)
    if is_by_connection:  # remove the comments, because these rules are clear without comments
        rules = {key: [dataclasses.replace(rule, comment="") for rule in value] for key, value in rules.items()}
    chains, jumps = {key: tuple(value) for key, value in rules.items()}, KUBE_PROXY_JUMPS
    if occupied & SCOPE_KINDS - {SetKind.MARKS, SetKind.NOT_DIRECT} or _guards_tunnels(settings, view):
        chains |= _scope_chains(family, settings, view, occupied)
        jumps += SCOPE_JUMPS
    if SetKind.TUNNEL in occupied:
        answers = match(SetKind.TUNNEL, family, (Side.SOURCE, Side.SOURCE))
        limit = Rule(protocol=Protocol.TCP, set=answers, syn=True, target=LimitSegments(_SEGMENT_SIZES[family]))
        chains[DIRECT_CHAINS[0]] = (limit,)
        jumps += DIRECT_JUMPS
    return Skeleton(family=family, chains=chains, jumps=jumps)


_SEGMENT_SIZES: Mapping[Family, int] = {Family.IPV4: 1500 - 20 - 40, Family.IPV6: 1500 - 40 - 60}
"""The largest size of TCP segments from clients outside the cluster, in bytes. This size leaves room for the header that the
tunnel between two nodes adds to each packet."""


def _drop_own_packets(key: VirtualServerKey, family: Family, *, by_route: bool) -> Rule:
    """The rule that drops this host's own packets to a virtual server.

    If the service address is on ``kube-ipvs0``, the dropped packets have the service address as their source, as with kube-proxy.
    If a local route leads to the service address, the kernel chooses another source for IPv6 packets.
    """
    if by_route:
        return Rule(from_this_host=True, virtual_server=key, to_virtual_server=True, target=Verdict.DROP)
    return Rule(source=Network(key.address, family.bits), virtual_server=key, target=Verdict.DROP)


def _scope_chains(
    family: Family, settings: Settings, view: NodeView, occupied: AbstractSet[SetKind]
) -> Mapping[ChainKey, tuple[Rule, ...]]:
    """The rules that distinguish clients of this node from other clients, at external addresses with traffic policy Local.

    The number of these rules grows only with the number of pod ranges.

    A pod counts as a client of this node only if it is certainly on this node. If a pod may be on this node, its packets are not
    dropped. If the rules cannot distinguish pods from other clients, only this host's own packets get a mark, and no packets are
    dropped. Packets are marked in the table ``mangle``, because the kernel allows marks in this table, and because ``nat`` and
    IPVS process packets later.
    """
    arrival = list(_from_tunnels(family, settings, view, occupied))
    mark = (Rule(target=TakeMark(match(SetKind.SCOPE, family, TO_PORT))),) if SetKind.SCOPE in occupied else ()
    pods = list(_from_local_pods(family, settings, view))
    for pod in pods:
        arrival += (dataclasses.replace(pod, target=JumpTo(SCOPE_MARK)), pod)
    unsure = [Rule(source=item, target=Verdict.RETURN) for item in _cluster_networks(family, settings)]
    if (pods or unsure) and SetKind.NO_LOCAL in occupied:
        no_local = match(SetKind.NO_LOCAL, family, TO_PORT)
        arrival += unsure
        arrival.append(Rule(connection_states=(ConnectionState.NEW,), set=no_local, from_elsewhere=True, target=Verdict.DROP))
    if (pods or unsure) and SetKind.DIRECT in occupied:
        arrival += unsure if SetKind.NO_LOCAL not in occupied else ()
        arrival.append(Rule(from_elsewhere=True, target=TakeMark(match(SetKind.DIRECT, family, TO_PORT))))
    masquerade = tuple(_scope_masquerade(family, settings, occupied))
    return dict(zip(SCOPE_CHAINS, (tuple(arrival), mark, masquerade), strict=True))


def _from_local_pods(family: Family, settings: Settings, view: NodeView) -> Iterable[Rule]:
    """The rules that recognise pods of this node, one for each method (``detectLocalMode``)."""
    match settings.detect_local:
        case LocalMode.BRIDGE_INTERFACE:
            yield Rule(interface=InterfaceMatch(settings.local_interface), target=Verdict.RETURN)
        case LocalMode.INTERFACE_NAME_PREFIX:
            yield Rule(interface=InterfaceMatch(settings.local_interface, is_prefix=True), target=Verdict.RETURN)
        case LocalMode.CLUSTER_CIDR:
            yield from (Rule(source=item, target=Verdict.RETURN) for item in local_pod_networks(family, settings, view))
        case LocalMode.NODE_CIDR:
            yield from (Rule(source=item, target=Verdict.RETURN) for item in view.pod_networks if item.family is family)
        case never:
            assert_never(never)


def _guards_tunnels(settings: Settings, view: NodeView) -> bool:
    """Whether ipvsproxy owns the tunnel devices.

    If so, rules drop tunnel packets from unknown hosts even if no set has an entry.
    """
    return (settings.direct_return or settings.guards_tunnels) and not view.shared_tunnel


def _from_tunnels(family: Family, settings: Settings, view: NodeView, occupied: AbstractSet[SetKind]) -> Iterable[Rule]:
    """The rules for tunnels of direct return.

    The rules for tunnels come before all other rules, so that a packet from a tunnel is never forwarded. Any host that can send
    an outer packet to this node can put an arbitrary inner packet into the outer packet. If another program uses the tunnel
    device, no rule may drop the packets of the other program. The rules let through outer packets that go to pods or other hosts,
    and outer packets of other programs' tunnels between nodes.
    """
    occupied = occupied & {SetKind.NODES, SetKind.TUNNEL}
    if view.shared_tunnel or not (occupied or _guards_tunnels(settings, view)):
        return
    if SetKind.NODES in occupied:
        yield Rule(tunnel=True, set=match(SetKind.NODES, family, (Side.SOURCE,)), target=Verdict.RETURN)
    if occupied or settings.direct_return:  # without direct return, the Nodes are unknown
        yield Rule(tunnel=True, to_this_host=True, target=Verdict.DROP)
    tunnel = InterfaceMatch(TUNNEL_DEVICES[family])
    if SetKind.TUNNEL in occupied:
        yield Rule(interface=tunnel, target=TakeMark(match(SetKind.TUNNEL, family, TO_PORT)))
        yield Rule(interface=tunnel, any_mark=settings.scope_bits, target=Verdict.RETURN)
    yield Rule(interface=tunnel, target=Verdict.DROP)


def _scope_masquerade(family: Family, settings: Settings, occupied: AbstractSet[SetKind]) -> Iterable[Rule]:
    """Rules that masquerade a connection after IPVS has chosen an endpoint whose answers would bypass this node.

    This host's own packets to a service address have the service address as their source. A node that has the service address on
    an interface treats the service address as its own address.
    """
    if not occupied & {SetKind.SCOPE, SetKind.NOT_DIRECT}:
        return
    yield Rule(no_mark=settings.scope_bits, target=Verdict.RETURN)
    if SetKind.SCOPE in occupied:
        yield Rule(from_this_host=True, target=masquerade(family, settings))
    if SetKind.NOT_DIRECT in occupied:
        yield Rule(set=match(SetKind.NOT_DIRECT, family, TO_PORT), target=masquerade(family, settings))


def _cluster_networks(family: Family, settings: Settings) -> Iterable[Network]:
    """The ranges of the cluster's pods, if the local mode recognises pods by range."""
    if settings.detect_local is LocalMode.CLUSTER_CIDR:
        yield from (item for item in settings.cluster_networks if item.family is family)


def local_pod_networks(family: Family, settings: Settings, view: NodeView) -> Iterable[Network]:
    """The ranges whose pods are all on this node: the pod ranges of the Node object, and the ranges of this node's bridges.

    Some network plug-ins, such as Calico with its own address management, ignore ``spec.podCIDRs``. If a plug-in ignores
    ``spec.podCIDRs``, a pod on another node may have an address in the ranges of this node's Node object. If a plug-in uses
    ``spec.podCIDRs``, this node itself has an address in the ranges. If an interface's network contains the Node's own address,
    the network is left out. Such a network connects the nodes, and pods with its addresses may be on any node.
    """
    clusters = list(_cluster_networks(family, settings))
    own = [item for item in view.pod_networks if any(item.contains(address) for address in view.elsewhere)]
    bridged = [item for item in view.connected if not item.contains(view.primary_addresses[family])]
    for item in dict.fromkeys((*own, *bridged)):
        if item.prefix_length < family.bits and any(
            cluster.prefix_length < item.prefix_length and cluster.contains(item.address) for cluster in clusters
        ):
            yield item


def _source_range_rules(family: Family, occupied: Collection[SetKind]) -> Iterable[Rule]:
    for kind in (SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP):
        if kind in occupied:
            yield on_set(kind, family, TO_PORT_FROM, Verdict.RETURN)
    yield Rule(target=Verdict.DROP)


def _closed_port_rules(family: Family) -> Iterable[Rule]:
    """The rules that close the host's own ports on service addresses; only the ports of the Services stay open."""
    for kind in (SetKind.LOAD_BALANCER, SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL):
        yield Rule(set=match(kind, family, TO_PORT), target=Verdict.RETURN)
    yield Rule(set=match(SetKind.HEALTH_CHECK_NODE_PORT, family, TO), target=Verdict.RETURN)
    yield Rule(
        connection_states=(ConnectionState.NEW,),
        set=match(SetKind.IPVS_IPS, family, TO),
        target=Verdict.REJECT,
    )
