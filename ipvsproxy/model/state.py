"""The desired state of one Service on this node, and the observed state that was read from the kernel."""

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
    """The clients that the endpoints of a ``ClusterScope`` serve.

    The value of each member is the kind of the set that gives the scope's mark to the packets of these clients. ``OF_NODE``:
    processes and pods on this node, for addresses with externalTrafficPolicy Local. ``OUTSIDE``: clients outside of the cluster
    that use an address with direct return. ``BY_TUNNEL``: clients outside of the cluster whose packets another node has sent to
    this node by tunnel.
    """

    OF_NODE = SetKind.SCOPE
    OUTSIDE = SetKind.DIRECT
    BY_TUNNEL = SetKind.TUNNEL


class ClusterScope(msgspec.Struct, frozen=True, gc=False):
    """The endpoints that ``clients`` reach at the external addresses of a Service port, in one IP family.

    ``virtual_servers`` are the virtual servers of the port's external addresses, with the endpoints for all other clients.
    ``protocol`` and ``port`` are the protocol and port of the Service port. ``settings``, ``weights`` and ``thresholds`` belong
    to the virtual server that takes the packets of ``clients`` by their mark.
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
    """The fields of the desired state that only few Services of a cluster have.

    All Services without such fields share ``NO_RARITIES``. ``refused`` are the virtual servers that this node itself may not use,
    because their source ranges do not include the node. ``flows`` maps each UDP and SCTP frontend to the real servers that may
    still reply. ``local_endpoints`` maps each health listener to the number of addresses of ready endpoints on this node.
    ``without_local`` has pairs of a traffic policy (``internal`` or ``external``) and an IP family. In each pair, the policy is
    Local, and only other nodes have endpoints of the family. ``skipped`` are the fields of the Service that are not used.
    ``scopes`` says which endpoints serve those clients of external addresses that ``Clients`` names. The weight of a new endpoint
    reaches its final value after ``slow_start_s`` seconds; 0 means that there is no slow start. ``drain_deadline_s`` replaces the
    node's drain deadline; 0 means that the node's deadline applies.
    """

    refused: tuple[VirtualServerKey, ...] = ()
    flows: Mapping[Flow, frozenset[RealServerKey]] = msgspec.field(default_factory=dict)
    local_endpoints: Mapping[HealthCheckPort, int] = msgspec.field(default_factory=dict)
    without_local: frozenset[tuple[str, Family]] = frozenset()
    skipped: tuple[Skipped, ...] = ()
    scopes: tuple[ClusterScope, ...] = ()
    slow_start_s: int = 0
    drain_deadline_s: int = 0


NO_RARITIES = Rarities()


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The desired state of one Service on this node, in both IP families.

    ``served`` are the Service's virtual servers, whose keys are all different. ``addresses`` are the Service's addresses on the
    dummy device, and ``routes`` are the Service's addresses that our local routes make local.
    """

    owner: Owner
    served: tuple[VirtualServer, ...] = ()
    entries: tuple[SetEntry, ...] = ()
    addresses: tuple[Address, ...] = ()
    routes: tuple[Address, ...] = ()
    rare: Rarities = NO_RARITIES

    def with_objects(self, served: tuple[VirtualServer, ...], entries: tuple[SetEntry, ...]) -> "ServiceState":
        """A copy of the desired state, in which the arguments replace the virtual servers and set entries."""
        return msgspec.structs.replace(self, served=served, entries=entries)

    @property
    def virtual_servers(self) -> Mapping[VirtualServerKey, VirtualServer]:
        """The virtual servers by key; each call makes a new mapping."""
        return {item.key: item for item in self.served}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The result of a complete read of the kernel, or one part of the result.

    A field is None if its objects were not read, could not be read, or have not changed since they were last read. For a field
    that is None, the previous observed state is kept.

    ``sets`` and ``virtual_servers`` hold all sets and all virtual servers. ``some_sets`` and ``some_virtual_servers`` hold only
    some objects, and do not say anything about other objects; a value of None means that an object is absent.
    ``has_shown_virtual_servers`` is true for the part that an audit returns after it has read all virtual servers. ``set_copy``
    says whether a ``SetCopy`` exists in the kernel. ``skeletons`` has only IP families in use, and ``sysctls`` has only paths
    that exist in this kernel. ``addresses`` are the addresses on the dummy device, ``routes`` are the addresses of our local
    routes, and ``interface_addresses`` are the addresses on all other interfaces. ``foreign_virtual_servers`` is the number of
    virtual servers whose protocol a Service cannot have. ``errors`` has one line for each field that could not be read.
    ``is_of_rules`` means that this part of the result contains only rules.
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
        """The service addresses on our device and in our local routes, as far as addresses and routes were read."""
        return frozenset().union(self.addresses or (), self.routes or ())
