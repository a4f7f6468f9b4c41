"""Follows a connection's path through the rules, to determine whether the connection is masqueraded, and which rules decide this.

Only the features that ``skeleton`` uses are supported: each field of ``Rule``, and the targets of the ``nat`` table.
"""

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple, assert_never

from ipvsproxy.model.net import Address, Family, parse_address
from ipvsproxy.model.rules import ChainKey, JumpTo, Masquerade, Rule, SetMatch, Side, Skeleton, TakeMark, Target, Verdict
from ipvsproxy.model.sets import IP_SETS, SetEntry, SetType
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.translate import nat, skeleton
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES, LocalMode, Settings
from ipvsproxy.translate.view import NodeView

_OUTSIDE = {Family.IPV4: parse_address("203.0.113.1"), Family.IPV6: parse_address("2001:db8::1")}
"""The address of a client outside the cluster (RFC 5737, RFC 3849)."""


class TracedClient(enum.StrEnum):
    """The origin of a connection."""

    POD = "pod of this node"
    OTHER_POD = "pod of another node"
    HOST = "this host"
    OUTSIDE = "outside of the cluster"


class TracedConnection(NamedTuple):
    """The first packet of a connection to a virtual server.

    ``is_from_pod_interface`` means that the packet arrives on an interface of pods.
    """

    source: Address
    virtual_server: VirtualServerKey
    is_from_host: bool = False
    is_from_pod_interface: bool = False
    has_mark: bool = False


class AppliedRule(NamedTuple):
    """A rule that applies to a connection, and the chain of the rule."""

    chain: ChainKey
    rule: Rule


class Trace(NamedTuple):
    """The verdict on a connection, and the rules that lead to the verdict, in their order.

    If no rule decides, the connection is not masqueraded. ``is_marked`` means that a rule marks the connection. The connection
    then reaches the virtual server of this mark, and not the virtual server of its destination address.
    """

    is_masqueraded: bool
    applied_rules: tuple[AppliedRule, ...]
    is_marked: bool = False
    is_dropped: bool = False


def connection_of(client: TracedClient, key: VirtualServerKey, settings: Settings, view: NodeView) -> TracedConnection:
    """An example of a client's connection.

    When the host connects to one of its own addresses, such as a service address, the source is the same address.
    """
    match client:
        case TracedClient.HOST:
            return TracedConnection(key.address, key, is_from_host=True)
        case TracedClient.OUTSIDE:
            return TracedConnection(_OUTSIDE[key.address.family], key)
        case TracedClient.POD:
            return TracedConnection(_pod_address(key.address.family, settings, view), key, is_from_pod_interface=True)
        case TracedClient.OTHER_POD:
            return TracedConnection(_other_pod_address(key.address.family, settings, view), key)
        case never:
            assert_never(never)


def _pod_address(family: Family, settings: Settings, view: NodeView) -> Address:
    """An address that a pod of this node may have. If no range of pod addresses is known, the address is outside the cluster."""
    clusters = settings.cluster_networks if settings.detect_local is LocalMode.CLUSTER_CIDR else ()
    for network in (*skeleton.local_pod_networks(family, settings, view), *view.pod_networks, *clusters):
        if network.family is family and (not clusters or any(one.contains(network.address) for one in clusters)):
            return Address((int.from_bytes(network.address, "big") + 1).to_bytes(len(network.address), "big"))
    return _OUTSIDE[family]


def _other_pod_address(family: Family, settings: Settings, view: NodeView) -> Address:
    """An address that is in the cluster's range, but that no pod of this node can have.

    If no range is known, the returned address is outside the cluster.
    """
    here = [*skeleton.local_pod_networks(family, settings, view), *(one for one in view.pod_networks if one.family is family)]
    for network in settings.cluster_networks:
        size = 1 << (len(network.address) * 8 - network.prefix_length)
        last = Address((int.from_bytes(network.address, "big") + max(0, size - 2)).to_bytes(len(network.address), "big"))
        if network.family is family and not any(one.contains(last) for one in here):
            return last
    return _OUTSIDE[family]


def follow(rules: Skeleton, is_in_set: Callable[[SetEntry], bool], connection: TracedConnection, *, has_scopes: bool) -> Trace:
    """Follow a connection until it is masqueraded or marked for masquerading, or until no further rule can apply to it.

    ``has_scopes`` means that the virtual server's address has a second scope: a set entry gives a mark to the packets of this
    node's clients.
    """
    applied: list[AppliedRule] = []
    connection = connection._replace(has_mark=has_scopes)
    arrival = skeleton.SCOPE_MARK if connection.is_from_host else skeleton.SCOPE_ARRIVAL
    first = _walk(rules, ChainKey("mangle", arrival), is_in_set, connection, applied)
    if first is _Verdict.DROPPED:
        return Trace(is_masqueraded=False, applied_rules=tuple(applied), is_dropped=True)
    is_scoped = first is _Verdict.SCOPED
    connection = connection._replace(has_mark=is_scoped)
    if not is_scoped:
        applied.clear()
    is_masqueraded = _walk(rules, _deciding_chain(rules), is_in_set, connection, applied) is _Verdict.MASQUERADED
    if is_scoped and not is_masqueraded:
        chain = ChainKey("nat", skeleton.SCOPE_MASQUERADE)
        is_masqueraded = _walk(rules, chain, is_in_set, connection, applied) is _Verdict.MASQUERADED
    return Trace(is_masqueraded, tuple(applied), is_marked=is_scoped)


def _deciding_chain(rules: Skeleton) -> ChainKey:
    """The chain that decides about masquerading.

    With masquerading by mark, the result is ``KUBE-SERVICES``, which packets pass before IPVS. With masquerading by connection,
    the result is ``KUBE-POSTROUTING``, which packets pass after IPVS.
    """
    postrouting = ChainKey("nat", nat.POSTROUTING)
    by_connection = any(rule.set and Side.ORIGINAL_DESTINATION in rule.set.sides for rule in rules.chains.get(postrouting, ()))
    return postrouting if by_connection else ChainKey("nat", nat.SERVICES)


class _Verdict(enum.Enum):
    DROPPED = enum.auto()
    SCOPED = enum.auto()
    MASQUERADED = enum.auto()
    ACCEPTED = enum.auto()


def _walk(
    rules: Skeleton,
    chain: ChainKey,
    is_in_set: Callable[[SetEntry], bool],
    connection: TracedConnection,
    applied_rules: list[AppliedRule],
) -> _Verdict | None:
    """Follow one chain.

    A result of None means a return to the calling chain. The rules that led to a verdict, or ended a chain, are added to
    ``applied_rules``.
    """
    for rule in rules.chains.get(chain, ()):
        if not all(_conditions(rule, is_in_set, connection)):
            continue
        applied_rule = AppliedRule(chain, rule)
        if verdict := _verdict(rule.target, connection):
            applied_rules.append(applied_rule)
            return verdict
        if rule.target is Verdict.RETURN:
            applied_rules.append(applied_rule)
            return None
        if isinstance(rule.target, JumpTo):
            within: list[AppliedRule] = []
            verdict = _walk(rules, ChainKey(chain.table, rule.target.chain), is_in_set, connection, within)
            if within:
                applied_rules += (applied_rule, *within)
            if verdict:
                return verdict
    return None


def _verdict(target: Target, connection: TracedConnection) -> _Verdict | None:
    """The verdict of a target; None if the target does not decide."""
    match target:
        case JumpTo(nat.MARK_MASQUERADE) | Masquerade():
            return _Verdict.MASQUERADED
        case TakeMark() if connection.has_mark:
            return _Verdict.SCOPED
        case Verdict.DROP:
            return _Verdict.DROPPED
        case Verdict.ACCEPT:
            return _Verdict.ACCEPTED
        case _:
            return None


def _conditions(rule: Rule, is_in_set: Callable[[SetEntry], bool], connection: TracedConnection) -> Iterator[bool]:
    source, key = connection.source, connection.virtual_server
    yield rule.source is None or rule.source.contains(source)
    yield rule.not_source is None or not rule.not_source.contains(source)
    yield not (rule.not_interface and connection.is_from_pod_interface)
    yield not rule.interface or (connection.is_from_pod_interface and rule.interface.name not in TUNNEL_DEVICES.values())
    yield not rule.tunnel
    yield rule.protocol in (None, key.protocol)
    yield rule.no_mark is None or not connection.has_mark
    yield rule.any_mark is None or connection.has_mark
    yield rule.original_destination in (None, key.address)
    yield not rule.from_this_host or connection.is_from_host
    yield not (rule.from_elsewhere and connection.is_from_host)
    yield rule.set is None or is_in_set(_entry(rule.set, connection))


def _entry(match: SetMatch, connection: TracedConnection) -> SetEntry:
    """The set entry that a match looks up for a connection.

    If the entry has an address, the match decides whether the address is the source or the destination of the connection.
    """
    asked = connection.virtual_server
    if IP_SETS[match.set].type is SetType.PORT:
        return SetEntry(match.set, port=asked.port)
    first = connection.source if match.sides[0] is Side.SOURCE else asked.address
    return SetEntry(match.set, first, asked.protocol, asked.port)
