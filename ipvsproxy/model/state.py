"""What one Service wants of this node's kernel, and what the kernel was seen to hold."""

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from ipvsproxy.model.kernel import (
    DEVICE,
    IP_SETS,
    SET_COPY,
    Device,
    Flow,
    HealthListener,
    InterfaceAddress,
    IpSet,
    ObservedVirtualServer,
    Owner,
    SetCopy,
    SetEntry,
    Sysctl,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import ObservedSkeleton
from ipvsproxy.model.service import Skipped


class Rarities(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What few Services of a cluster have: those without any of it share ``NO_RARITIES``.

    ``refused`` are the virtual servers that this node itself may not use, because their source ranges leave it out. ``flows``
    says for each UDP and SCTP frontend which real servers may go on answering. ``local_endpoints`` counts, per health listener,
    the addresses of ready endpoints on this node. ``without_local_internal`` and ``without_local_external`` are the families in
    which a Local traffic policy finds no endpoint on this node though there are some elsewhere. ``skipped`` is what is not used.
    """

    refused: tuple[VirtualServerKey, ...] = ()
    flows: Mapping[Flow, frozenset[RealServerKey]] = msgspec.field(default_factory=dict)
    local_endpoints: Mapping[HealthListener, int] = msgspec.field(default_factory=dict)
    without_local_internal: frozenset[Family] = frozenset()
    without_local_external: frozenset[Family] = frozenset()
    skipped: tuple[Skipped, ...] = ()


NO_RARITIES = Rarities()


class ServiceState(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All that one Service wants here, in both families.

    ``served`` are its virtual servers, no two with one key. ``addresses`` are to be bound to the dummy device.
    """

    owner: Owner
    served: tuple[VirtualServer, ...] = ()
    entries: tuple[SetEntry, ...] = ()
    addresses: tuple[Address, ...] = ()
    rare: Rarities = NO_RARITIES

    @property
    def virtual_servers(self) -> Mapping[VirtualServerKey, VirtualServer]:
        """They by their keys, made at each call."""
        return {item.key: item for item in self.served}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the kernel was seen to hold.

    None stands for a part that was not read, could not be, or is as it was at the last reading: what was believed of it stays.

    ``sets`` and ``virtual_servers`` are all that there are; ``some_sets`` and ``some_virtual_servers`` are such as were read by
    themselves, None for one that does not exist: they say nothing of others. ``set_copy``: whether a ``SetCopy`` was left.
    ``skeletons`` lacks the families that are not in use, ``sysctls`` the paths that this kernel does not have. ``addresses`` are
    those on the dummy device, ``interface_addresses`` those on all others. ``foreign_virtual_servers`` counts those by firewall
    mark, which are never ours.
    ``errors`` has one line per part that could not be read. ``is_of_rules``: a part with rules alone.
    """

    virtual_servers: Mapping[VirtualServerKey, ObservedVirtualServer] | None = None
    some_virtual_servers: Mapping[VirtualServerKey, ObservedVirtualServer | None] = dataclasses.field(default_factory=dict)
    foreign_virtual_servers: int = 0
    sets: Mapping[str, AbstractSet[SetEntry]] | None = None
    some_sets: Mapping[str, AbstractSet[SetEntry] | None] = dataclasses.field(default_factory=dict)
    set_copy: bool | None = None
    device: bool | None = None
    addresses: AbstractSet[Address] | None = None
    interface_addresses: tuple[InterfaceAddress, ...] | None = None
    skeletons: Mapping[Family, ObservedSkeleton] = dataclasses.field(default_factory=dict)
    sysctls: Mapping[str, str] | None = None
    errors: tuple[str, ...] = ()
    is_of_rules: bool = False

    @property
    def of_node(self) -> Iterator[tuple[type, Mapping[Any, Any]]]:
        """What was read as a whole of that which the node needs: the class of these objects, and value by key."""
        if self.sets is not None:
            yield IpSet, {IP_SETS[name]: True for name in self.sets}
        if self.set_copy is not None:
            yield SetCopy, {SET_COPY: True} if self.set_copy else {}
        if self.device is not None:
            yield Device, {Device(DEVICE): True} if self.device else {}
        if self.sysctls is not None:
            yield Sysctl, self.sysctls
