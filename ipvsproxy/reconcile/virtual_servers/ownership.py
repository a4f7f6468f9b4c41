"""Decides whether an undesired virtual server belongs to ipvsproxy, and which of several Services gets a virtual server.

Programs share the kernel's table of virtual servers: keepalived, kube-vip and docker may also have virtual servers in the table.
A new process uses other kernel objects to recognise the virtual servers of an earlier process. An entry in a
set of ipvsproxy is added before its virtual server and removed after the virtual server. The address on ``kube-ipvs0``, or the
local route, is also removed after the virtual server (see the stages in ``kinds/declaration.py``). Because of this order, each
virtual server of an earlier process has such an entry, address or route. This object is called the witness of the virtual server.

The set entry of a node port names no address. Therefore, the entry is a witness only for virtual servers on addresses where node
ports are served. On any other address, a virtual server with the node port's number may belong to keepalived. This applies
whether or not this host has the address now. But the virtual server may instead belong to ipvsproxy: an earlier process may have
served node ports on other addresses, or on an address that the host has lost. If such a virtual server belongs to ipvsproxy, a
second virtual server with the same settings and real servers exists and has a witness. The second virtual server is on the same
port of an address where node ports are served, or on the Service's cluster IP. Virtual servers of ipvsproxy and of another
program can have the same real servers only if these real servers have addresses of hosts. Therefore, a second virtual server
proves nothing about a virtual server that has a real server on an address of this host.

A virtual server that is identified by a firewall mark belongs to ipvsproxy if ipvsproxy's set of marks contains this mark.

Three rules decide which of several Services gets a virtual server:

Rule 1: addresses that the API server allocates take precedence: cluster IPs first, then node ports. An external or load-balancer
address, which the author of a Service chooses, never wins against an allocated address, even if its Service is older.
Rule 2: a Service in the newest list of Services takes precedence over a Service that is missing in this list (see ``Owner``).
Rule 3: the older Service takes precedence.
"""

import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ipvsproxy.model.net import Address, Family, Network, Protocol, network
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import (
    IP_SETS,
    NODE_PORT_SETS,
    SCOPE_KINDS,
    ForeignElement,
    IpSet,
    MarkedEntry,
    SetEntry,
    SetKind,
    SetType,
    mark_entry,
    mark_of,
)
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, Role, VirtualServer, VirtualServerKey

_WITNESSES = (
    *(SetKind.CLUSTER_IP, SetKind.EXTERNAL_IP, SetKind.EXTERNAL_IP_LOCAL, SetKind.LOAD_BALANCER),
    SetKind.NODE_PORT_SCTP,
)
_NODE_PORTS: Mapping[SetKind, Protocol] = {
    kind: protocol for protocol in (Protocol.TCP, Protocol.UDP) for kind in NODE_PORT_SETS[protocol]
}


_WITNESS_NAMES: Mapping[Family, tuple[str, ...]] = {
    family: tuple(IpSet(kind, family).name for kind in _WITNESSES) for family in Family
}
_NODE_PORT_NAMES: Mapping[tuple[Family, Protocol], tuple[str, ...]] = {
    (family, protocol): tuple(IpSet(kind, family).name for kind, one in _NODE_PORTS.items() if one is protocol)
    for family in Family
    for protocol in Protocol
}


EVERYWHERE: tuple[Network, ...] = tuple(network(Address(bytes(family.bits // 8)), 0) for family in Family)
"""The node-port ranges of a node that serves node ports on all of its addresses."""


class NodePort(NamedTuple):
    """A node port on any address; an entry of a ``bitmap:port`` set names such a node port."""

    family: Family
    protocol: Protocol
    port: int


def lies_in(key: VirtualServerKey, ranges: Iterable[Network]) -> bool:
    """Whether the address of a virtual server lies in one of the given ranges.

    A virtual server by firewall mark has no address, so the answer is false.
    """
    return not isinstance(key, FirewallMark) and any(one.contains(key.address) for one in ranges)


def owned_virtual_servers(
    sets: Mapping[str, Collection[SetEntry]],
    local: Container[Address],
    host_addresses: Collection[Address],
    left_behind: Mapping[VirtualServerKey, ObservedVirtualServer] = MappingProxyType({}),
    node_port_ranges: Collection[Network] = EVERYWHERE,
) -> Callable[[VirtualServerKey], bool]:
    """Returns a function that decides from the other observed objects whether a virtual server belongs to ipvsproxy.

    ``local`` are the addresses on ``kube-ipvs0`` and the addresses to which ipvsproxy's local routes lead. ``host_addresses`` are
    the addresses of this host on interfaces other than ``kube-ipvs0``. If ipvsproxy's set contains a node port, the virtual
    servers of this port on the host addresses in ``node_port_ranges`` belong to ipvsproxy. Loopback addresses never count as such
    host addresses. An IPv6 link-local address counts only if a range other than ``::/0`` contains the address. ``left_behind`` is
    empty, or has all observed virtual servers. If ``left_behind`` has all observed virtual servers, a virtual server of a node
    port may belong to ipvsproxy even if its address is not a host address in ``node_port_ranges``. Such a virtual server belongs
    to ipvsproxy only if a virtual server that certainly belongs to ipvsproxy has the same settings and real servers.
    """

    def serves(address: Address) -> bool:
        ranges = [item for item in node_port_ranges if item.prefix_length or not address.is_link_local_v6]
        return not address.is_loopback and any(item.contains(address) for item in ranges)

    served = frozenset(address for address in host_addresses if serves(address))

    def is_node_port(key: VirtualServerKey) -> bool:
        names = _NODE_PORT_NAMES[key.address.family, key.protocol]
        return any(SetEntry(name, port=key.port) in sets.get(name, ()) for name in names)

    def has_twin(key: VirtualServerKey) -> bool:
        observed = left_behind.get(key)
        if observed is None or not observed.real_servers or any(one.address in host_addresses for one in observed.real_servers):
            return False
        return _shape(key, observed) in shapes_of_ours()

    @functools.cache
    def shapes_of_ours() -> frozenset[object]:
        return frozenset(_shape(key, observed) for key, observed in left_behind.items() if is_witnessed(key))

    def is_witnessed(key: VirtualServerKey) -> bool:
        if key.address in local:
            return True
        names = _WITNESS_NAMES[key.address.family]
        if any(SetEntry(name, key.address, key.protocol, key.port) in sets.get(name, ()) for name in names):
            return True
        return key.address in served and is_node_port(key)

    def is_ours(key: VirtualServerKey) -> bool:
        if isinstance(key, FirewallMark):
            entry = mark_entry(key)
            return entry in sets.get(entry.set, ())
        return is_witnessed(key) or (is_node_port(key) and has_twin(key))

    return is_ours


def _shape(key: VirtualServerKey, observed: ObservedVirtualServer) -> object:
    """The properties that all virtual servers of one Service port share, on all addresses of one IP family."""
    return key.protocol, key.address.family, observed.settings, frozenset(observed.real_servers)


def virtual_server_of(entry: SetEntry) -> VirtualServerKey | None:
    """The virtual server that an entry of a ``hash:ip,port…`` set names; None if the entry names no virtual server."""
    ip_set = IP_SETS[entry.set]
    if entry.address is None or entry.protocol is None or ip_set.kind is SetKind.LOOP_BACK or ip_set.type is SetType.PORT:
        return None
    return VirtualServerKey(entry.protocol, entry.address, entry.port)


def node_port(key: VirtualServerKey) -> NodePort:
    """The node port that a virtual server on an address of this host serves."""
    return NodePort(key.address.family, key.protocol, key.port)


def node_port_of(entry: SetEntry) -> NodePort | None:
    """The node port that an entry of a ``bitmap:port`` set names; None if the entry names no node port."""
    ip_set = IP_SETS[entry.set]
    protocol = None if isinstance(entry, ForeignElement) else _NODE_PORTS.get(ip_set.kind)
    return NodePort(ip_set.family, protocol, entry.port) if protocol is not None else None


def _named(holds: Callable[[IpSet], bool]) -> frozenset[str]:
    return frozenset(name for name, ip_set in IP_SETS.items() if holds(ip_set))


RANGE_SETS = _named(lambda one: one.kind in {SetKind.LOAD_BALANCER_SOURCE_CIDR, SetKind.LOAD_BALANCER_SOURCE_IP})
"""The sets that hold the source addresses and ranges that virtual servers admit."""
FIREWALL_SETS = _named(lambda one: one.kind is SetKind.LOAD_BALANCER_FIREWALL)
"""The names of the sets that list the virtual servers with restricted source addresses."""
LOCAL_SETS = _named(lambda one: one.kind is SetKind.LOAD_BALANCER_LOCAL or one.kind.startswith("KUBE-NODE-PORT-LOCAL-"))
"""The sets for traffic that stays on this node and is therefore not masqueraded."""
SCOPE_SETS = _named(lambda one: one.gives_marks)
"""The sets whose entries give packets a firewall mark."""

Named = VirtualServerKey | NodePort | None


def mark_given_by(entry: SetEntry) -> FirewallMark | None:
    """The key of the virtual server for packets that get their mark from this entry; None if the entry gives no mark."""
    return FirewallMark.of(IP_SETS[entry.set].family, entry.mark) if isinstance(entry, MarkedEntry) else None


def firewall_entry(key: VirtualServerKey) -> SetEntry:
    """The set entry that makes the kernel apply the source ranges of a virtual server."""
    return SetEntry(IpSet(SetKind.LOAD_BALANCER_FIREWALL, key.address.family).name, key.address, key.protocol, key.port)


def named_by(entry: SetEntry) -> Named:
    """The virtual server or node port that an entry of ``LOCAL_SETS`` names."""
    return node_port_of(entry) or virtual_server_of(entry)


class Witnesses:
    """The addresses and set entries that must stay, because they show that an observed virtual server belongs to ipvsproxy."""

    def __init__(self, going: Iterable[VirtualServerKey]) -> None:
        """``going`` has the observed virtual servers that are no longer desired."""
        self._keys = frozenset(going)
        by_address = [key for key in self._keys if not isinstance(key, FirewallMark)]
        self._ports = frozenset(map(node_port, by_address))
        self.addresses = frozenset(key.address for key in by_address)

    def need(self, entry: SetEntry) -> bool:
        """Whether a set entry must stay because it is a witness."""
        if not self._keys:
            return False
        if IP_SETS[entry.set].kind in SCOPE_KINDS:
            return mark_of(entry) in self._keys
        if entry.address is None:
            return node_port_of(entry) in self._ports
        if entry.protocol is None:
            return entry.address in self.addresses
        return virtual_server_of(entry) in self._keys


_PRECEDENCE: Mapping[Role, int] = {Role.CLUSTER_IP: 0, Role.NODE_PORT: 1, Role.EXTERNAL_IP: 2, Role.LOAD_BALANCER_IP: 2}


def rank(desired: VirtualServer) -> tuple[int, Owner]:
    """The rank of a Service that desires a virtual server; the Service with the lowest rank gets the virtual server."""
    return _PRECEDENCE[desired.role], desired.owner


def reason(winner: VirtualServer, other: VirtualServer) -> str:
    """The reason why the winner takes precedence over the other Service, as a text that follows the winner's name."""
    if _PRECEDENCE[winner.role] != _PRECEDENCE[other.role]:
        return f"has it as its {winner.role}"
    if other.owner.is_remembered and not winner.owner.is_remembered:
        return "is on the newest list, which lacks the other, and has it"
    return "is older and has it"
