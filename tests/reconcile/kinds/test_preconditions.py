"""Tests which operations wait for other operations.

Each operation fails once, and the tests check the state after every operation.

The tests need no kernel, because ``simulation`` interprets the rules for source ranges as iptables does.
"""

import itertools
from collections.abc import Callable

import pytest

from ipvsproxy.model.kernel import FlowCleaning, Sysctl
from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Operation, Outcome, Verb, one_by_one
from ipvsproxy.model.real_servers import EvenWeights
from ipvsproxy.model.rules import ChainKey, Rule, SetMatch, Side, Skeleton, TakeMark, Verdict
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName, ServiceType
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, ForeignElement, IpSet, MarkedEntry, SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import ClusterScope, Rarities, ServiceState
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import FirewallMark, ObservedVirtualServer, RealServers, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.kinds.declaration import Circumstances
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from tests.reconcile import examples, simulation
from tests.support import builders, patience

ADDRESS = "192.0.2.10"
VIRTUAL_SERVER = builders.frontend(ADDRESS, 80)
NODE_RANGE = "192.168.0.0/24"
HOME, OFFICE, STRANGER = "10.1.1.1", "10.2.2.2", "203.0.113.5"
EVERYBODY = frozenset({HOME, OFFICE, STRANGER, "node"})
RANGES = {
    (): EVERYBODY,
    ("10.1.0.0/16",): frozenset({HOME}),
    ("10.0.0.0/8",): frozenset({HOME, OFFICE}),
    ("10.1.0.0/16", NODE_RANGE): frozenset({HOME, "node"}),
    ("10.2.0.0/16", "10.1.1.1/32"): frozenset({HOME, OFFICE}),
}
"""The clients that each list of source ranges admits."""


def web(source_ranges: tuple[str, ...], name: str = "web", address: str = ADDRESS, created_s: float = 5.0) -> Service:
    return builders.service(
        name, load_balancer=(address,), source_ranges=source_ranges, cluster=(f"10.96.0.{len(name)}",), created_s=created_s
    )


def endpoints() -> EndpointSlice:
    return builders.endpoint_slice(builders.endpoint("10.244.0.5"))


def serving(service: tuple[Service, EndpointSlice]) -> simulation.SimulatedNode:
    """A node that serves this Service."""
    node = simulation.SimulatedNode()
    node.put(*service)
    node.sync()
    return node


def let_in(node: simulation.SimulatedNode, key: VirtualServerKey = VIRTUAL_SERVER) -> set[str]:
    clients = {source for source in (HOME, OFFICE, STRANGER) if simulation.lets_in(node.kernel, key, source)}
    return clients | ({"node"} if simulation.lets_node_in(node.kernel, key) else set())


class Nth:
    """Selects the operation at position ``number``, counted from 0, and all later operations that equal it."""

    def __init__(self, number: int) -> None:
        self.picked: Operation | None = None
        self._to_come = number

    def __call__(self, operation: Operation) -> bool:
        if self.picked is None and self._to_come == 0:
            self.picked = operation
        self._to_come -= 1
        return operation == self.picked


def each_failure(change: Callable[[Nth], None]) -> None:
    """Make the same change repeatedly, each time with a different failing operation, until each operation has failed once."""
    for number in itertools.count():
        failing = Nth(number)
        change(failing)
        if failing.picked is None:
            assert number > 0
            return


def until_done(node: simulation.SimulatedNode) -> None:
    node.sync()
    for _ in range(2):
        node.observe()
        node.sync(after_s=61)


def with_a_second_one(node: simulation.SimulatedNode, source_ranges: tuple[str, ...]) -> None:
    """Add another Service with source ranges, so that the rules for source ranges already exist."""
    if source_ranges:
        node.put(web(source_ranges, "other", "192.0.2.77"))


@pytest.mark.untraced
@pytest.mark.parametrize("others", [(), ("10.1.0.0/16",)])
@pytest.mark.parametrize("ranges", [ranges for ranges in RANGES if ranges])
def test_only_clients_in_the_source_ranges_reach_a_new_address_whatever_operation_fails(
    ranges: tuple[str, ...], others: tuple[str, ...]
) -> None:
    def change(failing: Nth) -> None:
        node = simulation.SimulatedNode()
        with_a_second_one(node, others)
        node.sync()
        node.kernel.fail(failing, times=2)
        node.after_each = lambda operation: _assert_only(node, RANGES[ranges], operation)
        node.put(web(ranges), endpoints())
        until_done(node)
        assert let_in(node) == RANGES[ranges]
        assert not node.plan()

    each_failure(change)


def _assert_only(node: simulation.SimulatedNode, allowed: frozenset[str], operation: Operation) -> None:
    assert let_in(node) <= allowed, operation


@pytest.mark.untraced
@pytest.mark.parametrize("others", [(), ("10.1.0.0/16", NODE_RANGE), *([("10.1.0.0/16",)] if patience.IS_THOROUGH else [])])
@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(RANGES, 2)))
def test_a_client_in_both_the_old_and_the_new_source_ranges_is_never_shut_out_whatever_operation_fails(
    before: tuple[str, ...], after: tuple[str, ...], others: tuple[str, ...]
) -> None:
    def change(failing: Nth) -> None:
        node = simulation.SimulatedNode()
        with_a_second_one(node, others)
        node.put(web(before), endpoints())
        node.sync()
        assert let_in(node) == RANGES[before]
        node.kernel.fail(failing, times=2)
        node.after_each = lambda operation: _assert_all(node, RANGES[before] & RANGES[after], operation)
        node.put(web(after), endpoints())
        until_done(node)
        assert let_in(node) == RANGES[after]
        assert not node.plan()

    each_failure(change)


def _assert_all(node: simulation.SimulatedNode, allowed: frozenset[str], operation: Operation) -> None:
    assert allowed <= let_in(node), operation


@pytest.mark.parametrize("ranges", [ranges for ranges in RANGES if ranges])
def test_source_ranges_restrict_clients_even_if_operations_fail_during_the_removal_of_the_service(
    ranges: tuple[str, ...],
) -> None:
    def change(failing: Nth) -> None:
        node = serving((web(ranges), endpoints()))
        node.kernel.fail(failing, times=2)
        node.after_each = lambda operation: _assert_only(node, RANGES[ranges], operation)
        node.remove("web")
        until_done(node)
        assert VIRTUAL_SERVER not in node.kernel.virtual_servers
        assert not any(ip_set.entries for ip_set in node.kernel.sets.values())

    each_failure(change)


def test_an_address_is_not_bound_until_one_of_its_virtual_servers_exists() -> None:
    """If the address were bound earlier, any program on this host that listens on the Service's port would answer.

    The rules do not close the ports of Services.
    """
    node = simulation.SimulatedNode()
    cluster, balancer = builders.frontend("10.96.0.3", 80), VIRTUAL_SERVER
    node.kernel.fail(lambda operation: operation.verb is Verb.ADD and getattr(operation.item, "key", None) == balancer, times=3)
    node.put(web(()), endpoints())
    node.sync()
    assert {cluster.address} == set(node.kernel.addresses)
    node.put(builders.service("udp", builders.service_port(53, Protocol.UDP), load_balancer=(ADDRESS,), cluster=("10.96.0.9",)))
    node.sync()
    assert balancer not in node.kernel.virtual_servers
    assert balancer.address in node.kernel.addresses, "another Service answers there"


def test_a_second_service_on_the_same_address_does_not_wait_for_the_source_ranges_of_the_first_service() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(
        lambda operation: operation.item == SetEntries.of(examples.range_entry(VIRTUAL_SERVER, "10.1.0.0/16")), times=1
    )
    node.put(web(("10.1.0.0/16",)), endpoints())
    node.put(builders.service("free", builders.service_port(443), cluster=("10.96.0.99",), load_balancer=(ADDRESS,)))
    node.sync()
    assert VIRTUAL_SERVER not in node.kernel.virtual_servers
    assert builders.frontend(ADDRESS, 443) in node.kernel.virtual_servers
    assert VIRTUAL_SERVER.address in node.kernel.addresses


HERE, ELSEWHERE = builders.backend("10.244.0.5"), builders.backend("10.244.1.5")
NODE_PORT = 30080


def shop(protocol: Protocol, *, local: bool) -> tuple[Service, EndpointSlice]:
    """A Service that has a load balancer's address, a node port, an endpoint on this node, and an endpoint on another node."""
    service = builders.service(
        "shop",
        builders.service_port(80, protocol, node_port=NODE_PORT),
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=(ADDRESS,),
        external_local=local,
    )
    both = builders.endpoint(str(HERE.address)), builders.endpoint(str(ELSEWHERE.address), builders.OTHER_NODE)
    return service, builders.endpoint_slice(*both, service="shop", ports=(builders.endpoint_port(8080, protocol),))


def local_entries(protocol: Protocol) -> dict[VirtualServerKey, SetEntry]:
    """Maps each virtual server to the set entry that exempts its traffic from masquerading."""
    balancer = builders.frontend(ADDRESS, 80, protocol)
    node_port = builders.frontend(builders.NODE_ADDRESS, NODE_PORT, protocol)
    of_node_port = {
        Protocol.TCP: examples.port_entry(SetKind.NODE_PORT_LOCAL_TCP, NODE_PORT),
        Protocol.UDP: examples.port_entry(SetKind.NODE_PORT_LOCAL_UDP, NODE_PORT),
        Protocol.SCTP: examples.entry(SetKind.NODE_PORT_LOCAL_SCTP, node_port),
    }
    return {balancer: examples.entry(SetKind.LOAD_BALANCER_LOCAL, balancer), node_port: of_node_port[protocol]}


def in_force(node: simulation.SimulatedNode, entry: SetEntry) -> bool:
    return entry.set in node.kernel.sets and entry in node.kernel.sets[entry.set].entries


def _assert_answered(node: simulation.SimulatedNode, protocol: Protocol, operation: Operation) -> None:
    """Assert that no set entry exempts traffic to another node from masquerading.

    Such traffic must be masqueraded, so that the replies return through this node.
    """
    for key, entry in local_entries(protocol).items():
        server = node.kernel.virtual_servers.get(key)
        if server and server.real_servers.get(ELSEWHERE):
            assert not in_force(node, entry), operation


@pytest.mark.untraced
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("protocol", Protocol)
def test_traffic_to_another_node_stays_masqueraded_even_if_a_step_of_a_policy_change_fails(
    protocol: Protocol, *, local: bool, restarted: bool
) -> None:
    def change(failing: Nth) -> None:
        node = serving(shop(protocol, local=not local))
        node.kernel.fail(failing, times=2)
        node.after_each = lambda operation: _assert_answered(node, protocol, operation)
        node.put(*shop(protocol, local=local))
        if restarted:
            node.restart()
        until_done(node)
        assert not node.plan()
        for key, entry in local_entries(protocol).items():
            assert in_force(node, entry) is local
            assert (ELSEWHERE in node.kernel.virtual_servers[key].real_servers) is not local

    each_failure(change)


def test_remote_endpoints_wait_for_the_desired_states_of_all_services_if_a_policy_changed_during_a_restart() -> None:
    node = serving(shop(Protocol.TCP, local=True))
    node.put(*shop(Protocol.TCP, local=False))
    node.restart()
    node.plan()
    additions = at_once(node.reconciler.planning(node.now, only_additions=True))
    assert [str(operation) for operation in additions if isinstance(operation.item, RealServers)] == []


def test_a_change_of_a_services_traffic_policy_delays_only_that_services_endpoints() -> None:
    node = serving(shop(Protocol.TCP, local=True))
    node.put(*shop(Protocol.TCP, local=False))
    node.put(builders.service("web", cluster=("10.96.0.99",)), endpoints())
    given_traffic = {one.item.virtual_server for one in node.plan() if isinstance(one.item, RealServers)}
    assert given_traffic >= {builders.frontend("10.96.0.99", 80)}
    assert not given_traffic & local_entries(Protocol.TCP).keys()


def test_new_endpoints_do_not_wait_for_the_removal_of_source_ranges() -> None:
    node = serving((web(("10.1.0.0/16", "10.2.0.0/16")), builders.endpoint_slice()))
    node.put(web(("10.1.0.0/16",)), endpoints())
    assert VIRTUAL_SERVER in {one.item.virtual_server for one in node.plan() if isinstance(one.item, RealServers)}


def test_a_removed_endpoint_gets_weight_zero_at_once_even_if_the_traffic_policy_changes_too() -> None:
    node = serving(shop(Protocol.TCP, local=True))
    service, _ = shop(Protocol.TCP, local=False)
    node.put(service, builders.endpoint_slice(builders.endpoint(str(ELSEWHERE.address), builders.OTHER_NODE), service="shop"))
    operations = node.plan()
    for key in local_entries(Protocol.TCP):
        assert Operation(Verb.SET, RealServers.of(key, HERE, 0)) in operations
        assert Operation(Verb.ADD, RealServers.of(key, ELSEWHERE, 1)) not in operations


def test_only_entries_that_prevent_masquerading_wait_until_an_undesired_real_server_is_removed() -> None:
    node = serving(shop(Protocol.TCP, local=True))
    for server in node.kernel.virtual_servers.values():
        server.real_servers[ELSEWHERE] = 1
    for ip_set in node.kernel.sets.values():
        ip_set.entries.clear()
    node.observe()
    added = {one.item.key for one in one_by_one(node.plan()) if isinstance(one.item, SetEntries)}
    waiting = set(local_entries(Protocol.TCP).values())
    assert not added & waiting
    scoped = {entry for entry in added if IP_SETS[entry.set].kind in SCOPE_KINDS}
    assert waiting | (added - scoped) == {*node.states[ServiceName(builders.NAMESPACE, "shop")].entries}


def dns(*ready: str) -> tuple[Service, EndpointSlice]:
    port = builders.service_port(53, Protocol.UDP, node_port=30053)
    slices = builders.endpoint_slice(
        *(builders.endpoint(address) for address in ready), service="dns", ports=(builders.endpoint_port(53, port.protocol),)
    )
    return builders.service("dns", port), slices


def cleanings(operations: list[Operation]) -> list[FlowCleaning]:
    return [operation.item for operation in operations if isinstance(operation.item, FlowCleaning)]


@pytest.mark.checklist(102)
def test_a_flow_is_cleaned_only_after_its_virtual_server_has_lost_the_undesired_real_server() -> None:
    node = serving(dns("10.244.0.5", "10.244.0.6"))
    lost = builders.backend("10.244.0.6", 53)
    node_port = builders.frontend(builders.NODE_ADDRESS, 30053, Protocol.UDP)
    node.kernel.fail(lambda operation: operation == Operation(Verb.REMOVE, RealServers.of(node_port, lost, 0)), times=1)
    node.put(*dns("10.244.0.5"))
    of_cluster_ip, of_node_port = examples.flow(builders.CLUSTER_IP), examples.flow(builders.NODE_ADDRESS, 30053)
    keep = frozenset({builders.backend("10.244.0.5", 53)})
    assert cleanings(node.sync()) == [FlowCleaning(of_cluster_ip, keep)]
    assert cleanings(node.sync(after_s=1)) == [FlowCleaning(of_node_port, keep)]


def test_flows_are_not_cleaned_before_their_virtual_server_has_been_added() -> None:
    node = simulation.SimulatedNode()
    key = builders.frontend(builders.CLUSTER_IP, 53, Protocol.UDP)
    node.kernel.fail(lambda operation: getattr(operation.item, "key", None) == key, times=1)
    node.put(*dns("10.244.0.5"))
    assert [item.flow for item in cleanings(node.sync())] == [examples.flow(builders.NODE_ADDRESS, 30053)]
    assert [item.flow for item in cleanings(node.sync(after_s=1))] == [examples.flow(builders.CLUSTER_IP)]


def test_flows_of_a_real_server_are_cleaned_if_its_endpoint_is_ready_but_does_not_serve() -> None:
    """The endpoint is ready but not serving, as with ``publishNotReadyAddresses``."""
    node = simulation.SimulatedNode()
    service, _ = dns()
    slices = builders.endpoint_slice(
        builders.endpoint("10.244.0.5", serving=False),
        builders.endpoint("10.244.0.6"),
        service="dns",
        ports=(builders.endpoint_port(53, Protocol.UDP),),
    )
    node.put(service, slices)
    assert len(cleanings(node.sync())) == 2


def test_a_setting_for_tunnels_waits_for_the_rules_that_drop_tunnelled_packets_of_unknown_senders() -> None:
    device, other = Sysctl("tunl0", "0x81", for_tunnels=True), Sysctl("other", "1")
    guard = {ChainKey("mangle", "KUBE-IPVSPROXY-ARRIVAL"): (Rule(tunnel=True, target=Verdict.DROP),)}

    def settings(tables: NodeTables) -> list[str]:
        return [str(one.item.key) for one in tables.of_sysctls.additions(Circumstances(tables))]

    returning = {ChainKey("mangle", "KUBE-IPVSPROXY-ARRIVAL"): (Rule(tunnel=True, target=Verdict.RETURN),)}
    for chains, expected in ((guard, ["tunl0", "other"]), (returning, ["other"]), ({}, ["other"])):
        tables = NodeTables(Drains())
        tables.put_node([Family.IPV4], [device, other], None)
        assert settings(tables) == ["other"], "no rules are desired yet"
        rules = Skeleton(family=Family.IPV4, chains=chains, jumps=())
        tables.put_skeleton(rules)
        assert settings(tables) == ["other"], "the rules are not in force"
        tables.skeletons.confirm(Family.IPV4, rules.in_force)
        assert settings(tables) == expected


def test_refused_settings_of_a_missing_tunnel_device_are_tried_again_when_the_device_appears() -> None:
    device, filtering = Sysctl("tunl0", "0x81", for_tunnels=True), Sysctl("rp_filter", "0", for_tunnels=True)
    other, tables = Sysctl("other", "1"), NodeTables(Drains())
    guard = {ChainKey("mangle", "KUBE-IPVSPROXY-ARRIVAL"): (Rule(tunnel=True, target=Verdict.DROP),)}
    rules = Skeleton(family=Family.IPV4, chains=guard, jumps=())
    tables.put_skeleton(rules)
    tables.skeletons.confirm(Family.IPV4, rules.in_force)
    tables.put_node([Family.IPV4], [device, filtering, other], None)
    for setting in (device, filtering, other):
        tables.of_sysctls.settle_failure(Outcome(Operation(Verb.SET, setting), "no such device"))
    assert not list(tables.of_sysctls.additions(Circumstances(tables)))
    tables.sysctls.confirm("tunl0", "0x80")
    assert [one.item for one in tables.of_sysctls.additions(Circumstances(tables))] == [device, filtering]


def removals(tables: NodeTables) -> list[Operation]:
    return [operation for kind in tables.kinds for operation in kind.removals(Circumstances(tables))]


def test_a_set_is_not_removed_while_an_existing_rule_refers_to_it() -> None:
    named = IpSet(SetKind.SCOPE, Family.IPV4)
    match = SetMatch(named.name, (Side.DESTINATION, Side.DESTINATION))
    for rule in (Rule(target=Verdict.DROP, set=match), Rule(target=TakeMark(match))):
        tables = NodeTables(Drains())
        rules = Skeleton(family=Family.IPV4, chains={ChainKey("mangle", "KUBE-IPVSPROXY-MARK"): (rule,)}, jumps=())
        tables.put_skeleton(rules)
        other = IpSet(SetKind.NO_LOCAL, Family.IPV4)
        for ip_set in (named, other):
            tables.sets.confirm(ip_set, True)
        assert not removals(tables), "the rules may still name them"
        tables.skeletons.confirm(Family.IPV4, rules.in_force)
        assert removals(tables) == [Operation(Verb.REMOVE, other)]


@pytest.mark.parametrize(("port", "is_held_up"), [(80, True), (81, False)])
def test_cleaning_a_marked_flow_waits_only_for_the_virtual_server_of_its_mark(port: int, *, is_held_up: bool) -> None:
    flow, key, mark = examples.flow(ADDRESS, 80), builders.frontend(ADDRESS, 80, Protocol.UDP), FirewallMark.of(Family.IPV4, 1)
    gives = MarkedEntry(IpSet(SetKind.SCOPE, Family.IPV4).name, key.address, Protocol.UDP, port, mark=1, mask=1)
    scope = ClusterScope(
        Family.IPV4,
        Protocol.UDP,
        port,
        (builders.frontend(ADDRESS, port, Protocol.UDP),),
        examples.ROUND_ROBIN,
        EvenWeights.of([]),
    )
    state = ServiceState(
        owner=examples.OLD,
        served=(
            examples.virtual_server(key),
            VirtualServer(mark, examples.ROUND_ROBIN, owner=examples.OLD, marked=Protocol.UDP),
        ),
        entries=(gives,),
        rare=Rarities(flows={flow: frozenset()}, scopes=(scope,)),
    )
    tables = NodeTables(Drains())
    at_once(tables.putting(examples.OLD.service, state))
    tables.virtual_servers.confirm(key, ObservedVirtualServer(examples.ROUND_ROBIN, {}))
    tables.flows.confirm(flow, frozenset([builders.backend("10.244.0.9")]))
    cleaning = [Operation(Verb.REMOVE, FlowCleaning(flow, frozenset()))]
    assert list(tables.of_flows.additions(Circumstances(tables))) == ([] if is_held_up else cleaning)
    tables.virtual_servers.confirm(mark, ObservedVirtualServer(examples.ROUND_ROBIN, {}))
    assert list(tables.of_flows.additions(Circumstances(tables))) == cleaning


def test_a_foreign_element_in_a_set_of_source_ranges_is_removed() -> None:
    tables = NodeTables(Drains())
    element = ForeignElement(IpSet(SetKind.LOAD_BALANCER_SOURCE_CIDR, Family.IPV4).name)
    tables.entries[element.set].confirm(element, True)
    assert removals(tables) == [Operation(Verb.REMOVE, SetEntries(element.set, (element,)))]


def test_only_desired_rules_that_do_not_exist_count_as_missing() -> None:
    tables = NodeTables(Drains())
    assert not tables.of_rules.lacks(Family.IPV4)
    tables.put_skeleton(Skeleton(family=Family.IPV4, chains={}, jumps=()))
    assert tables.of_rules.lacks(Family.IPV4)
