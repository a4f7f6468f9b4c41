"""The desired state of the node and of its Services in each table.

``test_reconciler`` tests the operations that the reconciler plans.
"""

import itertools

import pytest

from ipvsproxy.model.kernel import DEVICE, TIMEOUTS, Device, HealthCheck, HealthCheckPort, Sysctl, Timeouts
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import ChainKey, Rule, Skeleton, Verdict
from ipvsproxy.model.service import NODE_OWNER, Owner
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, ForeignElement, IpSet, SetKind
from ipvsproxy.model.state import Rarities, ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import VirtualServerKey
from ipvsproxy.reconcile.kinds.flows import Keep
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from tests.reconcile import examples
from tests.reconcile.examples import OLD, YOUNG
from tests.support import builders

KEY = builders.frontend("192.0.2.10", 80)
CLUSTER_IP = builders.frontend("10.96.0.1", 80)
NODE_PORT = builders.frontend(builders.NODE_ADDRESS, 30080)
OTHER_NODE_PORT = builders.frontend("172.17.0.1", 30080)
ONE, TWO = builders.backend("10.244.0.1"), builders.backend("10.244.0.2")
LOAD_BALANCER, FIREWALL = examples.entry(SetKind.LOAD_BALANCER, KEY), examples.entry(SetKind.LOAD_BALANCER_FIREWALL, KEY)
NODE_PORT_ENTRY = examples.port_entry(SetKind.NODE_PORT_TCP, 30080)
LOCAL_ENTRY = examples.port_entry(SetKind.NODE_PORT_LOCAL_TCP, 30080)
FLOW = examples.flow("10.96.0.10")


def new_claims(*states: ServiceState) -> NodeTables:
    """Tables into which these desired states of Services were put in this order."""
    tables = NodeTables(Drains())
    put(tables, *states)
    return tables


def put(tables: NodeTables, *states: ServiceState) -> None:
    for state in states:
        at_once(tables.putting(state.owner.service, state))


def entries(tables: NodeTables, owner: Owner) -> set[object]:
    return {entry for table in tables.entries.values() for entry, owner_of in table.desired.items() if owner_of == owner}


def restricted(owner: Owner) -> ServiceState:
    return examples.state(owner, KEY, real_servers=[ONE], entries=[LOAD_BALANCER, FIREWALL], refused=[KEY])


def free(owner: Owner) -> ServiceState:
    return examples.state(owner, KEY, real_servers=[TWO], entries=[LOAD_BALANCER])


def test_after_put_node_the_device_the_sets_the_sysctls_and_the_timeouts_are_desired() -> None:
    tables = new_claims()
    tables.put_node({Family.IPV4}, [Sysctl("net/ipv4/ip_forward", "1")], Timeouts(1, 2, 3))
    assert list(tables.devices.desired) == [Device(DEVICE)]
    assert set(tables.sets.desired) == {IpSet(kind, Family.IPV4) for kind in SetKind if kind not in SCOPE_KINDS}
    assert tables.sysctls.desired == {"net/ipv4/ip_forward": Sysctl("net/ipv4/ip_forward", "1")}
    assert tables.timeouts.desired == {TIMEOUTS: Timeouts(1, 2, 3)}


def test_put_node_keeps_the_desired_sets_of_scopes_only_in_families_that_are_still_served() -> None:
    tables = new_claims()
    tables.put_node(tuple(Family), [], None)
    scoped = {family: IpSet(SetKind.SCOPE, family) for family in Family}
    for ip_set in scoped.values():
        tables.sets.desire(ip_set, NODE_OWNER, NODE_OWNER)
    tables.put_node({Family.IPV4}, [], None)
    assert {ip_set for ip_set in tables.sets.desired if ip_set.kind in SCOPE_KINDS} == {scoped[Family.IPV4]}


def test_a_reading_includes_all_desired_sysctls_and_all_sets_of_the_families_in_use() -> None:
    tables = new_claims()
    tables.put_node({Family.IPV4}, [Sysctl("net/ipv4/ip_forward", "1")], None)
    sets, sysctls = Survey(tables).subjects()
    assert sorted(sets) == sorted(name for name, ip_set in IP_SETS.items() if ip_set.family is Family.IPV4)
    assert sysctls == ["net/ipv4/ip_forward"]


def skeleton(family: Family, *rules: Rule) -> Skeleton:
    return Skeleton(family=family, chains={ChainKey("filter", "KUBE-FORWARD"): rules}, jumps=())


def test_the_rules_of_each_family_are_confirmed_and_replaced_separately() -> None:
    tables = new_claims()
    tables.put_skeleton(skeleton(Family.IPV4))
    tables.put_skeleton(skeleton(Family.IPV6))
    tables.skeletons.confirm(Family.IPV4, skeleton(Family.IPV4).in_force)
    assert list(tables.skeletons.pending) == [Family.IPV6]
    tables.put_skeleton(skeleton(Family.IPV4, Rule(target=Verdict.DROP)))
    assert set(tables.skeletons.pending) == {Family.IPV4, Family.IPV6}


@pytest.mark.parametrize("order", list(itertools.permutations((restricted(OLD), free(YOUNG)))))
def test_set_entries_belong_to_the_service_that_owns_their_virtual_server(order: tuple[ServiceState, ServiceState]) -> None:
    tables = new_claims(*order)
    assert tables.virtual_servers.desired[KEY].real_servers == {ONE}
    assert entries(tables, OLD) == {LOAD_BALANCER, FIREWALL}
    assert entries(tables, YOUNG) == set()
    assert Survey(tables).refused() == {KEY}
    assert [conflict.waiting for conflict in Survey(tables).conflicts()] == [(YOUNG,)]
    at_once(tables.putting(OLD.service, None))
    assert tables.virtual_servers.desired[KEY].real_servers == {TWO}
    assert (entries(tables, OLD), entries(tables, YOUNG)) == (set(), {LOAD_BALANCER})
    assert Survey(tables).refused() == frozenset()
    assert not list(Survey(tables).conflicts())


def test_a_recreated_service_counts_as_younger_than_a_conflicting_service() -> None:
    tables = new_claims(restricted(OLD), free(YOUNG))
    again = Owner(3.0, OLD.service)
    put(tables, restricted(again))
    assert tables.virtual_servers.desired[KEY].owner == YOUNG
    assert entries(tables, YOUNG) == {LOAD_BALANCER}
    assert entries(tables, again) == entries(tables, OLD) == set()
    assert set(tables.states) == {OLD.service, YOUNG.service}
    at_once(tables.putting(YOUNG.service, None))
    assert tables.virtual_servers.desired[KEY].owner == again


def test_a_set_entry_that_two_services_desire_stays_until_both_services_are_deleted() -> None:
    tables = new_claims()
    shared = examples.entry(SetKind.LOOP_BACK, builders.frontend("10.244.0.1", 8080), "10.244.0.1")
    for owner, key in ((OLD, KEY), (YOUNG, CLUSTER_IP)):
        put(tables, examples.state(owner, key, entries=[shared]))
    table = tables.entries[shared.set]
    at_once(tables.putting(OLD.service, None))
    assert table.desired == {shared: YOUNG}
    at_once(tables.putting(YOUNG.service, None))
    assert not table.desired


def service_with_node_port(owner: Owner, *keys: VirtualServerKey) -> ServiceState:
    cluster_entry = examples.entry(SetKind.CLUSTER_IP, CLUSTER_IP)
    health_check = examples.port_entry(SetKind.HEALTH_CHECK_NODE_PORT, 30080)
    return examples.state(owner, CLUSTER_IP, *keys, entries=[cluster_entry, NODE_PORT_ENTRY, LOCAL_ENTRY, health_check])


def test_entries_of_a_lost_node_port_are_removed_even_if_another_object_has_that_port_or_address() -> None:
    """The other object is a cluster IP with the same port number, or an entry of a second scope with the node's address.

    The entry of the cluster IP stays, and the entry of the second scope is removed.
    """
    kept = builders.frontend("10.96.0.1", 30080)
    no_local = examples.entry(SetKind.NO_LOCAL, NODE_PORT)
    for key, entry in ((kept, examples.entry(SetKind.CLUSTER_IP, kept)), (CLUSTER_IP, no_local)):
        tables = new_claims()
        desired = service_with_node_port(YOUNG, NODE_PORT, key)
        put(tables, examples.state(YOUNG, *desired.virtual_servers, entries=[*desired.entries, entry]))
        put(tables, examples.state(OLD, NODE_PORT, entries=[NODE_PORT_ENTRY]))
        assert NODE_PORT_ENTRY in entries(tables, OLD)
        assert LOCAL_ENTRY not in entries(tables, YOUNG)
        assert examples.port_entry(SetKind.HEALTH_CHECK_NODE_PORT, 30080) in entries(tables, YOUNG)
        assert (entry in entries(tables, YOUNG)) is (key == kept)


@pytest.mark.parametrize(
    "lost",
    [
        builders.frontend("192.0.2.10", 30080),
        builders.frontend(builders.NODE_ADDRESS, 30080, Protocol.UDP),
        OTHER_NODE_PORT,
    ],
)
def test_a_node_port_keeps_its_entries_if_its_service_loses_a_virtual_server_with_that_port(lost: VirtualServerKey) -> None:
    """The lost object has a load balancer's address, another protocol with the same port, or one of several node addresses."""
    tables = new_claims()
    desired = service_with_node_port(YOUNG, NODE_PORT, lost)
    named = [examples.entry(SetKind.LOAD_BALANCER, lost)] if lost.address != NODE_PORT.address and lost != OTHER_NODE_PORT else []
    put(tables, examples.state(YOUNG, *desired.virtual_servers, entries=[*desired.entries, *named]), examples.state(OLD, lost))
    assert {NODE_PORT_ENTRY, LOCAL_ENTRY} <= entries(tables, YOUNG)


def test_a_set_counts_as_not_empty_while_one_of_its_entries_is_desired_or_still_observed() -> None:
    tables = new_claims()
    assert Survey(tables).occupied(Family.IPV4) == frozenset()
    put(tables, free(OLD))
    assert Survey(tables).occupied(Family.IPV4) == {SetKind.LOAD_BALANCER}
    assert Survey(tables).occupied(Family.IPV4, settled=True) == {SetKind.LOAD_BALANCER}
    assert Survey(tables).occupied(Family.IPV6) == frozenset()
    tables.entries[LOAD_BALANCER.set].confirm(LOAD_BALANCER, True)
    at_once(tables.putting(OLD.service, None))
    assert Survey(tables).occupied(Family.IPV4) == {SetKind.LOAD_BALANCER}
    assert Survey(tables).occupied(Family.IPV4, settled=True) == frozenset()
    tables.entries[LOAD_BALANCER.set].confirm(LOAD_BALANCER, None)
    assert Survey(tables).occupied(Family.IPV4) == frozenset()
    tables.entries[LOAD_BALANCER.set].confirm(ForeignElement(LOAD_BALANCER.set), True)
    assert Survey(tables).occupied(Family.IPV4) == frozenset(), "no rule is written for that"


def test_connections_from_this_node_to_an_undesired_virtual_server_are_refused_until_it_is_removed() -> None:
    tables = new_claims(restricted(OLD))
    tables.put_skeleton(skeleton(Family.IPV4, Rule(target=Verdict.DROP, virtual_server=KEY), Rule(target=Verdict.RETURN)))
    tables.virtual_servers.confirm(KEY, examples.observed({ONE: 1}))
    assert Survey(tables).refused(settled=True) == {KEY}
    at_once(tables.putting(OLD.service, None))
    assert Survey(tables).refused() == {KEY}
    assert Survey(tables).refused(settled=True) == frozenset()
    assert KEY in tables.virtual_servers.surplus
    tables.virtual_servers.confirm(KEY, None)
    assert Survey(tables).refused() == frozenset()
    assert KEY not in tables.virtual_servers.surplus


def put_flow(tables: NodeTables, keep: set[RealServerKey] | None, owner: Owner = OLD) -> None:
    """Put a Service. Only the real servers in ``keep`` may answer its tracked flow.

    None means that no endpoint of the Service serves.
    """
    put(tables, examples.state(owner, CLUSTER_IP, flows={FLOW: frozenset(keep)} if keep else {}))


def clean(tables: NodeTables) -> None:
    for flow in list(tables.flows.pending):
        tables.flows.confirm(flow, tables.flows.desired[flow].real_servers)


@pytest.mark.checklist(102)
@pytest.mark.parametrize(
    ("before", "after", "is_due"),
    [
        (None, [{ONE}], True),
        ({ONE}, [{ONE, TWO}], False),
        ({ONE, TWO}, [{ONE}], True),
        ({ONE}, [{TWO}], True),
        ({ONE}, [{ONE}], False),
        ({ONE}, [None], False),
        ({ONE}, [{ONE, TWO}, {ONE}], True),
        ({ONE, TWO}, [{ONE}, {ONE, TWO}], False),
        ({ONE}, [None, {ONE}], True),
    ],
)
def test_flows_are_cleaned_when_a_service_gets_its_first_real_servers_or_loses_real_servers(
    before: set[RealServerKey] | None, after: list[set[RealServerKey] | None], *, is_due: bool
) -> None:
    tables = new_claims()
    put_flow(tables, before)
    clean(tables)
    for change in after:
        put_flow(tables, change)
    assert (FLOW in tables.flows.pending) is is_due


def test_a_flow_that_two_services_desire_belongs_to_the_older_service_until_this_service_is_removed() -> None:
    tables = new_claims()
    put_flow(tables, {TWO}, YOUNG)
    put_flow(tables, {ONE}, OLD)
    assert tables.flows.desired[FLOW] == Keep(OLD, frozenset({ONE}))
    clean(tables)
    put_flow(tables, {ONE, TWO}, YOUNG)
    assert not tables.flows.pending
    at_once(tables.putting(OLD.service, None))
    assert not tables.flows.pending
    put_flow(tables, {TWO}, YOUNG)
    assert list(tables.flows.pending) == [FLOW]


def test_a_virtual_server_refuses_connections_of_this_node_only_if_the_owning_service_requests_this() -> None:
    tables = new_claims(examples.state(OLD, KEY), examples.state(YOUNG, KEY, refused=[KEY]))
    assert Survey(tables).refused() == frozenset()
    at_once(tables.putting(OLD.service, None))
    assert Survey(tables).refused() == {KEY}


def test_a_setting_that_is_no_longer_desired_keeps_its_value() -> None:
    tables = new_claims()
    setting, timeouts, rules = (
        Sysctl("net/ipv4/ip_forward", "1"),
        Timeouts(1, 2, 3),
        Skeleton(family=Family.IPV4, chains={}, jumps=()),
    )
    tables.put_node([Family.IPV4], [setting], timeouts)
    tables.put_skeleton(rules)
    tables.sysctls.confirm(setting.path, setting.value)
    tables.timeouts.confirm(TIMEOUTS, timeouts)
    tables.skeletons.confirm(Family.IPV4, rules.in_force)
    tables.skeletons.confirm(Family.IPV6, rules.in_force)
    tables.devices.confirm(Device("another"), value=True)
    for ip_set in list(tables.sets.pending):
        tables.sets.confirm(ip_set, value=True)
    tables.put_node([], [], None)
    assert [list(table.surplus) for table in examples.tables_of(tables) if table.surplus] == []


def health_checked(owner: Owner, local_endpoints: int) -> ServiceState:
    listener = HealthCheckPort(Family.IPV4, 30001)
    return ServiceState(owner=owner, rare=Rarities(local_endpoints={listener: local_endpoints}))


@pytest.mark.checklist(42)
def test_a_shared_health_check_port_answers_for_the_oldest_remaining_service() -> None:
    tables = new_claims()
    port = HealthCheckPort(Family.IPV4, 30001)
    put(tables, health_checked(YOUNG, 2), health_checked(OLD, 1))
    assert tables.health_checks.desired == {port: HealthCheck(OLD, 1)}
    put(tables, health_checked(OLD, 0))
    assert tables.health_checks.desired == {port: HealthCheck(OLD, 0)}
    at_once(tables.putting(OLD.service, None))
    assert tables.health_checks.desired == {port: HealthCheck(YOUNG, 2)}
    moved = HealthCheckPort(Family.IPV4, 30002)
    put(tables, ServiceState(owner=YOUNG, rare=Rarities(local_endpoints={moved: 2})))
    assert tables.health_checks.desired == {moved: HealthCheck(YOUNG, 2)}
    at_once(tables.putting(YOUNG.service, None))
    assert tables.health_checks.desired == {}
