"""Tables that other programs have made, as data: what of them shows whose they are, and what they do to packets of Services."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple


class BaseChain(NamedTuple):
    """The place of a chain that packets meet by themselves.

    ``kind`` is ``filter``, ``nat`` or ``route``. ``hook`` has its name in nft, such as ``input``; empty if it has none here. Of
    two chains of a hook, packets meet the one with the lower ``priority`` first. ``drops``: its policy is to drop a packet.
    """

    kind: str
    hook: str
    priority: int
    drops: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NftTable:
    """A table without its elements, and of its rules only what they mean to packets of Services.

    ``family`` has its name in nft: ``ip``, ``ip6``, ``inet``, ... For the tables of iptables-legacy, it is the program's name.
    ``comment`` is empty without one. ``chains`` has the place of each base chain, and None for the other chains. ``maps`` are the
    names of the sets that map their elements to something. ``closed`` are the base chains of type ``filter`` that refuse every
    packet that no rule accepts before: by their policy, or by their last rule.
    """

    family: str
    name: str
    comment: str = ""
    chains: Mapping[str, BaseChain | None] = dataclasses.field(default_factory=dict)
    maps: frozenset[str] = frozenset()
    closed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.name}"
