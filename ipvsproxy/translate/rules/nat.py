"""Rules of the table ``nat``: which connections to Services are masqueraded, in two ways with the same outcome.

*By mark*, as kube-proxy: a rule before IPVS gives a packet a bit of its mark, and one behind it masquerades packets with the bit.
Iptables knows no other way, because it cannot look up in a set which destination a client has chosen.

*By connection*, for a backend that can: one rule behind IPVS asks connection tracking for that destination. No bit is shared with
other programs, and no packet carries one. Rules stand whether or not their sets have entries, so they change with the node alone.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import assert_never

from ipvsproxy.model.net import Family, Network, Protocol, parse_network
from ipvsproxy.model.rules import InterfaceMatch, InvertMark, JumpTo, Masquerade, Rule, SetMark, Side, Target, Verdict
from ipvsproxy.model.sets import SetKind
from ipvsproxy.translate.node.view import NodeView
from ipvsproxy.translate.rules import chains
from ipvsproxy.translate.rules.lookup import (
    COMMENTS,
    FROM_ORIGINAL_PORT,
    FROM_PORT,
    ORIGINALLY_TO,
    ORIGINALLY_TO_PORT,
    TO,
    TO_PORT,
    TO_PORT_FROM,
    match,
    on_set,
)
from ipvsproxy.translate.settings import Binding, LocalMode, Settings

_LOOPBACK: Mapping[Family, Network] = {Family.IPV4: parse_network("127.0.0.0/8"), Family.IPV6: parse_network("::1/128")}
_NODE_PORT_SETS = (
    (Protocol.TCP, SetKind.NODE_PORT_LOCAL_TCP, SetKind.NODE_PORT_TCP),
    (Protocol.UDP, SetKind.NODE_PORT_LOCAL_UDP, SetKind.NODE_PORT_UDP),
    (Protocol.SCTP, SetKind.NODE_PORT_LOCAL_SCTP, SetKind.NODE_PORT_SCTP),
)

ChainRules = Mapping[str, Collection[Rule]]
"""The rules of each chain of ``nat``, by its name."""


def masquerade(family: Family, settings: Settings) -> Masquerade:
    """The target that masquerades, as this host can do it."""
    return Masquerade(fully_random=settings.random_fully.get(family, True))


def by_mark(family: Family, settings: Settings, view: NodeView, occupied: AbstractSet[SetKind]) -> ChainRules:
    """The rules that masquerade by a bit of the packet's mark, as in kube-proxy.

    ``occupied`` are the kinds of sets with an entry: most rules exist only while their set has one.
    """
    mark = settings.mark
    postrouting = [
        Rule(not_mark=mark, target=Verdict.RETURN),
        Rule(target=InvertMark(mark)),
        Rule(comment="kubernetes service traffic requiring SNAT", target=masquerade(family, settings)),
    ]
    if SetKind.LOOP_BACK in occupied:
        postrouting.insert(0, on_set(SetKind.LOOP_BACK, family, TO_PORT_FROM, Masquerade()))
    load_balancer = [Rule(target=JumpTo(chains.MARK_MASQUERADE))]
    if SetKind.LOAD_BALANCER_LOCAL in occupied:
        load_balancer.insert(0, on_set(SetKind.LOAD_BALANCER_LOCAL, family, TO_PORT, Verdict.RETURN))
    return {
        chains.SERVICES: [Rule(source=_LOOPBACK[family], target=Verdict.RETURN), *_marking(family, settings, view, occupied)],
        chains.POSTROUTING: postrouting,
        chains.NODE_PORT: list(_node_ports(family, occupied, TO, JumpTo(chains.MARK_MASQUERADE))),
        chains.LOAD_BALANCER: load_balancer,
        chains.MARK_MASQUERADE: [Rule(target=SetMark(mark))],
    }


def by_connection(family: Family, settings: Settings, view: NodeView) -> ChainRules:
    """The rules that masquerade by the destination that a client has chosen. They use no mark.

    Before IPVS, ``KUBE-SERVICES`` only keeps a connection at its Service address or node port, so that no rule of others
    redirects it.
    """
    target = masquerade(family, settings)
    kept = (SetKind.LOAD_BALANCER, SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL)
    return {
        chains.SERVICES: [
            Rule(source=_LOOPBACK[family], target=Verdict.RETURN),
            *(on_set(kind, family, TO_PORT, Verdict.ACCEPT) for kind in kept),
            *_kept_node_ports(family, view),
        ],
        chains.POSTROUTING: [
            on_set(SetKind.LOOP_BACK, family, TO_PORT_FROM, Masquerade()),
            on_set(SetKind.LOAD_BALANCER, family, ORIGINALLY_TO_PORT, JumpTo(chains.LOAD_BALANCER)),
            *_cluster_clients(family, settings, view, target, by_connection=True),
            *_this_host(family, settings, target),
            on_set(SetKind.EXTERNAL_IP, family, ORIGINALLY_TO_PORT, target),
            # The address counts as well: pods of this node connect to the same port of other hosts.
            *(
                Rule(original_destination=address, target=JumpTo(chains.NODE_PORT))
                for address in view.node_port_addresses[family]
            ),
        ],
        chains.NODE_PORT: list(_node_ports(family, frozenset(SetKind), ORIGINALLY_TO, target)),
        chains.LOAD_BALANCER: [
            on_set(SetKind.LOAD_BALANCER_LOCAL, family, ORIGINALLY_TO_PORT, Verdict.RETURN),
            Rule(target=target),
        ],
    }


def _marking(family: Family, settings: Settings, view: NodeView, occupied: Collection[SetKind]) -> Iterable[Rule]:
    """KUBE-SERVICES after its first rule: traffic to masquerade, and traffic for the node-port chain."""
    marking = JumpTo(chains.MARK_MASQUERADE)
    if SetKind.LOAD_BALANCER in occupied:
        yield on_set(SetKind.LOAD_BALANCER, family, TO_PORT, JumpTo(chains.LOAD_BALANCER))
    if SetKind.CLUSTER_IP in occupied:
        yield from _cluster_clients(family, settings, view, marking)
    for kind, is_marked in ((SetKind.EXTERNAL_IP, True), (SetKind.EXTERNAL_IP_LOCAL, False)):
        if kind in occupied:
            comment, looked_up = COMMENTS[kind], match(kind, family, TO_PORT)
            if is_marked:
                yield Rule(comment=comment, set=looked_up, target=marking)
            yield Rule(comment=comment, set=looked_up, not_from_bridge_port=True, from_elsewhere=True, target=Verdict.ACCEPT)
            yield Rule(comment=comment, set=looked_up, to_this_host=True, target=Verdict.ACCEPT)
    yield Rule(to_this_host=True, target=JumpTo(chains.NODE_PORT))
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
    """The rules for clients of cluster IPs that are masqueraded: all, or others than this node's pods.

    Without local detection: only clients with a service address, as the host's own connections have.
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
        # The source is the service address otherwise. With a route, the kernel chooses any address of this host, perhaps one
        # in a range of pods, or one that nobody else has a route to.
        yield dataclasses.replace(everybody, from_this_host=True)


def _this_host(family: Family, settings: Settings, target: Target) -> Iterable[Rule]:
    """The rule for this host's own connections where an interface tells pods: behind IPVS, they have come from none."""
    if settings.detect_local.is_by_interface and not settings.masquerade_all:
        yield on_set(SetKind.CLUSTER_IP, family, ORIGINALLY_TO_PORT, target, from_this_host=True)


def _kept_node_ports(family: Family, view: NodeView) -> Iterable[Rule]:
    """The rules that keep a connection at its node port. Each node port is in the set of its protocol, local ones as well."""
    for address in view.node_port_addresses[family]:
        for protocol, _, every in _NODE_PORT_SETS:
            asked = TO_PORT if protocol is Protocol.SCTP else TO
            rule = on_set(every, family, asked, Verdict.ACCEPT, protocol)
            yield dataclasses.replace(rule, original_destination=address)


def _node_ports(family: Family, occupied: Collection[SetKind], sides: tuple[Side, ...], target: Target) -> Iterable[Rule]:
    for protocol, local, every in _NODE_PORT_SETS:
        asked = sides * 2 if protocol is Protocol.SCTP else sides  # its sets have the address as well
        if local in occupied:
            yield on_set(local, family, asked, Verdict.RETURN, protocol)
        if every in occupied:
            yield on_set(every, family, asked, target, protocol)
