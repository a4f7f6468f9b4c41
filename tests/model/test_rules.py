"""Skeletons: the desired and the observed rules of an IP family."""

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, Jump, ObservedSkeleton, Rule, Skeleton, Verdict

DROP, ONE, TWO = "-j DROP", "-s 192.0.2.1/32 -j DROP", "-s 192.0.2.2/32 -j DROP"


def test_an_observed_skeleton_equals_a_desired_skeleton_with_the_same_chains_and_jumps() -> None:
    key, jump = ChainKey("filter", "KUBE-X"), Jump("filter", "INPUT", "KUBE-X", "x")
    rules = (Rule(target=Verdict.ACCEPT, mark=1), Rule(target=Verdict.DROP))
    skeleton = Skeleton(family=Family.IPV4, chains={key: rules}, jumps=(jump,))
    texts = ("-m mark --mark 0x1/0x1 -j ACCEPT", DROP)
    assert skeleton.in_force == ObservedSkeleton(family=Family.IPV4, chains={key: texts}, jumps=frozenset({jump}))


def test_the_order_of_rules_matters_unless_all_rules_of_the_chain_drop_packets() -> None:
    key = ChainKey("filter", "KUBE-IPVS-OUT-FILTER")

    def observed(*rules: str) -> ObservedSkeleton:
        return ObservedSkeleton(family=Family.IPV4, chains={key: rules}, jumps=frozenset())

    returns, changed = "-s 192.0.2.1/32 -j RETURN", "-s 192.0.2.1/32 -j DROP (changed)"
    assert observed(TWO, ONE) == observed(ONE, TWO)
    assert observed(TWO) != observed(TWO, TWO)
    assert observed(returns, DROP) != observed(DROP, returns)
    assert observed(changed, DROP) != observed(DROP, changed)


def test_a_skeleton_without_a_table_ignores_the_observed_chains_and_jumps_of_the_table() -> None:
    mangle, nat = (
        ObservedSkeleton(
            family=Family.IPV4,
            chains={ChainKey(table, "KUBE-X"): (DROP,)},
            jumps=frozenset({Jump(table, "OUTPUT", "KUBE-X", "x")}),
            strange_rules={ChainKey(table, "OUTPUT"): ("accept",)},
        )
        for table in ("mangle", "nat")
    )
    both = ObservedSkeleton(
        family=Family.IPV4,
        chains={**mangle.chains, **nat.chains},
        jumps=mangle.jumps | nat.jumps,
        strange_rules={**mangle.strange_rules, **nat.strange_rules},
    )
    assert both != nat
    assert both.without("mangle") == nat


def test_the_observed_rules_differ_if_another_program_adds_a_rule_to_one_of_our_base_chains() -> None:
    desired = Skeleton(family=Family.IPV4, chains={}, jumps=()).in_force
    strange = {ChainKey("nat", "OUTPUT"): ("accept",)}
    assert ObservedSkeleton(family=Family.IPV4, chains={}, jumps=frozenset(), strange_rules=strange) != desired
