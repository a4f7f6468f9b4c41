"""From pending and surplus keys to operations, in one walk. Their order is the business of ``order``."""

import itertools
from collections.abc import Collection, Iterable, Iterator

from ipvsproxy.model.kernel import FlowCleaning
from ipvsproxy.model.plan import KINDS, Operation, Verb, one_by_one
from ipvsproxy.model.sets import IpSet, SetEntries
from ipvsproxy.model.virtual_servers import FirewallMark, RealServers
from ipvsproxy.reconcile.operations import precondition
from ipvsproxy.reconcile.tables.node import Tables
from ipvsproxy.reconcile.virtual_servers import diff, ownership
from ipvsproxy.reconcile.virtual_servers.drain import Drains


def desired_operations(tables: Tables, drains: Drains, *, together: bool) -> Iterator[Operation]:
    """The operations for desired keys that may be done now.

    ``together``: several entries of one set are one operation, and so are several addresses or local routes.
    """
    yield from _foundation(tables)
    has_ranges = precondition.ranges_in_force(tables)
    for name, _ in tables.unequal_entries():
        entries = tuple(precondition.may_be_added(tables, name, has_ranges))
        if entries:
            yield from _split(Operation(Verb.ADD, SetEntries(name, entries)), together=together)
    held_back = precondition.held_back(tables, has_ranges)
    not_masqueraded_yet = precondition.not_masqueraded_yet(tables)
    still_given = precondition.still_given(tables)
    virtual_servers = tables.virtual_servers
    for key in virtual_servers.pending:
        if isinstance(key, FirewallMark) and (key in still_given or not precondition.is_witnessed(tables, key)):
            continue
        if key not in held_back:
            desired, observed = virtual_servers.desired[key], virtual_servers.observed.get(key)
            operations = diff.virtual_server_operations(key, desired, observed, drains.may_remove)
            if observed is None and isinstance(key, FirewallMark):
                operations = itertools.islice(operations, 1)  # the virtual server itself
            yield from itertools.filterfalse(_gives_traffic, operations) if key in not_masqueraded_yet else operations
    for object_class, binding in tables.bindings.items():
        addresses = tuple(precondition.may_become_local(tables, binding))
        if addresses:
            yield from _split(Operation(Verb.ADD, object_class(addresses)), together=together)
    for flow, keep in precondition.may_be_cleaned(tables):
        yield Operation(Verb.REMOVE, FlowCleaning(flow, keep.real_servers))


def _split(operation: Operation, *, together: bool) -> Iterable[Operation]:
    return (operation,) if together else one_by_one((operation,))


def _gives_traffic(operation: Operation) -> bool:
    """Whether an operation gives a real server new connections."""
    item = operation.item
    return isinstance(item, RealServers) and operation.verb is not Verb.REMOVE and item.weight > 0


def _foundation(tables: Tables) -> Iterator[Operation]:
    """The operations for objects that the node needs with any Services.

    Additions in tables of presence, else the desired value.
    """
    given_up = tables.settings_given_up
    for object_class, table in tables.foundation:
        verb = Verb.ADD if Verb.ADD in KINDS[object_class].stages else Verb.SET
        for key in itertools.filterfalse(given_up.__contains__, table.pending):
            yield Operation(verb, key if verb is Verb.ADD else table.desired[key])


def surplus_operations(
    tables: Tables, drains: Drains, *, has_observed_all: bool, keeping: Collection[object], together: bool
) -> Iterator[Operation]:
    """The removals. ``has_observed_all``: every kind of witness of virtual servers has been read once.

    ``keeping`` are entries, addresses and local routes that stay for now. ``together``: as for ``desired_operations``.
    """
    going, still_given = tables.virtual_servers.surplus, precondition.still_given(tables)
    for key in going:
        if key in still_given:
            continue
        observed = tables.virtual_servers.observed[key]
        yield from diff.virtual_server_operations(key, None, observed, drains.may_remove)
    for _, table in tables.foundation:
        for key in table.surplus:
            if not isinstance(key, IpSet) or precondition.may_be_destroyed(tables, key):
                yield Operation(Verb.REMOVE, key)
    if not has_observed_all:
        return
    witnesses, lacking = ownership.Witnesses(going), precondition.lacking_ranges(tables)
    for name, table in tables.unequal_entries():
        entries = tuple(
            entry
            for entry in table.surplus
            if entry not in keeping and not witnesses.need(entry) and precondition.may_be_removed(tables, entry, lacking)
        )
        if entries:
            yield from _split(Operation(Verb.REMOVE, SetEntries(name, entries)), together=together)
    for object_class, binding in tables.bindings.items():
        addresses = tuple(
            address
            for address in binding.surplus
            if address not in keeping and address not in witnesses.addresses and precondition.stays_local(tables, address)
        )
        if addresses:
            yield from _split(Operation(Verb.REMOVE, object_class(addresses)), together=together)
