"""One reading of the kernel, or a part of one."""

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ipvsproxy.model.kernel import DEVICE, Device, InterfaceAddress, Sysctl
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.rules import ObservedSkeleton
from ipvsproxy.model.sets import IP_SETS, SET_COPY, IpSet, SetCopy, SetEntry
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServerKey


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A reading of the kernel, or a part of one.

    A field is None if it was not read, could not be read, or has not changed since the last reading. Then its observed state
    stays.

    ``sets`` and ``virtual_servers`` are complete. ``some_sets`` and ``some_virtual_servers`` do not mention others; None stands
    for an object that does not exist. ``has_shown_virtual_servers``: the parts of an audit up to this one have shown all of
    them. ``set_copy``: whether a ``SetCopy`` exists. ``skeletons`` lacks families that are not in use, ``sysctls`` lacks paths
    that this kernel does not have. ``addresses`` are on the dummy device, ``routes`` are those that a local route of ours leads
    to, ``interface_addresses`` are on all other interfaces. ``foreign_virtual_servers`` is the number of virtual servers of
    protocols that no Service has. ``errors`` has one line for each field that could not be read. ``is_of_rules``: this part only
    has rules.
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
        """The service addresses that are local by an address on our device or a route of ours, as far as these were read."""
        return frozenset().union(self.addresses or (), self.routes or ())

    @property
    def of_node(self) -> Iterator[tuple[type, Mapping[Any, Any]]]:
        """The complete readings of objects that the node needs with any Services: their class, and their values by key."""
        if self.sets is not None:
            yield IpSet, {IP_SETS[name]: True for name in self.sets}
        if self.set_copy is not None:
            yield SetCopy, {SET_COPY: True} if self.set_copy else {}
        if self.device is not None:
            yield Device, {Device(DEVICE): True} if self.device else {}
        if self.sysctls is not None:
            yield Sysctl, self.sysctls
