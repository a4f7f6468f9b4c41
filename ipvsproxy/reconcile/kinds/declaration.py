"""Declares a kind of kernel object: its tables, the stages and preconditions of its operations, and its differences.

Code that iterates over ``NodeTables.kinds`` treats all kinds in the same way. ``kinds/node_tables.py`` lists them.

The stages give the order of the operations within one plan. Additions come before removals, and an object that restricts another
object comes before the restricted object:

* Rules refer to sets by name, so sets come first. A rule about an empty set has no effect, so entries come before rules.
* Source ranges take effect before clients can reach the restricted address, and never shut out an admitted client. A virtual
  server with source ranges is programmed in this order: the ranges, the rules, the firewall entry that sends packets through the
  rules, and the virtual server.
* A virtual server and its real servers come before its address. If the address came first, the kernel would refuse clients for a
  moment.
* A virtual server is removed before its set entries and its address. The entries and the address are witnesses of the virtual
  server: they show a later process that the virtual server belongs to ipvsproxy. Local routes have the same stages as
  addresses, because a route may replace an address and vice versa.
* A packet gets a mark only while the virtual server of that mark has its real servers. A packet without a mark reaches the
  virtual server of its address.

The order within one plan is not sufficient, because operations can fail. Therefore an operation may have a precondition, which
names objects that must already exist in the kernel.
"""

import dataclasses
import enum
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from ipvsproxy.model.kind import KINDS
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.service import NODE_OWNER, Owner
from ipvsproxy.model.sets import IP_SETS, SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import each
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey
from ipvsproxy.reconcile.tables.table import K, PresenceTable, Table, V, W
from ipvsproxy.reconcile.virtual_servers import ownership

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

MISSING = "missing"
STALE = "nothing"
"""The value of ``Difference.desired`` if the object is observed but not desired."""


class Stage(enum.IntEnum):
    """The stage of an operation in a plan. Lower stages come first; operations of one stage keep their planned order."""

    SETTINGS = 0
    TIMEOUTS = 1
    DEVICE = 2
    SETS = 3
    MARK_REMOVALS = 4
    SOURCE_RANGES = 5
    ENTRIES = 6
    RULES = 7
    FIREWALL_ENTRIES = 8
    SERVERS = 9
    ADDRESSES = 10
    MARKS = 11
    REAL_SERVER_REMOVALS = 12
    VIRTUAL_SERVER_REMOVALS = 13
    FIREWALL_REMOVALS = 14
    ENTRY_REMOVALS = 15
    ADDRESS_REMOVALS = 16
    SET_REMOVALS = 17
    FLOWS = 18


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One kernel object whose desired and observed values differ.

    ``owner`` is None if the object is not desired, or if the node itself needs the object.
    """

    kind: str
    name: str
    owner: Owner | None = None
    desired: str
    observed: str

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner and self.owner.service.namespace else ""
        return f"{self.kind} {self.name}{owner}: desired {self.desired}, observed {self.observed}"


class Circumstances:
    """The facts on which the preconditions of one plan depend.

    ``has_observed_all`` means that every kind of witness of virtual servers has been read at least once. ``keeping`` has the set
    entries, addresses and local routes that the plan must not remove.
    """

    def __init__(self, tables: "NodeTables", *, has_observed_all: bool = True, keeping: Collection[object] = ()) -> None:
        self.has_observed_all = has_observed_all
        self.keeping = keeping
        self._tables = tables

    @functools.cached_property
    def witnesses(self) -> ownership.Witnesses:
        """The observed objects that show which of the undesired virtual servers belong to ipvsproxy."""
        return ownership.Witnesses(self._tables.virtual_servers.surplus)

    @functools.cached_property
    def still_given(self) -> Collection[FirewallMark]:
        """The marks that undesired set entries still give to packets."""
        surplus = self._tables.of_entries.surplus(ownership.SCOPE_SETS)
        return {mark for entry in surplus if (mark := ownership.mark_given_by(entry)) is not None}

    def has_ranges(self, firewall: SetEntry) -> bool:
        """Whether the kernel has the rules and source ranges that let all admitted sources pass this firewall entry."""
        return (
            IP_SETS[firewall.set].family not in self._without_rules
            and ownership.virtual_server_of(firewall) not in self.lacking_ranges
        )

    @functools.cached_property
    def _without_rules(self) -> Collection[object]:
        tables = self._tables
        return {family for family in tables.skeletons.pending if tables.of_rules.lacks(family)}

    @functools.cached_property
    def lacking_ranges(self) -> Collection[VirtualServerKey | None]:
        """The virtual servers for which a desired source-range entry is not in the kernel yet."""
        tables = (self._tables.entries[name] for name in ownership.RANGE_SETS)
        return {ownership.virtual_server_of(entry) for table in tables for entry in table.pending}


class ReconciledKind(Generic[K, V, W]):
    """One kind of kernel object on one node; the type variables ``K``, ``V`` and ``W`` are the same as in ``Table``.

    ``classes`` are the classes of the kind's items, and ``stages`` has a stage for each verb of its operations. An operation is
    planned only if ``stages`` has a stage for its verb. ``is_witness`` means that objects of the kind show which virtual servers
    belong to ipvsproxy. ``tables`` has the tables of the kind, and ``all`` has the tables of all kinds. ``objects`` is the first
    table; nearly every kind has only one table.

    By default, the node itself owns the objects, no object is ever removed, and an object needs an operation if its desired and
    observed values differ.
    """

    classes: ClassVar[tuple[type, ...]]
    stages: ClassVar[Mapping[Verb, Stage]]
    is_witness: ClassVar[bool] = False

    def __init__(self, all_tables: "NodeTables", names: Iterable[str] = ("",)) -> None:
        """``names`` are the names of the tables.

        Texts for people give the name of the table first, then the name of the object.
        """
        self.all = all_tables
        self.names: Mapping[Table[K, V, W], str] = {self.make_table(): name for name in names}
        self.tables = tuple(self.names)
        self.objects = self.tables[0]
        self.name = KINDS[self.classes[0]].name
        """The name of the kind in log lines, metrics and documents."""

    def make_table(self) -> Table[K, V, W]:
        """A new, empty table of the kind."""
        return Table(self.owner_of, self.differs, self.is_protected, self.all.unequal)

    def owner_of(self, _desired: V) -> Owner:
        """The owner that desires a value."""
        return NODE_OWNER

    def differs(self, desired: V, observed: W) -> bool:
        """Whether a desired value differs from an observed value."""
        return bool(desired != observed)

    def is_protected(self, _key: K) -> bool:
        """Whether an object must never be removed."""
        return True

    def table(self, _item: Any) -> Table[K, V, W]:
        """The table with the objects of an operation's item."""
        return self.objects

    def place(self, item: Any) -> tuple[Table[K, V, W], K]:
        """The table and the key of the only object in an operation's item.

        Raises:
            ValueError: the operation's item has several objects.
        """
        return self.table(item), item.key

    def stage(self, operation: Operation) -> Stage:
        """The stage of an operation on an object of the kind.

        Raises:
            KeyError: objects of the kind never get an operation with this verb.
        """
        return self.stages[operation.verb]

    def identity(self, item: Any) -> object:
        """The identity of the objects in an operation's item; it does not depend on the objects' values.

        Failures are counted for each identity.
        """
        return item.key

    def take_in(self, _observed: Observation) -> Iterator[None]:
        """Records what a reading has found about objects of this kind; yields after each piece of work.

        The tables keep the values of objects that were not read, or could not be read.
        """
        return iter(())

    def additions(self, _circumstances: Circumstances) -> Iterator[Operation]:
        """The operations that may be done now for pending keys.

        By default, each key gets one operation, which sets the desired value.
        """
        desired: Mapping[K, Any] = self.objects.desired
        return (Operation(Verb.SET, desired[key]) for key in self.objects.pending)

    def removals(self, _circumstances: Circumstances) -> Iterator[Operation]:
        """The operations that may be done now for surplus keys."""
        return iter(())

    def settle(self, _verb: Verb, item: Any) -> Iterable[None]:
        """Records an operation that the kernel has done; yields after each piece of work.

        By default, the new value of the object is recorded.
        """
        self.objects.confirm(item.key, item.in_force)
        return ()

    def settle_failure(self, _outcome: Outcome) -> bool:
        """Handles the failure of an operation. Returns false if the operation must be tried again later."""
        return False

    def differences(self) -> Iterator[Difference]:
        """The differences between desired and observed objects, in words.

        Differences and operations come from the same comparison of the tables.
        """
        return iter(())

    def difference(self, name: str, desired: str, observed: str, owner: Owner | None = None, *, of: str = "") -> Difference:
        """Makes a ``Difference`` of this kind, or of the kind that ``of`` names."""
        owner = None if owner == NODE_OWNER else owner
        return Difference(kind=of or self.name, name=name, owner=owner, desired=desired, observed=observed)


class PresenceKind(ReconciledKind[K, Owner, bool]):
    """A kind whose objects have no value, so that only the presence or absence of an object counts.

    The item of an operation names one object, or several objects of one class. By default, an observed object without an owner is
    removed.
    """

    def make_table(self) -> PresenceTable[K]:
        """A new, empty table of the kind."""
        return PresenceTable(self.is_protected, self.all.unequal)

    def is_protected(self, _key: K) -> bool:
        """Whether an object must never be removed."""
        return False

    def may_be_added(self, table: Table[K, Owner, bool], _circumstances: Circumstances) -> Iterable[K]:
        """The objects that are pending in a table and that may be added to the kernel now."""
        return table.pending

    def may_be_removed(self, table: Table[K, Owner, bool], _circumstances: Circumstances) -> Iterable[K]:
        """The objects that are surplus in a table and that may be removed from the kernel now."""
        return table.surplus

    def items(self, _table: Table[K, Owner, bool], keys: tuple[Any, ...]) -> Iterable[Item]:
        """Divides the objects of one table into items for operations; by default, each object gets a separate item."""
        return keys

    def unequal(self) -> list[Table[K, Owner, bool]]:
        """The tables that have pending or surplus objects."""
        return [table for table in self.all.unequal if table in self.names]

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Yields the operations that add the pending objects."""
        for table in self.unequal():
            if keys := tuple(self.may_be_added(table, circumstances)):
                yield from (Operation(Verb.ADD, item) for item in self.items(table, keys))

    def removals(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Yields the operations that remove the surplus objects."""
        for table in self.unequal():
            if keys := tuple(self.may_be_removed(table, circumstances)):
                yield from (Operation(Verb.REMOVE, item) for item in self.items(table, keys))

    def settle(self, verb: Verb, item: Any) -> Iterable[None]:
        """Records whether the objects of an operation are present now."""
        table, value = self.table(item), None if verb is Verb.REMOVE else True
        return each(functools.partial(table.confirm, value=value), self.identity(item))

    def identity(self, item: Any) -> Collection[Any]:
        """The keys of all objects that an operation's item contains."""
        return getattr(item, "keys", None) or (item.key,)

    def label(self, table: Table[K, Owner, bool], key: K) -> str:
        """The name of an object in texts for people."""
        return f"{self.names[table]} {key}".lstrip()

    def differences(self) -> Iterator[Difference]:
        """Yields desired objects that are absent, and observed objects that serve no Service."""
        for table in self.tables:
            for key in table.pending:
                yield self.difference(self.label(table, key), "present", MISSING, table.desired[key])
            for key in table.surplus:
                yield self.difference(self.label(table, key), STALE, "present")
