"""Rules, jumps and skeletons as iptables-save prints them."""

import pytest

from ipvsproxy.model.net import Family, Protocol, parse_network
from ipvsproxy.model.rules import ChainKey, Jump, Rule, SetMatch, Skeleton, SkeletonImage
from tests import builders

FRONTEND, BACKEND = builders.frontend("10.96.0.10", 443), builders.backend("10.244.0.5", 8443)
FRONTEND_V6 = builders.frontend("fd00::10", 53, Protocol.UDP)

SET = SetMatch("KUBE-CLUSTER-IP", "dst,dst")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (Rule(target="DROP"), "-j DROP"),
        (Rule(target="RETURN", source=parse_network("127.0.0.0/8")), "-s 127.0.0.0/8 -j RETURN"),
        (
            Rule(target="T", not_source=parse_network("fd00::/56"), set=SET),
            "! -s fd00::/56 -m set --match-set KUBE-CLUSTER-IP dst,dst -j T",
        ),
        (Rule(target="T", not_interface="cni+", comment="c"), '! -i cni+ -m comment --comment "c" -j T'),
        (Rule(target="T", protocol=Protocol.SCTP, comment="type 'x'"), r"""-p sctp -m comment --comment "type \'x\'" -j T"""),
        (Rule(target="ACCEPT", mark=0x4000), "-m mark --mark 0x4000/0x4000 -j ACCEPT"),
        (Rule(target="RETURN", not_mark=1), "-m mark ! --mark 0x1/0x1 -j RETURN"),
        (Rule(target="ACCEPT", connection_states="RELATED,ESTABLISHED"), "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
        (
            Rule(target="ACCEPT", set=SET, not_from_bridge_port=True, from_elsewhere=True),
            "-m set --match-set KUBE-CLUSTER-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT",
        ),
        (Rule(target="KUBE-NODE-PORT", to_this_host=True), "-m addrtype --dst-type LOCAL -j KUBE-NODE-PORT"),
        (
            Rule(target="DROP", source=parse_network("fd00::10/128"), virtual_server=FRONTEND_V6),
            "-s fd00::10/128 -m ipvs --vproto 17 --vaddr fd00::10 --vport 53 -j DROP",
        ),
        (Rule(target="MARK --set-xmark 0x4000/0x0"), "-j MARK --set-xmark 0x4000/0x0"),
    ],
)
def test_rules_are_written_as_iptables_save_prints_them(rule: Rule, text: str) -> None:
    assert rule.text == str(rule) == text


def test_a_jump_is_written_as_iptables_save_prints_it() -> None:
    jump = Jump("filter", "INPUT", "KUBE-NODE-PORT", "kubernetes health check rules")
    assert jump.text == '-m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT'


def test_the_image_of_a_skeleton_is_its_text_chain_by_chain() -> None:
    key, jump = ChainKey("filter", "KUBE-X"), Jump("filter", "INPUT", "KUBE-X", "x")
    rules = (Rule(target="ACCEPT", mark=1), Rule(target="DROP"))
    skeleton = Skeleton(family=Family.IPV4, chains={key: rules}, jumps=(jump,))
    chains = {key: ("-m mark --mark 0x1/0x1 -j ACCEPT", "-j DROP")}
    assert skeleton.image == SkeletonImage(family=Family.IPV4, chains=chains, jumps=frozenset({jump}))


def test_the_order_of_rules_means_nothing_where_all_of_them_drop_and_much_elsewhere() -> None:
    key = ChainKey("filter", "KUBE-IPVS-OUT-FILTER")

    def image(*rules: str) -> SkeletonImage:
        return SkeletonImage(family=Family.IPV4, chains={key: rules}, jumps=frozenset())

    assert image("-s 192.0.2.2/32 -j DROP", "-s 192.0.2.1/32 -j DROP") == image(
        "-s 192.0.2.1/32 -j DROP", "-s 192.0.2.2/32 -j DROP"
    )
    assert image("-s 192.0.2.2/32 -j DROP") != image("-s 192.0.2.2/32 -j DROP", "-s 192.0.2.2/32 -j DROP")
    assert image("-s 192.0.2.2/32 -j RETURN", "-j DROP") != image("-j DROP", "-s 192.0.2.2/32 -j RETURN")
