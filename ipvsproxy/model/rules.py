"""Packet-filter rules as data: the matches and the target of each rule.

A backend in ``kernel/`` writes and reads rules. An observed rule is the text that ``iptables-save`` prints, or that our rule in
nf_tables has in its user data. Two rules are equal if their texts are equal. This module also has values for rules that another
proxy has left behind, and for tables of other programs.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, assert_never

from ipvsproxy.model.kind import DriverName, KernelKind
from ipvsproxy.model.net import Address, Family, Network, Protocol
from ipvsproxy.model.virtual_servers import VirtualServerKey


class Backend(enum.StrEnum):
    """The part of the kernel that holds rules and sets: either iptables with ipset, or nftables alone.

    ``AUTO`` is not a backend; ``AUTO`` means that ipvsproxy chooses a backend.
    """

    IPTABLES = "iptables"
    NFTABLES = "nftables"
    AUTO = "auto"


class Side(enum.Enum):
    """The address or port of a packet that a ``SetMatch`` looks up in the set.

    ``ORIGINAL_DESTINATION`` is the destination that the connection's first packet had on arrival; iptables cannot look up this
    address.
    """

    SOURCE = "src"
    DESTINATION = "dst"
    ORIGINAL_DESTINATION = "origdst"


class SetMatch(NamedTuple):
    """A match on the set with this name.

    For each dimension of the set, in the order of the dimensions, ``sides`` says which address or port of the packet is looked
    up.
    """

    set: str
    sides: tuple[Side, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class InterfaceMatch:
    """A match on the interface on which the packet arrived.

    If ``is_prefix`` is true, the match applies to every interface whose name begins with ``name``.
    """

    name: str
    is_prefix: bool = False


class ConnectionState(enum.Enum):
    """The state of a packet in connection tracking (ctstate in iptables-extensions(8))."""

    NEW = "NEW"
    RELATED = "RELATED"
    ESTABLISHED = "ESTABLISHED"


class Verdict(enum.Enum):
    """A rule target without arguments. ``REJECT`` replies with the ICMP error "port unreachable" of the rule's IP family."""

    ACCEPT = "ACCEPT"
    DROP = "DROP"
    REJECT = "REJECT"
    RETURN = "RETURN"


@dataclasses.dataclass(frozen=True, slots=True)
class JumpTo:
    """Continues in another of our chains in the same table, and then returns to the chain of the rule."""

    chain: str


@dataclasses.dataclass(frozen=True, slots=True)
class Masquerade:
    """Replaces the packet's source address. With ``fully_random``, the source port is also chosen at random."""

    fully_random: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SetMark:
    """Sets ``bits`` in the packet's mark."""

    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class InvertMark:
    """Inverts these bits of the packet's mark.

    If an earlier rule returns all packets in which the bits are not set, this target gets only packets with set bits, and clears
    the bits.
    """

    bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class TakeMark:
    """Copies the mark of the packet's set entry to the packet; without such an entry, the packet keeps its mark."""

    match: SetMatch


@dataclasses.dataclass(frozen=True, slots=True)
class LimitSegments:
    """Lowers the maximum segment size that a TCP packet announces to this many bytes.

    A smaller announced size is left unchanged.
    """

    size: int


Target = Verdict | JumpTo | Masquerade | SetMark | InvertMark | TakeMark | LimitSegments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of a chain.

    A rule applies to packets that meet every match. A field with its default value matches every packet. ``not_source``,
    ``not_interface`` and ``not_mark`` match the packets that do not have the given value. ``mark`` and ``not_mark`` are bit
    masks. A packet matches ``mark`` if all bits of the mask are set in the packet's mark, and matches ``not_mark`` if at least
    one bit is not set. A packet matches ``any_mark`` if at least one bit of this mask is set in the packet's mark, and matches
    ``no_mark`` if no bit of this mask is set. A packet matches if its connection-tracking state is among ``connection_states``.
    ``virtual_server`` matches all packets of connections to the virtual server; with ``to_virtual_server``, only packets from
    clients match. ``original_destination`` is the destination that the connection's first packet had on arrival. ``tunnel``
    matches the outer packet of an IP-in-IP tunnel (IPv4 rules) or of an IPv6-in-IPv6 tunnel (IPv6 rules). ``syn`` matches the
    first packet in each direction of a TCP connection.
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


_REJECT: Mapping[Family, str] = {Family.IPV4: "icmp-port-unreachable", Family.IPV6: "icmp6-port-unreachable"}
_TUNNELS: Mapping[Family, str] = {Family.IPV4: "ipencap", Family.IPV6: "ipv6"}
"""The names that /etc/protocols gives to the protocols of tunnels. Without that file, iptables prints the protocol numbers."""


def render(rule: Rule, family: Family) -> str:
    """The text of a rule without ``-A CHAIN``, in the form that both variants of ``iptables-save`` 1.8 print."""
    comment = rule.comment.replace("'", "\\'")
    parts = (
        rule.source and f"-s {rule.source}",
        rule.not_source and f"! -s {rule.not_source}",
        rule.interface and f"-i {_interface(rule.interface)}",
        rule.not_interface and f"! -i {_interface(rule.not_interface)}",
        rule.protocol and f"-p {rule.protocol.label}",
        rule.tunnel and f"-p {_TUNNELS[family]}",
        rule.comment and f'-m comment --comment "{comment}"',
        rule.mark is not None and f"-m mark --mark {rule.mark:#x}/{rule.mark:#x}",
        rule.not_mark is not None and f"-m mark ! --mark {rule.not_mark:#x}/{rule.not_mark:#x}",
        rule.any_mark is not None and f"-m mark ! --mark 0x0/{rule.any_mark:#x}",
        rule.no_mark is not None and f"-m mark --mark 0x0/{rule.no_mark:#x}",
        rule.original_destination and f"-m conntrack --ctorigdst {rule.original_destination}",
        rule.connection_states and f"-m conntrack --ctstate {','.join(state.value for state in rule.connection_states)}",
        rule.set and f"-m set --match-set {_set(rule.set)}",
        rule.syn and "-m tcp --tcp-flags SYN,RST SYN",
        rule.not_from_bridge_port and "-m physdev ! --physdev-is-in",
        rule.from_this_host and "-m addrtype --src-type LOCAL",
        rule.from_elsewhere and "-m addrtype ! --src-type LOCAL",
        rule.to_this_host and "-m addrtype --dst-type LOCAL",
        (key := rule.virtual_server) and f"-m ipvs --vproto {key.protocol:d} --vaddr {key.address} --vport {key.port}",
        rule.to_virtual_server and "--vdir ORIGINAL",
        f"-j {_target(rule.target, family)}",
    )
    return " ".join(part for part in parts if part)


def _set(match: SetMatch) -> str:
    return f"{match.set} {','.join(side.value for side in match.sides)}"


def _interface(match: InterfaceMatch) -> str:
    return f"{match.name}+" if match.is_prefix else match.name


def _target(target: Target, family: Family) -> str:  # noqa: PLR0911 - one return for each kind of target
    match target:
        case Verdict.REJECT:
            return f"REJECT --reject-with {_REJECT[family]}"
        case Verdict():
            return str(target.value)
        case JumpTo(chain):
            return chain
        case Masquerade(fully_random):
            return "MASQUERADE --random-fully" if fully_random else "MASQUERADE"
        case SetMark(bits):
            return f"MARK --set-xmark {bits:#x}/{bits:#x}"
        case InvertMark(bits):
            return f"MARK --set-xmark {bits:#x}/0x0"
        case TakeMark(match):
            return f"SET --map-set {_set(match)} --map-mark"
        case LimitSegments(size):
            return f"TCPMSS --set-mss {size}"
        case never:
            assert_never(never)


class ChainKey(NamedTuple):
    """The key of a chain: the chain's table (``nat``, ``filter`` or ``mangle``), and the chain's name in the table."""

    table: str
    chain: str

    def __str__(self) -> str:
        return f"{self.table}/{self.chain}"


class Jump(NamedTuple):
    """A rule in a built-in chain that jumps to one of our chains.

    A jump that is absent is inserted at the top of the built-in chain.
    """

    table: str
    source: str
    target: str
    comment: str

    def __str__(self) -> str:
        return f"{self.table}/{self.source} -> {self.target}"


def render_jump(jump: Jump) -> str:
    """The text of a jump without ``-A CHAIN``, in the form that ``render`` writes."""
    return f'-m comment --comment "{jump.comment}" -j {jump.target}'


MARKING_TABLE = "mangle"
"""The table of rules that give packets a mark. A kernel may lack this table: every Service can be reached without these rules."""


@KernelKind("rules", DriverName.IPTABLES, one="family of rules", several="families of rules")
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The desired rules of one IP family: the whole content of each of our chains, and the jumps to these chains.

    Chains and jumps are written in the given order.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[Rule, ...]]
    jumps: tuple[Jump, ...]

    @property
    def key(self) -> Family:
        """The key of this skeleton, which is its IP family."""
        return self.family

    @property
    def in_force(self) -> "ObservedSkeleton":
        """The observed state after this skeleton has been written."""
        chains = {key: tuple(render(rule, self.family) for rule in rules) for key, rules in self.chains.items()}
        return ObservedSkeleton(family=self.family, chains=chains, jumps=frozenset(self.jumps))

    def __str__(self) -> str:
        return f"{self.family.label} rules"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSkeleton:
    """The observed rules of one IP family: our existing chains with their rules, and the existing jumps.

    Chains and jumps of other programs are not included. If all rules of a chain drop packets, the rules are sorted, because
    kube-proxy writes such rules in random order.

    ``hidden`` are the tables that cannot be read; for these tables, the chains and jumps are those that ipvsproxy last wrote.
    ``strange_rules`` has two kinds of rules in the base chains of our nftables table: duplicates of our jumps, and rules that
    other programs added. No program other than ipvsproxy may add rules to our nftables table. The next write of our table removes
    the rules in ``strange_rules``. The keys of ``idle_jumps`` are the existing jumps that no packet reaches; each value is a text
    that says why.
    """

    family: Family
    chains: Mapping[ChainKey, tuple[str, ...]]
    jumps: frozenset[Jump]
    strange_rules: Mapping[ChainKey, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)
    idle_jumps: Mapping[Jump, str] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        chains = {key: tuple(sorted(rules)) if _only_drops(rules) else rules for key, rules in self.chains.items()}
        object.__setattr__(self, "chains", chains)

    def without(self, table: str) -> "ObservedSkeleton":
        """A copy of the observed rules without the chains and jumps of the given table."""
        return dataclasses.replace(
            self,
            chains={key: rules for key, rules in self.chains.items() if key.table != table},
            jumps=frozenset(jump for jump in self.jumps if jump.table != table),
            strange_rules={key: rules for key, rules in self.strange_rules.items() if key.table != table},
        )


def _only_drops(rules: Sequence[str]) -> bool:
    return len(rules) > 1 and all(rule.endswith("-j DROP") for rule in rules)


class Reference(NamedTuple):
    """A rule that jumps to another chain.

    The fields are the chain that contains the rule, the rule's text from the backend, and the chain to which the rule jumps.
    """

    source: ChainKey
    text: str
    target: ChainKey

    def __str__(self) -> str:
        return f"-t {self.source.table} -A {self.source.chain} {self.text}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeftRules:
    """The leftover chains in the tables of one IP family, and the rules that jump to these chains.

    ``chains`` has the number of rules in each requested chain. ``references`` are the rules in all other chains that jump to one
    of the requested chains. ``hidden`` are the tables that iptables cannot show, because each of these tables contains rules that
    only nft can read.
    """

    chains: Mapping[ChainKey, int] = dataclasses.field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    hidden: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """The changes that remove leftover rules. Each table is changed either completely or not at all.

    First the rules in ``references`` are deleted, then all rules of the chains in ``emptied``, and then the chains in
    ``deleted``. Every chain in ``deleted`` is also in ``emptied``. ``staying`` are rules of other programs that jump to leftover
    chains; these leftover chains are not removed. ``held_back`` is the reason why nothing can be removed now; it is empty if
    removal is possible.
    """

    references: tuple[Reference, ...] = ()
    emptied: tuple[ChainKey, ...] = ()
    deleted: tuple[ChainKey, ...] = ()
    staying: tuple[Reference, ...] = ()
    held_back: str = ""

    @property
    def is_needed(self) -> bool:
        """Whether there are leftover rules to remove, even if nothing can be removed now."""
        return bool(self.references or self.emptied or self.held_back)


class BaseChain(NamedTuple):
    """The hook to which a base chain is attached; packets enter the chain at the hook, without a jump.

    ``kind`` is ``filter``, ``nat`` or ``route``. ``hook`` is the hook's name in nft, such as ``input``. An empty ``hook`` means
    that ipvsproxy does not know the hook. If two chains are attached to a hook, packets first pass through the chain with the
    lower ``priority``. ``drops`` means that the chain's policy is to drop packets.
    """

    kind: str
    hook: str
    priority: int
    drops: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NftTable:
    """The content of a table of nf_tables, without set elements. The rules are reduced to their effect on packets of Services.

    ``family`` is the family's name in nft, such as ``ip``, ``ip6`` or ``inet``. For a table of iptables-legacy, ``family`` is the
    name of the iptables program. ``comment`` is empty if the table has no comment. ``chains`` maps each base chain to its hook
    and priority, and each other chain to None. ``maps`` are the names of all sets that are maps. ``closed`` are the base chains
    of type ``filter`` whose policy or last rule refuses every packet that no earlier rule has accepted.
    """

    family: str
    name: str
    comment: str = ""
    chains: Mapping[str, BaseChain | None] = dataclasses.field(default_factory=dict)
    maps: frozenset[str] = frozenset()
    closed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.name}"
