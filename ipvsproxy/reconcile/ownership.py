"""Which virtual servers in the kernel are ours, when nobody wants them any more.

The kernel's table is shared: keepalived, kube-vip or docker have virtual servers there too. A fresh process has no memory,
but the kernel has: an address on our device or an entry in one of our sets stands before its virtual server and goes after
it (see ``order``), so whatever a former process programmed is still witnessed by one of them.
"""

from collections.abc import Callable, Collection, Mapping

from ipvsproxy.model.kernel import IP_SETS, SetEntry, SetKind, SetType, VirtualServerKey
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
_NODE_PORTS: Mapping[SetKind, Protocol] = {SetKind.NODE_PORT_TCP: Protocol.TCP, SetKind.NODE_PORT_UDP: Protocol.UDP}


def owned_virtual_servers(
    sets: Mapping[str, Collection[SetEntry]],
    bound: Collection[Address],
    host_addresses: Collection[Address],
) -> Callable[[VirtualServerKey], bool]:
    """A test for "ours", from what the kernel holds besides the virtual servers.

    ``host_addresses`` are the addresses of this host on other interfaces than our device: a node port in our set makes the
    virtual server of that port ours on each of them.
    """
    witnessed: set[VirtualServerKey] = set()
    node_ports: set[tuple[Family, Protocol, int]] = set()
    for name, entries in sets.items():
        ip_set = IP_SETS[name]
        if ip_set.kind in _WITNESSES:
            witnessed.update(key for entry in entries if (key := virtual_server_of(entry)) is not None)
        elif ip_set.kind in _NODE_PORTS:
            node_ports.update((ip_set.family, _NODE_PORTS[ip_set.kind], entry.port) for entry in entries)

    def is_ours(key: VirtualServerKey) -> bool:
        if key.address in bound or key in witnessed:
            return True
        return key.address in host_addresses and (key.address.family, key.protocol, key.port) in node_ports

    return is_ours


def virtual_server_of(entry: SetEntry) -> VirtualServerKey | None:
    """The virtual server that an entry of a ``hash:ip,port…`` set stands for; None for entries that stand for none."""
    ip_set = IP_SETS[entry.set]
    if entry.address is None or entry.protocol is None or ip_set.kind is SetKind.LOOP_BACK or ip_set.type is SetType.PORT:
        return None
    return VirtualServerKey(entry.protocol, entry.address, entry.port)
