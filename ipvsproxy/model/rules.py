"""Packet-filter rules as data, without the syntax of any program: what each rule matches, and what it does.

A backend in ``kernel/`` writes them and reads them back. Everything above compares values.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.kernel import VirtualServerKey
from ipvsproxy.model.kind import DriverName, Kind, Stage
from ipvsproxy.model.net import Family, Network, Protocol


class Side(enum.Enum):
    """Which end of a packet a set match looks up."""

    SOURCE = "src"
    DESTINATION = "dst"


class SetMatch(NamedTuple):
    """A match on a set, by its name. ``sides`` has one side for each dimension of the set, in the set's order."""

    set: str
    sides: tuple[Side, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class InterfaceMatch:
    """A match on the interface of arrival. With ``is_prefix`` it matches every interface whose name begins with ``name``."""

    name: str
    is_prefix: bool = False


class ConnectionState(enum.Enum):
    """How connection tracking classifies a packet (ctstate in iptables-extensions(8))."""

    NEW = "NEW"
    RELATED = "RELATED"
    ESTABLISHED = "ESTABLISHED"


class Verdict(enum.Enum):
    """A target without arguments. ``REJECT`` answers with "port unreachable" of the rule's family."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"
    RETURN = "RETURN"


@dataclasses.dataclass(frozen=True, slots=True)
class JumpTo:
    """Goes on in another of our chains, in the same table, and comes back at its end."""

    chain: str


@dataclasses.dataclass(frozen=True, slots=True)
class Masquerade:
    """Replaces the source address. ``fully_random`` also draws the source port at random."""

    fully_random: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetMark:
    """Sets these bits of the packet's mark, and leaves the others."""

    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class InvertMark:
    """Inverts these bits of the packet's mark: it clears them where a rule before has made sure that they are set."""

    bits: int


Target = Verdict | JumpTo | Masquerade | SetMark | InvertMark


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a chain. A packet must meet every match; a field with its default matches every packet.

    ``not_source``, ``not_interface`` and ``not_mark`` match what the value does not match. ``mark`` and ``not_mark`` are bits
    that must all be set. One of ``connection_states`` is enough.
    """

    target: Target
    source: Network | None = None
    not_source: Network | None = None
    not_interface: InterfaceMatch | None = None
    protocol: Protocol | None = None
    comment: str = ""
    mark: int | None = None
    not_mark: int | None = None
    connection_states: tuple[ConnectionState, ...] = ()
    set: SetMatch | None = None
    not_from_bridge_port: bool = False
    from_elsewhere: bool = False
    to_this_host: bool = False
    virtual_server: VirtualServerKey | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownRule:
    """A rule in a chain of ours that no ``Rule`` describes: somebody else added it. ``text`` is as the backend prints it."""

    text: str


ObservedRule = Rule | UnknownRule


class ChainKey(NamedTuple):
    """A chain of a table: ``nat`` or ``filter``."""

    table: str
    chain: str

    def __str__(self) -> str:
        return f"{self.table}/{self.chain}"


class Jump(NamedTuple):
    """A rule of a built-in chain that leads to a chain of ours. An absent one is put first in its chain."""

    table: str
    source: str
    target: str
    comment: str

    def __str__(self) -> str:
        return f"{self.table}/{self.source} -> {self.target}"


@Kind("rules", DriverName.IPTABLES, one="family of rules", several="families of rules", set=Stage.RULES)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The desired rules of one family: the whole content of each of our chains, and the jumps that lead into them.

    Chains and jumps keep the order in which they are written.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[Rule, ...]]
    jumps: tuple[Jump, ...]

    @property
    def key(self) -> Family:
        """What names it among those of its kind."""
        return self.family

    @property
    def in_force(self) -> "ObservedSkeleton":
        """The observed state once this skeleton is in force."""
        return ObservedSkeleton(family=self.family, chains=self.chains, jumps=frozenset(self.jumps))

    def __str__(self) -> str:
        return f"{self.family.label} rules"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSkeleton:
    """The observed part of a skeleton: the rules of each of our chains that exists, and the jumps that are present.

    Only chains and jumps of ours count; everything else in the tables is somebody else's. The rules of a chain that only drops
    are kept in one order, whatever the kernel's is: their order has no meaning, and kube-proxy's is random.

    ``hidden`` are tables that cannot be read. Their chains and jumps are those that were last written.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[ObservedRule, ...]]
    jumps: frozenset[Jump]
    hidden: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        chains = {key: tuple(sorted(rules, key=repr)) if _only_drops(rules) else rules for key, rules in self.chains.items()}
        object.__setattr__(self, "chains", chains)


def _only_drops(rules: Sequence[ObservedRule]) -> bool:
    return len(rules) > 1 and all(isinstance(rule, Rule) and rule.target is Verdict.DROP for rule in rules)
