"""Who wants a kernel object, and how differences are said; most of the latter is shown by ``tests/daemon/test_verify.py``."""

import pytest

from ipvsproxy.model.kernel import (
    NODE_OWNER,
    BoundAddress,
    ChainKey,
    Flow,
    FlowCleaning,
    Owner,
    RealServer,
    Skeleton,
    SkeletonImage,
    Sysctl,
    Timeouts,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Item
from ipvsproxy.reconcile import compare
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.translate import state
from tests import builders
from tests.translate.test_trace import BY_CLUSTER

KEY = builders.frontend(builders.CLUSTER_IP, 53, Protocol.UDP)
SERVICE = builders.service("dns", builders.service_port(53, Protocol.UDP))
OWNER = Owner(builders.CREATED_S, "default", "dns")
FLOW = Flow(Family.IPV4, Protocol.UDP, parse_address(builders.CLUSTER_IP), 53)


@pytest.fixture
def reconciler() -> Reconciler:
    """One that knows what a Service of UDP wants."""
    made = Reconciler(Policy(node_name="node-a"))
    port = builders.endpoint_port(53, Protocol.UDP)
    slices = [builders.endpoint_slice(builders.endpoint("10.244.0.1"), service="dns", ports=[port])]
    made.put(SERVICE.name, state.translate(SERVICE, slices, builders.node_view(), BY_CLUSTER))
    return made


@pytest.mark.parametrize(
    ("item", "owner"),
    [
        (VirtualServer(KEY, VirtualServerSettings("rr")), OWNER),
        (RealServer(KEY, builders.backend("10.9.9.9", 53), 0), OWNER),
        (BoundAddress(KEY.address), OWNER),
        (FlowCleaning(FLOW, frozenset()), OWNER),
        (BoundAddress(parse_address("10.96.9.9")), None),
        (VirtualServer(builders.frontend("10.96.9.9", 53), VirtualServerSettings("rr")), None),
        (Sysctl("net/ipv4/ip_forward", "1"), NODE_OWNER),
    ],
)
def test_the_owner_of_an_operation_is_who_wants_its_object(reconciler: Reconciler, item: Item, owner: Owner | None) -> None:
    assert compare.owner_of(reconciler.claims, item) == owner


def test_an_address_that_is_missing_or_nobodys_is_said(reconciler: Reconciler) -> None:
    table = reconciler.claims.addresses
    nobodys = parse_address("10.96.9.9")
    table.observe({nobodys: True}, lambda _: True)
    assert {one.name for one in compare.compare(reconciler) if one.kind == "address"} == {str(KEY.address), str(nobodys)}
    table.observe({KEY.address: True}, lambda _: True)
    assert [one for one in compare.compare(reconciler) if one.kind == "address"] == []


def test_timeouts_that_are_left_as_they_are_count_as_equal(reconciler: Reconciler) -> None:
    reconciler.claims.put_node((), (), Timeouts(600, 0, 0))
    compare.note_timeouts(reconciler.claims, Timeouts(600, 120, 300))
    assert [one for one in compare.compare(reconciler) if one.kind == "timeouts"] == []
    compare.note_timeouts(reconciler.claims, Timeouts(900, 120, 300))
    (found,) = [one for one in compare.compare(reconciler) if one.kind == "timeouts"]
    assert (found.name, found.wanted, found.found) == ("tcp", "600 s", "900 s")


def test_of_a_chain_the_first_rule_that_differs_is_said(reconciler: Reconciler) -> None:
    claims = reconciler.claims
    key = ChainKey("nat", "KUBE-MARK-MASQ")
    claims.put_skeleton(Skeleton(family=Family.IPV4, chains={key: ()}, jumps=()))
    claims.skeletons.confirm(Family.IPV4, SkeletonImage(family=Family.IPV4, chains={key: ("-j DROP",)}, jumps=frozenset()))
    (found,) = [one for one in compare.compare(reconciler) if one.kind == "rules"]
    assert str(found) == "rules IPv4 chain nat/KUBE-MARK-MASQ rule 1: wanted no rule, found -j DROP"
