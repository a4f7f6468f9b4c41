"""Covers the marks, virtual servers and set entries of second scopes (docs/scopes.md), on an in-memory kernel."""

import dataclasses

import pytest

from ipvsproxy.model.net import Family, Protocol
from ipvsproxy.model.plan import Operation, Verb, one_by_one
from ipvsproxy.model.service import EndpointSlice, Service, ServiceName, ServiceType
from ipvsproxy.model.sets import DIRECT_KINDS, IP_SETS, SCOPE_KINDS, IpSet, MarkedEntry, SetEntries, SetKind, mark_entry
from ipvsproxy.model.steps import at_once
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    RealServers,
    VirtualServer,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.kinds.declaration import Circumstances
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.reconcile.removal import own_objects
from ipvsproxy.reconcile.tables.scopes import MarkedPort, Marks, spread
from ipvsproxy.reconcile.virtual_servers.ownership import firewall_entry
from ipvsproxy.translate.translation_settings import TrafficScopes
from tests.reconcile.simulation import SimulatedNode
from tests.support import builders

HERE, ELSEWHERE = "10.244.0.5", "10.244.1.5"
BALANCER = "192.0.2.12"
FIRST, SECOND = 0x3FFF, 0x3FFE
"""The first two marks that ipvsproxy gives to Service ports, in this order."""


def shop(name: str = "shop", *, local: bool = True, number: int = 12, created_s: float = 1.0) -> tuple[Service, EndpointSlice]:
    service = builders.service(
        name,
        builders.service_port(80),
        cluster=[f"10.96.1.{number}"],
        load_balancer=[f"192.0.2.{number}"],
        kind=ServiceType.LOAD_BALANCER,
        external_local=local,
        created_s=created_s,
    )
    slices = builders.endpoint_slice(builders.endpoint(HERE), builders.endpoint(ELSEWHERE, builders.OTHER_NODE), service=name)
    return service, slices


def node_with(bits: int = 0x3FFF, **options: object) -> SimulatedNode:
    return SimulatedNode(scopes=TrafficScopes.API, scope_bits=bits, **options)  # type: ignore[arg-type]


def serving(*services: tuple[Service, EndpointSlice], bits: int = 0x3FFF, **options: object) -> SimulatedNode:
    """A node that serves these Services."""
    node = node_with(bits, **options)
    for service in services:
        node.put(*service)
    node.sync()
    return node


def come_to_rest(node: SimulatedNode) -> None:
    """End every drain that can end, and do the operations that wait for these drains."""
    for wait_s in (0, 60, 60, 60):
        node.sync(after_s=wait_s)


def marks_of(node: SimulatedNode) -> dict[str, int]:
    """The mark that the kernel gives to packets; the key is the destination address of the packets."""
    entries = [entry for name, held in node.kernel.sets.items() if IP_SETS[name].gives_marks for entry in held.entries]
    return {str(entry.address): entry.mark for entry in entries if isinstance(entry, MarkedEntry)}


def scopes_of(node: SimulatedNode) -> dict[int, set[str]]:
    """Maps each packet mark to the endpoints to which the kernel sends packets with this mark."""
    return {
        key.mark: {str(one.address) for one in server.real_servers}
        for key, server in node.kernel.virtual_servers.items()
        if isinstance(key, FirewallMark)
    }


def traces_of(node: SimulatedNode) -> list[str]:
    sets = [name for name in node.kernel.sets if IP_SETS[name].kind in SCOPE_KINDS]
    return [*sets, *(str(key) for key in node.kernel.virtual_servers if isinstance(key, FirewallMark))]


def test_only_marked_packets_reach_endpoints_on_other_nodes_if_the_traffic_policy_is_local() -> None:
    node = serving(shop())
    plain = node.kernel.virtual_servers[builders.frontend(BALANCER, 80)]
    assert {str(one.address) for one in plain.real_servers} == {HERE}
    assert marks_of(node) == {BALANCER: FIRST}
    assert scopes_of(node) == {FIRST: {HERE, ELSEWHERE}}


def test_waiting_services_get_freed_marks_in_the_order_in_which_they_began_to_wait() -> None:
    node = node_with(0x3)
    for number in range(5):
        node.put(*shop(f"s{number}", number=20 + number, created_s=100.0 - number))
    come_to_rest(node)
    assert marks_of(node).keys() == {"192.0.2.20", "192.0.2.21", "192.0.2.22"}
    assert [port.service.name for port in node.reconciler.survey.without_scope] == ["s3", "s4"]
    node.remove("s1")
    come_to_rest(node)
    assert marks_of(node).keys() == {"192.0.2.20", "192.0.2.22", "192.0.2.23"}


def test_a_wrong_mark_in_a_set_entry_is_drift_and_is_repaired() -> None:
    node = serving(shop())
    (name,) = (name for name in node.kernel.sets if IP_SETS[name].gives_marks)
    (entry,) = node.kernel.sets[name].entries
    assert isinstance(entry, MarkedEntry)
    held = node.kernel.sets[name].entries
    held.clear()
    held.add(MarkedEntry(entry.set, entry.address, entry.protocol, entry.port, mark=7, mask=entry.mask))
    node.observe()
    operations = [str(one) for one in one_by_one(node.sync()) if "SCOPE" in str(one)]
    assert [one.split()[0] for one in operations] == ["remove", "add"]
    assert marks_of(node) == {BALANCER: FIRST}


def test_every_scope_gets_a_mark_of_the_new_bits_when_the_operator_changes_the_mark_bits() -> None:
    node = serving(shop())
    node.reconciler.adopt(Policy(scope_bits=0xFF0000))
    come_to_rest(node)
    assert marks_of(node) == {BALANCER: 0xFF0000}
    assert scopes_of(node) == {0xFF0000: {HERE, ELSEWHERE}}


@pytest.mark.parametrize(("number", "bits", "mark"), [(1, 0x3FFF, 1), (0x3FFF, 0x3FFF, 0x3FFF), (5, 0xF0, 0x50), (3, 0x11, 0x11)])
def test_the_bits_of_a_number_are_distributed_over_the_mark_bits_that_the_operator_allows(
    number: int, bits: int, mark: int
) -> None:
    assert spread(number, bits) == mark


def test_the_survey_finds_the_firewall_mark_that_a_service_port_uses_for_its_second_scope() -> None:
    node = node_with()
    service, slices = shop()
    node.put(service, slices)
    node.sync()
    survey, port = node.reconciler.survey, MarkedPort(service.name, Protocol.TCP, 80)
    mark = survey.scope(port, Family.IPV4)
    assert mark == FirewallMark.of(Family.IPV4, FIRST)
    assert survey.port_of(mark) == port
    assert survey.service_port(service, survey.virtual_servers[mark]) == service.ports[0]
    assert survey.witness(mark) == mark_entry(mark)
    assert survey.witness(FirewallMark.of(Family.IPV4, SECOND)) is None
    assert survey.scope(MarkedPort(service.name, Protocol.UDP, 80), Family.IPV4) is None
    assert survey.scope(port, Family.IPV6) is None


def test_a_family_does_not_count_as_lacking_an_object_if_only_sets_of_second_scopes_are_missing() -> None:
    node = serving(shop())
    lost = IpSet(SetKind.SCOPE, Family.IPV4)
    del node.kernel.sets[lost.name]
    node.observe()
    assert list(node.reconciler._tables.sets.pending) == [lost]
    assert node.reconciler.survey.lacking([Family.IPV4]) == frozenset()


def test_a_reconciler_that_never_writes_still_desires_the_sets_of_scopes() -> None:
    node = serving(shop())
    reader = node._new_reconciler()
    for name, state in node.states.items():
        at_once(reader.putting(name, state))
    reader.tend(node.now)
    assert not [one for one in reader.survey.differences() if one.kind == "set"]
    assert {ip_set.kind for ip_set in reader._tables.sets.desired} >= SCOPE_KINDS - DIRECT_KINDS
    assert {ip_set.kind for ip_set in reader._tables.sets.desired}.isdisjoint(DIRECT_KINDS)


def test_services_that_begin_to_wait_for_a_mark_are_reported_once() -> None:
    node = serving(*(shop(name, number=number) for number, name in enumerate(("first", "second"), 20)), bits=0x1)
    assert [port.service.name for port in node.reconciler.take_without_scope()] == ["second"]
    assert node.reconciler.survey.statistics(node.now).without_scope == 1
    node.put(*shop("second", number=21, created_s=21))
    node.sync()
    assert node.reconciler.take_without_scope() == []


def plan_additions(node: SimulatedNode) -> None:
    """Apply the operations that take nothing away, until no such operation is left.

    ipvsproxy does the same while the first list of a kind of objects is in doubt.
    """
    node.plan()
    add(node)


def add(node: SimulatedNode) -> None:
    while operations := at_once(node.reconciler.planning(node.now, only_additions=True)):
        at_once(node.reconciler.settling(node.apply(operations), node.now))


def test_a_mark_that_the_kernel_still_has_for_a_deleted_service_never_leads_to_endpoints_of_another_service() -> None:
    node = serving(shop("first", number=20), bits=0x1)
    node.remove("first")
    service, _ = shop("second", number=21)
    node.put(service, builders.endpoint_slice(builders.endpoint("10.244.0.9"), service="second"))
    add(node)
    assert (marks_of(node), scopes_of(node)) == ({"192.0.2.20": 1}, {1: {HERE, ELSEWHERE}})
    come_to_rest(node)
    assert (marks_of(node), scopes_of(node)) == ({"192.0.2.21": 1}, {1: {"10.244.0.9"}})


@pytest.mark.parametrize("change", ["is created anew", "is only remembered"])
def test_a_service_keeps_its_mark_if_its_creation_time_changes_or_if_it_is_only_remembered(change: str) -> None:
    node = node_with()
    service, slices = shop()
    node.put(service, slices)
    node.sync()
    if change == "is created anew":
        node.put(*shop(created_s=5.0))
    else:
        node.put(service, slices, remembered=True)
        (state,) = node.states.values()
        assert state.owner.is_remembered
    assert not [one for one in node.sync() if isinstance(one.item, VirtualServer | RealServers | SetEntries)]
    assert marks_of(node) == {BALANCER: FIRST}


@pytest.mark.parametrize("mark", [0, 0x4001])
def test_a_mark_that_does_not_fit_into_the_bits_in_use_is_not_taken_over_after_a_restart(mark: int) -> None:
    marks = Marks(lambda _: False)
    marks.adopt(0x3FFF)
    port = MarkedPort(ServiceName("shop", "shop"), Protocol.TCP, 80)
    marks.want(port)
    assert marks.give([(port, mark)]) == [port]
    assert marks.mark_of(port) == FIRST


def test_no_scope_is_removed_before_every_service_has_a_desired_state() -> None:
    node = serving(shop())
    node.states.clear()
    node.restart()
    at_once(node.reconciler.planning(node.now, only_additions=True))
    assert not [key for key in node.reconciler._tables.virtual_servers.desired if isinstance(key, FirewallMark)]
    assert scopes_of(node) == {FIRST: {HERE, ELSEWHERE}}


def test_a_released_mark_is_reused_only_after_all_marks_that_were_never_used() -> None:
    marks = Marks(lambda _: False)
    marks.adopt(0x3)
    ports = [MarkedPort(ServiceName("shop", "shop"), Protocol.TCP, port) for port in (80, 81, 82, 83)]
    given = []
    for port in ports:
        marks.want(port)
        assert marks.give() == [port]
        given.append(marks.mark_of(port))
        assert marks.release(port)
        assert not marks.release(port)
    assert given == [3, 2, 1, 3]


def test_no_service_gets_a_mark_that_another_program_took_while_ipvsproxy_was_down() -> None:
    node = serving(shop())
    theirs = FirewallMark.of(Family.IPV4, FIRST)
    entry = mark_entry(theirs)
    del node.kernel.virtual_servers[theirs]
    node.kernel.sets[entry.set].entries.clear()
    node.kernel.schedulers |= {"wlc"}
    node.kernel.apply([Operation(Verb.ADD, VirtualServer(theirs, VirtualServerSettings("wlc")))])
    node.restart()
    node.sync()
    assert node.kernel.virtual_servers[theirs].settings.scheduler == "wlc"
    assert marks_of(node) == {BALANCER: SECOND}


def test_a_mark_that_is_in_use_is_checked_only_once_in_the_search_for_free_marks() -> None:
    asked: list[int] = []
    marks = Marks(lambda mark: not asked.append(mark) and mark > 0x3F00)  # type: ignore[func-returns-value]
    marks.adopt(0x3FFF)
    for number in range(10):
        marks.want(MarkedPort(ServiceName("default", str(number)), Protocol.TCP, 80))
        marks.give()
    assert len(asked) == 0x3FFF - 0x3F00 + 10


def test_a_scope_that_is_no_longer_desired_keeps_its_connections_until_they_end() -> None:
    node = serving(shop())
    key = FirewallMark.of(Family.IPV4, FIRST)
    busy = builders.backend(HERE)
    assert busy in node.kernel.virtual_servers[key].real_servers
    node.kernel.connection_counts[key, busy] = ConnectionCounts(1, 0)
    node.put(*shop(local=False))
    come_to_rest(node)
    assert marks_of(node) == {}
    assert node.kernel.virtual_servers[key].real_servers == {busy: 0}
    del node.kernel.connection_counts[key, busy]
    come_to_rest(node)
    assert traces_of(node) == []


def test_an_undesired_second_scope_for_udp_is_removed_at_once_despite_open_flows() -> None:
    node = node_with()
    port, endpoints = builders.service_port(80, Protocol.UDP), (builders.endpoint(HERE), builders.endpoint(ELSEWHERE))
    slices = builders.endpoint_slice(*endpoints, service="shop", ports=(builders.endpoint_port(80, Protocol.UDP),))
    for local in (True, False):
        node.put(builders.service("shop", port, external=[BALANCER], external_local=local), slices)
        node.sync()
        if local:
            assert scopes_of(node) == {FIRST: {HERE, ELSEWHERE}}
            busy = next(iter(node.kernel.virtual_servers[FirewallMark.of(Family.IPV4, FIRST)].real_servers))
            node.kernel.connection_counts[FirewallMark.of(Family.IPV4, FIRST), busy] = ConnectionCounts(1, 0)
    assert scopes_of(node) == {}


def ends_marking(operation: Operation) -> bool:
    item = operation.item
    return operation.verb is Verb.REMOVE and isinstance(item, SetEntries) and IP_SETS[item.set].gives_marks


@pytest.mark.parametrize("kept", [{HERE: 1, ELSEWHERE: 1}, {}], ids=["with real servers", "empty"])
def test_an_undesired_scope_is_kept_with_its_weights_while_packets_still_get_its_mark(kept: dict[str, int]) -> None:
    node = serving(shop())
    scope = node.kernel.virtual_servers[FirewallMark.of(Family.IPV4, FIRST)]
    node.kernel.fail(ends_marking)
    node.put(*shop(local=False))
    if not kept:
        scope.real_servers.clear()
        node.observe()
    node.sync()
    assert marks_of(node) == {BALANCER: FIRST}
    assert scopes_of(node) == {FIRST: kept.keys()}
    assert {str(key.address): weight for key, weight in scope.real_servers.items()} == kept
    come_to_rest(node)
    assert traces_of(node) == []


def test_nothing_fails_if_the_virtual_server_of_a_draining_scope_vanishes() -> None:
    node = serving(shop(), drain_deadline_s=900)
    scope = FirewallMark.of(Family.IPV4, FIRST)
    for key in node.kernel.virtual_servers[scope].real_servers:
        node.kernel.connection_counts[scope, key] = ConnectionCounts(1, 0)
    node.put(*shop(local=False))
    node.sync()
    assert scope in node.kernel.virtual_servers
    del node.kernel.virtual_servers[scope]
    node.observe()
    node.sync()
    assert traces_of(node) == []


def test_a_port_that_loses_its_mark_in_one_family_keeps_its_mark_in_the_other_family() -> None:
    service, slices = shop()
    both = builders.service(
        "shop",
        builders.service_port(80),
        cluster=["10.96.1.12", "fd00::12"],
        load_balancer=[BALANCER, "2001:db8::12"],
        kind=ServiceType.LOAD_BALANCER,
        external_local=True,
        created_s=service.created_s,
    )
    node = serving(shop("first", number=11), families=Family)
    node.put(both, slices, builders.endpoint_slice(builders.endpoint("fd00:244::5"), service="shop", suffix="6"))
    node.sync()
    node.remove("first")
    come_to_rest(node)
    (mark,) = set(marks_of(node).values())
    node.kernel.sets[IpSet(SetKind.SCOPE, Family.IPV4).name].entries.clear()
    node.restart()
    node.sync()
    assert marks_of(node) == {BALANCER: mark, "2001:db8::12": mark}


def test_a_virtual_server_by_firewall_mark_is_removed_even_if_a_range_excludes_all_addresses() -> None:
    node = serving(shop(), excluded=["0.0.0.0/0"])
    plan = own_objects.plan(dataclasses.replace(node.kernel.observe(), skeletons={}), {}, builders.networks("0.0.0.0/0"))
    assert [one.item.key for one in plan.virtual_servers] == [FirewallMark.of(Family.IPV4, FIRST)]
    node.remove("shop")
    come_to_rest(node)
    assert traces_of(node) == []


def test_source_ranges_are_applied_even_if_the_kernel_refuses_rules_that_mark_packets() -> None:
    node = serving(shop())
    skeleton = node.kernel.observe().skeletons[Family.IPV4].without("mangle")
    node.observe(skeletons={Family.IPV4: skeleton})
    tables = node.reconciler._tables
    assert Family.IPV4 in tables.skeletons.pending
    assert not tables.of_rules.lacks(Family.IPV4)
    assert Circumstances(tables).has_ranges(firewall_entry(builders.frontend(BALANCER, 80)))
    assert node.reconciler.survey.lacking([Family.IPV4]) == frozenset()
    node.observe(skeletons={Family.IPV4: skeleton.without("filter")})
    assert tables.of_rules.lacks(Family.IPV4)
    assert not Circumstances(tables).has_ranges(firewall_entry(builders.frontend(BALANCER, 80)))
    assert node.reconciler.survey.lacking([Family.IPV4]) == {Family.IPV4}


def test_ipvsproxy_releases_a_mark_that_another_program_has_taken_since_the_last_read() -> None:
    node = node_with()
    node.sync()
    node.kernel.schedulers |= {"wlc"}
    key = FirewallMark.of(Family.IPV4, FIRST)
    theirs = VirtualServer(key, VirtualServerSettings("wlc"))
    node.kernel.apply([Operation(Verb.ADD, theirs)])
    node.put(*shop())
    node.sync()
    for _ in range(2):
        left = node.kernel.virtual_servers[key]
        assert (left.settings, left.real_servers) == (theirs.settings, {})
        assert mark_entry(key) not in node.kernel.sets[mark_entry(key).set].entries
        assert (marks_of(node), scopes_of(node)[SECOND]) == ({BALANCER: SECOND}, {HERE, ELSEWHERE})
        node.observe()
        node.sync()
    node.remove("shop")
    come_to_rest(node)
    assert key in node.kernel.virtual_servers
    del node.kernel.virtual_servers[key]
    node.observe()
    node.put(*shop())
    node.sync()
    assert node.reconciler.pending == 0
    assert not node.reconciler._tables.scopes.is_refused(key)


def test_a_waiting_service_gets_a_mark_as_soon_as_another_program_stops_using_the_mark() -> None:
    theirs = {3, 2}
    marks = Marks(lambda mark: mark in theirs)
    marks.adopt(0b11)
    first, second, third = (MarkedPort(ServiceName("shop", name), Protocol.TCP, 80) for name in ("first", "second", "third"))
    for port in (first, second, third):
        marks.want(port)
    assert marks.give() == [first]
    assert marks.give() == []
    assert marks.take_news() == list(marks.waiting) == [second, third]
    theirs.remove(2)
    assert marks.give() == [second]
    assert [marks.mark_of(port) for port in (first, second, third)] == [1, 2, 0]


def shared(name: str, number: int, created_s: float, *addresses: str, node_port: int = 0) -> tuple[Service, EndpointSlice]:
    """A Service with these load-balancer addresses; ``number`` is part of its cluster IP and of the address of its endpoint."""
    service = builders.service(
        name,
        builders.service_port(80, node_port=node_port),
        cluster=[f"10.96.1.{number}"],
        load_balancer=list(addresses),
        kind=ServiceType.LOAD_BALANCER,
        external_local=True,
        created_s=created_s,
    )
    return service, builders.endpoint_slice(builders.endpoint(f"10.244.0.{number}"), service=name)


def services_by_address(node: SimulatedNode) -> dict[str, set[str]]:
    """Maps each destination address whose packets get a mark to the endpoints that get the address's new connections."""
    servers = {key.mark: one for key, one in node.kernel.virtual_servers.items() if isinstance(key, FirewallMark)}
    return {
        address: {str(one.address) for one, weight in servers[mark].real_servers.items() if weight}
        for address, mark in marks_of(node).items()
    }


def start(node: SimulatedNode) -> list[dict[str, set[str]]]:
    """Start a new process, which makes additions before removals.

    For each operation, returns the endpoints that each address leads to after the operation.
    """
    examined: list[dict[str, set[str]]] = []
    node.restart()
    node.after_each = lambda _: examined.append(services_by_address(node))
    add(node)
    node.sync()
    return examined


def test_a_port_has_a_mark_only_while_its_service_owns_a_virtual_server_of_the_port() -> None:
    node = serving(shared("old", 20, 1, BALANCER), shared("young", 21, 2, BALANCER))
    assert scopes_of(node) == {FIRST: {"10.244.0.20"}}
    assert node.reconciler.take_without_scope() == []
    node.restart()
    assert [str(one) for one in node.sync() if "timeouts" not in str(one)] == []
    node.remove("old")
    node.sync()
    assert services_by_address(node) == {BALANCER: {"10.244.0.21"}}
    node.put(*shared("older", 22, 0, BALANCER))
    come_to_rest(node)
    assert services_by_address(node) == {BALANCER: {"10.244.0.22"}}
    assert len(scopes_of(node)) == 1


@pytest.mark.parametrize("is_last", [False, True])
def test_only_an_address_that_moved_to_another_service_while_no_process_ran_gets_new_endpoints(*, is_last: bool) -> None:
    node = serving(shared("giver", 20, 1, BALANCER, "192.0.2.20"))
    node.states.clear()
    node.put(*shared("giver", 20, 1, "192.0.2.20"))
    node.put(*shared("taker", 21, 2, BALANCER))
    if is_last:
        node.states = dict(reversed(node.states.items()))
    examined = start(node)
    assert all(one.get("192.0.2.20", {"10.244.0.20"}) == {"10.244.0.20"} for one in examined)
    come_to_rest(node)
    assert services_by_address(node) == {BALANCER: {"10.244.0.21"}, "192.0.2.20": {"10.244.0.20"}}


@pytest.mark.parametrize("is_last", [False, True])
def test_a_mark_shared_equally_by_two_ports_stays_with_the_port_that_has_no_other_mark(*, is_last: bool) -> None:
    node = serving(shared("giver", 20, 1, BALANCER, "192.0.2.20"), shared("taker", 21, 2, "192.0.2.21"))
    node.put(*shared("giver", 20, 1, "192.0.2.20"))
    node.put(*shared("taker", 21, 2, BALANCER, "192.0.2.21"))
    if is_last:
        node.states = dict(reversed(node.states.items()))
    start(node)
    assert marks_of(node) == {"192.0.2.20": FIRST, BALANCER: SECOND, "192.0.2.21": SECOND}


def test_a_port_keeps_the_firewall_mark_that_most_of_its_set_entries_have() -> None:
    node = serving(shared("giver", 20, 1, BALANCER, "192.0.2.20"), shared("taker", 21, 2, "192.0.2.21", "192.0.2.22"))
    node.put(*shared("giver", 20, 1, "192.0.2.20"))
    node.put(*shared("taker", 21, 2, BALANCER, "192.0.2.21", "192.0.2.22"))
    node.restart()
    node.sync()
    assert marks_of(node) == {"192.0.2.20": FIRST, BALANCER: SECOND, "192.0.2.21": SECOND, "192.0.2.22": SECOND}


def test_nothing_changes_when_a_mark_without_a_service_is_released() -> None:
    node = serving(shop())
    node.reconciler._tables.scopes.refuse(FirewallMark.of(Family.IPV4, SECOND))
    node.sync()
    assert marks_of(node) == {BALANCER: FIRST}
