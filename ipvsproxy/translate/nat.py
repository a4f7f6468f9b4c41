"""The rules of the table ``nat``; these rules masquerade connections of Services.

There are two methods of masquerading, which have the same outcome:

*By mark*, as in kube-proxy: a rule before IPVS sets one bit of the packet's mark, and a rule after IPVS masquerades packets with
this bit. Iptables needs the method by mark, because iptables cannot look up the client's chosen destination in a set.

*By connection*: after IPVS, one rule reads the client's chosen destination from connection tracking, and looks up the destination
in a set. Masquerading by connection shares no bit of the packet mark with other programs, and marks no packets. The rules exist
whether or not their sets have entries, so the rules change only when the node changes.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import assert_never

from ipvsproxy.model.net import Family, Network, Protocol, parse_network
from ipvsproxy.model.rules import InterfaceMatch, InvertMark, JumpTo, Masquerade, Rule, SetMark, SetMatch, Side, Target, Verdict
from ipvsproxy.model.sets import NODE_PORT_SETS, IpSet, SetKind
from ipvsproxy.translate.translation_settings import Binding, LocalMode, Settings
from ipvsproxy.translate.view import NodeView

SERVICES = "KUBE-SERVICES"
POSTROUTING = "KUBE-POSTROUTING"
NODE_PORT = "KUBE-NODE-PORT"
LOAD_BALANCER = "KUBE-LOAD-BALANCER"
MARK_MASQUERADE = "KUBE-MARK-MASQ"
"""The names of our chains in ``nat``. The table ``filter`` also has a chain ``KUBE-NODE-PORT``."""

COMMENTS: Mapping[SetKind, str] = {
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
"""The purpose of each set, in kube-proxy's words."""

TO = (Side.DESTINATION,)
TO_PORT = (Side.DESTINATION, Side.DESTINATION)
TO_PORT_FROM = (*TO_PORT, Side.SOURCE)
FROM_PORT = (Side.SOURCE, Side.DESTINATION)
"""For each field of a set entry, the side of the packet that the field must match. iptables writes ``TO_PORT_FROM`` as
``--match-set NAME dst,dst,src``.

``TO`` is the destination address or, for a set of ports, the destination port. ``TO_PORT`` is the destination address and the
destination port. The four constants above use the destination that a packet has when the rule is evaluated.
"""
ORIGINALLY_TO = (Side.ORIGINAL_DESTINATION,)
ORIGINALLY_TO_PORT = (Side.ORIGINAL_DESTINATION, Side.ORIGINAL_DESTINATION)
FROM_ORIGINAL_PORT = (Side.SOURCE, Side.ORIGINAL_DESTINATION)
"""The three constants above use the destination that the client has chosen, even after IPVS has replaced this destination by an
endpoint."""


def on_set(kind: SetKind, family: Family, sides: tuple[Side, ...], target: Target, protocol: Protocol | None = None) -> Rule:
    """A rule that matches a set of ipvsproxy, with a comment about the purpose of the set."""
    return Rule(protocol=protocol, comment=COMMENTS[kind], set=match(kind, family, sides), target=target)


def match(kind: SetKind, family: Family, sides: tuple[Side, ...]) -> SetMatch:
    """A match on the set of the given kind."""
    return SetMatch(IpSet(kind, family).name, sides)


_LOOPBACK: Mapping[Family, Network] = {Family.IPV4: parse_network("127.0.0.0/8"), Family.IPV6: parse_network("::1/128")}
ChainRules = Mapping[str, Collection[Rule]]
"""The rules of each chain of ``nat``; the key is the name of the chain."""


def masquerade(family: Family, settings: Settings) -> Masquerade:
    """The masquerading target, with the options that this host supports."""
    return Masquerade(fully_random=settings.random_fully.get(family, True))


def by_mark(family: Family, settings: Settings, view: NodeView, occupied: AbstractSet[SetKind]) -> ChainRules:
    """The rules that set a bit in the mark of some packets, and masquerade the packets with this bit, as kube-proxy does.

    ``occupied`` has the kinds of sets that have an entry; most rules exist only while their set has an entry.
    """
    mark = settings.mark
    postrouting = [
        Rule(not_mark=mark, target=Verdict.RETURN),
        Rule(target=InvertMark(mark)),
        Rule(comment="kubernetes service traffic requiring SNAT", target=masquerade(family, settings)),
    ]
    if SetKind.LOOP_BACK in occupied:
        postrouting.insert(0, on_set(SetKind.LOOP_BACK, family, TO_PORT_FROM, Masquerade()))
    load_balancer = [Rule(target=JumpTo(MARK_MASQUERADE))]
    if SetKind.LOAD_BALANCER_LOCAL in occupied:
        load_balancer.insert(0, on_set(SetKind.LOAD_BALANCER_LOCAL, family, TO_PORT, Verdict.RETURN))
    return {
        SERVICES: [Rule(source=_LOOPBACK[family], target=Verdict.RETURN), *_marking(family, settings, view, occupied)],
        POSTROUTING: postrouting,
        NODE_PORT: list(_node_ports(family, occupied, TO, JumpTo(MARK_MASQUERADE))),
        LOAD_BALANCER: load_balancer,
        MARK_MASQUERADE: [Rule(target=SetMark(mark))],
    }


def by_connection(family: Family, settings: Settings, view: NodeView) -> ChainRules:
    """The rules that masquerade without a packet mark. Instead of a mark, they match the destination that the client has chosen.

    The chain ``KUBE-SERVICES``, which packets pass before IPVS handles them, sets no mark. It accepts each connection to a
    Service address or node port, so that no rule of another program redirects the connection.
    """
    target = masquerade(family, settings)
    kept = (SetKind.LOAD_BALANCER, SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL)
    # The rules recognise pods by the interface on which packets arrive, but this host's own connections arrive on no interface.
    is_host_apart = settings.detect_local.is_by_interface and not settings.masquerade_all
    this_host = dataclasses.replace(on_set(SetKind.CLUSTER_IP, family, ORIGINALLY_TO_PORT, target), from_this_host=True)
    return {
        SERVICES: [
            Rule(source=_LOOPBACK[family], target=Verdict.RETURN),
            *(on_set(kind, family, TO_PORT, Verdict.ACCEPT) for kind in kept),
            *_kept_node_ports(family, view),
        ],
        POSTROUTING: [
            on_set(SetKind.LOOP_BACK, family, TO_PORT_FROM, Masquerade()),
            on_set(SetKind.LOAD_BALANCER, family, ORIGINALLY_TO_PORT, JumpTo(LOAD_BALANCER)),
            *_cluster_clients(family, settings, view, target, by_connection=True),
            *([this_host] if is_host_apart else []),
            on_set(SetKind.EXTERNAL_IP, family, ORIGINALLY_TO_PORT, target),
            # The address must match as well, because pods of this node also connect to the same port of other hosts.
            *(Rule(original_destination=address, target=JumpTo(NODE_PORT)) for address in view.node_port_addresses[family]),
        ],
        NODE_PORT: list(_node_ports(family, frozenset(SetKind), ORIGINALLY_TO, target)),
        LOAD_BALANCER: [
            on_set(SetKind.LOAD_BALANCER_LOCAL, family, ORIGINALLY_TO_PORT, Verdict.RETURN),
            Rule(target=target),
        ],
    }


def _marking(family: Family, settings: Settings, view: NodeView, occupied: Collection[SetKind]) -> Iterable[Rule]:
    """The rules after the first rule of KUBE-SERVICES; they send traffic to the chains for masquerading and for node ports."""
    marking = JumpTo(MARK_MASQUERADE)
    if SetKind.LOAD_BALANCER in occupied:
        yield on_set(SetKind.LOAD_BALANCER, family, TO_PORT, JumpTo(LOAD_BALANCER))
    if SetKind.CLUSTER_IP in occupied:
        yield from _cluster_clients(family, settings, view, marking)
    for kind, is_marked in ((SetKind.EXTERNAL_IP, True), (SetKind.EXTERNAL_IP_LOCAL, False)):
        if kind in occupied:
            comment, looked_up = COMMENTS[kind], match(kind, family, TO_PORT)
            if is_marked:
                yield Rule(comment=comment, set=looked_up, target=marking)
            yield Rule(comment=comment, set=looked_up, not_from_bridge_port=True, from_elsewhere=True, target=Verdict.ACCEPT)
            yield Rule(comment=comment, set=looked_up, to_this_host=True, target=Verdict.ACCEPT)
    yield Rule(to_this_host=True, target=JumpTo(NODE_PORT))
    for kind in (SetKind.CLUSTER_IP, SetKind.LOAD_BALANCER):
        if kind in occupied:
            yield Rule(set=match(kind, family, TO_PORT), target=Verdict.ACCEPT)


def _cluster_clients(
    family: Family,
    settings: Settings,
    view: NodeView,
    target: Target,
    *,
    by_connection: bool = False,
) -> Iterable[Rule]:
    """The rules that select which clients of cluster IPs are masqueraded.

    The masqueraded clients are all clients, or all clients except this node's pods. Without local detection, only connections
    with a service address as their source are masqueraded. Connections of this host to a service address usually have such a
    source.
    """
    everybody = on_set(SetKind.CLUSTER_IP, family, ORIGINALLY_TO_PORT if by_connection else TO_PORT, target)
    if settings.masquerade_all:
        yield everybody
        return
    match settings.detect_local:
        case LocalMode.BRIDGE_INTERFACE | LocalMode.INTERFACE_NAME_PREFIX:
            is_prefix = settings.detect_local is LocalMode.INTERFACE_NAME_PREFIX
            yield dataclasses.replace(everybody, not_interface=InterfaceMatch(settings.local_interface, is_prefix=is_prefix))
        case LocalMode.CLUSTER_CIDR | LocalMode.NODE_CIDR:
            by_cluster = settings.detect_local is LocalMode.CLUSTER_CIDR
            networks = settings.cluster_networks if by_cluster else view.pod_networks
            pods = next((item for item in networks if item.family is family), None)
            if pods is not None:
                yield dataclasses.replace(everybody, not_source=pods)
            else:
                yield on_set(SetKind.CLUSTER_IP, family, FROM_ORIGINAL_PORT if by_connection else FROM_PORT, target)
        case never:
            assert_never(never)
    if family is Family.IPV6 and settings.binding is Binding.ROUTES:
        # If the service address is on ``kube-ipvs0``, it is also the source of the connection. If a local route leads to the
        # service address, the kernel may choose any address of this host as the source. The chosen address may be in a range of
        # pods, or unreachable for other hosts.
        yield dataclasses.replace(everybody, from_this_host=True)


def _kept_node_ports(family: Family, view: NodeView) -> Iterable[Rule]:
    """The rules that protect a connection to a node port from redirection by other programs.

    The set of a protocol has all node ports of the protocol, also those with traffic policy Local.
    """
    for address in view.node_port_addresses[family]:
        for protocol, (every, _) in NODE_PORT_SETS.items():
            asked = TO_PORT if protocol is Protocol.SCTP else TO
            rule = on_set(every, family, asked, Verdict.ACCEPT, protocol)
            yield dataclasses.replace(rule, original_destination=address)


def _node_ports(family: Family, occupied: Collection[SetKind], sides: tuple[Side, ...], target: Target) -> Iterable[Rule]:
    for protocol, (every, local) in NODE_PORT_SETS.items():
        asked = sides * 2 if protocol is Protocol.SCTP else sides  # entries of SCTP sets also contain the address
        if local in occupied:
            yield on_set(local, family, asked, Verdict.RETURN, protocol)
        if every in occupied:
            yield on_set(every, family, asked, target, protocol)
