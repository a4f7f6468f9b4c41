"""The fixed rules: masquerading in ``nat``, source ranges and closed host ports in ``filter``.

Their number does not grow with the Services; only a load balancer address that this node itself may not use adds one rule.
Names, order and conditions are those of pkg/proxy/ipvs/proxier.go (kubernetes/kubernetes): operators know its rules, and
kube-proxy must be able to take over again.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import assert_never

from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.rules import Backend, ChainKey, ConnectionState, InterfaceMatch, JumpTo, Rule, Skeleton, TakeMark, Verdict
from ipvsproxy.model.sets import SCOPE_KINDS, SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate.node.view import NodeView
from ipvsproxy.translate.rules import chains, nat
from ipvsproxy.translate.rules.lookup import TO, TO_PORT, TO_PORT_FROM, match, on_set
from ipvsproxy.translate.settings import LocalMode, Settings

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

    ``occupied``: the kinds of sets with an entry; most rules exist only while their set is not empty.
    ``refused``: the virtual servers that this node itself may not use. ``routed``: those of them whose address is local by a
    route, or soon.
    """
    is_by_connection = settings.backend is Backend.NFTABLES
    if is_by_connection:  # rules stand while their sets are empty; those of scopes would meet every packet
        occupied = occupied | (frozenset(SetKind) - SCOPE_KINDS)
        nat_chains = nat.by_connection(family, settings, view)
    else:
        nat_chains = nat.by_mark(family, settings, view, occupied)
    rules = {ChainKey("nat", chain): list(one) for chain, one in nat_chains.items()}
    rules |= {key: [] for key in chains.KUBE_PROXY_CHAINS if key.table == "filter"}

    forward = rules[ChainKey("filter", chains.FORWARD)]
    if not is_by_connection:
        forward.append(Rule(comment="kubernetes forwarding rules", mark=settings.mark, target=Verdict.ACCEPT))
    comment = "kubernetes forwarding conntrack rule"
    forward.append(Rule(comment=comment, connection_states=_OF_KNOWN_CONNECTIONS, target=Verdict.ACCEPT))
    rules[ChainKey("filter", chains.NODE_PORT)].append(on_set(SetKind.HEALTH_CHECK_NODE_PORT, family, TO, Verdict.ACCEPT))
    if SetKind.LOAD_BALANCER_FIREWALL in occupied:
        jump = on_set(SetKind.LOAD_BALANCER_FIREWALL, family, TO_PORT, JumpTo(chains.SOURCE_RANGES_FIREWALL))
        rules[ChainKey("filter", chains.PROXY_FIREWALL)].append(jump)
    rules[ChainKey("filter", chains.SOURCE_RANGES_FIREWALL)] += _source_range_rules(family, occupied)
    rules[ChainKey("filter", chains.IPVS_FILTER)] += _closed_port_rules(family)
    rules[ChainKey("filter", chains.IPVS_OUT_FILTER)] += (
        _drop_own_packets(key, family, by_route=key in routed) for key in sorted(refused) if key.address.family is family
    )
    fixed = {key: tuple(map(_uncommented, value) if is_by_connection else value) for key, value in rules.items()}
    if not occupied & {SetKind.SCOPE, SetKind.NO_LOCAL}:
        return Skeleton(family=family, chains=fixed, jumps=chains.KUBE_PROXY_JUMPS)
    return Skeleton(family=family, chains={**fixed, **_scope_chains(family, settings, view, occupied)}, jumps=chains.JUMPS)


def _uncommented(rule: Rule) -> Rule:
    """The rule as nftables has it, where its own text is its comment."""
    return dataclasses.replace(rule, comment="")


def _drop_own_packets(key: VirtualServerKey, family: Family, *, by_route: bool) -> Rule:
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
    mark = (Rule(target=TakeMark(match(SetKind.SCOPE, family, TO_PORT))),) if SetKind.SCOPE in occupied else ()
    pods = list(_from_local_pods(family, settings, view))
    for pod in pods:
        arrival += (dataclasses.replace(pod, target=JumpTo(chains.SCOPE_MARK)), pod)
    if pods and SetKind.NO_LOCAL in occupied:
        no_local = match(SetKind.NO_LOCAL, family, TO_PORT)
        arrival.append(Rule(connection_states=(ConnectionState.NEW,), set=no_local, from_elsewhere=True, target=Verdict.DROP))
    masquerade = tuple(_scope_masquerade(family, settings, view)) if SetKind.SCOPE in occupied else ()
    return dict(zip(chains.SCOPE_CHAINS, (tuple(arrival), mark, masquerade), strict=True))


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
    masquerade = nat.masquerade(family, settings)
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
    clusters = settings.cluster_networks
    own = [item for item in view.pod_networks if any(item.contains(address) for address in view.elsewhere)]
    bridged = [item for item in view.connected if not item.contains(view.primary_addresses[family])]
    for item in dict.fromkeys((*own, *bridged)):
        if (
            item.family is family
            and item.prefix_length < family.bits
            and any(cluster.prefix_length < item.prefix_length and cluster.contains(item.address) for cluster in clusters)
        ):
            yield item


def _source_range_rules(family: Family, occupied: Collection[SetKind]) -> Iterable[Rule]:
    for kind in (SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP):
        if kind in occupied:
            yield on_set(kind, family, TO_PORT_FROM, Verdict.RETURN)
    yield Rule(target=Verdict.DROP)


def _closed_port_rules(family: Family) -> Iterable[Rule]:
    """Service addresses answer on their own ports alone: other ports of the host stay closed there."""
    for kind in (SetKind.LOAD_BALANCER, SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL):
        yield Rule(set=match(kind, family, TO_PORT), target=Verdict.RETURN)
    yield Rule(set=match(SetKind.HEALTH_CHECK_NODE_PORT, family, TO), target=Verdict.RETURN)
    yield Rule(
        connection_states=(ConnectionState.NEW,),
        set=match(SetKind.IPVS_IPS, family, TO),
        target=Verdict.REJECT,
    )
