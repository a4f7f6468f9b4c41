"""How operations are named, for each kind of item there is."""

import typing

import pytest

from ipvsproxy.model import plan
from ipvsproxy.model.kernel import (
    BoundAddress,
    Device,
    Flow,
    FlowCleaning,
    IpSet,
    RealServer,
    RealServers,
    SetEntry,
    SetKind,
    Sysctl,
    Timeouts,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Item, Operation, Verb
from ipvsproxy.model.real_servers import EvenWeights
from ipvsproxy.model.rules import Skeleton
from tests import builders

IP = parse_address("10.0.0.1")
PODS = ("10.244.0.5", "10.244.0.6")
BACKENDS = EvenWeights.of([builders.backend(one) for one in PODS])
FRONTEND = builders.frontend("10.0.0.1", 80)
TEXTS: list[tuple[Item, str]] = [
    (VirtualServer(FRONTEND, VirtualServerSettings("rr")), "virtual_server TCP 10.0.0.1:80"),
    (RealServer(FRONTEND, builders.backend("10.244.0.5")), "real_server TCP 10.0.0.1:80 -> 10.244.0.5:8080"),
    (
        RealServers(FRONTEND, BACKENDS),
        f"real_server TCP 10.0.0.1:80 -> {PODS[0]}:8080, {PODS[1]}:8080",
    ),
    (SetEntry("KUBE-IPVS-IPS", IP), "set_entry KUBE-IPVS-IPS 10.0.0.1"),
    (IpSet(SetKind.IPVS_IPS, Family.IPV4), "set KUBE-IPVS-IPS"),
    (BoundAddress(IP), "address 10.0.0.1"),
    (Device("kube-ipvs0"), "device kube-ipvs0"),
    (Sysctl("net/ipv4/ip_forward", "1"), "sysctl net/ipv4/ip_forward = 1"),
    (Timeouts(0, 0, 300), "timeouts timeouts 0 0 300"),
    (Skeleton(family=Family.IPV4, chains={}, jumps=()), "rules IPv4 rules"),
    (FlowCleaning(Flow(Family.IPV4, Protocol.UDP, IP, 53), frozenset()), "flow UDP flows to 10.0.0.1:53 (IPv4)"),
]


@pytest.mark.parametrize(("item", "text"), TEXTS)
def test_an_operation_says_what_is_done_to_which_object(item: Item, text: str) -> None:
    assert str(Operation(Verb.ADD, item)) == f"add {text}"


def test_every_kind_of_item_has_a_name_and_each_its_own() -> None:
    kinds = typing.get_args(Item)
    assert {type(item) for item, _ in TEXTS} == set(kinds)
    assert len({plan.kind_of(item) for item, _ in TEXTS}) == len(kinds) - 1
    assert plan._KINDS[RealServers] == plan._KINDS[RealServer], "one of them or several, they are counted together"


def test_real_servers_are_told_one_by_one_between_the_others() -> None:
    others = [Operation(Verb.ADD, BoundAddress(IP)), Operation(Verb.REMOVE, RealServer(FRONTEND, builders.backend(PODS[0])))]
    several = Operation(Verb.ADD, RealServers(FRONTEND, BACKENDS))
    alone = [Operation(Verb.ADD, RealServer(FRONTEND, builders.backend(address))) for address in PODS]
    assert list(plan.one_by_one([others[0], several, others[1]])) == [others[0], *alone, others[1]]
