"""Covers the texts that describe operations on each kind of kernel object."""

import typing
from collections.abc import Sequence

import pytest

from ipvsproxy.model import plan
from ipvsproxy.model.kernel import BoundAddresses, Device, Flow, FlowCleaning, LocalRoutes, Sysctl, Timeouts
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb
from ipvsproxy.model.real_servers import EvenWeights
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.sets import SET_COPY, IpSet, SetEntries, SetEntry, SetKind
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer, VirtualServerSettings
from tests.support import builders

IP = parse_address("10.0.0.1")
OTHER = parse_address("10.0.0.2")
ENTRIES = (SetEntry("KUBE-IPVS-IPS", IP), SetEntry("KUBE-IPVS-IPS", OTHER))
PODS = ("10.244.0.5", "10.244.0.6")
BACKENDS = EvenWeights.of([builders.backend(one) for one in PODS])
FRONTEND = builders.frontend("10.0.0.1", 80)
TEXTS: list[tuple[Item, str]] = [
    (VirtualServer(FRONTEND, VirtualServerSettings("rr")), "virtual_server TCP 10.0.0.1:80"),
    (RealServers.of(FRONTEND, builders.backend("10.244.0.5")), "real_server TCP 10.0.0.1:80 -> 10.244.0.5:8080"),
    (
        RealServers(FRONTEND, BACKENDS),
        f"real_server TCP 10.0.0.1:80 -> {PODS[0]}:8080, {PODS[1]}:8080",
    ),
    (SetEntries("KUBE-IPVS-IPS", ENTRIES), "set_entry KUBE-IPVS-IPS 10.0.0.1, 10.0.0.2"),
    (IpSet(SetKind.IPVS_IPS, Family.IPV4), "set KUBE-IPVS-IPS"),
    (SET_COPY, "set KUBE-IPVSPROXY-LARGER"),
    (SetEntries("KUBE-IPVS-IPS", (SetEntry("KUBE-IPVS-IPS", IP),)), "set_entry KUBE-IPVS-IPS 10.0.0.1"),
    (BoundAddresses.of(IP), "address 10.0.0.1"),
    (BoundAddresses((IP, OTHER)), "address 10.0.0.1, 10.0.0.2"),
    (LocalRoutes((IP, OTHER)), "route 10.0.0.1, 10.0.0.2"),
    (Device("kube-ipvs0"), "device kube-ipvs0"),
    (Sysctl("net/ipv4/ip_forward", "1"), "sysctl net/ipv4/ip_forward = 1"),
    (Timeouts(0, 0, 300), "timeouts timeouts 0 0 300"),
    (Skeleton(family=Family.IPV4, chains={}, jumps=()), "rules IPv4 rules"),
    (FlowCleaning(Flow(Family.IPV4, Protocol.UDP, IP, 53), frozenset()), "flow UDP flows to 10.0.0.1:53 (IPv4)"),
]


@pytest.mark.parametrize(("item", "text"), TEXTS)
def test_the_text_of_an_operation_contains_its_verb_and_the_kind_and_name_of_its_object(item: Item, text: str) -> None:
    assert str(Operation(Verb.ADD, item)) == f"add {text}"


def test_every_kind_of_object_that_operations_change_has_a_unique_name() -> None:
    kinds = typing.get_args(Item)
    assert {type(item) for item, _ in TEXTS} == set(kinds)
    assert len({plan.kind_of(item) for item, _ in TEXTS}) == len(kinds) - 1, "a set and its copy are counted together"


@pytest.mark.parametrize(
    ("several", "alone"),
    [
        (RealServers(FRONTEND, BACKENDS), [RealServers.of(FRONTEND, builders.backend(address)) for address in PODS]),
        (SetEntries("KUBE-IPVS-IPS", ENTRIES), list(map(SetEntries.of, ENTRIES))),
        (BoundAddresses((IP, OTHER)), [BoundAddresses.of(IP), BoundAddresses.of(OTHER)]),
        (LocalRoutes((IP, OTHER)), [LocalRoutes.of(IP), LocalRoutes.of(OTHER)]),
    ],
)
def test_an_operation_on_several_objects_splits_into_one_operation_per_object_in_order(
    several: Item, alone: Sequence[Item]
) -> None:
    others = [
        Operation(Verb.ADD, BoundAddresses.of(IP)),
        Operation(Verb.REMOVE, RealServers.of(FRONTEND, builders.backend(PODS[0]))),
    ]
    each = [Operation(Verb.ADD, item) for item in alone]
    assert list(plan.one_by_one([others[0], Operation(Verb.ADD, several), others[1]])) == [others[0], *each, others[1]]
    assert plan.count_objects(several) == len(alone)
    assert [plan.count_objects(item) for item in alone] == [1] * len(alone)


def test_failed_real_servers_are_retried_together_and_other_objects_one_at_a_time() -> None:
    several = [Operation(Verb.ADD, item) for item in (RealServers(FRONTEND, BACKENDS), SetEntries("KUBE-IPVS-IPS", ENTRIES))]
    assert list(plan.as_tried_again(several)) == [several[0], *(Operation(Verb.ADD, SetEntries.of(entry)) for entry in ENTRIES)]


def test_each_object_of_an_operation_gets_a_separate_outcome_if_one_object_has_failed() -> None:
    entries, addresses = (
        Operation(Verb.ADD, item) for item in (SetEntries("KUBE-IPVS-IPS", ENTRIES), BoundAddresses((IP, OTHER)))
    )
    alone = [
        Operation(Verb.ADD, item)
        for item in (IpSet(SetKind.IPVS_IPS, Family.IPV4), BoundAddresses.of(IP), BoundAddresses.of(OTHER))
    ]
    assert plan.outcomes([entries, addresses], {}) == [Outcome(entries), Outcome(addresses)]
    reported = {one: Outcome(one, "no") for one in alone[:2]}
    assert plan.outcomes([alone[0], entries, addresses], reported) == [
        reported[alone[0]],
        Outcome(entries),
        reported[alone[1]],
        Outcome(alone[2]),
    ]
