"""The kinds of kernel objects, with their names and drivers.

Each class of kernel objects declares its kind by a decorator in the line above the class. The package ``reconcile/kinds`` makes
all decisions about each kind.
"""

import enum
from typing import TypeVar


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun in the singular or plural, such as ``1 node`` or ``2 nodes``.

    The default of ``several`` is the value of ``one`` with an s appended.
    """
    return f"{number} {one if number == 1 else several or f'{one}s'}"


class DriverName(enum.StrEnum):
    """The names that metrics use for the drivers. ``kernel/node_kernel.py`` has one object for each driver."""

    IPVS = "ipvs"
    IPSET = "ipset"
    ADDRESSES = "addresses"
    ROUTES = "routes"
    SYSCTL = "sysctl"
    IPTABLES = "iptables"
    CONNTRACK = "conntrack"


T = TypeVar("T")


class KernelKind:
    """A kind of kernel object.

    ``name`` is used in log lines, metrics and documents; ``one`` and ``several`` are the singular and plural in texts for people.
    """

    def __init__(self, name: str, driver: DriverName, *, one: str = "", several: str = "") -> None:
        """``one`` defaults to the kind's name, and ``several`` defaults to the value of ``one`` with an s appended."""
        self.name = name
        self.driver = driver
        self.one = one or name
        self.several = several or f"{self.one}s"

    def __call__(self, object_class: type[T]) -> type[T]:
        """Decorate a class whose objects are of this kind."""
        KINDS[object_class] = self
        return object_class


KINDS: dict[type, KernelKind] = {}
"""The kind of each class of kernel objects."""
