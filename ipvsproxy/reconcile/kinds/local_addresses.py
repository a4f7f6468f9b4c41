"""The two kinds that make a service address local: an address on the device ``kube-ipvs0``, or a local route.

Rule 1: an address is added only if it has a virtual server. An address becomes local as soon as the address is on ``kube-ipvs0``,
or a local route leads to the address. Without a virtual server, connections to a local address reach a program of this host that
listens on the Service's port. The rules that close the host's ports do not cover the ports of Services.
Rule 2: if a route replaces an address on ``kube-ipvs0``, the address stays until the route has been added. If an address on
``kube-ipvs0`` replaces a route, the route stays until the address has been added. If the old address or route were removed first,
the service address would not be local for a moment, and nearly every connection would break.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Address
from ipvsproxy.model.plan import Item, Verb
from ipvsproxy.model.service import Owner
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.declaration import Circumstances, PresenceKind, Stage
from ipvsproxy.reconcile.tables.table import Table


class Addresses(PresenceKind[Address]):
    """Service addresses on the device ``kube-ipvs0``. Only addresses of the families that this node serves may be removed."""

    classes: ClassVar[tuple[type, ...]] = (BoundAddresses,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.ADDRESSES, Verb.REMOVE: Stage.ADDRESS_REMOVALS}
    is_witness = True

    def is_protected(self, key: Address) -> bool:
        """Whether an address must stay because this node does not serve the family of the address."""
        return not self.all.is_served(key.family)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records the addresses that a reading has found."""
        if observed.addresses is not None:
            yield from self.objects.observing(dict.fromkeys(observed.addresses, True))

    def may_be_added(self, table: Table[Address, Owner, bool], _circumstances: Circumstances) -> Iterable[Address]:
        """The pending addresses that already have a virtual server of one of their owners (rule 1)."""
        tables = self.all
        services = {owner.service for address in table.pending for owner in table.owners_of(address)}
        observed = tables.virtual_servers.observed
        served = {item.key.address for name in services for item in tables.states[name].served if item.key in observed}
        return filter(served.__contains__, table.pending)

    def may_be_removed(self, table: Table[Address, Owner, bool], circumstances: Circumstances) -> Iterable[Address]:
        """The surplus addresses that may be removed (rule 2).

        An address may be removed only if it is no witness of a virtual server. If a service address must stay local, its old
        binding (device or route) may be removed only after the desired binding has been added.
        """
        if not circumstances.has_observed_all:
            return ()
        reasons = (circumstances.keeping, circumstances.witnesses.addresses, *(one.pending for one in self.all.bindings.values()))
        return (address for address in table.surplus if not any(address in reason for reason in reasons))

    def items(self, _table: Table[Address, Owner, bool], keys: tuple[Any, ...]) -> Iterable[Item]:
        """Puts all of the given addresses into a single item, so that one operation covers them."""
        return (self.classes[0](keys),)


class Routes(Addresses):
    """Local routes, each of which leads to one service address."""

    classes: ClassVar[tuple[type, ...]] = (LocalRoutes,)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records the routes that a reading has found."""
        if observed.routes is not None:
            yield from self.objects.observing(dict.fromkeys(observed.routes, True))
