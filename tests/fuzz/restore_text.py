"""The allowed input of ``iptables-restore``: every shape that our lines may have, and nothing else."""

import re

from ipvsproxy.model.rules import render_jump
from ipvsproxy.model.sets import IP_SETS
from ipvsproxy.translate import nat, skeleton

_TABLES = frozenset(key.table for key in skeleton.CHAINS)
_CHAINS = "|".join(sorted({re.escape(key.chain) for key in skeleton.CHAINS}))
_OUR_COMMENTS = "|".join(re.escape(text.replace("'", "\\'")) for text in nat.COMMENTS.values())
_OTHER_COMMENTS = "kubernetes service traffic requiring SNAT|kubernetes forwarding (?:conntrack rule|rules)"
_NETWORK = r"[0-9a-f.:]{2,39}/[0-9]{1,3}"
_MARK = r"0x[0-9a-f]{1,8}/0x[0-9a-f]{1,8}"
_SETS = "|".join(map(re.escape, IP_SETS))
# An interface name is one word without quotation marks, backslashes, slashes and colons. Its maximum length, _INTERFACE_LIMIT, is
# in bytes.
_INTERFACE = r"(?P<interface>[^\s\"'\\/:]+)"
_INTERFACE_LIMIT = 15
_TARGETS = (
    rf"RETURN|ACCEPT|DROP|MASQUERADE(?: --random-fully)?|REJECT --reject-with icmp6?-port-unreachable|{_CHAINS}"
    rf"|MARK --set-xmark 0x[0-9a-f]{{1,8}}/0x[0-9a-f]{{1,8}}"
)
_RULE = re.compile(
    rf"-A (?:{_CHAINS}) "
    rf"(?:-s {_NETWORK} )?(?:! -s {_NETWORK} )?(?:! -i {_INTERFACE} )?(?:-p (?:tcp|udp|sctp) )?"
    rf'(?:-m comment --comment "(?:{_OUR_COMMENTS}|{_OTHER_COMMENTS})" )?'
    rf"(?:-m mark (?:! )?--mark {_MARK} )?(?:-m conntrack --ctstate [A-Z,]+ )?"
    rf"(?:-m set --match-set (?:{_SETS}) (?:src|dst)(?:,(?:src|dst)){{0,2}} )?"
    r"(?:-m physdev ! --physdev-is-in )?(?:-m addrtype ! --src-type LOCAL )?(?:-m addrtype --dst-type LOCAL )?"
    r"(?:-m ipvs --vproto (?:6|17|132) --vaddr [0-9a-f.:]{2,39} --vport [0-9]{1,5} )?"
    rf"-j (?:{_TARGETS})"
)
_DECLARATION = re.compile(rf":(?:{_CHAINS}) - \[0:0\]")
_DELETION = re.compile(rf"-X (?:{_CHAINS})")
_JUMPS = frozenset(f"-{verb} {jump.source} {render_jump(jump)}" for jump in skeleton.JUMPS for verb in "ID")


def _is_rule(line: str) -> bool:
    match = _RULE.fullmatch(line)
    if match is None or not line.isprintable():
        return False
    interface = match["interface"] or ""
    return len(interface.encode()) <= _INTERFACE_LIMIT


def check(text: str) -> None:
    """Raise AssertionError if a line has an unknown shape, or contains a line break other than its newline."""
    assert text == "".join(f"{line}\n" for line in text.splitlines()), "a line break that is not ours"
    for line in text.splitlines():
        known = (
            line == "COMMIT"
            or line[1:] in _TABLES
            or line in _JUMPS
            or _is_rule(line)
            or _DECLARATION.fullmatch(line)
            or _DELETION.fullmatch(line)
        )
        assert known, f"a line of an unknown shape: {line!r}"
