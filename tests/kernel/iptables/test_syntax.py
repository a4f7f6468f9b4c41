"""Covers how rules are written and read in the syntax of iptables.

``test_programs.py`` checks the same syntax against the output of the real programs.
"""

import pytest

from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.rules import (
    ChainKey,
    InterfaceMatch,
    JumpTo,
    LimitSegments,
    Masquerade,
    Reference,
    Removal,
    Rule,
    SetMatch,
    Side,
    TakeMark,
    Verdict,
    render,
)
from tests.support import builders

FRONTEND_V6 = builders.frontend("fd00::10", 53, Protocol.UDP)
SET = SetMatch("KUBE-CLUSTER-IP", (Side.DESTINATION, Side.DESTINATION))
FROM_CNI = InterfaceMatch("cni", is_prefix=True)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule(target=JumpTo("T"), interface=FROM_CNI), "-i cni+ -j T"),
        (Rule(target=Verdict.RETURN, no_mark=0x3FFF), "-m mark --mark 0x0/0x3fff -j RETURN"),
        (Rule(target=Verdict.RETURN, any_mark=0x3FFF), "-m mark ! --mark 0x0/0x3fff -j RETURN"),
        (
            Rule(target=Masquerade(), original_destination=parse_address("192.0.2.1"), from_this_host=True),
            "-m conntrack --ctorigdst 192.0.2.1 -m addrtype --src-type LOCAL -j MASQUERADE",
        ),
        (Rule(target=TakeMark(SET)), "-j SET --map-set KUBE-CLUSTER-IP dst,dst --map-mark"),
        (Rule(target=Verdict.DROP, tunnel=True), "-p ipencap -j DROP"),
        (
            Rule(target=LimitSegments(1440), protocol=Protocol.TCP, set=SET, syn=True),
            "-p tcp -m set --match-set KUBE-CLUSTER-IP dst,dst -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 1440",
        ),
        (
            Rule(target=Verdict.DROP, source=parse_network("fd00::10/128"), virtual_server=FRONTEND_V6),
            "-s fd00::10/128 -m ipvs --vproto 17 --vaddr fd00::10 --vport 53 -j DROP",
        ),
    ],
)
def test_a_rule_is_written_as_iptables_save_prints_it(rule: Rule, text: str) -> None:
    """Covers some parts of rules; ``test_programs`` compares the other parts with the output of the real programs."""
    assert render(rule, Family.IPV4) == text


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("-m comment --comment why -j DROP", '-m comment --comment "why" -j DROP'),
        ("-m ipvs --proto 17 --vaddr fd00::10 --vport 53 -j DROP", "-m ipvs --vproto 17 --vaddr fd00::10 --vport 53 -j DROP"),
        ("-p 4 -j DROP", "-p ipencap -j DROP"),
        ("-p 41 -j DROP", "-p ipv6 -j DROP"),
    ],
)
def test_equivalent_spellings_of_a_rule_are_read_as_the_same_rule(text: str, same: str) -> None:
    """For example, iptables prints protocol numbers instead of protocol names on a host without /etc/protocols."""
    assert iptables_syntax.normalise(text) == same


def test_leftover_chains_and_jumps_are_removed_from_their_own_tables() -> None:
    ours, other = ChainKey("nat", "KUBE-OURS"), ChainKey("filter", "KUBE-OTHER")
    jumps = (
        Reference(ChainKey("nat", "OUTPUT"), "-j KUBE-OURS", ours),
        Reference(ChainKey("filter", "INPUT"), "-j KUBE-OTHER", other),
    )
    removal = Removal(references=jumps, emptied=(ours, other), deleted=(other,))
    assert iptables_syntax.render_left_removal(removal) == (
        "*nat\n:KUBE-OURS - [0:0]\n-D OUTPUT -j KUBE-OURS\nCOMMIT\n"
        "*filter\n:KUBE-OTHER - [0:0]\n-D INPUT -j KUBE-OTHER\n-X KUBE-OTHER\nCOMMIT\n"
    )
