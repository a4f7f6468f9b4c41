"""Rules that a proxy has left behind, as data: the rules that were read, and the removal that follows.

A reference is a rule that leads to another chain. The kernel keeps a chain while a reference to it exists.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.model.rules import ChainKey


class Reference(NamedTuple):
    """A rule that leads to another chain: the chain with the rule, the rule as the backend prints it, and the other chain."""

    source: ChainKey
    text: str
    target: ChainKey

    def __str__(self) -> str:
        return f"-t {self.source.table} -A {self.source.chain} {self.text}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftRules:
    """The leftover chains in the tables of one family, and the references to them.

    ``chains`` has the number of rules of each requested chain. ``references`` are the rules of all other chains that lead to one
    of them. ``hidden`` are tables that iptables cannot show, because they hold rules that only nft understands.
    """

    chains: Mapping[ChainKey, int] = dataclasses.field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    hidden: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The changes that remove leftover rules. Each table changes as a whole, or not at all.

    First the rules in ``references`` are deleted, then the chains in ``emptied`` lose their rules, then those in ``deleted`` are
    deleted; each of these is also in ``emptied``. ``staying`` are references of other programs, which keep their chains in place.
    ``held_back`` is the reason if nothing can be removed now, else empty.
    """

    references: tuple[Reference, ...] = ()
    emptied: tuple[ChainKey, ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    staying: tuple[Reference, ...] = ()
    held_back: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether anything has to be removed, now or later."""
        return bool(self.references or self.emptied or self.held_back)
