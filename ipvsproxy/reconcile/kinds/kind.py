"""What each kind of kernel object declares once: its tables, the stages and preconditions of its operations, and its differences.

Nothing else tells kinds apart. ``kinds/node_tables.py`` lists them.

The stages give the order of one plan. Additions come before removals, a restriction comes before the object that it restricts:

* Rules name sets, so sets come first. A rule about an empty set has no effect, so entries come before rules.
* Source ranges are in force before the address that they guard is reachable, and no admitted client is ever shut out: first the
  ranges, then the rules, then the set that sends packets to them, then the virtual server.
* A virtual server and its real servers come before its address. Otherwise clients would be refused in between.
* On removal, the virtual server goes first, then its entries and its address. These are its witnesses: they show a later process
  that the virtual server is ours. Local routes have the stages of addresses: each may take the place of the other.
* A packet gets a mark only while the virtual server of that mark has its real servers. Without a mark, it comes to the virtual
  server of its address.

The order of one plan is not enough, since operations can fail: a precondition asks for objects that must be in force.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ipvsproxy.model import kind
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.rules import ObservedRule
from ipvsproxy.model.service import NODE_OWNER, Owner
from ipvsproxy.model.sets import IP_SETS, SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import each
from ipvsproxy.model.virtual_servers import FirewallMark, VirtualServerKey
from ipvsproxy.reconcile.tables.table import PresenceTable, Table
from ipvsproxy.reconcile.virtual_servers import ownership

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

MISSING = "missing"
STALE = "nothing"
"""The desired value of an observed object of ours that serves no Service."""

DescribeRule = Callable[[ObservedRule, Family], str]
"""Writes a rule as the operator's tools print it."""


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
    """One kernel object whose two sides differ. ``owner`` None: it is not desired, or the node itself needs it."""

    kind: str
    name: str
    owner: Owner | None = None
    desired: str
    observed: str

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner and self.owner.service.namespace else ""
        return f"{self.kind} {self.name}{owner}: desired {self.desired}, observed {self.observed}"


class Circumstances:
    """The circumstances of one plan.

    ``has_observed_all``: every kind of witness of virtual servers has been read once. ``keeping`` are entries, addresses and
    local routes that stay for now.
    """

    def __init__(self, tables: "NodeTables", *, has_observed_all: bool = True, keeping: Collection[object] = ()) -> None:
        self.has_observed_all = has_observed_all
        self.keeping = keeping
        self._tables = tables

    @functools.cached_property
    def witnesses(self) -> ownership.Witnesses:
        """The objects that show that undesired virtual servers are ours."""
        return ownership.Witnesses(self._tables.virtual_servers.surplus)

    @functools.cached_property
    def still_given(self) -> Collection[FirewallMark]:
        """The marks that packets still get by an undesired entry."""
        surplus = self._tables.of_entries.surplus(ownership.SCOPE_SETS)
        return {mark for entry in surplus if (mark := ownership.mark_given_by(entry)) is not None}

    def has_ranges(self, firewall: SetEntry) -> bool:
        """Whether all admitted sources of a virtual server pass its firewall entry."""
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
        """The virtual servers of which an entry of a source range is missing."""
        tables = (self._tables.entries[name] for name in ownership.RANGE_SETS)
        return {ownership.virtual_server_of(entry) for table in tables for entry in table.pending}


class ReconciledKind:
    """One kind of kernel object on one node.

    ``classes`` are the classes of its items, ``stages`` the stages of its verbs: a verb without one is never planned.
    ``is_witness``: its objects show which virtual servers are ours. ``tables`` are its tables; ``all`` are those of all kinds.
    """

    classes: ClassVar[tuple[type, ...]]
    stages: ClassVar[Mapping[Verb, Stage]]
    is_witness: ClassVar[bool] = False

    def __init__(self, all_tables: "NodeTables", *tables: Table[Any, Any, Any]) -> None:
        self.all = all_tables
        self.tables = tables
        self.name = kind.of(self.classes[0]).name
        """The name in log lines, metrics and documents."""

    def table(self, item: Any) -> Table[Any, Any, Any]:
        """The table of an item's objects."""
        del item
        return self.tables[0]

    def place(self, item: Any) -> tuple[Table[Any, Any, Any], Any]:
        """The table of an object, and its key there.

        Raises:
            ValueError: the item is several objects.
        """
        return self.table(item), item.key

    def stage(self, operation: Operation) -> Stage:
        """The stage of an operation on an object of this kind.

        Raises:
            KeyError: such an operation is never planned.
        """
        return self.stages[operation.verb]

    def identity(self, item: Any) -> object:
        """What identifies the objects of an item, whatever their values: failures are counted by it."""
        return item.key

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in what a reading shows of this kind, in steps. What was not read, or could not be read, does not change."""
        del observed
        return iter(())

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """The operations for pending keys that may be done now: here, the desired value of each."""
        del circumstances
        (table,) = self.tables
        return (Operation(Verb.SET, table.desired[key]) for key in table.pending)

    def removals(self, circumstances: Circumstances) -> Iterator[Operation]:
        """The operations for surplus keys that may be done now."""
        del circumstances
        return iter(())

    def settle(self, verb: Verb, item: Any) -> Iterable[None]:
        """Books an operation that the kernel has done, in steps: here, the new value."""
        del verb
        self.tables[0].confirm(item.key, item.in_force)
        return ()

    def settle_failure(self, outcome: Outcome) -> bool:
        """Takes in a failure. Returns False if the operation is to be tried again later."""
        del outcome
        return False

    def differences(self) -> Iterator[Difference]:
        """The differences between the two sides, in words. The tables decide what a difference is, as for operations."""
        return iter(())

    def difference(self, name: str, desired: str, observed: str, owner: Owner | None = None, *, of: str = "") -> Difference:
        """A difference of this kind, or of the kind ``of``."""
        owner = None if owner == NODE_OWNER else owner
        return Difference(kind=of or self.name, name=name, owner=owner, desired=desired, observed=observed)


class PresenceKind(ReconciledKind):
    """A kind of which only presence counts. Items are one object each, or several that share a class."""

    def __init__(self, all_tables: "NodeTables", names: Iterable[str] = ("",)) -> None:
        """``names`` are those of the tables, as they stand before their objects in texts for people."""
        self.names: Mapping[Table[Any, Owner, bool], str] = {
            PresenceTable(self.is_protected, all_tables.unequal): name for name in names
        }
        super().__init__(all_tables, *self.names)

    def is_protected(self, key: Any) -> bool:
        """Whether an object is never removed."""
        del key
        return False

    def may_be_added(self, table: Table[Any, Owner, bool], circumstances: Circumstances) -> Iterable[Any]:
        """The pending objects of a table that may be added now."""
        del circumstances
        return table.pending

    def may_be_removed(self, table: Table[Any, Owner, bool], circumstances: Circumstances) -> Iterable[Any]:
        """The surplus objects of a table that may be removed now."""
        del circumstances
        return table.surplus

    def items(self, table: Table[Any, Owner, bool], keys: tuple[Any, ...]) -> Iterable[Item]:
        """The items of operations on these objects, one or more, of one table: here, each object."""
        del table
        return keys

    def unequal(self) -> list[Table[Any, Owner, bool]]:
        """The tables with pending or surplus objects."""
        return [table for table in self.all.unequal if table in self.names]

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Adds pending objects."""
        for table in self.unequal():
            if keys := tuple(self.may_be_added(table, circumstances)):
                yield from (Operation(Verb.ADD, item) for item in self.items(table, keys))

    def removals(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Removes surplus objects."""
        for table in self.unequal():
            if keys := tuple(self.may_be_removed(table, circumstances)):
                yield from (Operation(Verb.REMOVE, item) for item in self.items(table, keys))

    def settle(self, verb: Verb, item: Any) -> Iterable[None]:
        """Books the presence of an item's objects."""
        table, value = self.table(item), None if verb is Verb.REMOVE else True
        return each(functools.partial(table.confirm, value=value), self.identity(item))

    def identity(self, item: Any) -> Collection[Any]:
        """The keys of all objects."""
        return getattr(item, "keys", None) or (item.key,)

    def label(self, table: Table[Any, Owner, bool], key: object) -> str:
        """The name of an object for people."""
        return f"{self.names[table]} {key}".lstrip()

    def differences(self) -> Iterator[Difference]:
        """Absent objects, and those that serve no Service."""
        for table in self.tables:
            for key in table.pending:
                yield self.difference(self.label(table, key), "present", MISSING, table.desired[key])
            for key in table.surplus:
                yield self.difference(self.label(table, key), STALE, "present")
