"""The fixed rules: masquerading in ``nat``, source ranges and closed host ports in ``filter``.

Their number does not grow with the Services; only a load balancer address that this node itself may not use adds one rule.
Names, order and conditions are those of pkg/proxy/ipvs/proxier.go (kubernetes/kubernetes): operators know its rules, and
kube-proxy must be able to take over again.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import assert_never

from ipvsproxy.model.kernel import IpSet, SetKind, VirtualServerKey
from ipvsproxy.model.net import Family, Network, Protocol, parse_network
from ipvsproxy.model.rules import (
    ChainKey,
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    Masquerade,
    Rule,
    SetMark,
    SetMatch,
    Side,
    Skeleton,
    TakeMark,
    Target,
    Verdict,
)
from ipvsproxy.translate.view import Binding, LocalMode, NodeView, Settings

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
NODE_PORT = "KUBE-NODE-PORT"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
MARK_MASQUERADE = "KUBE-MARK-MASQ"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
SOURCE_RANGES_FIREWALL = "KUBE-SOURCE-RANGES-FIREWALL"
IPVS_FILTER = "KUBE-IPVS-FILTER"
IPVS_OUT_FILTER = "KUBE-IPVS-OUT-FILTER"
SCOPE_ARRIVAL = "KUBE-IPVSPROXY-ARRIVAL"
SCOPE_MARK = "KUBE-IPVSPROXY-MARK"
SCOPE_MASQUERADE = "KUBE-IPVSPROXY-MASQ"

KUBE_PROXY_CHAINS: tuple[ChainKey, ...] = (
    *(ChainKey("nat", chain) for chain in (SERVICES, POSTROUTING, NODE_PORT, LOAD_BALANCER, MARK_MASQUERADE)),
    *(
        ChainKey("filter", chain)
        for chain in (FORWARD, NODE_PORT, PROXY_FIREWALL, SOURCE_RANGES_FIREWALL, IPVS_FILTER, IPVS_OUT_FILTER)
    ),
)
"""The chains that kube-proxy has, too, in the order of their declaration."""
SCOPE_CHAINS: tuple[ChainKey, ...] = (
    ChainKey("mangle", SCOPE_ARRIVAL),
    ChainKey("mangle", SCOPE_MARK),
    ChainKey("nat", SCOPE_MASQUERADE),
)
"""The chains that exist only while an external address has two scopes."""
CHAINS: tuple[ChainKey, ...] = (*KUBE_PROXY_CHAINS, *SCOPE_CHAINS)
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
"""The jumps to the chains that kube-proxy has, too."""
SCOPE_JUMPS: tuple[Jump, ...] = (
    Jump("mangle", "PREROUTING", SCOPE_ARRIVAL, "ipvsproxy traffic scopes"),
    Jump("mangle", "OUTPUT", SCOPE_MARK, "ipvsproxy traffic scopes"),
    Jump("nat", "POSTROUTING", SCOPE_MASQUERADE, "ipvsproxy traffic scopes"),
)
JUMPS: tuple[Jump, ...] = (*KUBE_PROXY_JUMPS, *SCOPE_JUMPS)
"""The jumps to our chains. An absent jump is inserted at the head of its chain, in this order."""

_COMMENTS: Mapping[SetKind, str] = {
    SetKind.LOOP_BACK: "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
    SetKind.CLUSTER_IP: "Kubernetes service cluster ip + port for masquerade purpose",
    SetKind.EXTERNAL_IP: "Kubernetes service external ip + port for masquerade and filter purpose",
    SetKind.EXTERNAL_IP_LOCAL: "Kubernetes service external ip + port with externalTrafficPolicy=local",
    SetKind.LOAD_BALANCER: "Kubernetes service lb portal",
    SetKind.LOAD_BALANCER_FIREWALL: "Kubernetes service load balancer ip + port for load balancer with sourceRange",
    SetKind.LOAD_BALANCER_LOCAL: "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
    SetKind.LOAD_BALANCER_SOURCE_IP: "Kubernetes service load balancer ip + port + source IP for packet filter purpose",
    SetKind.LOAD_BALANCER_SOURCE_CIDR: "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
    SetKind.NODE_PORT_TCP: "Kubernetes nodeport TCP port for masquerade purpose",
    SetKind.NODE_PORT_LOCAL_TCP: "Kubernetes nodeport TCP port with externalTrafficPolicy=local",
    SetKind.NODE_PORT_UDP: "Kubernetes nodeport UDP port for masquerade purpose",
    SetKind.NODE_PORT_LOCAL_UDP: "Kubernetes nodeport UDP port with externalTrafficPolicy=local",
    SetKind.NODE_PORT_SCTP: "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'",
    SetKind.NODE_PORT_LOCAL_SCTP: "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'",
    SetKind.HEALTH_CHECK_NODE_PORT: "Kubernetes health check node port",
    SetKind.IPVS_IPS: "Addresses on the ipvs interface",
}
_LOOPBACK: Mapping[Family, Network] = {Family.IPV4: parse_network("127.0.0.0/8"), Family.IPV6: parse_network("::1/128")}
_OF_KNOWN_CONNECTIONS = (ConnectionState.RELATED, ConnectionState.ESTABLISHED)
_TO = (Side.DESTINATION,)
_TO_PORT = (Side.DESTINATION, Side.DESTINATION)
_TO_PORT_FROM = (*_TO_PORT, Side.SOURCE)
_FROM_PORT = (Side.SOURCE, Side.DESTINATION)
_NODE_PORT_SETS = (
    (Protocol.TCP, SetKind.NODE_PORT_LOCAL_TCP, SetKind.NODE_PORT_TCP, _TO),
    (Protocol.UDP, SetKind.NODE_PORT_LOCAL_UDP, SetKind.NODE_PORT_UDP, _TO),
    (Protocol.SCTP, SetKind.NODE_PORT_LOCAL_SCTP, SetKind.NODE_PORT_SCTP, _TO_PORT),
)


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

    ``occupied``: the kinds of sets with an entry; most rules exist only while their set is not empty.
    ``refused``: the virtual servers that this node itself may not use. ``routed``: those of them whose address is local by a
    route, or soon.
    """
    mark = settings.mark
    masquerade = Masquerade(fully_random=settings.random_fully.get(family, True))
    rules = {(table, chain): list[Rule]() for table, chain in KUBE_PROXY_CHAINS}
    services, postrouting = rules["nat", SERVICES], rules["nat", POSTROUTING]

    services.append(Rule(source=_LOOPBACK[family], target=Verdict.RETURN))
    if SetKind.LOOP_BACK in occupied:
        postrouting.append(_on_set(SetKind.LOOP_BACK, family, _TO_PORT_FROM, Masquerade()))
    services += _service_rules(family, settings, view, occupied)
    postrouting += (
        Rule(not_mark=mark, target=Verdict.RETURN),
        Rule(target=InvertMark(mark)),
        Rule(comment="kubernetes service traffic requiring SNAT", target=masquerade),
    )
    rules["nat", NODE_PORT] += _node_port_rules(family, occupied)
    if SetKind.LOAD_BALANCER_LOCAL in occupied:
        rules["nat", LOAD_BALANCER].append(_on_set(SetKind.LOAD_BALANCER_LOCAL, family, _TO_PORT, Verdict.RETURN))
    rules["nat", LOAD_BALANCER].append(Rule(target=JumpTo(MARK_MASQUERADE)))
    rules["nat", MARK_MASQUERADE].append(Rule(target=SetMark(mark)))

    rules["filter", FORWARD] += (
        Rule(comment="kubernetes forwarding rules", mark=mark, target=Verdict.ACCEPT),
        Rule(
            comment="kubernetes forwarding conntrack rule",
            connection_states=(ConnectionState.RELATED, ConnectionState.ESTABLISHED),
            target=Verdict.ACCEPT,
        ),
    )
    rules["filter", NODE_PORT].append(_on_set(SetKind.HEALTH_CHECK_NODE_PORT, family, _TO, Verdict.ACCEPT))
    if SetKind.LOAD_BALANCER_FIREWALL in occupied:
        jump = _on_set(SetKind.LOAD_BALANCER_FIREWALL, family, _TO_PORT, JumpTo(SOURCE_RANGES_FIREWALL))
        rules["filter", PROXY_FIREWALL].append(jump)
    rules["filter", SOURCE_RANGES_FIREWALL] += _source_range_rules(family, occupied)
    rules["filter", IPVS_FILTER] += _closed_port_rules(family)
    rules["filter", IPVS_OUT_FILTER] += (
        _refusal(key, family, by_route=key in routed) for key in sorted(refused) if key.address.family is family
    )
    chains = {ChainKey(*key): tuple(value) for key, value in rules.items()}
    if not occupied & {SetKind.SCOPE, SetKind.NO_LOCAL}:
        return Skeleton(family=family, chains=chains, jumps=KUBE_PROXY_JUMPS)
    return Skeleton(family=family, chains={**chains, **_scope_chains(family, settings, view, occupied)}, jumps=JUMPS)


def _refusal(key: VirtualServerKey, family: Family, *, by_route: bool) -> Rule:
    """The rule that drops this host's own packets to a virtual server.

    As in kube-proxy, their source is the service address while that is on our device. With a route, the kernel chooses another
    source for IPv6.
    """
    if by_route:
        return Rule(from_this_host=True, virtual_server=key, to_virtual_server=True, target=Verdict.DROP)
    return Rule(source=Network(key.address, family.bits), virtual_server=key, target=Verdict.DROP)


def _scope_chains(
    family: Family, settings: Settings, view: NodeView, occupied: AbstractSet[SetKind]
) -> Mapping[ChainKey, tuple[Rule, ...]]:
    """The rules that tell clients of this node from others, at external addresses with traffic policy Local.

    Their number grows with the ranges of local pods and with the addresses of node ports alone.

    Where pods of this node cannot be told from other clients, only this host's own packets get a mark, and none is dropped.
    The mark is taken in ``mangle``, where the kernel allows it, and where neither ``nat`` nor IPVS has seen the packet.
    """
    arrival = list[Rule]()
    mark = (Rule(target=TakeMark(_match(SetKind.SCOPE, family, _TO_PORT))),) if SetKind.SCOPE in occupied else ()
    pods = list(_from_local_pods(family, settings, view))
    for pod in pods:
        arrival += (dataclasses.replace(pod, target=JumpTo(SCOPE_MARK)), pod)
    if pods and SetKind.NO_LOCAL in occupied:
        no_local = _match(SetKind.NO_LOCAL, family, _TO_PORT)
        arrival.append(Rule(connection_states=(ConnectionState.NEW,), set=no_local, from_elsewhere=True, target=Verdict.DROP))
    masquerade = tuple(_scope_masquerade(family, settings, view)) if SetKind.SCOPE in occupied else ()
    return dict(zip(SCOPE_CHAINS, (tuple(arrival), mark, masquerade), strict=True))


def _from_local_pods(family: Family, settings: Settings, view: NodeView) -> Iterable[Rule]:
    """A rule for each way to recognise pods of this node (``detectLocalMode``)."""
    match settings.detect_local:
        case LocalMode.BRIDGE_INTERFACE:
            yield Rule(interface=InterfaceMatch(settings.local_interface), target=Verdict.RETURN)
        case LocalMode.INTERFACE_NAME_PREFIX:
            yield Rule(interface=InterfaceMatch(settings.local_interface, is_prefix=True), target=Verdict.RETURN)
        case LocalMode.CLUSTER_CIDR:
            yield from (Rule(source=item, target=Verdict.RETURN) for item in settings.cluster_networks if item.family is family)
        case LocalMode.NODE_CIDR:
            yield from (Rule(source=item, target=Verdict.RETURN) for item in view.pod_networks if item.family is family)
        case never:
            assert_never(never)


def _scope_masquerade(family: Family, settings: Settings, view: NodeView) -> Iterable[Rule]:
    """Masquerading where answers would not come back through this node, after IPVS has chosen an endpoint.

    This host's own packets to a service address have that address as their source. Other nodes take it for their own, wherever
    this node carries it. In mode ClusterCIDR, pods of other nodes look like pods of this node, and come to node ports.
    """
    masquerade = Masquerade(fully_random=settings.random_fully.get(family, True))
    yield Rule(no_mark=settings.scope_bits, target=Verdict.RETURN)
    yield Rule(from_this_host=True, target=masquerade)
    if settings.detect_local is LocalMode.CLUSTER_CIDR:
        yield from (Rule(source=item, target=Verdict.RETURN) for item in _surely_local(family, settings, view))
        yield from (Rule(original_destination=one, target=masquerade) for one in view.node_port_addresses[family])


def _surely_local(family: Family, settings: Settings, view: NodeView) -> Iterable[Network]:
    """The ranges of the cluster's pods whose pods are all on this node: the Node's own, and those of its bridges.

    Some network plug-ins, as Calico's own address management, ignore ``spec.podCIDRs``: then a pod of any node may have an
    address in it. Where they use it, this node carries an address in it. A network that the Node's own address is in is that of
    the nodes, whose pods may be anywhere.
    """
    clusters = [item for item in settings.cluster_networks if item.family is family]
    own = [item for item in view.pod_networks if any(item.contains(address) for address in view.elsewhere)]
    bridged = [item for item in view.connected if not item.contains(view.primary_addresses[family])]
    for item in dict.fromkeys((*own, *bridged)):
        if (
            item.family is family
            and item.prefix_length < family.bits
            and any(cluster.prefix_length < item.prefix_length and cluster.contains(item.address) for cluster in clusters)
        ):
            yield item


def _on_set(
    kind: SetKind,
    family: Family,
    sides: tuple[Side, ...],
    target: Target,
    protocol: Protocol | None = None,
    *,
    from_this_host: bool = False,
) -> Rule:
    """A rule that matches one of our sets, with the comment that names the set's purpose."""
    match, comment = _match(kind, family, sides), _COMMENTS[kind]
    return Rule(protocol=protocol, comment=comment, set=match, from_this_host=from_this_host, target=target)


def _match(kind: SetKind, family: Family, sides: tuple[Side, ...]) -> SetMatch:
    return SetMatch(IpSet(kind, family).name, sides)


def _service_rules(family: Family, settings: Settings, view: NodeView, occupied: Collection[SetKind]) -> Iterable[Rule]:
    """KUBE-SERVICES after its first rule: traffic to masquerade, and traffic for the node-port chain."""
    if SetKind.LOAD_BALANCER in occupied:
        yield _on_set(SetKind.LOAD_BALANCER, family, _TO_PORT, JumpTo(LOAD_BALANCER))
    if SetKind.CLUSTER_IP in occupied:
        yield _cluster_masquerade(family, settings, view)
        if family is Family.IPV6 and settings.binding is Binding.ROUTES and not settings.masquerade_all:
            # The source is the service address otherwise. With a route, the kernel chooses any address of this host, perhaps one
            # in a range of pods, or one that nobody else has a route to.
            yield _on_set(SetKind.CLUSTER_IP, family, _TO_PORT, JumpTo(MARK_MASQUERADE), from_this_host=True)
    for kind, masquerade in ((SetKind.EXTERNAL_IP, True), (SetKind.EXTERNAL_IP_LOCAL, False)):
        if kind in occupied:
            comment, match = _COMMENTS[kind], _match(kind, family, _TO_PORT)
            if masquerade:
                yield Rule(comment=comment, set=match, target=JumpTo(MARK_MASQUERADE))
            yield Rule(comment=comment, set=match, not_from_bridge_port=True, from_elsewhere=True, target=Verdict.ACCEPT)
            yield Rule(comment=comment, set=match, to_this_host=True, target=Verdict.ACCEPT)
    yield Rule(to_this_host=True, target=JumpTo(NODE_PORT))
    for kind in (SetKind.CLUSTER_IP, SetKind.LOAD_BALANCER):
        if kind in occupied:
            yield Rule(set=_match(kind, family, _TO_PORT), target=Verdict.ACCEPT)


def _cluster_masquerade(family: Family, settings: Settings, view: NodeView) -> Rule:
    """The rules that masquerade traffic to cluster IPs: all of it, or traffic from other sources than this node's pods.

    Without local detection: only traffic from a service address, which the host's own connections have.
    """
    comment, name = _COMMENTS[SetKind.CLUSTER_IP], IpSet(SetKind.CLUSTER_IP, family).name
    everything = SetMatch(name, _TO_PORT)
    if settings.masquerade_all:
        return Rule(comment=comment, set=everything, target=JumpTo(MARK_MASQUERADE))
    match settings.detect_local:
        case LocalMode.BRIDGE_INTERFACE:
            bridge = InterfaceMatch(settings.local_interface)
            return Rule(not_interface=bridge, comment=comment, set=everything, target=JumpTo(MARK_MASQUERADE))
        case LocalMode.INTERFACE_NAME_PREFIX:
            prefix = InterfaceMatch(settings.local_interface, is_prefix=True)
            return Rule(not_interface=prefix, comment=comment, set=everything, target=JumpTo(MARK_MASQUERADE))
        case LocalMode.CLUSTER_CIDR:
            networks = settings.cluster_networks
        case LocalMode.NODE_CIDR:
            networks = view.pod_networks
        case never:
            assert_never(never)
    for item in networks:
        if item.family is family:
            return Rule(not_source=item, comment=comment, set=everything, target=JumpTo(MARK_MASQUERADE))
    return Rule(comment=comment, set=SetMatch(name, _FROM_PORT), target=JumpTo(MARK_MASQUERADE))


def _node_port_rules(family: Family, occupied: Collection[SetKind]) -> Iterable[Rule]:
    for protocol, local, every, sides in _NODE_PORT_SETS:
        if local in occupied:
            yield _on_set(local, family, sides, Verdict.RETURN, protocol)
        if every in occupied:
            yield _on_set(every, family, sides, JumpTo(MARK_MASQUERADE), protocol)


def _source_range_rules(family: Family, occupied: Collection[SetKind]) -> Iterable[Rule]:
    for kind in (SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP):
        if kind in occupied:
            yield _on_set(kind, family, _TO_PORT_FROM, Verdict.RETURN)
    yield Rule(target=Verdict.DROP)


def _closed_port_rules(family: Family) -> Iterable[Rule]:
    """Service addresses answer on their own ports alone: other ports of the host stay closed there."""
    for kind in (SetKind.LOAD_BALANCER, SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL):
        yield Rule(set=_match(kind, family, _TO_PORT), target=Verdict.RETURN)
    yield Rule(set=_match(SetKind.HEALTH_CHECK_NODE_PORT, family, _TO), target=Verdict.RETURN)
    yield Rule(
        connection_states=(ConnectionState.NEW,),
        set=_match(SetKind.IPVS_IPS, family, _TO),
        target=Verdict.REJECT,
    )
