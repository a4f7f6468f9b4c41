"""Translating one rule to rules of nf_tables, without a kernel."""

import pytest

from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Rule, SetMatch, Side, Verdict
from ipvsproxy.model.sets import IpSet, SetKind

TO_PORT_FROM = (Side.DESTINATION, Side.DESTINATION, Side.SOURCE)


@pytest.mark.parametrize("family", Family, ids=str)
def test_prefix_lengths_are_looked_up_from_the_longest_to_the_shortest_with_a_masked_address(family: Family) -> None:
    match = SetMatch(IpSet(SetKind.LOAD_BALANCER_SOURCE_CIDR, family).name, TO_PORT_FROM)
    rules = nft_rule.expand(Rule(set=match, target=Verdict.RETURN), family, "filter")
    assert len(rules) == family.bits
    size, words = family.bits // 8, family.bits // 32
    unmasked = rules[0]
    for number, rule in enumerate(rules[1:], 1):
        mask = (-1 << number) & ((1 << family.bits) - 1)
        cut = nft_rule.bitwise(mask.to_bytes(size, "big"), bytes(size), words + 2)
        assert cut in rule
        assert cut not in unmasked
        assert len(rule) == len(unmasked) + 1
