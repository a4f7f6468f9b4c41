"""What has to be in force before something else may be done, where the order of one plan is not enough: operations can fail.

Rule 1: a virtual server that only certain sources may reach is not added before its source ranges are in force.
Rule 2: where it is there already, nobody whom the ranges let in is shut out for a moment: its firewall entry comes after the
ranges and the rules, and goes before them; of changed ranges the old ones go when the new ones are in force.
Rule 3: tracked flows are cleaned when the kernel leads nobody any more to a real server that they may not go on with: those
that begin in between would stay.
Rule 4: what is led to another node is masqueraded, or its answers would not find back through this one. The entry that keeps
traffic from being masqueraded comes when no real server that must not be there gets any, and real servers come when it has gone.
Rule 5: an address is local as soon as it is on our device: without a virtual server there, whatever listens on this host on a
Service's port would answer in its place. The rules that close the host's ports leave out those of Services.
"""

from collections.abc import Collection, Iterable

from ipvsproxy.model.kernel import IP_SETS, Flow, IpSet, SetEntry, SetKind, VirtualServerKey
from ipvsproxy.model.net import Address
from ipvsproxy.reconcile import order, ownership
from ipvsproxy.reconcile.tables import Keep, Tables


def held_back(tables: Tables) -> Collection[VirtualServerKey]:
    """The virtual servers that are wanted and missing, and may not be added yet (rule 1)."""
    if not any(tables.entries[name].desired for name in order.FIREWALL_SETS):
        return frozenset()
    table = tables.virtual_servers
    return {key for key in table.pending if key not in table.observed and not _may_be_reached(tables, key)}


def may_be_bound(tables: Tables, address: Address) -> bool:
    """Whether an address has a virtual server (rule 5)."""
    observed = tables.virtual_servers.observed
    for owner in tables.addresses.owners_of(address):
        for item in tables.states[owner.service].served:
            key = item.key
            if key.address == address and key in observed:
                return True
    return False


def may_be_added(tables: Tables, name: str, entries: Iterable[SetEntry]) -> Iterable[SetEntry]:
    """Those entries of one set that shut out nobody whom the source ranges let in (rule 2), and lose no answers (rule 4)."""
    if name in order.FIREWALL_SETS:
        return (entry for entry in entries if _has_ranges_in_force(tables, entry))
    if name in order.LOCAL_SETS:
        return (entry for entry in entries if not _leads_elsewhere(tables, entry))
    return entries


def may_be_removed(tables: Tables, entry: SetEntry) -> bool:
    """False for a source range as long as it alone may let somebody in (rule 2)."""
    key = ownership.virtual_server_of(entry) if entry.set in order.RANGE_SETS else None
    if key is None:
        return True
    firewall = _firewall_entry(key)
    table = tables.entries[firewall.set]
    return firewall not in table.observed or (firewall in table.desired and _has_ranges_in_force(tables, firewall))


def not_masqueraded_yet(tables: Tables) -> Collection[VirtualServerKey]:
    """Virtual servers that must not get real servers as long as an entry is there that nobody wants any more (rule 4)."""
    going = {_names(entry) for name, table in tables.unequal_entries() if name in order.LOCAL_SETS for entry in table.surplus}
    if not going:
        return frozenset()
    return {key for key in tables.virtual_servers.pending if key in going or ownership.node_port(key) in going}


def leads_only_to(tables: Tables, flow: Flow, keep: Keep) -> bool:
    """Whether the virtual servers of a flow are there, without any real server that is neither kept nor wanted (rule 3)."""
    table = tables.virtual_servers
    return all(
        key in table.observed and table.observed[key].real_servers.keys() <= keep.real_servers | table.desired[key].real_servers
        for key in (item.key for item in tables.states[keep.owner.service].served)
        if key == VirtualServerKey(flow.protocol, flow.address, flow.port)
    )


def _leads_elsewhere(tables: Tables, entry: SetEntry) -> bool:
    """Whether new connections to what an entry names may go to a real server that is not wanted there."""
    table, named = tables.virtual_servers, _names(entry)
    return any(
        weight and real_server not in real_servers
        for key in (item.key for item in tables.states[tables.entries[entry.set].desired[entry].service].served)
        if key in table.observed and named in (key, ownership.node_port(key))
        for real_servers in (table.desired[key].real_servers,)
        for real_server, weight in table.observed[key].real_servers.items()
    )


def _names(entry: SetEntry) -> VirtualServerKey | ownership.NodePort | None:
    """What an entry of ``LOCAL_SETS`` is about."""
    return ownership.node_port_of(entry) or ownership.virtual_server_of(entry)


def _may_be_reached(tables: Tables, key: VirtualServerKey) -> bool:
    """Whether a virtual server has no source ranges, or has them in force."""
    firewall = _firewall_entry(key)
    table = tables.entries[firewall.set]
    return firewall not in table.desired or (firewall not in table.pending and _has_ranges_in_force(tables, firewall))


def _has_ranges_in_force(tables: Tables, firewall: SetEntry) -> bool:
    """Whether everybody whom the source ranges of a virtual server let in gets through the firewall that is wanted for it."""
    if IP_SETS[firewall.set].family in tables.skeletons.pending:
        return False
    key = ownership.virtual_server_of(firewall)
    state = tables.states[tables.entries[firewall.set].desired[firewall].service]
    return not any(
        entry in tables.entries[entry.set].pending
        for entry in state.entries
        if entry.set in order.RANGE_SETS and ownership.virtual_server_of(entry) == key
    )


def _firewall_entry(key: VirtualServerKey) -> SetEntry:
    """What makes the source ranges of a virtual server count."""
    return SetEntry(IpSet(SetKind.LOAD_BALANCER_FIREWALL, key.address.family).name, key.address, key.protocol, key.port)
