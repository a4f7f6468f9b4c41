"""Packet-filter rules as data: the matches and the target of each rule, without the syntax of any program.

A backend in ``kernel/`` writes and reads rules. All other rooms only compare these values. Rules that another proxy has left
behind, and the tables of other programs, are data as well.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.model.kind import DriverName, KernelKind
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.virtual_servers import VirtualServerKey


class Backend(enum.StrEnum):
    """The part of the kernel that holds rules and sets: iptables and ipset, or nftables alone.

    ``AUTO`` stands for no part: ipvsproxy chooses.
    """

    IPTABLES = "iptables"
    NFTABLES = "nftables"
    AUTO = "auto"


class Side(enum.Enum):
    """The end of a packet that a set match looks up.

    ``ORIGINAL_DESTINATION`` is the destination of the connection's first packet on its arrival; iptables cannot look it up.
    """

    SOURCE = "src"
    DESTINATION = "dst"
    ORIGINAL_DESTINATION = "origdst"


class SetMatch(NamedTuple):
    """A match on the set of this name. ``sides`` has one side for each dimension of the set, in the set's order."""

    set: str
    sides: tuple[Side, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class InterfaceMatch:
    """A match on the interface of arrival. With ``is_prefix`` it matches every interface whose name begins with ``name``."""

    name: str
    is_prefix: bool = False


class ConnectionState(enum.Enum):
    """The class of a packet in connection tracking (ctstate in iptables-extensions(8))."""

    NEW = "NEW"
    RELATED = "RELATED"
    ESTABLISHED = "ESTABLISHED"


class Verdict(enum.Enum):
    """A target without arguments. ``REJECT`` replies with "port unreachable" of the rule's family."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"
    RETURN = "RETURN"


@dataclasses.dataclass(frozen=True, slots=True)
class JumpTo:
    """Continues in another of our chains in the same table, and returns at its end."""

    chain: str


@dataclasses.dataclass(frozen=True, slots=True)
class Masquerade:
    """Replaces the source address. ``fully_random`` also draws the source port at random."""

    fully_random: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetMark:
    """Sets these bits of the packet's mark."""

    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class InvertMark:
    """Inverts these bits of the packet's mark. After a rule that returns unless the bits are set, this target clears them."""

    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class TakeMark:
    """Gives the packet the mark of its entry in a set of marks; without an entry, the mark stays as it is."""

    match: SetMatch


@dataclasses.dataclass(frozen=True, slots=True)
class LimitSegments:
    """Lowers the size of segments that a TCP packet announces to this many bytes. A smaller size stays."""

    size: int


Target = Verdict | JumpTo | Masquerade | SetMark | InvertMark | TakeMark | LimitSegments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a chain. A rule applies to packets that meet every match; a field with its default matches every packet.

    ``not_source``, ``not_interface`` and ``not_mark`` match packets that the value does not match. ``mark`` and ``not_mark`` are
    bits, all of which must be set. At least one bit of ``any_mark`` and no bit of ``no_mark`` must be set. A packet matches if
    its state is among ``connection_states``. ``virtual_server`` matches all packets of its connections; with
    ``to_virtual_server``, only packets from clients. ``original_destination`` is the destination of the connection's first packet
    on its arrival. ``tunnel`` matches the outer packet of a tunnel of the rule's family: IP in IP, or IPv6 in IPv6.
    ``syn`` matches the first packet of a TCP connection in each direction.
    """

    target: Target
    source: Network | None = None
    not_source: Network | None = None
    interface: InterfaceMatch | None = None
    not_interface: InterfaceMatch | None = None
    protocol: Protocol | None = None
    tunnel: bool = False
    comment: str = ""
    mark: int | None = None
    not_mark: int | None = None
    any_mark: int | None = None
    no_mark: int | None = None
    connection_states: tuple[ConnectionState, ...] = ()
    original_destination: Address | None = None
    set: SetMatch | None = None
    syn: bool = False
    not_from_bridge_port: bool = False
    from_this_host: bool = False
    from_elsewhere: bool = False
    to_this_host: bool = False
    virtual_server: VirtualServerKey | None = None
    to_virtual_server: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class UnknownRule:
    """A rule that another program added to one of our chains, and that no ``Rule`` describes.

    ``text`` is as the backend prints it.
    """

    text: str


ObservedRule = Rule | UnknownRule


class ChainKey(NamedTuple):
    """The key of a chain: its table (``nat``, ``filter`` or ``mangle``), and its name there."""

    table: str
    chain: str

    def __str__(self) -> str:
        return f"{self.table}/{self.chain}"


class Jump(NamedTuple):
    """A rule of a built-in chain that leads to one of our chains. An absent jump is inserted at the top of its chain."""

    table: str
    source: str
    target: str
    comment: str

    def __str__(self) -> str:
        return f"{self.table}/{self.source} -> {self.target}"


MARKING_TABLE = "mangle"
"""The table of rules that give packets a mark. A kernel may lack it: every Service can be reached without these rules."""


@KernelKind("rules", DriverName.IPTABLES, one="family of rules", several="families of rules")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The desired rules of one family: the whole content of each of our chains, and the jumps that lead to them.

    Chains and jumps are written in this order.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[Rule, ...]]
    jumps: tuple[Jump, ...]

    @property
    def key(self) -> Family:
        """The key in the table of its kind."""
        return self.family

    @property
    def in_force(self) -> "ObservedSkeleton":
        """The observed state once this skeleton is in force."""
        return ObservedSkeleton(family=self.family, chains=self.chains, jumps=frozenset(self.jumps))

    def __str__(self) -> str:
        return f"{self.family.label} rules"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSkeleton:
    """The observed rules of one family: our existing chains with their rules, and the present jumps.

    Chains and jumps of other programs are left out. The rules of a chain that only drops are sorted, because their order has no
    meaning, and is random in kube-proxy.

    ``hidden`` are tables that cannot be read; for them, the chains and jumps of our last write stand here. ``strange_rules`` are
    rules of other programs, or duplicates of our jumps, in the base chains of our nftables table, where no other program may add
    rules. A write removes such rules. ``idle_jumps`` are present jumps that no packet meets, each with the reason.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[ObservedRule, ...]]
    jumps: frozenset[Jump]
    strange_rules: Mapping[ChainKey, tuple[UnknownRule, ...]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    idle_jumps: Mapping[Jump, str] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        chains = {key: tuple(sorted(rules, key=repr)) if _only_drops(rules) else rules for key, rules in self.chains.items()}
        object.__setattr__(self, "chains", chains)

    def without(self, table: str) -> "ObservedSkeleton":
        """The same observed rules without the chains and jumps of a table."""
        return dataclasses.replace(
            self,
            chains={key: rules for key, rules in self.chains.items() if key.table != table},
            jumps=frozenset(jump for jump in self.jumps if jump.table != table),
            strange_rules={key: rules for key, rules in self.strange_rules.items() if key.table != table},
        )


def _only_drops(rules: Sequence[ObservedRule]) -> bool:
    return len(rules) > 1 and all(isinstance(rule, Rule) and rule.target is Verdict.DROP for rule in rules)


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

    First the rules in ``references`` are deleted, then the chains in ``emptied`` lose their rules, then the chains in
    ``deleted``, all of which are also in ``emptied``, are deleted. ``staying`` are references of other programs: the chains that
    they lead to stay. ``held_back`` is the reason if nothing can be removed now, else empty.
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


class BaseChain(NamedTuple):
    """The place of a base chain: packets meet it without a jump.

    ``kind`` is ``filter``, ``nat`` or ``route``. ``hook`` is the hook's name in nft, such as ``input``; empty for a hook that
    this program does not know. Of two chains of a hook, packets meet the one with the lower ``priority`` first. ``drops``: its
    policy is to drop a packet.
    """

    kind: str
    hook: str
    priority: int
    drops: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NftTable:
    """A table of nf_tables without set elements; of its rules, only what they mean to packets of Services.

    ``family`` is the family's name in nft: ``ip``, ``ip6``, ``inet``, ... For the tables of iptables-legacy, it is the program's
    name. ``comment`` is empty if the table has none. ``chains`` has the place of each base chain, and None for the other chains.
    ``maps`` are the names of the sets that are maps. ``closed`` are the base chains of type ``filter`` that refuse every packet
    that no rule accepts before: by their policy, or by their last rule.
    """

    family: str
    name: str
    comment: str = ""
    chains: Mapping[str, BaseChain | None] = dataclasses.field(default_factory=dict)
    maps: frozenset[str] = frozenset()
    closed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.name}"
