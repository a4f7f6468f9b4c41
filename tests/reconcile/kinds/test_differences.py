"""The owners of kernel objects, and descriptions of differences. ``tests/commands/test_verify.py`` has tests on a whole node."""

import dataclasses
import types
from collections.abc import Iterable, Mapping

import pytest

from ipvsproxy.model.kernel import BoundAddresses, Flow, FlowCleaning, Sysctl, Timeouts
from ipvsproxy.model.kind import KINDS
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Item
from ipvsproxy.model.real_servers import NOT_MASQUERADED
from ipvsproxy.model.rules import ChainKey, Jump, ObservedSkeleton, Rule, Skeleton, Verdict
from ipvsproxy.model.service import NODE_OWNER, Owner, ServiceName
from ipvsproxy.model.sets import IpSet, SetEntries, SetKind
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import PERSISTENT, SCHEDULER_PORT, RealServers, VirtualServer, VirtualServerSettings
from ipvsproxy.reconcile import survey
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from tests.reconcile import examples, serving, simulation
from tests.reconcile.serving import running
from tests.support import builders
from tests.translate.test_trace import BY_CLUSTER

KEY = builders.frontend(builders.CLUSTER_IP, 53, Protocol.UDP)
SERVICE = builders.service("dns", builders.service_port(53, Protocol.UDP))
OWNER = Owner(builders.CREATED_S, ServiceName("default", "dns"))
FLOW = Flow(Family.IPV4, Protocol.UDP, parse_address(builders.CLUSTER_IP), 53)


@pytest.fixture
def reconciler() -> Reconciler:
    """A reconciler with the desired state of a UDP Service."""
    made = Reconciler(Policy())
    made._tables.put_node(tuple(Family), (), None)
    port = builders.endpoint_port(53, Protocol.UDP)
    slices = [builders.endpoint_slice(builders.endpoint("10.244.0.1"), service="dns", ports=[port])]
    at_once(made.putting(SERVICE.name, builders.translate(SERVICE, slices, builders.node_view(), BY_CLUSTER)))
    return made


@pytest.mark.parametrize(
    ("item", "owner"),
    [
        (VirtualServer(KEY, VirtualServerSettings("rr")), OWNER),
        (RealServers.of(KEY, builders.backend("10.9.9.9", 53), 0), OWNER),
        (BoundAddresses.of(KEY.address), OWNER),
        (FlowCleaning(FLOW, frozenset()), OWNER),
        (FlowCleaning(examples.flow("10.96.9.9"), frozenset()), None),
        (SetEntries.of(examples.entry(SetKind.CLUSTER_IP, KEY)), OWNER),
        (SetEntries.of(examples.bound_entry("10.96.9.9")), None),
        (BoundAddresses.of(parse_address("10.96.9.9")), None),
        (VirtualServer(builders.frontend("10.96.9.9", 53), VirtualServerSettings("rr")), None),
        (IpSet(SetKind.CLUSTER_IP, Family.IPV4), NODE_OWNER),
        (Sysctl("net/ipv4/ip_forward", "1"), None),
    ],
)
def test_the_owner_of_an_operation_is_the_owner_of_the_object_that_it_changes(
    reconciler: Reconciler, item: Item, owner: Owner | None
) -> None:
    assert reconciler.survey.owner_of(item) == owner


def lines(node: simulation.SimulatedNode) -> list[str]:
    """Reads the kernel, and returns the differences between its present state and the desired state."""
    node.observe()
    return [str(one) for one in node.reconciler.survey.differences()]


def test_a_node_in_its_desired_state_has_no_differences() -> None:
    assert lines(running("10.244.0.1")) == []


def test_a_difference_of_the_device_or_a_set_or_a_sysctl_is_reported_with_the_desired_value() -> None:
    node = running("10.244.0.1")
    node.kernel.sysctls[simulation.SYSCTL.path] = "0"
    node.kernel.device = False
    del node.kernel.sets["KUBE-LOAD-BALANCER"]
    assert lines(node) == [
        "sysctl net/ipv4/vs/conntrack: desired 1, observed 0",
        "device kube-ipvs0: desired present, observed missing",
        "set KUBE-LOAD-BALANCER: desired hash:ip,port, observed missing or of another type",
    ]
    node.kernel.set_copy = True
    assert lines(node)[-1] == "set KUBE-IPVSPROXY-LARGER: desired nothing, observed present"
    del node.kernel.sysctls[simulation.SYSCTL.path]
    assert lines(node)[0] == "sysctl net/ipv4/vs/conntrack: desired 1, observed no such setting in this kernel"


def test_a_difference_of_a_set_entry_is_shown_with_the_set_and_the_service() -> None:
    node = running("10.244.0.1")
    node.kernel.sets["KUBE-CLUSTER-IP"].entries = {examples.entry(SetKind.CLUSTER_IP, builders.frontend("10.96.9.9", 80))}
    assert lines(node) == [
        "set_entry KUBE-CLUSTER-IP 10.96.0.10,tcp:80 of default/web: desired present, observed missing",
        "set_entry KUBE-CLUSTER-IP 10.96.9.9,tcp:80: desired nothing, observed present",
    ]


def test_a_missing_virtual_server_is_reported_in_one_line_with_the_number_of_its_real_servers() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.kernel.virtual_servers.clear()
    assert lines(node) == ["virtual_server TCP 10.96.0.10:80 of default/web: desired rr, real servers: 2, observed missing"]


def test_an_undesired_virtual_server_is_reported_in_one_line_with_its_settings() -> None:
    node = running("10.244.0.1")
    settings = VirtualServerSettings("mh", SCHEDULER_PORT | PERSISTENT, 10800)
    stray = examples.observed({builders.backend("10.244.0.1"): 1}, settings=settings)
    node.kernel.virtual_servers[builders.frontend(builders.CLUSTER_IP, 9)] = stray
    assert lines(node) == [
        "virtual_server TCP 10.96.0.10:9: desired nothing, observed mh (port), session affinity 10800 s, real servers: 1"
    ]


def test_one_line_is_reported_for_each_real_server_that_differs_from_the_desired_state() -> None:
    node = running("10.244.0.1", "10.244.0.2", "10.244.0.4")
    weights = node.kernel.virtual_servers[serving.KEY].real_servers
    weights[builders.backend("10.244.0.1")] = 0
    del weights[builders.backend("10.244.0.2")]
    weights[builders.backend("10.244.0.3")] = 1
    weights[builders.backend("10.244.0.4")] = NOT_MASQUERADED
    unused = "weight 0 (its endpoint is not used; its connections go on until they end)"
    name = "real_server TCP 10.96.0.10:80 ->"
    assert sorted(lines(node)) == [
        f"{name} 10.244.0.1:8080 of default/web: desired weight 1, observed weight 0",
        f"{name} 10.244.0.2:8080 of default/web: desired weight 1, observed missing",
        f"{name} 10.244.0.3:8080 of default/web: desired {unused}, observed weight 1",
        f"{name} 10.244.0.4:8080 of default/web: desired weight 1, observed not masqueraded",
    ]


def test_the_report_says_that_an_undesired_udp_real_server_is_removed_at_once(reconciler: Reconciler) -> None:
    weights = {builders.backend("10.244.0.1", 53): 1, builders.backend("10.9.9.9", 53): 0}
    list(reconciler._tables.virtual_servers.observing({KEY: examples.observed(weights)}))
    assert [str(one) for one in reconciler.survey.differences() if one.kind.endswith("server")] == [
        "real_server UDP 10.96.0.10:53 -> 10.9.9.9:53 of default/dns: desired nothing, observed weight 0"
    ]


def test_virtual_servers_of_other_programs_are_reported_as_foreign_unless_a_service_desires_them(reconciler: Reconciler) -> None:
    foreign = [builders.frontend("203.0.113.9", 443), builders.frontend("203.0.113.9", 25)]
    observed = {key: examples.observed() for key in (*foreign, KEY)}
    list(reconciler._tables.virtual_servers.observing(observed, lambda _: False))
    assert list(reconciler.survey.foreign()) == [(foreign[1], examples.observed()), (foreign[0], examples.observed())]


def test_an_observed_timeout_without_a_desired_value_is_not_reported_as_a_difference(reconciler: Reconciler) -> None:
    reconciler.note_timeouts(Timeouts(600, 120, 300))
    assert list(reconciler._tables.timeouts.observed) == [], "none are wanted, none are looked at"
    reconciler.put_node((), (), Timeouts(600, 0, 0))
    assert timeouts(reconciler) == ["timeouts tcp: desired 600 s, observed unknown"]
    reconciler.note_timeouts(Timeouts(600, 120, 300))
    assert timeouts(reconciler) == []
    reconciler.note_timeouts(Timeouts(900, 120, 300))
    assert timeouts(reconciler) == ["timeouts tcp: desired 600 s, observed 900 s"]


def timeouts(reconciler: Reconciler) -> list[str]:
    return [str(one) for one in reconciler.survey.differences() if one.kind == "timeouts"]


CHAIN = ChainKey("nat", "KUBE-MARK-MASQ")
JUMP = Jump("nat", "OUTPUT", "KUBE-MARK-MASQ", "why")
DROP, RETURN = Rule(target=Verdict.DROP), Rule(target=Verdict.RETURN)


@pytest.mark.parametrize(
    ("desired", "found", "difference"),
    [
        ((), (DROP,), "rule 1: desired no rule, observed -j DROP"),
        ((DROP, RETURN), (DROP,), "rule 2: desired -j RETURN, observed no rule"),
        ((RETURN, DROP, DROP), (RETURN, RETURN, RETURN), "rule 2: desired -j DROP, observed -j RETURN"),
    ],
)
def test_the_difference_of_a_chain_names_the_first_rule_that_differs(
    reconciler: Reconciler, desired: tuple[Rule, ...], found: tuple[Rule, ...], difference: str
) -> None:
    assert rules(reconciler, {CHAIN: desired}, {CHAIN: found}) == [f"rules IPv4 chain nat/KUBE-MARK-MASQ {difference}"]


def test_chains_and_jumps_are_reported_as_differences_if_they_are_missing_or_undesired(reconciler: Reconciler) -> None:
    other = ChainKey("nat", "KUBE-SERVICES")
    assert rules(reconciler, {CHAIN: (DROP,), other: (DROP, RETURN)}, None, JUMP) == [
        "rules IPv4 chain nat/KUBE-MARK-MASQ: desired 1 rule, observed missing",
        "rules IPv4 chain nat/KUBE-SERVICES: desired 2 rules, observed missing",
        "rules IPv4 jump nat/OUTPUT -> KUBE-MARK-MASQ: desired present, observed missing",
    ]
    assert rules(reconciler, {CHAIN: (DROP,)}, {CHAIN: (DROP,), other: ()}) == [
        "rules IPv4 chain nat/KUBE-SERVICES: desired nothing, observed present"
    ]
    assert rules(reconciler, {CHAIN: (DROP,)}, {CHAIN: ()}, JUMP, present=[JUMP]) == [
        "rules IPv4 chain nat/KUBE-MARK-MASQ rule 1: desired -j DROP, observed no rule"
    ]


def test_a_jump_in_a_dormant_table_is_reported_as_not_in_force_instead_of_missing(reconciler: Reconciler) -> None:
    tables = reconciler._tables
    other = JUMP._replace(source="PREROUTING")
    tables.put_skeleton(Skeleton(family=Family.IPV4, chains={}, jumps=(JUMP, other)))
    image = ObservedSkeleton(family=Family.IPV4, chains={}, jumps=frozenset(), idle_jumps={JUMP: "the table is dormant"})
    tables.skeletons.confirm(Family.IPV4, image)
    assert [str(one) for one in reconciler.survey.differences() if one.kind == "rules"] == [
        f"rules IPv4 jump {JUMP}: desired present, observed not in force: the table is dormant",
        f"rules IPv4 jump {other}: desired present, observed missing",
    ]


def test_a_rule_of_another_program_between_our_jumps_is_not_reported_as_a_missing_jump(reconciler: Reconciler) -> None:
    key = ChainKey("filter", "INPUT")
    chains = {CHAIN: (DROP,)}

    def found(count: int) -> list[str]:
        strange = tuple(f"accept {number}" for number in range(count))
        return rules(reconciler, chains, chains, JUMP, present=[JUMP], strange_rules={key: strange})

    begin, end = "rules IPv4 chain filter/INPUT: desired only jumps of ours, observed accept 0", "all of which run removes"
    assert found(1) == [f"{begin}, which run removes"]
    assert found(5) == [f"{begin}; accept 1; accept 2; accept 3; accept 4, {end}"]
    assert found(7) == [f"{begin}; accept 1; accept 2; accept 3; accept 4; and 2 more, {end}"]
    assert rules(reconciler, chains, chains, JUMP, present=[JUMP]) == []


def rules(
    reconciler: Reconciler,
    desired: Mapping[ChainKey, tuple[Rule, ...]],
    found: Mapping[ChainKey, tuple[Rule, ...]] | None,
    *jumps: Jump,
    present: Iterable[Jump] = (),
    strange_rules: Mapping[ChainKey, tuple[str, ...]] = types.MappingProxyType({}),
) -> list[str]:
    """The reported differences of rules, for the observed rules ``found``; None means that the rules have not been observed."""
    tables = reconciler._tables
    tables.put_skeleton(Skeleton(family=Family.IPV4, chains=desired, jumps=jumps))
    image = None
    if found is not None:
        in_force = Skeleton(family=Family.IPV4, chains=found, jumps=tuple(present)).in_force
        image = dataclasses.replace(in_force, strange_rules=dict(strange_rules))
    tables.skeletons.confirm(Family.IPV4, image)
    return [str(one) for one in reconciler.survey.differences() if one.kind == "rules"]


def test_tracked_flows_are_never_reported_as_differences() -> None:
    assert set(survey.COMPARED_KINDS) == {kind.name for kind in KINDS.values()} - {KINDS[FlowCleaning].name}
