"""One rule in the syntax of iptables.

The same syntax is checked against the output of the real programs in ``test_programs.py``.
"""

import pytest

from ipvsproxy.kernel.iptables import syntax as iptables_syntax
from ipvsproxy.model.net import Family, Protocol, parse_address, parse_network
from ipvsproxy.model.rules import (
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    Jump,
    JumpTo,
    LimitSegments,
    Masquerade,
    Rule,
    SetMark,
    SetMatch,
    Side,
    TakeMark,
    Verdict,
    render,
    render_jump,
)
from tests.support import builders

FRONTEND_V6 = builders.frontend("fd00::10", 53, Protocol.UDP)
SET = SetMatch("KUBE-CLUSTER-IP", (Side.DESTINATION, Side.DESTINATION))
KNOWN = (ConnectionState.RELATED, ConnectionState.ESTABLISHED)
FROM_CNI = InterfaceMatch("cni", is_prefix=True)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule(target=Verdict.DROP), "-j DROP"),
        (Rule(target=Verdict.RETURN, source=parse_network("127.0.0.0/8")), "-s 127.0.0.0/8 -j RETURN"),
        (
            Rule(target=JumpTo("T"), not_source=parse_network("fd00::/56"), set=SET),
            "! -s fd00::/56 -m set --match-set KUBE-CLUSTER-IP dst,dst -j T",
        ),
        (
            Rule(target=JumpTo("T"), not_interface=FROM_CNI, comment="c"),
            '! -i cni+ -m comment --comment "c" -j T',
        ),
        (
            Rule(target=JumpTo("T"), protocol=Protocol.SCTP, comment="type 'x'"),
            r"""-p sctp -m comment --comment "type \'x\'" -j T""",
        ),
        (Rule(target=Verdict.ACCEPT, mark=0x4000), "-m mark --mark 0x4000/0x4000 -j ACCEPT"),
        (Rule(target=Verdict.RETURN, not_mark=1), "-m mark ! --mark 0x1/0x1 -j RETURN"),
        (
            Rule(target=Verdict.ACCEPT, connection_states=KNOWN),
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        ),
        (
            Rule(target=Verdict.ACCEPT, set=SET, not_from_bridge_port=True, from_elsewhere=True),
            "-m set --match-set KUBE-CLUSTER-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT",
        ),
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
        (Rule(target=JumpTo("KUBE-NODE-PORT"), to_this_host=True), "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT"),
        (
            Rule(target=Verdict.DROP, source=parse_network("fd00::10/128"), virtual_server=FRONTEND_V6),
            "-s fd00::10/128 -m ipvs --vproto 17 --vaddr fd00::10 --vport 53 -j DROP",
        ),
        (Rule(target=InvertMark(0x4000)), "-j MARK --set-xmark 0x4000/0x0"),
        (Rule(target=SetMark(0x8)), "-j MARK --set-xmark 0x8/0x8"),
        (Rule(target=Masquerade()), "-j MASQUERADE"),
        (Rule(target=Masquerade(fully_random=True)), "-j MASQUERADE --random-fully"),
        (Rule(target=Verdict.DROP, not_interface=InterfaceMatch("cni0")), "! -i cni0 -j DROP"),
    ],
)
def test_a_rule_is_written_as_iptables_save_prints_it(rule: Rule, text: str) -> None:
    assert render(rule, Family.IPV4) == text


@pytest.mark.parametrize(("family", "kind"), [(Family.IPV4, "icmp-port-unreachable"), (Family.IPV6, "icmp6-port-unreachable")])
def test_a_reject_target_uses_the_icmp_version_of_its_family(family: Family, kind: str) -> None:
    text = f"-j REJECT --reject-with {kind}"
    assert render(Rule(target=Verdict.REJECT), family) == text


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
    """Among them numbers instead of names, which iptables prints on a host without /etc/protocols."""
    assert iptables_syntax.normalise(text) == same


def test_a_jump_is_written_as_iptables_save_prints_it() -> None:
    jump = Jump("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules")
    assert render_jump(jump) == '-m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT'
