"""The kinds for sets, for the enlarged copy of a set that a killed process has left behind, and for set entries.

The entries of each set are in a separate table.

Rule 1: clients in the source ranges of an existing virtual server (its admitted sources) are never blocked. The firewall entry of
a virtual server with source ranges is added after the ranges and the rules, and removed before them. Old ranges are removed only
after the new ranges have been added to the kernel.
Rule 2: traffic to another node is masqueraded, because otherwise its replies would not return through this node. An entry that
exempts traffic from masquerading is added only after undesired real servers have stopped getting traffic. If an undesired entry
exempts the traffic of real servers from masquerading, the real servers are added only after the entry has been removed.
Rule 3: a packet gets a mark only while the virtual server of the mark has its real servers.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ipvsproxy.model.plan import Item, Operation, Verb
from ipvsproxy.model.rules import Rule, TakeMark
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, SET_COPY, IpSet, SetCopy, SetEntries, SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.declaration import MISSING, Circumstances, Difference, PresenceKind, Stage
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.reconcile.virtual_servers import ownership

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

_STAGES: Mapping[tuple[Verb, str], Stage] = (
    {(Verb.ADD, name): Stage.SOURCE_RANGES for name in ownership.RANGE_SETS}
    | {(Verb.ADD, name): Stage.FIREWALL_ENTRIES for name in ownership.FIREWALL_SETS}
    | {(Verb.REMOVE, name): Stage.FIREWALL_REMOVALS for name in ownership.FIREWALL_SETS}
    | {(Verb.ADD, name): Stage.MARKS for name in ownership.SCOPE_SETS}
    | {(Verb.REMOVE, name): Stage.MARK_REMOVALS for name in ownership.SCOPE_SETS}
)
"""The stages of operations on entries, by verb and set. For all other verbs and sets, ``Entries.stages`` applies."""


class Entries(PresenceKind[SetEntry]):
    """The entries of all sets; there is one table for each set."""

    classes: ClassVar[tuple[type, ...]] = (SetEntries,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.ENTRIES, Verb.REMOVE: Stage.ENTRY_REMOVALS}
    is_witness = True

    def __init__(self, all_tables: "NodeTables") -> None:
        super().__init__(all_tables, IP_SETS)
        self.by_set = {name: table for table, name in self.names.items()}

    def table(self, item: SetEntries) -> Table[SetEntry, Owner, bool]:
        """The table of the set to which the given entries belong."""
        return self.by_set[item.set]

    def items(self, table: Table[SetEntry, Owner, bool], keys: tuple[Any, ...]) -> Iterable[Item]:
        """Puts all of the given entries into a single item, so that one operation covers them."""
        return (SetEntries(self.names[table], keys),)

    def stage(self, operation: Operation) -> Stage:
        """The stage of an operation on entries; the stage depends on the set of the entries."""
        verb, item = operation
        assert isinstance(item, SetEntries)  # noqa: S101 - all items of this kind are ``SetEntries``
        return _STAGES.get((verb, item.set)) or self.stages[verb]

    def surplus(self, sets: Collection[str]) -> Iterator[SetEntry]:
        """The surplus entries of some sets."""
        return (entry for table in self.unequal() if self.names[table] in sets for entry in table.surplus)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records the entries that a reading of all or some sets has found."""
        if observed.sets is not None:
            for name, table in self.by_set.items():
                yield from table.observing(dict.fromkeys(observed.sets.get(name, ()), True))
        for name, some in observed.some_sets.items():
            yield from self.by_set[name].observing(dict.fromkeys(some or (), True))

    def may_be_added(self, table: Table[SetEntry, Owner, bool], circumstances: Circumstances) -> Iterable[SetEntry]:
        """The pending entries that may be added now (rules 1 to 3).

        When one of these entries is added, no admitted source is shut out, no answer is lost, and no packet is marked too early.
        """
        name = self.names[table]
        entries = table.pending
        if name in ownership.FIREWALL_SETS:
            return filter(circumstances.has_ranges, entries)
        if name in ownership.LOCAL_SETS:
            elsewhere = self._leading_elsewhere({table.desired[entry].service for entry in entries})
            return (entry for entry in entries if (table.desired[entry].service, ownership.named_by(entry)) not in elsewhere)
        if name in ownership.SCOPE_SETS:
            # A new entry waits until the old entry for its address and port is removed. The kernel identifies an entry by its
            # address and port, and not by its mark, so a later removal of the old entry would also remove the new entry.
            taken = {ownership.virtual_server_of(entry) for entry in table.surplus}
            return (
                entry for entry in entries if ownership.virtual_server_of(entry) not in taken and self._is_served_by_mark(entry)
            )
        return entries

    def _is_served_by_mark(self, entry: SetEntry) -> bool:
        table, key = self.all.virtual_servers, ownership.mark_given_by(entry)
        return key is not None and key in table.observed and key not in table.pending

    def _leading_elsewhere(self, services: Iterable[ServiceName]) -> Collection[tuple[ServiceName, ownership.Named]]:
        """The virtual servers and node ports from which an undesired real server of a Service may still get connections."""
        table = self.all.virtual_servers
        return {
            (name, named)
            for name in services
            for key in (item.key for item in self.all.states[name].served)
            if key in table.observed and table.observed[key].real_servers is not (desired := table.desired[key]).weights
            if any(weight and one not in desired.real_servers for one, weight in table.observed[key].real_servers.items())
            for named in (key, ownership.node_port(key))
        }

    def may_be_removed(self, table: Table[SetEntry, Owner, bool], circumstances: Circumstances) -> Iterable[SetEntry]:
        """The surplus entries that are no witness of a virtual server.

        A source range is included only if no admitted source depends on the range (rule 1).
        """
        if not circumstances.has_observed_all:
            return ()
        has_ranges = self.names[table] in ownership.RANGE_SETS
        return (
            entry
            for entry in table.surplus
            if entry not in circumstances.keeping
            and not circumstances.witnesses.need(entry)
            and not (has_ranges and self._alone_admits(entry, circumstances))
        )

    def _alone_admits(self, entry: SetEntry, circumstances: Circumstances) -> bool:
        key = ownership.virtual_server_of(entry)
        if key is None:
            return False
        firewall = ownership.firewall_entry(key)
        table = self.by_set[firewall.set]
        return firewall in table.observed and (firewall not in table.desired or key in circumstances.lacking_ranges)


class Sets(PresenceKind[IpSet]):
    """The sets. A set that only scopes use is removed when it is empty and no rule refers to it."""

    classes: ClassVar[tuple[type, ...]] = (IpSet,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.SETS, Verb.REMOVE: Stage.SET_REMOVALS}

    def is_protected(self, key: IpSet) -> bool:
        """Whether the set must stay because kube-proxy has a set of the same name."""
        return key.kind not in SCOPE_KINDS

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records which sets a reading has found."""
        if observed.sets is not None:
            yield from self.objects.observing({IP_SETS[name]: True for name in observed.sets})
        some = {IP_SETS[name]: None if entries is None else True for name, entries in observed.some_sets.items()}
        yield from self.objects.observing_some(some)

    def may_be_removed(self, table: Table[IpSet, Owner, bool], _circumstances: Circumstances) -> Iterable[IpSet]:
        """The surplus sets that are empty and that rules do not use."""
        return filter(self._is_unused, table.surplus)

    def _is_unused(self, ip_set: IpSet) -> bool:
        tables = self.all
        if tables.entries[ip_set.name].observed or ip_set.family in tables.skeletons.pending:
            return False
        desired = tables.skeletons.desired.get(ip_set.family)  # the desired rules are in the kernel, because no rules are pending
        rules = itertools.chain.from_iterable(desired.chains.values()) if desired else ()
        return not any(_names_set(rule, ip_set.name) for rule in rules)

    def differences(self) -> Iterator[Difference]:
        """Yields desired sets that are absent or have another type."""
        for ip_set in self.objects.pending:
            yield self.difference(str(ip_set), str(ip_set.type), f"{MISSING} or of another type")


class SetCopies(PresenceKind[SetCopy]):
    """Copies of sets; a copy is never desired."""

    classes: ClassVar[tuple[type, ...]] = (SetCopy,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.REMOVE: Stage.ADDRESS_REMOVALS}

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records whether a reading has found the copy of a set."""
        if observed.set_copy is not None:
            yield from self.objects.observing({SET_COPY: True} if observed.set_copy else {})


def _names_set(rule: Rule, name: str) -> bool:
    target = rule.target
    return (rule.set is not None and rule.set.set == name) or (isinstance(target, TakeMark) and target.match.set == name)
