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
from collections.abc import Collection, Iterable

from ipvsproxy.model.kernel import Flow
from ipvsproxy.model.net import Address
from ipvsproxy.model.owner import Owner
from ipvsproxy.model.rules import Rule, TakeMark
from ipvsproxy.model.sets import IP_SETS, IpSet, MarkedEntry, SetEntry, SetKind, mark_entry
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.operations import order
from ipvsproxy.reconcile.tables.node import Keep, Tables
from ipvsproxy.reconcile.virtual_servers import ownership


def held_back(tables: Tables) -> Collection[VirtualServerKey]:
    """The desired, missing virtual servers that may not be added yet (rule 1)."""
    if not any(tables.entries[name].desired for name in order.FIREWALL_SETS):
        return frozenset()
    table = tables.virtual_servers
    return {key for key in table.pending if key not in table.observed and not _may_be_reached(tables, key)}


def may_become_local(tables: Tables, owners: Iterable[Owner], address: Address) -> bool:
    """Whether an address has a virtual server of one of these owners (rule 5)."""
    observed = tables.virtual_servers.observed
    for owner in owners:
        for item in tables.states[owner.service].served:
            key = item.key
            if key.address == address and key in observed:
                return True
    return False


def stays_local(tables: Tables, address: Address) -> bool:
    """Whether an address is local in the desired way, or is not to be local (rule 7)."""
    return not any(address in table.pending for table in tables.bindings.values())


def may_be_added(tables: Tables, name: str, entries: Iterable[SetEntry]) -> Iterable[SetEntry]:
    """The entries of one set that shut out no admitted source (rule 2), and lose no answers (rule 4)."""
    if name in order.FIREWALL_SETS:
        return (entry for entry in entries if _has_ranges_in_force(tables, entry))
    if name in order.LOCAL_SETS:
        return (entry for entry in entries if not _leads_elsewhere(tables, entry))
    if name in order.SCOPE_SETS:
        # The kernel has one entry for each of these, whatever its mark: the removal of the old one would remove the new one.
        taken = {ownership.virtual_server_of(entry) for entry in tables.entries[name].surplus}
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


def may_be_removed(tables: Tables, entry: SetEntry) -> bool:
    """False for a source range while it alone may admit a source (rule 2)."""
    key = ownership.virtual_server_of(entry) if entry.set in order.RANGE_SETS else None
    if key is None:
        return True
    firewall = _firewall_entry(key)
    table = tables.entries[firewall.set]
    return firewall not in table.observed or (firewall in table.desired and _has_all_ranges(tables, firewall))


def not_masqueraded_yet(tables: Tables) -> Collection[VirtualServerKey]:
    """Virtual servers that must not get real servers while an undesired entry is still there (rule 4)."""
    going = {_names(entry) for name, table in tables.unequal_entries() if name in order.LOCAL_SETS for entry in table.surplus}
    if not going:
        return frozenset()
    return {key for key in tables.virtual_servers.pending if key in going or ownership.node_port(key) in going}


def leads_only_to(tables: Tables, flow: Flow, keep: Keep) -> bool:
    """Whether the virtual servers of a flow exist without a real server that is neither kept nor desired (rule 3)."""
    table = tables.virtual_servers
    return all(
        key in table.observed and table.observed[key].real_servers.keys() <= keep.real_servers | table.desired[key].real_servers
        for key in (item.key for item in tables.states[keep.owner.service].served if _may_carry(item, flow))
    )


def _may_carry(item: VirtualServer, flow: Flow) -> bool:
    """Whether packets of a flow may come to a virtual server of its Service: to that of its address, or to one by mark."""
    if isinstance(item.key, FirewallMark):
        return item.marked is flow.protocol and item.key.family is flow.family
    return item.key == VirtualServerKey(flow.protocol, flow.address, flow.port)


def _leads_elsewhere(tables: Tables, entry: SetEntry) -> bool:
    """Whether new connections to a virtual server that an entry names may go to an undesired real server."""
    table, named = tables.virtual_servers, _names(entry)
    return any(
        weight and real_server not in real_servers
        for key in (item.key for item in tables.states[tables.entries[entry.set].desired[entry].service].served)
        if key in table.observed and named in (key, ownership.node_port(key))
        for real_servers in (table.desired[key].real_servers,)
        for real_server, weight in table.observed[key].real_servers.items()
    )


def _names(entry: SetEntry) -> VirtualServerKey | ownership.NodePort | None:
    """The virtual server or node port that an entry of ``LOCAL_SETS`` names."""
    return ownership.node_port_of(entry) or ownership.virtual_server_of(entry)


def _may_be_reached(tables: Tables, key: VirtualServerKey) -> bool:
    """Whether a virtual server has no source ranges, or has them in force."""
    firewall = _firewall_entry(key)
    table = tables.entries[firewall.set]
    return firewall not in table.desired or (firewall not in table.pending and _has_ranges_in_force(tables, firewall))


def _has_ranges_in_force(tables: Tables, firewall: SetEntry) -> bool:
    """Whether all admitted sources of a virtual server pass its desired firewall."""
    return not tables.lacks_rules(IP_SETS[firewall.set].family) and _has_all_ranges(tables, firewall)


def _has_all_ranges(tables: Tables, firewall: SetEntry) -> bool:
    """Whether no entry of a source range is missing that a virtual server's desired firewall admits."""
    key = ownership.virtual_server_of(firewall)
    state = tables.states[tables.entries[firewall.set].desired[firewall].service]
    return not any(
        entry in tables.entries[entry.set].pending
        for entry in state.entries
        if entry.set in order.RANGE_SETS and ownership.virtual_server_of(entry) == key
    )


def _firewall_entry(key: VirtualServerKey) -> SetEntry:
    """The entry that puts the source ranges of a virtual server in force."""
    return SetEntry(IpSet(SetKind.LOAD_BALANCER_FIREWALL, key.address.family).name, key.address, key.protocol, key.port)
