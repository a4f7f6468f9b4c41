"""The kinds by which a service address becomes local: an address on our device, or a local route.

Rule 1: an address is added only if it has a virtual server. An address is local as soon as it is on our device or a local route
leads to it; without a virtual server, a program of this host that listens on the Service's port would answer. The rules that
close the host's ports leave out the ports of Services.
Rule 2: an address that is to become local by a route stays on our device until the route is in force, and vice versa. Otherwise
it would not be local for a moment, and nearly every connection would break.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Address
from ipvsproxy.model.plan import Item, Verb
from ipvsproxy.model.service import Owner
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.kind import Circumstances, PresenceKind, Stage
from ipvsproxy.reconcile.tables.table import Table


class Addresses(PresenceKind):
    """Service addresses on our device. Addresses of a family that is not served are never removed."""

    classes: ClassVar[tuple[type, ...]] = (BoundAddresses,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.ADDRESSES, Verb.REMOVE: Stage.ADDRESS_REMOVALS}
    is_witness = True

    def is_protected(self, key: Address) -> bool:
        """Whether an address must stay because its family is not served."""
        return not self.all.is_served(key.family)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in the addresses of a reading."""
        if observed.addresses is not None:
            yield from self.tables[0].observing(dict.fromkeys(observed.addresses, True))

    def may_be_added(self, table: Table[Any, Owner, bool], circumstances: Circumstances) -> Iterable[Address]:
        """Pending addresses that have a virtual server of one of their owners (rule 1)."""
        del circumstances
        tables = self.all
        services = {owner.service for address in table.pending for owner in table.owners_of(address)}
        observed = tables.virtual_servers.observed
        served = {item.key.address for name in services for item in tables.states[name].served if item.key in observed}
        return filter(served.__contains__, table.pending)

    def may_be_removed(self, table: Table[Any, Owner, bool], circumstances: Circumstances) -> Iterable[Address]:
        """Addresses that witness no virtual server, and that are local in the desired way or need not be local (rule 2)."""
        if not circumstances.has_observed_all:
            return ()
        reasons = (circumstances.keeping, circumstances.witnesses.addresses, *(one.pending for one in self.all.bindings.values()))
        return (address for address in table.surplus if not any(address in reason for reason in reasons))

    def items(self, table: Table[Any, Owner, bool], keys: tuple[Any, ...]) -> Iterable[Item]:
        """One item with all of these addresses."""
        del table
        return (self.classes[0](keys),)


class Routes(Addresses):
    """Local routes, each to a service address."""

    classes: ClassVar[tuple[type, ...]] = (LocalRoutes,)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in the routes of a reading."""
        if observed.routes is not None:
            yield from self.tables[0].observing(dict.fromkeys(observed.routes, True))
