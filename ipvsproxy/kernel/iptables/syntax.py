"""The syntax of iptables: single rules, the output of ``iptables-save``, and the input of ``iptables-restore``.

``render`` writes a rule as ``iptables-save`` 1.8 prints it, in both of its variants. ``parse`` also reads rules in the spelling
of older or newer versions of iptables. A text that ``render`` would not produce becomes an ``UnknownRule``. Therefore two
observed rules are equal exactly if they are the same rule in the kernel.
"""

import collections
import dataclasses
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, assert_never

from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.rules import (
    ChainKey,
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    LeftRules,
    LimitSegments,
    Masquerade,
    ObservedRule,
    Reference,
    Removal,
    Rule,
    SetMark,
    SetMatch,
    Side,
    Skeleton,
    TakeMark,
    Target,
    UnknownRule,
    Verdict,
)
from ipvsproxy.model.virtual_servers import VirtualServerKey

_REJECT: Mapping[Family, str] = {Family.IPV4: "icmp-port-unreachable", Family.IPV6: "icmp6-port-unreachable"}
_PROTOCOLS: Mapping[str, Protocol] = {protocol.label: protocol for protocol in Protocol}
_BARE_COMMENT = re.compile(r'--comment ([^"\s]\S*)')
_TUNNELS: Mapping[Family, str] = {Family.IPV4: "ipencap", Family.IPV6: "ipv6"}
"""The protocols of tunnels by the names of /etc/protocols; without that file, iptables prints their numbers."""
_SYN_FLAGS = "SYN,RST SYN"
_VIRTUAL_SERVER = ("protocol", "address", "port")


def render(rule: ObservedRule, family: Family) -> str:
    """The rule without ``-A CHAIN``, as ``iptables-save`` prints it and ``iptables-restore`` accepts it."""
    if isinstance(rule, UnknownRule):
        return rule.text
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
        rule.syn and f"-m tcp --tcp-flags {_SYN_FLAGS}",
        rule.not_from_bridge_port and "-m physdev ! --physdev-is-in",
        rule.from_this_host and "-m addrtype --src-type LOCAL",
        rule.from_elsewhere and "-m addrtype ! --src-type LOCAL",
        rule.to_this_host and "-m addrtype --dst-type LOCAL",
        rule.virtual_server and _virtual_server(rule.virtual_server),
        rule.to_virtual_server and "--vdir ORIGINAL",
        f"-j {_target(rule.target, family)}",
    )
    return " ".join(part for part in parts if part)


def render_jump(jump: Jump) -> str:
    """The jump without ``-A CHAIN``, in the form that ``render`` writes."""
    return f'-m comment --comment "{jump.comment}" -j {jump.target}'


def _set(match: SetMatch) -> str:
    return f"{match.set} {','.join(side.value for side in match.sides)}"


def _interface(match: InterfaceMatch) -> str:
    return f"{match.name}+" if match.is_prefix else match.name


def _virtual_server(key: VirtualServerKey) -> str:
    return f"-m ipvs --vproto {key.protocol:d} --vaddr {key.address} --vport {key.port}"


def _target(target: Target, family: Family) -> str:  # noqa: PLR0911 - one for each kind of target
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


def parse(text: str, family: Family) -> ObservedRule:
    """The rule that ``iptables-save`` printed after ``-A CHAIN``, parsed."""
    text = normalise(text)
    try:
        rule = _parse(_words(text))
    except (ValueError, LookupError, TypeError):  # raises a TypeError if the text ends where a value is expected
        return UnknownRule(text)
    return rule if render(rule, family) == text else UnknownRule(text)


def normalise(text: str) -> str:
    """The text of a rule in the form that ``render`` writes, whichever version of iptables printed it.

    Some versions of iptables print a one-word comment without quotes, or the number of a protocol instead of its name. Some
    releases of libxt_ipvs print ``--vproto`` as ``--proto``, although they cannot read ``--proto`` themselves.
    """
    text = _BARE_COMMENT.sub(r'--comment "\1"', text).replace("-m ipvs --proto ", "-m ipvs --vproto ")
    return text.replace("-p 4 ", "-p ipencap ").replace("-p 41 ", "-p ipv6 ")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = True, "", "", '"'
    return list(lexer)


def _parse(words: list[str]) -> Rule:
    """The rule that a text describes. Raises ValueError, KeyError or IndexError if the rule cannot be one of ours."""
    fields: dict[str, Any] = {}
    virtual_server: dict[str, Any] = {}
    is_inverted = False
    position = 0
    while words[position] != "-j":
        option = words[position]
        position += 1
        if option == "!":
            is_inverted = True
        elif option == "-m":
            position += 1
        elif option == "--physdev-is-in":
            fields["not_from_bridge_port"] = is_inverted
            is_inverted = False
        else:
            values = words[position : position + (2 if option in ("--match-set", "--tcp-flags") else 1)]
            position += len(values)
            name, value = _MATCHES[f"! {option}" if is_inverted else option](*values)
            (virtual_server if name in _VIRTUAL_SERVER and option.startswith("--v") else fields)[name] = value
            is_inverted = False
    if virtual_server:
        fields["virtual_server"] = VirtualServerKey(*(virtual_server[name] for name in _VIRTUAL_SERVER))
    return Rule(target=_parse_target(words[position + 1 :]), **fields)


_MATCHES: Mapping[str, Callable[..., tuple[str, object]]] = {
    "-s": lambda text: ("source", parse_network(text)),
    "! -s": lambda text: ("not_source", parse_network(text)),
    "-i": lambda text: ("interface", InterfaceMatch(text.removesuffix("+"), is_prefix=text.endswith("+"))),
    "! -i": lambda text: ("not_interface", InterfaceMatch(text.removesuffix("+"), is_prefix=text.endswith("+"))),
    "-p": lambda text: ("tunnel", True) if text in _TUNNELS.values() else ("protocol", _PROTOCOLS[text]),
    "--comment": lambda text: ("comment", text.replace("\\'", "'")),
    "--mark": lambda text: _mark(text, "mark", "no_mark"),
    "! --mark": lambda text: _mark(text, "not_mark", "any_mark"),
    "--ctorigdst": lambda text: ("original_destination", parse_address(text.removesuffix("/128"))),
    "--src-type": lambda _: ("from_this_host", True),
    "--ctstate": lambda text: ("connection_states", tuple(map(ConnectionState, text.split(",")))),
    "--match-set": lambda name, sides: ("set", SetMatch(name, tuple(map(Side, sides.split(","))))),
    "--tcp-flags": lambda *_: ("syn", True),
    "! --src-type": lambda _: ("from_elsewhere", True),
    "--dst-type": lambda _: ("to_this_host", True),
    "--vproto": lambda text: ("protocol", Protocol(int(text))),
    "--vaddr": lambda text: ("address", parse_address(text)),
    "--vport": lambda text: ("port", int(text)),
    "--vdir": lambda text: ("to_virtual_server", text == "ORIGINAL"),
}
"""The field of a rule that an option of iptables sets. A wrong value is noticed when the rule is rendered again."""


def _mark(text: str, of_set_bits: str, of_clear_bits: str) -> tuple[str, object]:
    value, _, mask = text.partition("/")
    return (of_set_bits, int(value, 16)) if int(value, 16) else (of_clear_bits, int(mask, 16))


def _parse_target(words: list[str]) -> Target:  # noqa: PLR0911 - one for each kind of target
    match words:
        case ["REJECT", "--reject-with", _]:
            return Verdict.REJECT
        case ["ACCEPT" | "DROP" | "RETURN" as name]:
            return Verdict(name)
        case ["MASQUERADE", *options]:
            return Masquerade(fully_random=bool(options))
        case ["MARK", "--set-xmark", bits]:
            value, _, mask = bits.partition("/")
            return InvertMark(int(value, 16)) if mask == "0x0" else SetMark(int(value, 16))
        case ["SET", "--map-set", name, sides, "--map-mark"]:
            return TakeMark(SetMatch(name, tuple(map(Side, sides.split(",")))))
        case ["TCPMSS", "--set-mss", size]:
            return LimitSegments(int(size))
        case [chain]:
            return JumpTo(chain)
        case _:
            raise ValueError(words)


_INCOMPATIBLE = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Our rules in one IP family, as ``iptables-save`` shows them.

    ``chains`` are those of our chains that exist, with the text of each rule. ``jumps`` has the number of copies of each jump:
    two copies are as wrong as no copy. ``foreign_jumps`` has one entry for each of our chains to which rules of other programs
    jump: one of these rules. ``above`` and ``below`` are the rules of other programs before and after each jump in the jump's
    chain. ``hidden`` are the tables that we use but that iptables does not show, because they have rules that only nft
    understands; the content of these tables is unknown.
    """

    chains: Mapping[ChainKey, tuple[str, ...]]
    jumps: Mapping[Jump, int]
    foreign_jumps: Mapping[ChainKey, str]
    above: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    below: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


NOTHING_LISTED = Listing(chains={}, jumps={}, foreign_jumps={})


def parse_save(text: str, chains: Collection[ChainKey], jumps: Collection[Jump]) -> Listing:
    """Extract our rules from the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete: a table does not end with COMMIT.
    """
    rules_of: dict[ChainKey, list[str]] = {}
    count: collections.Counter[Jump] = collections.Counter()
    foreign_jumps: dict[ChainKey, str] = {}
    known_jumps = {(ChainKey(jump.table, jump.source), render_jump(jump)): jump for jump in jumps}
    above: dict[Jump, frozenset[str]] = {}
    others: dict[ChainKey, list[str]] = {key: [] for key, _ in known_jumps}
    for key, rule in rules(text):
        if key in chains:
            content = rules_of.setdefault(key, [])
            if rule is not None:
                content.append(normalise(rule))
        elif rule is None:
            continue
        elif (key, rule) in known_jumps:
            count[known_jumps[key, rule]] += 1
            above[known_jumps[key, rule]] = frozenset(others[key])
            continue
        elif (target := ChainKey(key.table, _target_chain(rule))) in chains:
            foreign_jumps[target] = f"-A {key.chain} {rule}"
        if key in others and rule is not None:
            others[key].append(rule)
    below = {jump: frozenset(others[ChainKey(jump.table, jump.source)]) - rules_above for jump, rules_above in above.items()}
    whole = {key: tuple(rules) for key, rules in rules_of.items()}
    hidden = frozenset(_INCOMPATIBLE.findall(text)) & {key.table for key in chains}
    return Listing(chains=whole, jumps=count, foreign_jumps=foreign_jumps, above=above, below=below, hidden=hidden)


def rules(text: str, *, may_be_cut: bool = False) -> Iterator[tuple[ChainKey, str | None]]:
    """The content of the output of ``iptables-save``, table by table: first every chain with None, then every rule with its text.

    Raises:
        ValueError: the output is incomplete, although it has to be complete.
    """
    table = ""
    for line in text.splitlines():
        if line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")
            yield ChainKey(table, name), rule
        elif line.startswith(":"):
            yield ChainKey(table, line[1:].partition(" ")[0]), None
        elif line.startswith("*"):
            table = line[1:]
        elif line == "COMMIT":
            table = ""
    if table and not may_be_cut:
        raise ValueError(f"its output ends in the middle of table {table[:32]}")


def _target_chain(rule: str) -> str:
    match = re.search(r"(?:^| )-[jg] (\S+)", rule)
    return match.group(1) if match else ""


def parse_left(text: str, concerns: Callable[[ChainKey], bool]) -> LeftRules:
    """Extract the chains for which ``concerns`` is true, and the rules that jump to them, from the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete.
    """
    chains: collections.Counter[ChainKey] = collections.Counter()
    references: list[Reference] = []
    for key, rule in rules(text):
        if concerns(key):
            chains[key] += rule is not None
        elif rule is not None:
            words = rule.rsplit(" ", 2)  # a jump to a chain has no options, so it is the end of the rule
            if words[-2:-1] in (["-j"], ["-g"]) and concerns(target := ChainKey(key.table, words[-1])):
                references.append(Reference(key, rule, target))
    return LeftRules(chains=chains, references=tuple(references), hidden=frozenset(_INCOMPATIBLE.findall(text)))


def render_left_removal(removal: Removal) -> str:
    """The input of ``iptables-restore --noflush`` that removes leftover rules; empty if there is nothing to remove."""
    lines: list[str] = []
    for table in dict.fromkeys(key.table for key in (*(reference.source for reference in removal.references), *removal.emptied)):
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in removal.emptied if key.table == table]
        lines += [
            f"-D {reference.source.chain} {reference.text}" for reference in removal.references if reference.source.table == table
        ]
        lines += [f"-X {key.chain}" for key in removal.deleted if key.table == table]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def render_restore(skeleton: Skeleton, listing: Listing, moved: Collection[Jump] = ()) -> str:
    """The input of ``iptables-restore --noflush`` that programs a skeleton.

    The input declares every chain, which empties the chain, and then appends all rules of the chain. Listed chains and jumps that
    are not in the skeleton are removed. A chain to which another program's rule jumps is only emptied. An absent jump is inserted
    at the top of its chain, in the skeleton's order, so that the last jump ends up on top, as with kube-proxy's jumps. A jump
    that is present keeps its position. If a jump exists more than once, the last copy is kept: each copy was inserted at the top,
    so the last copy is the oldest. Jumps in ``moved`` are inserted at the top again.
    """
    lines: list[str] = []
    gone = [key for key in listing.chains if key not in skeleton.chains]
    ways = [jump for jump in listing.jumps if jump not in skeleton.jumps]
    for table in dict.fromkeys([*_tables(skeleton), *(key.table for key in gone), *(jump.table for jump in ways)]):
        keys = [key for key in skeleton.chains if key.table == table]
        going = [key for key in gone if key.table == table]
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in (*keys, *going)]
        for jump in ways:
            lines += [f"-D {jump.source} {render_jump(jump)}"] * (listing.jumps[jump] if jump.table == table else 0)
        lines += [f"-X {key.chain}" for key in going if key not in listing.foreign_jumps]
        lines += [f"-A {key.chain} {render(rule, skeleton.family)}" for key in keys for rule in skeleton.chains[key]]
        for jump in skeleton.jumps:
            if jump.table == table:
                there = listing.jumps.get(jump, 0)
                stays = there > 0 and jump not in moved
                lines += [f"-D {jump.source} {render_jump(jump)}"] * (there - stays)
                lines += [] if stays else [f"-I {jump.source} {render_jump(jump)}"]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def render_removal(skeleton: Skeleton, listing: Listing) -> str:
    """The input of ``iptables-restore --noflush`` that removes the present parts of a skeleton; empty if no part is present.

    A chain to which another program's rule jumps is only emptied, because the kernel would refuse the whole table if the chain
    were deleted.
    """
    lines: list[str] = []
    for table in _tables(skeleton):
        keys = [key for key in skeleton.chains if key.table == table and key in listing.chains]
        jumps = [jump for jump in skeleton.jumps if jump.table == table for _ in range(listing.jumps.get(jump, 0))]
        if not keys and not jumps:
            continue
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in keys]
        lines += [f"-D {jump.source} {render_jump(jump)}" for jump in jumps]
        lines += [f"-X {key.chain}" for key in keys if key not in listing.foreign_jumps]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def _tables(skeleton: Skeleton) -> Iterator[str]:
    return iter(dict.fromkeys(key.table for key in skeleton.chains))
