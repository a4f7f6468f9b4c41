"""The kinds of kernel objects: their names, their drivers, and the stages of their operations.

Each class of kernel objects declares its kind in the line above it. Every table by kind is derived from these declarations.

Additions come before removals, and a restriction comes before the object that it restricts:

* Rules name sets, so sets come first. A rule about an empty set has no effect, so entries come before rules.
* Source ranges are in force before the address that they guard is reachable, and no admitted client is ever shut out: first the
  ranges, then the rules, then the set that sends packets to them, then the virtual server.
* A virtual server and its real servers come before its address. Otherwise clients would be refused in between.
* On removal, the virtual server goes first, then its entries and its address. These are its witnesses: they show a later process
  that the virtual server is ours. Local routes have the stages of addresses: each may take the place of the other.
* A packet gets a mark only while the virtual server of that mark has its real servers. Without a mark, it comes to the virtual
  server of its address.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar


class DriverName(enum.StrEnum):
    """The drivers, by their names in metrics. ``kernel/node.py`` has an object for each."""

    IPVS = "ipvs"
    IPSET = "ipset"
    ADDRESSES = "addresses"
    ROUTES = "routes"
    SYSCTL = "sysctl"
    IPTABLES = "iptables"
    CONNTRACK = "conntrack"


class Stage(enum.IntEnum):
    """The stage of an operation in a plan. Lower stages come first."""

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


T = TypeVar("T")


class Kind:
    """A kind of kernel object.

    ``name`` is for log lines, metrics and documents, ``one`` and ``several`` are for people. ``stages`` has the stage of each
    verb; a verb without a stage is never planned.
    """

    def __init__(
        self,
        name: str,
        driver: DriverName,
        *,
        one: str = "",
        several: str = "",
        **stages: Stage,
    ) -> None:
        """The names of ``stages`` are verbs. By default, ``one`` is the name, and ``several`` is ``one`` with an s."""
        self.name = name
        self.driver = driver
        self.one = one or name
        self.several = several or f"{self.one}s"
        self.stages: Mapping[str, Stage] = stages

    def __call__(self, object_class: type[T]) -> type[T]:
        """Declare, as a decorator, that the objects of a class are of this kind."""
        _KINDS[object_class] = self
        return object_class


_KINDS: dict[type, Kind] = {}


def of(object_class: type) -> Kind:
    """The kind of a class of kernel objects.

    Raises:
        KeyError: the class declares none.
    """
    return _KINDS[object_class]
