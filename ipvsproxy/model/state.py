"""The two sides of the kernel's state: what one Service needs on this node, and one reading of the kernel."""

import dataclasses
import enum
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import msgspec

from ipvsproxy.model.kernel import Flow, HealthCheckPort, InterfaceAddress
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.real_servers import NO_THRESHOLDS, RealServerKey, Thresholds, Weights
from ipvsproxy.model.rules import ObservedSkeleton
from ipvsproxy.model.service import Owner, Skipped
from ipvsproxy.model.sets import SetEntry, SetKind
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServer, VirtualServerKey, VirtualServerSettings


class Clients(enum.Enum):
    """The clients of a scope, whose packets get its mark from a set of this kind.

    ``OF_NODE``: processes and pods of this node, at addresses with externalTrafficPolicy Local. ``OUTSIDE``: clients outside of
    the cluster, at addresses with direct return. ``BY_TUNNEL``: the same, whose packets another node has sent here by tunnel.
    """

    OF_NODE = SetKind.SCOPE
    OUTSIDE = SetKind.DIRECT
    BY_TUNNEL = SetKind.TUNNEL


class ClusterScope(msgspec.Struct, frozen=True, gc=False):
    """The endpoints of a Service port in one family for some of the clients at its external addresses.

    ``virtual_servers`` are the virtual servers of its external addresses, with the endpoints for all other clients. ``protocol``
    and ``port`` are those of the Service port. ``settings``, ``weights`` and ``thresholds`` belong to the virtual server by mark
    that takes the packets of these clients.
    """

    family: Family
    protocol: Protocol
    port: int
    virtual_servers: tuple[VirtualServerKey, ...]
    settings: VirtualServerSettings
    weights: Weights
    thresholds: Thresholds = NO_THRESHOLDS
    clients: Clients = Clients.OF_NODE


class Rarities(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The parts of the desired state that few Services of a cluster have. All other Services share ``NO_RARITIES``.

    ``refused`` are the virtual servers that this node itself may not use, because their source ranges leave it out. ``flows`` has
    the real servers that may still reply, for each UDP and SCTP frontend. ``local_endpoints`` is the number of addresses of ready
    endpoints on this node, for each health listener. ``without_local_internal`` and ``without_local_external`` are the families
    in which a Local traffic policy has no endpoint on this node, although there are endpoints elsewhere. ``skipped`` are the
    unused fields. ``scopes`` are second scopes of external addresses. A new endpoint reaches its own weight after
    ``slow_start_s``; 0 means at once. ``drain_deadline_s`` replaces the node's drain deadline unless it is 0.
    """

    refused: tuple[VirtualServerKey, ...] = ()
    flows: Mapping[Flow, frozenset[RealServerKey]] = msgspec.field(default_factory=dict)
    local_endpoints: Mapping[HealthCheckPort, int] = msgspec.field(default_factory=dict)
    without_local_internal: frozenset[Family] = frozenset()
    without_local_external: frozenset[Family] = frozenset()
    skipped: tuple[Skipped, ...] = ()
    scopes: tuple[ClusterScope, ...] = ()
    slow_start_s: int = 0
    drain_deadline_s: int = 0


NO_RARITIES = Rarities()


class Role(enum.StrEnum):
    """The role of a virtual server's address for its Service."""

    CLUSTER_IP = "cluster IP"
    EXTERNAL_IP = "external IP"
    LOAD_BALANCER_IP = "load balancer IP"
    NODE_PORT = "node port"


class Frontend(msgspec.Struct, frozen=True, gc=False):
    """A virtual server of a Service, and the role of its address."""

    role: Role
    virtual_server: VirtualServer


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The desired state of one Service on this node, in both families.

    ``served`` are its virtual servers, with different keys. ``addresses`` are its service addresses on the dummy device,
    ``routes`` its service addresses that our routes make local.
    """

    owner: Owner
    served: tuple[VirtualServer, ...] = ()
    entries: tuple[SetEntry, ...] = ()
    addresses: tuple[Address, ...] = ()
    routes: tuple[Address, ...] = ()
    rare: Rarities = NO_RARITIES

    def with_objects(self, served: tuple[VirtualServer, ...], entries: tuple[SetEntry, ...]) -> "ServiceState":
        """The same state with these virtual servers and entries."""
        return msgspec.structs.replace(self, served=served, entries=entries)

    @property
    def virtual_servers(self) -> Mapping[VirtualServerKey, VirtualServer]:
        """The virtual servers by key; a new mapping at each call."""
        return {item.key: item for item in self.served}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A reading of the kernel, or a part of one.

    A field is None if it was not read, could not be read, or has not changed since the last reading. The observed state of such a
    field stays.

    ``sets`` and ``virtual_servers`` are complete. ``some_sets`` and ``some_virtual_servers`` say nothing about objects that they
    do not name; None stands for an absent object. ``has_shown_virtual_servers``: the parts of an audit up to this one have shown
    all virtual servers. ``set_copy``: whether a ``SetCopy`` exists. ``skeletons`` lacks families that are not in use, ``sysctls``
    lacks paths that this kernel does not have. ``addresses`` are on the dummy device, ``routes`` are the addresses that our local
    routes lead to, ``interface_addresses`` are on all other interfaces. ``foreign_virtual_servers`` is the number of virtual
    servers of protocols that no Service has. ``errors`` has one line for each field that could not be read. ``is_of_rules``: this
    part only has rules.
    """

    virtual_servers: Mapping[VirtualServerKey, ObservedVirtualServer] | None = None
    some_virtual_servers: Mapping[VirtualServerKey, ObservedVirtualServer | None] = dataclasses.field(default_factory=dict)
    has_shown_virtual_servers: bool = False
    foreign_virtual_servers: int = 0
    sets: Mapping[str, AbstractSet[SetEntry]] | None = None
    some_sets: Mapping[str, AbstractSet[SetEntry] | None] = dataclasses.field(default_factory=dict)
    set_copy: bool | None = None
    device: bool | None = None
    addresses: AbstractSet[Address] | None = None
    routes: AbstractSet[Address] | None = None
    interface_addresses: tuple[InterfaceAddress, ...] | None = None
    skeletons: Mapping[Family, ObservedSkeleton] = dataclasses.field(default_factory=dict)
    sysctls: Mapping[str, str] | None = None
    errors: tuple[str, ...] = ()
    is_of_rules: bool = False

    @property
    def local(self) -> frozenset[Address]:
        """The service addresses on our device, and those that our routes lead to, as far as they were read."""
        return frozenset().union(self.addresses or (), self.routes or ())
