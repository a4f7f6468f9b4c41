"""The kinds by which a service address becomes local: an address on our device, or a local route.

Rule 1: an address is local as soon as it is on our device or a local route leads to it. Without a virtual server there, a program
of this host that listens on the Service's port would answer. The rules that close the host's ports leave out those of Services.
Rule 2: an address that is to be local by a route stays on our device until the route is in force, and the other way round. In
between it would not be local, and nearly every connection would break.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.kind import Circumstances, PresenceKind, Stage, ours, together_or_not


class Addresses(PresenceKind):
    """Service addresses on our device. Those of a family that is not served are never removed."""

    classes: ClassVar[tuple[type, ...]] = (BoundAddresses,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.ADDRESSES, Verb.REMOVE: Stage.ADDRESS_REMOVALS}
    is_witness = True

    def is_protected(self, key: Address) -> bool:
        """Whether the family of an address is not served."""
        return not self.all.is_served(key.family)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in the addresses of a reading."""
        if observed.addresses is not None:
            yield from self.tables[0].observing_all(observed.addresses, True, ours)

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Adds pending addresses that have a virtual server of one of their owners (rule 1)."""
        (table,), tables = self.tables, self.all
        observed = tables.virtual_servers.observed
        services = {owner.service for address in table.pending for owner in table.owners_of(address)}
        served = {item.key.address for name in services for item in tables.states[name].served if item.key in observed}
        return self._operations(Verb.ADD, tuple(one for one in table.pending if one in served), circumstances)

    def removals(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Removes addresses that witness nothing, and are local in the desired way, or not to be local (rule 2)."""
        if not circumstances.has_observed_all or not self.tables[0].surplus:
            return iter(())
        kept, witnesses = circumstances.keeping, circumstances.witnesses.addresses
        pending = [binding.pending for binding in self.all.bindings.values()]
        addresses = tuple(
            one for one in self.tables[0].surplus if not (one in kept or one in witnesses or any(one in keys for keys in pending))
        )
        return self._operations(Verb.REMOVE, addresses, circumstances)

    def _operations(self, verb: Verb, addresses: tuple[Address, ...], circumstances: Circumstances) -> Iterator[Operation]:
        if addresses:
            yield from together_or_not(Operation(verb, self.classes[0](addresses)), together=circumstances.together)


class Routes(Addresses):
    """Local routes, each to a service address."""

    classes: ClassVar[tuple[type, ...]] = (LocalRoutes,)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in the routes of a reading."""
        if observed.routes is not None:
            yield from self.tables[0].observing_all(observed.routes, True, ours)
