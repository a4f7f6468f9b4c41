"""What differs, as operations: the one walk over all pending and surplus keys. Order is ``order``'s, not this module's."""

import itertools
from collections.abc import Collection, Iterator

from ipvsproxy.model.kernel import BoundAddress, BoundAddresses, FlowCleaning, RealServer, RealServers, SetEntries
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.reconcile import diff, ownership, precondition
from ipvsproxy.reconcile.claims import TIMEOUTS, Claims
from ipvsproxy.reconcile.drain import Drains


def wanted(claims: Claims, drains: Drains, *, together: bool = True) -> Iterator[Operation]:
    """What is to be done for the keys that somebody wants, as far as it may be done now.

    ``together``: several entries of one set are one operation, and so are several addresses.
    """
    yield from _foundation(claims)
    for name, table in claims.unequal_entries():
        entries = tuple(precondition.may_be_added(claims, name, table.pending))
        if together and len(entries) > 1:
            yield Operation(Verb.ADD, SetEntries(name, entries))
        else:
            yield from (Operation(Verb.ADD, entry) for entry in entries)
    held_back = precondition.held_back(claims)
    not_masqueraded_yet = precondition.not_masqueraded_yet(claims)
    virtual_servers = claims.virtual_servers
    for key in virtual_servers.pending:
        if key not in held_back:
            wish, seen = virtual_servers.desired[key], virtual_servers.observed.get(key)
            operations = diff.virtual_server_operations(key, wish, seen, drains.is_over)
            yield from itertools.filterfalse(_gives_traffic, operations) if key in not_masqueraded_yet else operations
    addresses = tuple([address for address in claims.addresses.pending if precondition.may_be_bound(claims, address)])
    if together and len(addresses) > 1:
        yield Operation(Verb.ADD, BoundAddresses(addresses))
    else:
        yield from (Operation(Verb.ADD, BoundAddress(address)) for address in addresses)
    for flow in claims.flows.pending:
        keep = claims.flows.desired[flow]
        if precondition.leads_only_to(claims, flow, keep):
            yield Operation(Verb.REMOVE, FlowCleaning(flow, keep.real_servers))


def _gives_traffic(operation: Operation) -> bool:
    """Whether a real server gets new connections by this."""
    item = operation.item
    return isinstance(item, RealServers) or (
        isinstance(item, RealServer) and operation.verb is not Verb.REMOVE and item.weight > 0
    )


def _foundation(claims: Claims) -> Iterator[Operation]:
    given_up = claims.settings_given_up
    for path in itertools.filterfalse(given_up.__contains__, claims.sysctls.pending):
        yield Operation(Verb.SET, claims.sysctls.desired[path])
    if TIMEOUTS in claims.timeouts.pending:
        yield Operation(Verb.SET, claims.timeouts.desired[TIMEOUTS])
    for device in claims.devices.pending:
        yield Operation(Verb.ADD, device)
    for ip_set in claims.sets.pending:
        yield Operation(Verb.ADD, ip_set)
    for family in claims.skeletons.pending:
        yield Operation(Verb.SET, claims.skeletons.desired[family])


def surplus(claims: Claims, drains: Drains, *, has_seen_all: bool, keeping: Collection[object] = ()) -> Iterator[Operation]:
    """What is to be removed. ``has_seen_all``: whatever may witness that a virtual server is ours has been looked at once.

    ``keeping`` are entries and addresses that stay for now.
    """
    going = claims.virtual_servers.surplus
    for key in going:
        seen = claims.virtual_servers.observed[key]
        yield from diff.virtual_server_operations(key, None, seen, drains.is_over)
    yield from (Operation(Verb.REMOVE, copy) for copy in claims.copies.surplus)
    if not has_seen_all:
        return
    witnesses = ownership.Witnesses(going)
    for _, table in claims.unequal_entries():
        for entry in table.surplus:
            if entry not in keeping and not witnesses.need(entry) and precondition.may_be_removed(claims, entry):
                yield Operation(Verb.REMOVE, entry)
    for address in claims.addresses.surplus:
        if address not in keeping and address not in witnesses.addresses:
            yield Operation(Verb.REMOVE, BoundAddress(address))
