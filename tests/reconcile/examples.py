"""Desired states built by hand for tests of single modules.

Each state has one owner, and contains this owner's virtual servers, set entries, addresses and flows.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ipvsproxy.model.kernel import Flow
from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.real_servers import EvenWeights, RealServerKey
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.sets import IpSet, SetEntry, SetKind
from ipvsproxy.model.state import Rarities, ServiceState
from ipvsproxy.model.virtual_servers import Role, VirtualServer, VirtualServerKey, VirtualServerSettings
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.tables.table import Table
from tests.support import builders
from tests.support.fake_kernel import KernelVirtualServer

ROUND_ROBIN = VirtualServerSettings("rr")
OLD = Owner(1.0, ServiceName("default", "old"))
YOUNG = Owner(2.0, ServiceName("default", "young"))
NODE_ADDRESSES = builders.addresses(builders.NODE_ADDRESS, "172.17.0.1")


def virtual_server(
    key: VirtualServerKey,
    *real_servers: RealServerKey,
    owner: Owner = OLD,
    settings: VirtualServerSettings = ROUND_ROBIN,
) -> VirtualServer:
    """A desired virtual server of an owner."""
    return VirtualServer(key, settings, EvenWeights.of(real_servers), owner)


def observed(
    weights: Mapping[RealServerKey, int] | None = None,
    *,
    settings: VirtualServerSettings = ROUND_ROBIN,
) -> KernelVirtualServer:
    """A virtual server as it is observed in the kernel."""
    return KernelVirtualServer(settings, dict(weights or {}))


def state(
    owner: Owner,
    *virtual_servers: VirtualServerKey,
    real_servers: Iterable[RealServerKey] = (),
    entries: Iterable[SetEntry] = (),
    addresses: Iterable[str] = (),
    flows: Mapping[Flow, frozenset[RealServerKey]] | None = None,
    refused: Iterable[VirtualServerKey] = (),
) -> ServiceState:
    """The desired state of one Service; all of its virtual servers have the same real servers.

    A virtual server on one of ``NODE_ADDRESSES`` serves a node port; any other virtual server serves a cluster IP.
    """
    desired = EvenWeights.of(list(real_servers))
    roles = {key: Role.NODE_PORT if key.address in NODE_ADDRESSES else Role.CLUSTER_IP for key in virtual_servers}
    return ServiceState(
        owner=owner,
        served=tuple(VirtualServer(key, ROUND_ROBIN, desired, owner, role=role) for key, role in roles.items()),
        entries=tuple(entries),
        addresses=tuple(map(parse_address, addresses)),
        rare=Rarities(flows=flows or {}, refused=tuple(refused)),
    )


def tables_of(tables: NodeTables) -> list[Table[Any, Any, Any]]:
    """The tables of all kinds of kernel objects; the table of health checks has no observed values."""
    return [table for kind in tables.kinds for table in kind.tables]


def entry(kind: SetKind, key: VirtualServerKey, other: str | None = None) -> SetEntry:
    """The set entry that names a virtual server, with the additional fields that the type of the set requires."""
    return SetEntry(
        IpSet(kind, key.address.family).name, key.address, key.protocol, key.port, parse_address(other) if other else None
    )


def range_entry(key: VirtualServerKey, source_range: str) -> SetEntry:
    """The entry that admits clients of a range to a virtual server."""
    source = parse_network(source_range)
    name = IpSet(SetKind.LOAD_BALANCER_SOURCE_CIDR, key.address.family).name
    return SetEntry(name, key.address, key.protocol, key.port, source.address, source.prefix_length)


def port_entry(kind: SetKind, port: int, family: Family = Family.IPV4) -> SetEntry:
    """The entry of a ``bitmap:port`` set."""
    return SetEntry(IpSet(kind, family).name, port=port)


def bound_entry(address: str) -> SetEntry:
    """The entry for an address in the set of service addresses."""
    parsed = parse_address(address)
    return SetEntry(IpSet(SetKind.IPVS_IPS, parsed.family).name, parsed)


def flow(address: str, port: int = 53, protocol: Protocol = Protocol.UDP, family: Family = Family.IPV4) -> Flow:
    """Tracked flows to a frontend."""
    return Flow(family, protocol, parse_address(address), port)
