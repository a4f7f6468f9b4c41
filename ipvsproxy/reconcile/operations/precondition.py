"""Objects that must be in force before an operation. The order of one plan is not enough, since operations can fail.

Rule 1: a virtual server for certain sources only is not added before its source ranges are in force.
Rule 2: for an existing virtual server, admitted sources are never shut out: its firewall entry comes after the ranges and the
rules, and goes before them; old ranges go after new ones are in force.
Rule 3: tracked flows are cleaned after the kernel has stopped using the real servers that they must leave: flows that begin in
between would stay.
Rule 4: traffic to another node is masqueraded, or its answers would not return through this node. The entry that exempts traffic
from masquerading comes when no undesired real server gets traffic, and real servers come when the entry has gone.
Rule 5: an address is local as soon as it is on our device or a local route leads to it. Without a virtual server there, a program
of this host that listens on the Service's port would answer. The rules that close the host's ports leave out those of Services.
Rule 6: a packet gets a mark only while the virtual server of the mark has its real servers. Before the virtual server is added,
the entry that shows that it is ours is in force. It gets real servers once the kernel has added it: if another program has made
one by this mark in the meantime, that one stays as it is. While an undesired entry still gives its mark, as perhaps at an address
of another Service, the virtual server does not change. Sets that only scopes use go when no rule names them.
Rule 7: an address that is to be local by a route stays on our device until the route is in force, and the other way round. In
between it would not be local, and nearly every connection would break.
"""

import itertools
from collections.abc import Callable, Collection, Iterable

from ipvsproxy.model.kernel import Flow
from ipvsproxy.model.net import Address
from ipvsproxy.model.rules import Rule, TakeMark
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.sets import IP_SETS, IpSet, MarkedEntry, SetEntry, SetKind, mark_entry
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey
from ipvsproxy.reconcile.operations import order
from ipvsproxy.reconcile.tables.node import Keep, Tables
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.reconcile.virtual_servers import ownership

_HasRanges = Callable[[SetEntry], bool]


def lacking_ranges(tables: Tables) -> Collection[VirtualServerKey | None]:
    """The virtual servers of which an entry of a source range is missing."""
    return {ownership.virtual_server_of(entry) for name in order.RANGE_SETS for entry in tables.entries[name].pending}


def ranges_in_force(tables: Tables) -> _HasRanges:
    """A test whether all admitted sources of a virtual server pass its firewall entry."""
    without_rules = {family for family in tables.skeletons.pending if tables.lacks_rules(family)}
    lacking = lacking_ranges(tables)
    return lambda firewall: (
        IP_SETS[firewall.set].family not in without_rules and ownership.virtual_server_of(firewall) not in lacking
    )


def held_back(tables: Tables, has_ranges: _HasRanges) -> Collection[VirtualServerKey]:
    """The desired, missing virtual servers that may not be added yet (rule 1)."""
    if not any(tables.entries[name].desired for name in order.FIREWALL_SETS):
        return frozenset()

    def waits(firewall: SetEntry) -> bool:
        table = tables.entries[firewall.set]
        return firewall in table.desired and (firewall in table.pending or not has_ranges(firewall))

    table = tables.virtual_servers
    return {key for key in table.pending if key not in table.observed and waits(_firewall_entry(key))}


def may_become_local(tables: Tables, binding: Table[Address, Owner, bool]) -> Collection[Address]:
    """The pending addresses of a binding that have a virtual server of one of their owners (rule 5)."""
    observed = tables.virtual_servers.observed
    services = {owner.service for address in binding.pending for owner in binding.owners_of(address)}
    served = {item.key.address for name in services for item in tables.states[name].served if item.key in observed}
    return tuple(address for address in binding.pending if address in served)


def stays_local(tables: Tables, address: Address) -> bool:
    """Whether an address is local in the desired way, or is not to be local (rule 7)."""
    return not any(address in table.pending for table in tables.bindings.values())


def may_be_added(tables: Tables, name: str, has_ranges: _HasRanges) -> Iterable[SetEntry]:
    """The pending entries of one set that shut out no admitted source (rule 2), and lose no answers (rule 4)."""
    table = tables.entries[name]
    entries = table.pending
    if name in order.FIREWALL_SETS:
        return filter(has_ranges, entries)
    if name in order.LOCAL_SETS:
        elsewhere = _leading_elsewhere(tables, {owner.service for owner in map(table.desired.__getitem__, entries)})
        return (entry for entry in entries if (table.desired[entry].service, _names(entry)) not in elsewhere)
    if name in order.SCOPE_SETS:
        # The kernel has one entry for each of these, whatever its mark: the removal of the old one would remove the new one.
        taken = {ownership.virtual_server_of(entry) for entry in table.surplus}
        return (
            entry for entry in entries if ownership.virtual_server_of(entry) not in taken and _is_served_by_mark(tables, entry)
        )
    return entries


def _is_served_by_mark(tables: Tables, entry: SetEntry) -> bool:
    table, key = tables.virtual_servers, _mark_given_by(entry)
    return key is not None and key in table.observed and key not in table.pending


def _mark_given_by(entry: SetEntry) -> FirewallMark | None:
    return FirewallMark.of(IP_SETS[entry.set].family, entry.mark) if isinstance(entry, MarkedEntry) else None


def is_witnessed(tables: Tables, key: FirewallMark) -> bool:
    """Whether the entry is in force that shows that this virtual server is ours (rule 6)."""
    entry = mark_entry(key)
    return entry in tables.entries[entry.set].observed


def still_given(tables: Tables) -> Collection[FirewallMark]:
    """The marks that packets still get by an undesired entry (rule 6)."""
    unequal = (table for name, table in tables.unequal_entries() if name in order.SCOPE_SETS)
    return {mark for table in unequal for entry in table.surplus if (mark := _mark_given_by(entry)) is not None}


def may_be_destroyed(tables: Tables, ip_set: IpSet) -> bool:
    """Whether a set is empty, and no rule that is in force names it (rule 6)."""
    if tables.entries[ip_set.name].observed or ip_set.family in tables.skeletons.pending:
        return False
    desired = tables.skeletons.desired.get(ip_set.family)  # and in force, since it is not pending
    rules = itertools.chain.from_iterable(desired.chains.values()) if desired else ()
    return not any(_names_set(rule, ip_set.name) for rule in rules)


def _names_set(rule: Rule, name: str) -> bool:
    target = rule.target
    return (rule.set is not None and rule.set.set == name) or (isinstance(target, TakeMark) and target.match.set == name)


def may_be_removed(tables: Tables, entry: SetEntry, lacking: Collection[VirtualServerKey | None]) -> bool:
    """False for a source range while it alone may admit a source (rule 2). ``lacking`` are those of ``lacking_ranges``."""
    key = ownership.virtual_server_of(entry) if entry.set in order.RANGE_SETS else None
    if key is None:
        return True
    firewall = _firewall_entry(key)
    table = tables.entries[firewall.set]
    return firewall not in table.observed or (firewall in table.desired and key not in lacking)


def not_masqueraded_yet(tables: Tables) -> Collection[VirtualServerKey]:
    """Virtual servers that must not get real servers while an undesired entry is still there (rule 4)."""
    going = {_names(entry) for name, table in tables.unequal_entries() if name in order.LOCAL_SETS for entry in table.surplus}
    if not going:
        return frozenset()
    return {key for key in tables.virtual_servers.pending if key in going or ownership.node_port(key) in going}


def may_be_cleaned(tables: Tables) -> Iterable[tuple[Flow, Keep]]:
    """The pending flows whose virtual servers exist without a real server that is neither kept nor desired (rule 3).

    Packets of a flow come to the virtual server of its address, or to the one whose mark the address gives.
    """
    table, flows = tables.virtual_servers, tables.flows
    marks = {
        (name, ownership.virtual_server_of(entry)): _mark_given_by(entry)
        for name in {flows.desired[flow].owner.service for flow in flows.pending}
        if tables.states[name].rare.scopes
        for entry in tables.states[name].entries
        if isinstance(entry, MarkedEntry)
    }
    for flow in flows.pending:
        keep, key = flows.desired[flow], VirtualServerKey(flow.protocol, flow.address, flow.port)
        if all(
            one in table.observed
            and table.observed[one].real_servers.keys() <= keep.real_servers | table.desired[one].real_servers
            for one in (key, marks.get((keep.owner.service, key)))
            if one is not None
        ):
            yield flow, keep


def _leading_elsewhere(
    tables: Tables, services: Iterable[ServiceName]
) -> Collection[tuple[ServiceName, VirtualServerKey | ownership.NodePort | None]]:
    """Virtual servers and node ports of Services whose new connections may go to an undesired real server."""
    table = tables.virtual_servers
    return {
        (name, named)
        for name in services
        for key in (item.key for item in tables.states[name].served)
        if key in table.observed and table.observed[key].real_servers is not (desired := table.desired[key]).weights
        if any(weight and one not in desired.real_servers for one, weight in table.observed[key].real_servers.items())
        for named in (key, ownership.node_port(key))
    }


def _names(entry: SetEntry) -> VirtualServerKey | ownership.NodePort | None:
    """The virtual server or node port that an entry of ``LOCAL_SETS`` names."""
    return ownership.node_port_of(entry) or ownership.virtual_server_of(entry)


def _firewall_entry(key: VirtualServerKey) -> SetEntry:
    """The entry that puts the source ranges of a virtual server in force."""
    return SetEntry(IpSet(SetKind.LOAD_BALANCER_FIREWALL, key.address.family).name, key.address, key.protocol, key.port)
