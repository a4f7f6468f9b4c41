"""Covers the translation of one rule to rules of nf_tables, without a kernel."""

import dataclasses
import hashlib

import pytest

from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family, Network, Protocol, parse_address
from ipvsproxy.model.rules import (
    ConnectionState,
    InterfaceMatch,
    InvertMark,
    JumpTo,
    LimitSegments,
    Masquerade,
    Rule,
    SetMark,
    SetMatch,
    Side,
    TakeMark,
    Target,
    Verdict,
)
from ipvsproxy.model.sets import IpSet, SetKind
from ipvsproxy.model.virtual_servers import VirtualServerKey

TO_PORT_FROM = (Side.DESTINATION, Side.DESTINATION, Side.SOURCE)


@pytest.mark.parametrize("family", Family, ids=str)
def test_a_match_on_source_ranges_becomes_one_rule_per_prefix_length_longest_prefix_first(family: Family) -> None:
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


DROP = Verdict.DROP
ADDRESSES = {Family.IPV4: parse_address("192.0.2.0"), Family.IPV6: parse_address("2001:db8::")}
SIDES = {
    SetKind.CLUSTER_IP: (Side.DESTINATION, Side.DESTINATION),
    SetKind.LOOP_BACK: TO_PORT_FROM,
    SetKind.LOAD_BALANCER_SOURCE_CIDR: TO_PORT_FROM,
    SetKind.NODE_PORT_TCP: (Side.ORIGINAL_DESTINATION,),
    SetKind.IPVS_IPS: (Side.SOURCE,),
    SetKind.EXTERNAL_IP: (Side.ORIGINAL_DESTINATION, Side.ORIGINAL_DESTINATION),
}


def examples(family: Family) -> list[Rule]:
    """Rules with each target, each match and each type of set."""
    address, scope = ADDRESSES[family], SetMatch(IpSet(SetKind.SCOPE, family).name, SIDES[SetKind.CLUSTER_IP])
    network, cni = Network(address, family.bits - 8), InterfaceMatch("cni", is_prefix=True)
    targets: list[Target] = [*Verdict, JumpTo("KUBE-X"), *map(Masquerade, (False, True)), SetMark(8), InvertMark(8)]
    return [
        *(Rule(target=target) for target in (*targets, TakeMark(scope), LimitSegments(1440))),
        *(Rule(target=DROP, set=SetMatch(IpSet(kind, family).name, sides)) for kind, sides in SIDES.items()),
        Rule(target=DROP, source=network, interface=InterfaceMatch("eth0"), protocol=Protocol.SCTP, mark=1, any_mark=2, syn=True),
        Rule(target=DROP, not_source=network, not_interface=cni, not_mark=4, no_mark=8, connection_states=tuple(ConnectionState)),
        Rule(target=DROP, tunnel=True, original_destination=address, not_from_bridge_port=True, from_this_host=True),
        Rule(target=DROP, from_elsewhere=True, to_this_host=True, comment="why"),
        Rule(target=DROP, virtual_server=VirtualServerKey(Protocol.UDP, address, 53), to_virtual_server=True),
    ]


def test_the_example_rules_use_every_field_of_a_rule() -> None:
    given = {
        field.name
        for rule in examples(Family.IPV4)
        for field in dataclasses.fields(Rule)
        if field.name != "target" and getattr(rule, field.name) != field.default
    }
    assert given == {field.name for field in dataclasses.fields(Rule)} - {"target"}


def test_the_encoding_number_must_be_increased_if_the_expressions_of_any_rule_change() -> None:
    """If this test fails because the expressions of a rule have changed, increase ``ENCODING`` and record the new digest."""
    made = [
        b"".join(one)
        for family in Family
        for table in ("nat", "filter")
        for rule in examples(family)
        for one in nft_rule.expand(rule, family, table)
    ]
    assert (nft_rule.ENCODING, hashlib.blake2b(repr(made).encode(), digest_size=8).hexdigest()) == (1, "030b3a728ea4125d")
