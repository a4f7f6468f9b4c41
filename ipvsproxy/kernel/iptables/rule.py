"""One rule in the syntax of iptables: ``render`` for ``iptables-restore``, ``parse`` for the output of ``iptables-save``.

``render`` writes a rule as ``iptables-save`` 1.8 prints it, in both of its variants. ``parse`` also reads the other spelling of
rules that versions print in two ways. A text that ``render`` would not write is an ``UnknownRule``. So two observed rules are
equal exactly if the kernel holds the same rule.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.rules import (
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    Masquerade,
    ObservedRule,
    Rule,
    SetMark,
    SetMatch,
    Side,
    TakeMark,
    Target,
    UnknownRule,
    Verdict,
)
from ipvsproxy.model.virtual_servers import VirtualServerKey

_REJECT: Mapping[Family, str] = {Family.IPV4: "icmp-port-unreachable", Family.IPV6: "icmp6-port-unreachable"}
_PROTOCOLS: Mapping[str, Protocol] = {protocol.label: protocol for protocol in Protocol}
_BARE_COMMENT = re.compile(r'--comment ([^"\s]\S*)')
_VIRTUAL_SERVER = ("protocol", "address", "port")


def render(rule: ObservedRule, family: Family) -> str:
    """The rule without ``-A CHAIN``, as ``iptables-save`` prints it and ``iptables-restore`` takes it."""
    if isinstance(rule, UnknownRule):
        return rule.text
    comment = rule.comment.replace("'", "\\'")
    parts = (
        rule.source and f"-s {rule.source}",
        rule.not_source and f"! -s {rule.not_source}",
        rule.interface and f"-i {_interface(rule.interface)}",
        rule.not_interface and f"! -i {_interface(rule.not_interface)}",
        rule.protocol and f"-p {rule.protocol.label}",
        rule.comment and f'-m comment --comment "{comment}"',
        rule.mark is not None and f"-m mark --mark {rule.mark:#x}/{rule.mark:#x}",
        rule.not_mark is not None and f"-m mark ! --mark {rule.not_mark:#x}/{rule.not_mark:#x}",
        rule.any_mark is not None and f"-m mark ! --mark 0x0/{rule.any_mark:#x}",
        rule.no_mark is not None and f"-m mark --mark 0x0/{rule.no_mark:#x}",
        rule.original_destination and f"-m conntrack --ctorigdst {rule.original_destination}",
        rule.connection_states and f"-m conntrack --ctstate {','.join(state.value for state in rule.connection_states)}",
        rule.set and f"-m set --match-set {_set(rule.set)}",
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
    """The jump without ``-A CHAIN``, as for ``render``."""
    return f'-m comment --comment "{jump.comment}" -j {jump.target}'


def _set(match: SetMatch) -> str:
    return f"{match.set} {','.join(side.value for side in match.sides)}"


def _interface(match: InterfaceMatch) -> str:
    return f"{match.name}+" if match.is_prefix else match.name


def _virtual_server(key: VirtualServerKey) -> str:
    return f"-m ipvs --vproto {key.protocol:d} --vaddr {key.address} --vport {key.port}"


def _target(target: Target, family: Family) -> str:  # noqa: PLR0911 - one for each kind
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
        case never:
            assert_never(never)


def parse(text: str, family: Family) -> ObservedRule:
    """The rule that ``iptables-save`` printed after ``-A CHAIN``."""
    text = normalise(text)
    try:
        rule = _parse(_words(text))
    except (ValueError, LookupError, TypeError):  # a TypeError: the text ends where a value should be
        return UnknownRule(text)
    return rule if render(rule, family) == text else UnknownRule(text)


def normalise(text: str) -> str:
    """A rule in the spelling of ``render``, if versions of iptables print it in two ways.

    Some print a comment of one word without quotes. Some releases of libxt_ipvs print ``--vproto`` as ``--proto``, which they
    cannot read back themselves.
    """
    return _BARE_COMMENT.sub(r'--comment "\1"', text).replace("-m ipvs --proto ", "-m ipvs --vproto ")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape, lexer.quotes = True, "", "", '"'
    return list(lexer)


def _parse(words: list[str]) -> Rule:
    """Raises ValueError, KeyError or IndexError for a rule that cannot be ours."""
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
            values = words[position : position + _VALUES.get(option, 1)]
            position += len(values)
            name, value = _MATCHES[f"! {option}" if is_inverted else option](*values)
            (virtual_server if name in _VIRTUAL_SERVER and option.startswith("--v") else fields)[name] = value
            is_inverted = False
    if virtual_server:
        fields["virtual_server"] = VirtualServerKey(*(virtual_server[name] for name in _VIRTUAL_SERVER))
    return Rule(target=_parse_target(words[position + 1 :]), **fields)


_VALUES: Mapping[str, int] = {"--match-set": 2}
"""The number of values of an option, if it is not one."""

_MATCHES: Mapping[str, Callable[..., tuple[str, object]]] = {
    "-s": lambda text: ("source", parse_network(text)),
    "! -s": lambda text: ("not_source", parse_network(text)),
    "-i": lambda text: ("interface", InterfaceMatch(text.removesuffix("+"), is_prefix=text.endswith("+"))),
    "! -i": lambda text: ("not_interface", InterfaceMatch(text.removesuffix("+"), is_prefix=text.endswith("+"))),
    "-p": lambda text: ("protocol", _PROTOCOLS[text]),
    "--comment": lambda text: ("comment", text.replace("\\'", "'")),
    "--mark": lambda text: _mark(text, "mark", "no_mark"),
    "! --mark": lambda text: _mark(text, "not_mark", "any_mark"),
    "--ctorigdst": lambda text: ("original_destination", parse_address(text.removesuffix("/128"))),
    "--src-type": lambda _: ("from_this_host", True),
    "--ctstate": lambda text: ("connection_states", tuple(map(ConnectionState, text.split(",")))),
    "--match-set": lambda name, sides: ("set", SetMatch(name, tuple(map(Side, sides.split(","))))),
    "! --src-type": lambda _: ("from_elsewhere", True),
    "--dst-type": lambda _: ("to_this_host", True),
    "--vproto": lambda text: ("protocol", Protocol(int(text))),
    "--vaddr": lambda text: ("address", parse_address(text)),
    "--vport": lambda text: ("port", int(text)),
    "--vdir": lambda text: ("to_virtual_server", text == "ORIGINAL"),
}
"""The field of a rule that an option of iptables sets. A value that does not fit shows when the rule is rendered again."""


def _mark(text: str, of_set_bits: str, of_clear_bits: str) -> tuple[str, object]:
    value, _, mask = text.partition("/")
    return (of_set_bits, int(value, 16)) if int(value, 16) else (of_clear_bits, int(mask, 16))


def _parse_target(words: list[str]) -> Target:
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
        case [chain]:
            return JumpTo(chain)
        case _:
            raise ValueError(words)
