"""Finds out why Services that are programmed correctly cannot be reached on this node, for ``doctor`` and ``explain``."""

import collections
import enum
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.facts import Facts
from ipvsproxy.kernel.iptables.variant import Variant
from ipvsproxy.kernel.rivals import BoundSocket, PortRule, Rivals
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import DEVICE, InterfaceAddress
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.rules import Backend, NftTable
from ipvsproxy.model.service import Node, Service, ServiceName
from ipvsproxy.model.virtual_servers import Role, VirtualServerKey
from ipvsproxy.reconcile.removal import leftovers
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.services import desired_state, refusal
from ipvsproxy.translate.translation_settings import LocalMode, Settings, TrafficScopes
from ipvsproxy.translate.view import NodeView


class Level(enum.StrEnum):
    """How serious a finding is."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """The result of one check. An empty ``remedy`` means that there is nothing to do."""

    level: Level
    topic: str
    text: str
    remedy: str = ""


ok = functools.partial(Finding, Level.OK)
"""A finding that all is well."""
note = functools.partial(Finding, Level.NOTE)
"""A finding for which the operator need not act, because ``run`` corrects the state, or because the finding is only a
reminder."""
warn = functools.partial(Finding, Level.WARN)
"""A finding on which the operator should act, or about which the operator should at least know."""
fail = functools.partial(Finding, Level.FAIL)
"""A finding that traffic cannot flow."""


_REFUSED = {
    "input": "connections to Services, from pods and from outside,",
    "forward": "what pods send, and the answers of Services,",
    "output": "what IPVS sends to endpoints, and the connections of this host,",
}
"""For each hook: the traffic of Services that a chain may refuse there, in the words of ``doctor``."""
MOST_COLLISIONS = 20
"""The largest number of collisions that ``doctor`` describes."""


class Collision(NamedTuple):
    """A collision on this host: a Service competes with a program, a rule or an interface for the same packets."""

    service: ServiceName
    text: str
    remedy: str


def judge(
    services: Collection[Service], settings: Settings, collisions: Iterable[Collision], unknown: Collection[str] = ()
) -> Iterator[Finding]:
    """All findings about Services. ``unknown`` has a reason for each part of this host's state that could not be read."""
    yield from _cluster_ranges(services, settings)
    found = list(collisions)
    for one in found[:MOST_COLLISIONS]:
        yield warn("collisions", f"{one.service}: {one.text}", one.remedy)
    if len(found) > MOST_COLLISIONS:
        yield warn("collisions", f"{len(found) - MOST_COLLISIONS} more of them", "ipvsproxy explain shows those of each Service")
    if services and not found and not unknown:
        yield ok("collisions", "no program, rule or interface of this host takes packets of a Service")


def judge_scopes(settings: Settings, view: NodeView) -> Iterator[Finding]:
    """A finding for each IP family in which second scopes cannot recognise the pods of this node."""
    if settings.scopes is not TrafficScopes.API or settings.detect_local is not LocalMode.CLUSTER_CIDR:
        return
    for family in sorted(settings.families & {network.family for network in settings.cluster_networks}):
        if not any(skeleton.local_pod_networks(family, settings, view)):
            yield warn(
                "scopes",
                f"no {family.label} range shows which pods are on this node, so they reach only its endpoints at external "
                "addresses and node ports with externalTrafficPolicy Local, as with kube-proxy",
                "use --detect-local-mode=InterfaceNamePrefix, unless the network plug-in makes a bridge with the first pod",
            )


LARGEST_PACKET = 1500
"""The size, in bytes, of the largest packet of a TCP client in a tunnel of direct return, including the tunnel's header. Rules of
``skeleton`` limit the client's TCP segments so that the packets never exceed this size."""


def mtu_of(view: NodeView, addresses: Iterable[InterfaceAddress]) -> int:
    """The smallest MTU of the interfaces that have the node's addresses; the MTU of Ethernet if there is no such interface."""
    own = {one.interface for one in addresses if one.address in view.primary_addresses.values()}
    mtus = SysctlDriver().observe(f"/sys/class/net/{name}/mtu" for name in own)
    return min(map(int, mtus.values()), default=LARGEST_PACKET)


def judge_direct_return(settings: Settings, view: NodeView, node: Node | None, mtu: int) -> Iterator[Finding]:
    """Whether this node can take part in direct return, and whether its Node object announces this to the other nodes.

    ``mtu`` is the value that ``mtu_of`` returns.
    """
    takes_part = node is not None and node.takes_direct_return
    if not settings.direct_return:
        if takes_part:
            text = "this node's Node has the annotation ipvsproxy.io/direct-return, so other nodes send it packets by tunnel"
            yield warn("direct-return", text, "remove the annotation, or set --ipvs-direct-return=on")
        return
    if view.shared_tunnel:
        text = f"{view.shared_tunnel} has an address: it belongs to another program, so this node has no direct return"
        yield warn(
            "direct-return", text, "remove the annotation ipvsproxy.io/direct-return from its Node, or use another tunnel there"
        )
    elif not takes_part:
        text = "this node's Node lacks the annotation ipvsproxy.io/direct-return, so no other node sends it packets by tunnel"
        yield warn("direct-return", text, 'set it to "true"; until then its endpoints are served without direct return')
    else:
        yield ok("direct-return", f"this node and {counted(len(view.tunnel_ends), 'other node')} take part")
        text = (
            "whether the network lets nodes send packets from addresses of Services, and passes protocols 4 and 41, is not known"
        )
        yield note("direct-return", text, "turn off the source/destination check of the cloud or router for the nodes")
        if mtu < LARGEST_PACKET:
            text = f"the node's interface has the MTU {mtu}, so large packets of clients do not fit into the tunnel"
            yield note(
                "direct-return", text, "let ICMP (fragmentation needed, packet too big) reach the clients, or raise the MTU"
            )


def _cluster_ranges(services: Collection[Service], settings: Settings) -> Iterator[Finding]:
    """Whether cluster IPs lie in the range of pods; packets from that range are not masqueraded.

    Packets from the host to a cluster IP have the cluster IP as their source address, so the host would count as a pod
    (kubernetes#65158).
    """
    if settings.detect_local is not LocalMode.CLUSTER_CIDR or settings.masquerade_all or not services:
        return
    is_fine = True
    for network in settings.cluster_networks:
        inside = [(one, service.name) for service in services for one in service.cluster_addresses if network.contains(one)]
        if inside:
            is_fine = False
            address, name = min(inside)
            yield warn(
                "cluster-cidr",
                f"{network} of --cluster-cidr has {counted(len(inside), 'cluster IP')} in it, such as {address} of {name}: this "
                "host, and pods in its network, have a cluster IP as their source there, so they are not masqueraded, and get no "
                "answer from endpoints of other nodes",
                "set --cluster-cidr (clusterCIDR) to the range of the pods only, or set --masquerade-all",
            )
    if is_fine and settings.cluster_networks:
        yield ok("cluster-cidr", "no cluster IP lies in --cluster-cidr")


def ports_of(services: Iterable[Service]) -> frozenset[tuple[Protocol, int]]:
    """All Service ports and node ports. A program of this host could listen on the same ports."""
    ports = [port for service in services for port in service.ports]
    return frozenset((port.protocol, number) for port in ports for number in (port.port, port.node_port) if number)


def collisions(
    services: Iterable[Service], view: NodeView, addresses: Iterable[InterfaceAddress], rivals: Rivals, settings: Settings
) -> Iterator[Collision]:
    """The collisions of this node with the given Services; each program, rule or interface is reported once for each port.

    ``addresses`` are the addresses of this host's interfaces.
    """
    interfaces = {one.address: one.interface for one in addresses if one.interface != DEVICE}
    for service in services:
        found: dict[object, Collision] = {}
        translation = desired_state.Translation(service, view, settings)
        collections.deque(translation.adding(()), maxlen=0)
        for place, served in translation.virtual_servers.items():
            if node := view.other_nodes.get(place.address):
                text = f"{place.address} is an address of the node {node}, which this node and its pods can no longer reach"
                found[place.address] = Collision(service.name, text, refusal.ways_out(translation.service, place.address))
            for one in _takers(place, served.role, interfaces, rivals):
                key = one if isinstance(one, str) else (place.protocol, place.port, one)
                found.setdefault(key, _collision(service.name, place, one, settings.backend))
        yield from found.values()


def _takers(
    place: VirtualServerKey, role: Role, interfaces: Mapping[Address, str], rivals: Rivals
) -> Iterator[BoundSocket | PortRule | str]:
    """The rules at ``place``, and either the listening sockets or, for a cluster IP, the interface that has it."""
    if role is Role.CLUSTER_IP and place.address in interfaces:
        yield interfaces[place.address]
    elif place.address in interfaces:
        for socket in rivals.sockets:
            is_everywhere = socket.address.is_unspecified and socket.address.family in (place.address.family, Family.IPV6)
            if (socket.protocol, socket.port) == (place.protocol, place.port) and (
                is_everywhere or socket.address == place.address
            ):
                yield socket
    for rule in rivals.rules:
        is_there = rule.destination is None or rule.destination.contains(place.address)
        if is_there and rule.has(place.protocol, place.port) and (rule.exempts or role is Role.NODE_PORT):
            yield rule


def _collision(service: ServiceName, place: VirtualServerKey, taker: BoundSocket | PortRule | str, backend: Backend) -> Collision:
    match taker:
        case BoundSocket(program=program):
            text = f"{program} listens at {place}, too, and is out of reach there: the packets go to the Service"
            remedy = "let the program listen on another port, or give the Service another one"
        case PortRule(exempts=True):
            text = f"a rule exempts packets to {place} from connection tracking, so they are not masqueraded: {taker.text}"
            remedy = "remove the rule: otherwise clients whose answers do not come back through this node get none"
        case PortRule() if backend is Backend.NFTABLES:
            text = f"a rule is about {place}, too, but gets no packets there, because the Service gets them: {taker.text}"
            remedy = "give the hostPort, or the Service, another port"
        case PortRule():
            text = f"a rule sends packets to {place} elsewhere before the Service gets them: {taker.text}"
            remedy = "give the hostPort, or the Service, another port; with --rules-backend=nftables the Service goes first"
        case interface:
            text = f"the interface {interface} has the cluster IP {place.address}, too, but a program there gets no packets, "
            text += "because the Service gets them"
            remedy = f"remove the address from {interface}; for NodeLocal DNS, see docs/neighbours.md"
    return Collision(service, text, remedy)


def judge_firewalls(facts: Facts) -> Iterator[Finding]:
    """Chains that belong to other programs and reject packets by default.

    The rules of such a chain may accept some packets, but the check does not find out which packets. If a firewall rejects a
    packet, the packet is lost. If a firewall accepts a packet, another table (nf_tables) or variant of iptables may still reject
    the packet.
    """
    closed = [
        (table, chain, place.hook)
        for table in facts.tables
        if not is_of_kube_proxy(table)
        for chain in table.closed
        if (place := table.chains[chain]) and place.hook in _REFUSED and not _is_overruled(facts, table, place.hook)
    ]
    for table, chain, hook in closed:
        text = f"the chain {chain} of the table {table} (hook {hook}) refuses {_REFUSED[hook]} unless a rule there accepts them"
        by = " (by a zone of firewalld whose target is ACCEPT)" if table.name == "firewalld" else ""
        remedy = f"accept them there: for example all packets of the pods' interfaces, and clients' connections to Services{by}"
        yield warn("firewall", text, remedy)
    if not closed and not facts.unread_tables:
        yield ok("firewall", "no chain of another program refuses packets by default")


def is_of_kube_proxy(table: NftTable) -> bool:
    """Whether a table belongs to kube-proxy's nftables mode."""
    return table.name == leftovers.TABLE_NAME and not leftovers.why_foreign(table)


def _is_overruled(facts: Facts, table: NftTable, hook: str) -> bool:
    """Whether KUBE-FORWARD is in this table, and accepts the packets of Services before the chain at this hook refuses them."""
    choice, is_of_nft = facts.iptables_choice, table.family in ("ip", "ip6")
    is_forward = hook == "forward" and table.name == "filter"
    return is_forward and choice is not None and (choice.variant is Variant.NF_TABLES) == is_of_nft
