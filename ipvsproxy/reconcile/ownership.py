"""Which virtual servers in the kernel are ours, when nobody wants them any more.

The kernel's table is shared: keepalived, kube-vip or docker have virtual servers there too. A fresh process has no memory,
but the kernel has: an address on our device or an entry in one of our sets stands before its virtual server and goes after
it (see ``order``), so whatever a former process programmed is still witnessed by one of them.

What is left is the virtual server of a node port on an address that this host lost while no process ran. Its port is in our set,
but so may be that of a keepalived whose address is on another host just now. Ours has a twin: a virtual server of the same port
on an address that this host has, with the same settings and real servers. Somebody else's leads to other places, unless these are
hosts' own addresses; so those do not count.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ipvsproxy.model.kernel import IP_SETS, ObservedVirtualServer, SetEntry, SetKind, SetType, VirtualServerKey
from ipvsproxy.model.net import Address, Family, Protocol

_WITNESSES = frozenset(
    {
        SetKind.CLUSTER_IP,
        SetKind.EXTERNAL_IP,
        SetKind.EXTERNAL_IP_LOCAL,
        SetKind.LOAD_BALANCER,
        SetKind.NODE_PORT_SCTP,
    }
)
_NODE_PORTS: Mapping[SetKind, Protocol] = {
    SetKind.NODE_PORT_TCP: Protocol.TCP,
    SetKind.NODE_PORT_LOCAL_TCP: Protocol.TCP,
    SetKind.NODE_PORT_UDP: Protocol.UDP,
    SetKind.NODE_PORT_LOCAL_UDP: Protocol.UDP,
}


_WITNESS_NAMES: Mapping[Family, tuple[str, ...]] = {
    family: tuple(name for name, ip_set in IP_SETS.items() if ip_set.family is family and ip_set.kind in _WITNESSES)
    for family in Family
}
_NODE_PORT_NAMES: Mapping[tuple[Family, Protocol], tuple[str, ...]] = {
    (family, protocol): tuple(
        name for name, ip_set in IP_SETS.items() if ip_set.family is family and _NODE_PORTS.get(ip_set.kind) is protocol
    )
    for family in Family
    for protocol in Protocol
}


class NodePort(NamedTuple):
    """A node port on whatever addresses: what an entry of a ``bitmap:port`` set stands for."""

    family: Family
    protocol: Protocol
    port: int


def owned_virtual_servers(
    sets: Mapping[str, Collection[SetEntry]],
    bound: Collection[Address],
    host_addresses: Collection[Address],
    left_behind: Mapping[VirtualServerKey, ObservedVirtualServer] = MappingProxyType({}),
) -> Callable[[VirtualServerKey], bool]:
    """A test for "ours", from what the kernel holds besides the virtual servers.

    ``host_addresses`` are the addresses of this host on other interfaces than our device: a node port in our set makes the
    virtual server of that port ours on each of them. ``left_behind`` are all virtual servers, where one on an address that is not
    there any more may be ours.
    """

    def is_node_port(key: VirtualServerKey) -> bool:
        names = _NODE_PORT_NAMES[key.address.family, key.protocol]
        return any(SetEntry(name, port=key.port) in sets.get(name, ()) for name in names)

    def has_twin(key: VirtualServerKey) -> bool:
        seen = left_behind.get(key)
        if seen is None or not seen.real_servers or any(one.address in host_addresses for one in seen.real_servers):
            return False
        twins = (left_behind.get(VirtualServerKey(key.protocol, address, key.port)) for address in host_addresses)
        return any(
            twin is not None and twin.settings == seen.settings and twin.real_servers.keys() == seen.real_servers.keys()
            for twin in twins
        )

    def is_ours(key: VirtualServerKey) -> bool:
        family = key.address.family
        if key.address in bound:
            return True
        if any(SetEntry(name, key.address, key.protocol, key.port) in sets.get(name, ()) for name in _WITNESS_NAMES[family]):
            return True
        return is_node_port(key) and (key.address in host_addresses or has_twin(key))

    return is_ours


def virtual_server_of(entry: SetEntry) -> VirtualServerKey | None:
    """The virtual server that an entry of a ``hash:ip,port…`` set stands for; None for entries that stand for none."""
    ip_set = IP_SETS[entry.set]
    if entry.address is None or entry.protocol is None or ip_set.kind is SetKind.LOOP_BACK or ip_set.type is SetType.PORT:
        return None
    return VirtualServerKey(entry.protocol, entry.address, entry.port)


def node_port(key: VirtualServerKey) -> NodePort:
    """The node port that a virtual server on an address of this host serves."""
    return NodePort(key.address.family, key.protocol, key.port)


def node_port_of(entry: SetEntry) -> NodePort | None:
    """The node port that an entry of a ``bitmap:port`` set stands for; None for entries that stand for none."""
    ip_set = IP_SETS[entry.set]
    protocol = _NODE_PORTS.get(ip_set.kind)
    return NodePort(ip_set.family, protocol, entry.port) if protocol is not None else None


class Witnesses:
    """Addresses and entries that must stay because they tell that a virtual server, which is still there, is ours."""

    def __init__(self, going: Iterable[VirtualServerKey]) -> None:
        """``going`` are virtual servers that nobody wants any more."""
        self._keys = frozenset(going)
        self._ports = frozenset(map(node_port, self._keys))
        self.addresses = frozenset(key.address for key in self._keys)

    def need(self, entry: SetEntry) -> bool:
        """Whether the entry must stay."""
        if not self._keys:
            return False
        if entry.address is None:
            return node_port_of(entry) in self._ports
        if entry.protocol is None:
            return entry.address in self.addresses
        return virtual_server_of(entry) in self._keys
