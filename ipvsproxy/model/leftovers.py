"""Rules that a proxy has left behind, as data: what was found of them, and what is to be removed."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.model.rules import ChainKey


class Way(NamedTuple):
    """A rule that leads to another chain: the chain that holds it, its text as the backend prints it, and that other chain."""

    source: ChainKey
    text: str
    target: ChainKey

    def __str__(self) -> str:
        return f"-t {self.source.table} -A {self.source.chain} {self.text}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftRules:
    """What the tables of one family hold of the chains that somebody asked about.

    ``chains`` counts the rules of each such chain. ``ways`` are the rules of all other chains that lead to one of them.
    ``hidden`` are tables of which nothing can be read, because they hold rules that only nft understands.
    """

    chains: Mapping[ChainKey, int] = dataclasses.field(default_factory=dict)
    ways: tuple[Way, ...] = ()
    hidden: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What is to be removed, each table at once or not at all: first ``ways``, then the rules of ``emptied``, then ``deleted``.

    All chains that are ``deleted`` are among those ``emptied``. ``staying`` are rules of others, whose chains stay for them.
    ``held_back`` says why nothing can be removed for now.
    """

    ways: tuple[Way, ...] = ()
    emptied: tuple[ChainKey, ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    staying: tuple[Way, ...] = ()
    held_back: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to remove, now or later."""
        return bool(self.ways or self.emptied or self.held_back)
