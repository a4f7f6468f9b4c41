"""What each kind of kernel object is called, which driver programs it, and when its operations have their turn.

A class of kernel objects says so in the line above it, and nowhere else: every table by kind is derived from that.

Additions come before removals, and what restricts comes before what it restricts:

* rules name sets, so sets come first; a rule on an empty set does nothing, so entries come before rules;
* source ranges are in force before the address that they guard is reachable, and nobody whom they let in is shut out:
  ranges, then rules, then the set that sends packets to them, then the virtual server;
* a virtual server and its real servers come before its address, or clients would be refused in between;
* on removal the virtual server goes first, its entries and address after it: they are also what tells a later process that
  the virtual server is ours.
"""

import enum
from collections.abc import Mapping
from typing import TypeVar


class DriverName(enum.StrEnum):
    """The drivers, as metrics name them. ``kernel/node.py`` has an object for each."""

    IPVS = "ipvs"
    IPSET = "ipset"
    ADDRESSES = "addresses"
    SYSCTL = "sysctl"
    IPTABLES = "iptables"
    CONNTRACK = "conntrack"


class Stage(enum.IntEnum):
    """When an operation has its turn: lower ones come first."""

    SETTINGS = 0
    TIMEOUTS = 1
    DEVICE = 2
    SETS = 3
    SOURCE_RANGES = 4
    ENTRIES = 5
    RULES = 6
    FIREWALL_ENTRIES = 7
    SERVERS = 8
    ADDRESSES = 9
    REAL_SERVER_REMOVALS = 10
    VIRTUAL_SERVER_REMOVALS = 11
    FIREWALL_REMOVALS = 12
    ENTRY_REMOVALS = 13
    ADDRESS_REMOVALS = 14
    FLOWS = 15


T = TypeVar("T")


class Kind:
    """A kind of kernel object.

    ``name`` stands in log lines, metrics and documents; ``one`` and ``several`` are for people. ``stages`` are by verb: a verb
    that is not among them is never planned.
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
        """Each of ``stages`` is named as its verb. ``one`` is the name, ``several`` has an s more, where they are not given."""
        self.name = name
        self.driver = driver
        self.one = one or name
        self.several = several or f"{self.one}s"
        self.stages: Mapping[str, Stage] = stages

    def __call__(self, described: type[T]) -> type[T]:
        """As a decorator: these objects are of this kind."""
        _KINDS[described] = self
        return described


_KINDS: dict[type, Kind] = {}


def of(described: type) -> Kind:
    """The kind of a class of kernel objects.

    Raises:
        KeyError: the class names none.
    """
    return _KINDS[described]
