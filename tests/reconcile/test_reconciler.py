"""The core on a kernel in memory: changes, drift, failures, drains, restarts, and what is not ours.

Left out: what waits for what (``test_precondition``), what it costs (``test_cost``), and everything at once
(``test_properties``).
"""

import copy
import errno
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from ipvsproxy.model.kernel import (
    IP_SETS,
    BoundAddress,
    Connections,
    FlowCleaning,
    InterfaceAddress,
    IpSet,
    ObservedVirtualServer,
    RealServer,
    RealServers,
    SetEntry,
    SetKind,
    Sysctl,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb, kind_of
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import ChainKey, Rule, Skeleton, SkeletonImage
from ipvsproxy.model.service import EndpointSlice, Service, ServiceType
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile import drift
from ipvsproxy.reconcile.reconciler import Policy, Reconciler
from ipvsproxy.reconcile.retry import LONGEST_DELAY_S
from ipvsproxy.reconcile.table import KEYS_AT_ONCE, Table
from tests import builders
from tests.reconcile import examples, simulation

KEY = builders.frontend(builders.CLUSTER_IP, 80)
ONE, TWO = builders.backend("10.244.0.1"), builders.backend("10.244.0.2")
FOREIGN = builders.frontend("203.0.113.9", 25)
BUSY = Connections(1, 0)
DNS_FLOW = examples.flow(builders.CLUSTER_IP)


def web(*endpoints: str, name: str = "web", created_s: float = 5.0) -> tuple[Service, EndpointSlice]:
    slices = builders.endpoint_slice(*map(builders.endpoint, endpoints), service=name)
    return builders.service(name, created_s=created_s), slices


def dns(*endpoints: str) -> tuple[Service, EndpointSlice]:
    port = builders.endpoint_port(53, Protocol.UDP)
    slices = builders.endpoint_slice(*map(builders.endpoint, endpoints), service="dns", ports=(port,))
    return builders.service("dns", builders.service_port(53, Protocol.UDP)), slices


def running(*endpoints: str, drain_deadline_s: float = 0) -> simulation.SimulatedNode:
    """A node that serves one Service with these endpoints."""
    node = simulation.SimulatedNode(drain_deadline_s=drain_deadline_s)
    node.put(*web(*endpoints))
    node.sync()
    return node


def weights(node: simulation.SimulatedNode, key: VirtualServerKey = KEY) -> dict[RealServerKey, int]:
    return node.kernel.virtual_servers[key].real_servers


def set_weight(real_server: RealServerKey, weight: int, key: VirtualServerKey = KEY) -> Operation:
    return Operation(Verb.SET, RealServer(key, real_server, weight))


def removal(real_server: RealServerKey, key: VirtualServerKey = KEY) -> Operation:
    return Operation(Verb.REMOVE, RealServer(key, real_server, 0))


def kinds(operations: Iterable[Operation]) -> list[tuple[Verb, type]]:
    return list(dict.fromkeys((operation.verb, type(operation.item)) for operation in operations))


# Changes.


def test_a_node_is_built_from_nothing_in_one_order() -> None:
    node = running("10.244.0.1")
    assert weights(node) == {ONE: 1}
    assert node.kernel.device
    assert node.kernel.addresses == {KEY.address}
    assert node.kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert node.kernel.timeouts == simulation.TIMEOUTS
    assert node.kernel.sets["KUBE-CLUSTER-IP"].entries == {examples.entry(SetKind.CLUSTER_IP, KEY)}
    assert [kind.__name__ for _, kind in kinds(node.applied)] == [
        "Sysctl",
        "Timeouts",
        "Device",
        "IpSet",
        "SetEntry",
        "Skeleton",
        "VirtualServer",
        "RealServer",
        "BoundAddress",
    ]


@pytest.mark.checklist(67)
def test_the_second_plan_is_empty() -> None:
    node = running("10.244.0.1")
    assert not node.plan().operations
    node.observe()
    assert not node.plan().operations
    node.put(*web("10.244.0.1"))
    assert not node.plan().operations
    assert node.reconciler.pending == 0
    assert node.reconciler.next_s() is None


def test_a_restart_into_an_unchanged_world_touches_only_what_cannot_be_read_back() -> None:
    node = running("10.244.0.1")
    node.restart()
    assert [str(operation) for operation in node.sync()] == ["set timeouts timeouts 900 120 300"]


def test_one_endpoint_more_is_one_operation_for_each_virtual_server_and_one_for_its_pod() -> None:
    node = running("10.244.0.1")
    node.put(*web("10.244.0.1", "10.244.0.2"))
    loop_back = examples.entry(SetKind.LOOP_BACK, builders.frontend("10.244.0.2", 8080), "10.244.0.2")
    assert node.sync() == [Operation(Verb.ADD, loop_back), Operation(Verb.ADD, RealServer(KEY, TWO, 1))]


@pytest.mark.checklist(74)
def test_an_address_is_bound_once_for_all_ports_and_goes_with_the_last() -> None:
    node = simulation.SimulatedNode()
    ports = [builders.service_port(80), builders.service_port(443), builders.service_port(53, Protocol.UDP)]
    bindings = []
    for chosen in (ports[:2], ports[:1], ports):
        node.put(builders.service("web", *chosen))
        bindings.append([operation.verb for operation in node.sync() if isinstance(operation.item, BoundAddress)])
    node.remove("web")
    bindings.append([operation.verb for operation in node.sync() if isinstance(operation.item, BoundAddress)])
    assert bindings == [[Verb.ADD], [], [], [Verb.REMOVE]]


@pytest.mark.checklist(72)
def test_a_service_leaves_nothing_behind_and_its_virtual_server_goes_first() -> None:
    node = running("10.244.0.1")
    node.remove("web")
    gone = [operation for operation in node.sync() if operation.verb is Verb.REMOVE]
    assert [kind.__name__ for _, kind in kinds(gone)] == ["VirtualServer", "SetEntry", "BoundAddress"]
    assert (node.kernel.virtual_servers, node.kernel.addresses) == ({}, set())
    assert not any(held.entries for held in node.kernel.sets.values())


def test_rules_come_before_the_virtual_server_and_go_after_the_last_entry_of_their_set() -> None:
    node = running()
    before = dict(node.kernel.chains[Family.IPV4])
    node.remove("web")
    assert [kind.__name__ for _, kind in kinds(node.sync())] == ["VirtualServer", "SetEntry", "BoundAddress", "Skeleton"]
    assert node.kernel.chains[Family.IPV4] != before


def test_two_services_that_want_one_address_and_port_do_not_flap() -> None:
    for names in (("old", "young"), ("young", "old")):
        node = simulation.SimulatedNode()
        endpoints = {"old": "10.244.0.1", "young": "10.244.0.2"}
        created_s = {"old": 1.0, "young": 2.0}
        for name in names:
            node.put(*web(endpoints[name], name=name, created_s=created_s[name]))
        node.sync()
        assert weights(node) == {ONE: 1}
        node.put(*web(endpoints["young"], name="young", created_s=2.0))
        assert not node.plan().operations
        node.remove("old")
        node.sync()
        assert weights(node) == {TWO: 1}
        assert not any(operation.verb is Verb.REMOVE for operation in node.applied if isinstance(operation.item, VirtualServer))


def test_additions_alone_take_nothing_away() -> None:
    node = running("10.244.0.1")
    node.reconciler.put(builders.service("web").name, None)
    node.put_state(examples.state(examples.OLD, builders.frontend("10.96.0.99", 80), real_servers=[TWO]))
    only_additions = node.reconciler.plan(node.now, only_additions=True).operations
    assert {operation.verb for operation in only_additions} == {Verb.ADD}
    assert any(operation.verb is Verb.REMOVE for operation in node.plan().operations)


DROP, RETURN = Rule(target="DROP"), Rule(target="RETURN")
CHAIN, OTHER_CHAIN = ChainKey("filter", "KUBE-FORWARD"), ChainKey("filter", "KUBE-NODE-PORT")


@pytest.mark.parametrize(
    ("seen", "is_planned"),
    [
        (None, True),
        ({}, True),
        ({CHAIN: ("-j DROP",), OTHER_CHAIN: ("-j DROP",)}, True),
        ({CHAIN: ("-j DROP", "-j ACCEPT"), OTHER_CHAIN: ("-j DROP",)}, False),
        ({CHAIN: ("-j DROP",), ChainKey("nat", "KUBE-MARK-MASQ"): ("-j DROP",)}, False),
    ],
)
def test_rules_are_added_before_every_service_has_spoken_unless_one_would_be_lost(
    seen: Mapping[ChainKey, tuple[str, ...]] | None, *, is_planned: bool
) -> None:
    reconciler = Reconciler(Policy())
    wanted = Skeleton(family=Family.IPV4, chains={CHAIN: (DROP, RETURN), OTHER_CHAIN: (DROP,)}, jumps=())
    reconciler.claims.put_skeleton(wanted)
    if seen is not None:
        image = SkeletonImage(family=Family.IPV4, chains=seen, jumps=frozenset())
        reconciler.claims.skeletons.notice(Family.IPV4, image)
    planned = reconciler.plan(0, only_additions=True).operations
    assert planned == ([Operation(Verb.SET, wanted)] if is_planned else [])
    assert reconciler.plan(0).operations == [Operation(Verb.SET, wanted)]


def test_after_a_restart_no_rule_goes_before_every_service_has_spoken() -> None:
    service = builders.service(
        "web",
        builders.service_port(80),
        kind=ServiceType.LOAD_BALANCER,
        load_balancer=["203.0.113.1"],
        source_ranges=["192.0.2.0/24"],
    )
    node = simulation.SimulatedNode()
    node.put(service)
    node.sync()
    key = builders.frontend("203.0.113.1", 80)
    assert not simulation.lets_node_in(node.kernel, key)
    node.states.clear()
    node.restart()
    node.plan()  # puts the rules that are needed as long as nobody has spoken
    early = node.reconciler.plan(node.now, only_additions=True).operations
    assert not [operation for operation in early if isinstance(operation.item, Skeleton)]
    node.put(service)
    node.sync()
    assert not simulation.lets_node_in(node.kernel, key)


# Drains.


@pytest.mark.checklist(89)
def test_a_real_server_without_connections_is_gone_in_the_same_sync() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.put(*web("10.244.0.2"))
    node.sync()
    assert weights(node) == {TWO: 1}
    assert node.applied[0] == set_weight(ONE, 0)


@pytest.mark.checklist(90)
def test_a_real_server_with_connections_stays_without_weight_until_they_end() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    node.kernel.connection_counts[KEY, ONE] = BUSY
    node.put(*web("10.244.0.2"))
    node.sync()
    assert weights(node) == {ONE: 0, TWO: 1}
    assert node.reconciler.pending == 0
    assert node.reconciler.next_s() == node.now + 1
    node.sync(after_s=1)
    assert weights(node) == {ONE: 0, TWO: 1}
    del node.kernel.connection_counts[KEY, ONE]
    assert node.sync(after_s=1) == [removal(ONE)]
    assert node.reconciler.next_s() is None


def draining(drain_deadline_s: float = 0) -> simulation.SimulatedNode:
    """A node with a real server that is draining, and has a connection."""
    node = running("10.244.0.1", "10.244.0.2", drain_deadline_s=drain_deadline_s)
    node.kernel.connection_counts[KEY, ONE] = BUSY
    node.put(*web("10.244.0.2"))
    node.sync()
    return node


def test_a_real_server_that_returns_while_draining_gets_its_weight_back_and_is_not_removed() -> None:
    node = draining(drain_deadline_s=60)
    node.put(*web("10.244.0.1", "10.244.0.2"))
    assert set_weight(ONE, 1) in node.sync()
    assert removal(ONE) not in node.sync(after_s=1000)
    assert weights(node) == {ONE: 1, TWO: 1}
    assert len(node.reconciler.drains) == 0


def test_the_deadline_removes_a_real_server_with_its_connections() -> None:
    node = draining(drain_deadline_s=60)
    assert node.sync(after_s=59) == []
    assert node.sync(after_s=1) == [removal(ONE)]
    assert node.reconciler.next_s() is None


def test_a_drain_whose_connections_cannot_be_counted_goes_on() -> None:
    node = draining()
    del node.kernel.connection_counts[KEY, ONE]
    node.kernel.unreadable = {"connections"}
    assert node.sync(after_s=10) == []
    node.kernel.unreadable = set()
    assert node.sync(after_s=10) == [removal(ONE)]


def test_a_removed_virtual_server_takes_its_drains_along() -> None:
    node = draining()
    node.remove("web")
    node.sync()
    assert KEY not in node.kernel.virtual_servers
    assert len(node.reconciler.drains) == 0
    assert node.reconciler.next_s() is None


def test_a_drain_goes_on_after_a_restart() -> None:
    node = draining(drain_deadline_s=60)
    node.restart()
    assert [operation for operation in node.sync() if isinstance(operation.item, RealServer)] == [set_weight(ONE, 0)]
    assert node.sync(after_s=59) == []
    assert node.sync(after_s=1) == [removal(ONE)]


def test_a_drain_that_is_seen_in_the_kernel_is_taken_up_with_nothing_said_to_it() -> None:
    node = draining()
    node.restart()
    node.observe()
    assert not any(isinstance(operation.item, RealServer) for operation in node.sync())
    node.kernel.connection_counts.clear()
    assert node.sync(after_s=1) == [removal(ONE)]


def test_a_drain_goes_on_after_a_restart_though_endpoints_were_added_meanwhile() -> None:
    node = draining()
    node.kernel.connection_counts.clear()
    del node.kernel.virtual_servers[KEY].real_servers[TWO]
    node.restart()
    node.sync()
    assert weights(node) == {TWO: 1}


@pytest.mark.checklist(26)
def test_a_real_server_that_a_former_process_was_draining_gets_its_weight_back_when_it_is_wanted() -> None:
    node = running("10.244.0.1")
    weights(node)[ONE] = 0
    node.restart()
    node.sync()
    assert weights(node) == {ONE: 1}


def test_a_weight_changed_by_hand_is_set_right() -> None:
    node = draining()
    weights(node).update({ONE: 4, TWO: 0})
    node.observe()
    assert set(node.sync()) == {set_weight(ONE, 0), set_weight(TWO, 1)}
    assert len(node.reconciler.drains) == 1


def test_a_real_server_that_lost_its_weight_by_hand_and_then_its_endpoint_is_drained_all_the_same() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    weights(node)[ONE] = 0
    node.observe()
    node.put(*web("10.244.0.2"))
    node.sync()
    assert weights(node) == {TWO: 1}


def test_what_still_gets_connections_or_will_again_is_no_drain() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    weights(node).update({ONE: 0, builders.backend("10.244.0.9"): 1})
    node.observe()
    assert len(node.reconciler.drains) == 0
    node.sync()
    assert weights(node) == {ONE: 1, TWO: 1}


def test_a_draining_real_server_that_somebody_removed_is_forgotten() -> None:
    node = draining()
    del weights(node)[ONE]
    node.observe()
    assert node.sync() == []
    assert len(node.reconciler.drains) == 0


def test_drains_of_a_virtual_server_that_somebody_removed_are_forgotten() -> None:
    node = draining()
    del node.kernel.virtual_servers[KEY]
    node.observe()
    node.sync()
    assert weights(node) == {TWO: 1}
    assert len(node.reconciler.drains) == 0


def test_drains_of_a_virtual_server_that_turns_out_to_be_gone_are_forgotten_at_once() -> None:
    node = draining()
    del node.kernel.virtual_servers[KEY]
    node.put(*web("10.244.0.2", "10.244.0.3"))
    node.sync()
    assert len(node.reconciler.drains) == 0


def test_counts_without_a_drain_mean_nothing() -> None:
    node = running("10.244.0.1")
    node.reconciler.note_connections({KEY: {ONE: Connections(0, 0)}}, node.now)
    assert not node.plan().operations


@pytest.mark.checklist(92)
def test_a_real_server_that_is_gone_already_is_a_surprise_and_no_error() -> None:
    node = draining()
    del weights(node)[ONE]
    assert node.sync(after_s=1) == [removal(ONE)]
    assert node.has_failed
    assert node.reports[-1].surprises == 1
    assert node.reports[-1].pending == 0


# Flows.


@pytest.mark.checklist(102)
def test_tracked_flows_of_a_lost_endpoint_are_cleaned_and_others_stay() -> None:
    node = simulation.SimulatedNode()
    one, two = (builders.backend(address, 53) for address in ("10.244.0.1", "10.244.0.2"))
    node.put(*dns("10.244.0.1", "10.244.0.2"))
    node.sync()
    node.kernel.flows[DNS_FLOW] = {one: 3, two: 4}
    node.put(*dns("10.244.0.2"))
    assert node.sync()[-1] == Operation(Verb.REMOVE, FlowCleaning(DNS_FLOW, frozenset({two})))
    assert node.kernel.flows[DNS_FLOW] == {two: 4}


@pytest.mark.checklist(102)
def test_flows_are_cleaned_once_at_the_first_endpoint_and_once_after_a_restart_and_not_for_more_endpoints() -> None:
    node = simulation.SimulatedNode()
    cleanings = []
    for change in (dns(), dns("10.244.0.1"), dns("10.244.0.1", "10.244.0.2"), dns()):
        node.put(*change)
        cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    node.put(*dns("10.244.0.1"))
    node.restart()
    cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    node.remove("dns")
    cleanings.append(sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()))
    assert cleanings == [0, 1, 0, 0, 1, 0]


def test_a_cleaning_that_failed_is_tried_again() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, FlowCleaning))
    node.put(*dns("10.244.0.1"))
    node.sync()
    assert node.reconciler.pending == 1
    assert kinds(node.sync(after_s=1)) == [(Verb.REMOVE, FlowCleaning)]
    assert node.reconciler.pending == 0


# What is not ours.


def test_virtual_servers_of_others_are_left_alone_with_their_real_servers() -> None:
    kernel = simulation.new_kernel()
    kernel.virtual_servers[FOREIGN] = examples.observed({ONE: 7, TWO: 0})
    node = simulation.SimulatedNode(kernel)
    for _ in range(2):
        node.put(*web("10.244.0.1"))
        node.sync()
        node.observe()
        node.sync(after_s=1000)
        node.restart()
    assert node.kernel.virtual_servers[FOREIGN] == examples.observed({ONE: 7, TWO: 0})
    assert set(node.reconciler.claims.virtual_servers.foreign) == {FOREIGN}


def test_a_foreign_virtual_server_survives_a_service_that_wanted_it_only_for_a_moment() -> None:
    kernel = simulation.new_kernel()
    kernel.virtual_servers[FOREIGN] = examples.observed({ONE: 7})
    node = simulation.SimulatedNode(kernel)
    node.put_state(examples.state(examples.OLD, FOREIGN, real_servers=[TWO]))
    node.remove("old")
    node.sync()
    assert kernel.virtual_servers[FOREIGN] == examples.observed({ONE: 7})


def test_a_foreign_virtual_server_that_a_service_wants_is_served_and_is_ours_from_then_on() -> None:
    kernel = simulation.new_kernel()
    kernel.virtual_servers[FOREIGN] = examples.observed({ONE: 7, TWO: 0})
    node = simulation.SimulatedNode(kernel)
    node.put_state(examples.state(examples.OLD, FOREIGN, real_servers=[builders.backend("10.244.0.3")]))
    node.sync()
    assert weights(node, FOREIGN) == {builders.backend("10.244.0.3"): 1}
    node.remove("old")
    node.sync()
    assert FOREIGN not in kernel.virtual_servers


@pytest.mark.checklist(71)
def test_virtual_servers_that_a_former_process_left_are_removed_and_those_of_excluded_ranges_stay() -> None:
    wanted, stale = builders.frontend("10.96.0.1", 80), builders.frontend("10.96.0.2", 80)
    excluded = [builders.frontend("198.51.100.7", 80), builders.frontend("2001:db8::7", 80)]
    former = simulation.SimulatedNode()
    former.put_state(examples.state(examples.OLD, wanted, stale, *excluded, addresses=["10.96.0.2", "198.51.100.7"]))
    former.sync()
    node = simulation.SimulatedNode(former.kernel, excluded=("198.51.100.0/24", "2001:db8::/32"))
    node.put_state(examples.state(examples.OLD, wanted))
    node.sync()
    assert set(node.kernel.virtual_servers) == {wanted, *excluded}


@pytest.mark.checklist(75)
@pytest.mark.parametrize(
    ("ranges", "kept"),
    [
        (("198.51.100.0/24", "2001:db8::/32"), {"198.51.100.7", "2001:db8::7"}),
        (("198.51.100.0/24",), {"198.51.100.7"}),
        (("2001:db8::/32",), {"2001:db8::7"}),
        (("0.0.0.0/0",), {"198.51.100.7"}),
        (("::/0",), {"2001:db8::7"}),
        ((), set()),
    ],
)
def test_excluded_ranges_protect_virtual_servers_of_their_own_family_alone(ranges: tuple[str, ...], kept: set[str]) -> None:
    stale = [builders.frontend("198.51.100.7", 80), builders.frontend("2001:db8::7", 80)]
    former = simulation.SimulatedNode()
    former.put_state(examples.state(examples.OLD, *stale, addresses=["198.51.100.7", "2001:db8::7"]))
    former.sync()
    node = simulation.SimulatedNode(former.kernel, excluded=ranges)
    node.sync()
    assert {str(key.address) for key in node.kernel.virtual_servers} == kept


@pytest.mark.checklist(73)
def test_real_servers_of_an_excluded_virtual_server_are_not_even_drained() -> None:
    excluded = builders.frontend("198.51.100.7", 80)
    kernel = simulation.new_kernel()
    kernel.virtual_servers[excluded] = examples.observed({ONE: 0, TWO: 1})
    kernel.device = True
    kernel.addresses.add(excluded.address)
    node = simulation.SimulatedNode(kernel, excluded=("198.51.100.0/24",))
    node.sync()
    node.observe()
    node.sync(after_s=1000)
    assert weights(node, excluded) == {ONE: 0, TWO: 1}


def test_an_excluded_virtual_server_is_served_while_it_is_wanted_and_left_as_it_is_then() -> None:
    excluded = builders.frontend("198.51.100.7", 80)
    node = simulation.SimulatedNode(excluded=("198.51.100.0/24",))
    node.put_state(examples.state(examples.OLD, excluded, real_servers=[ONE, TWO]))
    node.sync()
    node.kernel.connection_counts[excluded, ONE] = BUSY
    node.put_state(examples.state(examples.OLD, excluded, real_servers=[TWO]))
    node.sync()
    node.remove("old")
    node.sync()
    node.observe()
    assert node.sync(after_s=1000) == []
    assert weights(node, excluded) == {ONE: 0, TWO: 1}
    assert node.reconciler.next_s() is None


@pytest.mark.checklist(71)
@pytest.mark.parametrize("lost", ["entries", "addresses", "nothing"])
def test_either_witness_tells_a_fresh_process_that_a_virtual_server_is_ours(lost: str) -> None:
    node = running("10.244.0.1")
    if lost == "addresses":
        node.kernel.addresses.clear()
    if lost == "entries":
        for held in node.kernel.sets.values():
            held.entries.clear()
    fresh = simulation.SimulatedNode(node.kernel)
    fresh.sync()
    assert not fresh.kernel.virtual_servers


def test_node_ports_are_known_by_our_set_and_the_hosts_addresses() -> None:
    node = simulation.SimulatedNode()
    node.put(builders.service("web", builders.service_port(80, node_port=30080)))
    node.sync()
    foreign = builders.frontend(builders.NODE_ADDRESS, 30081)
    node.kernel.virtual_servers[foreign] = examples.observed({ONE: 1})
    fresh = simulation.SimulatedNode(node.kernel)
    fresh.sync()
    assert set(node.kernel.virtual_servers) == {foreign}


# What could not be read.


@pytest.mark.parametrize("part", ["virtual_servers", "sets", "addresses", "device", "sysctls", "interface_addresses"])
def test_a_part_that_could_not_be_read_changes_nothing(part: str) -> None:
    node = running("10.244.0.1")
    node.observe(**{part: None})
    assert not node.plan().operations


@pytest.mark.parametrize("part", ["virtual_servers", "sets", "addresses", "interface_addresses"])
def test_a_fresh_process_that_could_not_read_a_part_loses_no_trace_of_what_is_ours(part: str) -> None:
    former = simulation.SimulatedNode()
    former.put(builders.service("web", builders.service_port(80, node_port=30080)))
    former.sync()
    former.kernel.unreadable = {part}
    node = simulation.SimulatedNode(former.kernel)
    removed = [operation.item for operation in node.sync() if operation.verb is Verb.REMOVE]
    assert not [item for item in removed if isinstance(item, (SetEntry, BoundAddress))]
    node.kernel.unreadable = set()
    node.observe()
    node.sync()
    assert not node.kernel.virtual_servers
    assert not node.kernel.addresses


@pytest.mark.parametrize(("number", "pauses"), [(KEYS_AT_ONCE - 1, 0), (KEYS_AT_ONCE, 3), (2 * KEYS_AT_ONCE, 6)])
def test_a_look_at_many_virtual_servers_pauses_in_search_of_drains_and_of_changes_and_when_it_compares(
    number: int, pauses: int
) -> None:
    node = simulation.SimulatedNode()
    keys = [builders.frontend(builders.CLUSTER_IP, port) for port in range(1, number + 1)]
    node.put_state(examples.state(examples.OLD, *keys))
    seen = Observation(virtual_servers={key: examples.observed({}) for key in keys})
    assert sum(1 for _ in node.reconciler.observing(seen, node.now)) == pauses


def test_virtual_servers_that_are_the_same_objects_as_before_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = running("10.244.0.1", "10.244.0.2")
    seen = dict(node.kernel.observe().virtual_servers or {})
    node.observe(virtual_servers=seen)
    compared: list[VirtualServerKey] = []
    touch = Table.touch

    def noted(table: Table[VirtualServerKey, Any, Any], key: VirtualServerKey) -> None:
        if table is node.reconciler.claims.virtual_servers:
            compared.append(key)
        touch(table, key)

    monkeypatch.setattr(Table, "touch", noted)
    node.observe(virtual_servers=dict(seen))
    assert not compared
    seen[KEY] = examples.observed({TWO: 1})
    node.observe(virtual_servers=seen)
    assert compared == [KEY]
    assert node.plan().operations


def look(node: simulation.SimulatedNode, told: Mapping[VirtualServerKey, ObservedVirtualServer | None]) -> None:
    """A part of a look that tells of these."""
    node.reconciler.observe(Observation(some_virtual_servers=told), node.now)


def test_virtual_servers_that_a_look_says_nothing_of_are_believed_to_be_there() -> None:
    node = running("10.244.0.1")
    look(node, {builders.frontend("10.96.9.9", 80): examples.observed({})})
    assert not node.plan().operations, "it is somebody else's, too"


def test_what_a_look_tells_to_be_otherwise_is_drift_and_healed() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    look(node, {KEY: examples.observed({ONE: 1, TWO: 7})})
    assert node.reconciler.drifts.take_news().found == {"virtual_server": 1}
    assert node.plan().operations == [set_weight(TWO, 1)]
    look(node, {KEY: None})
    assert Operation(Verb.ADD, node.reconciler.claims.virtual_servers.desired[KEY]) in node.plan().operations


def test_what_appears_in_a_part_stays_until_the_reading_is_over_and_makes_a_virtual_server_ours() -> None:
    node = running("10.244.0.1")
    stray = builders.frontend("10.96.9.9", 80)
    look(node, {stray: examples.observed({ONE: 1})})
    bound = frozenset({KEY.address, stray.address})
    node.reconciler.observe(Observation(addresses=bound, device=True), node.now)
    assert node.reconciler.has_newcomers
    assert not node.plan().operations
    for _ in node.reconciler.concluding(node.now):
        pass
    assert [kind_of(one.item) for one in node.plan().operations] == ["virtual_server"]


def test_a_drain_whose_virtual_server_a_look_tells_to_be_gone_is_over() -> None:
    node = draining()
    assert len(node.reconciler.drains) == 1
    look(node, {KEY: None})
    assert len(node.reconciler.drains) == 0


def test_what_was_read_is_never_changed_by_what_is_done_then() -> None:
    node = running("10.244.0.1")
    seen = dict(node.kernel.observe().virtual_servers or {})
    node.observe(virtual_servers=seen)
    before = copy.deepcopy(seen[KEY])
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    assert seen[KEY] == before
    assert node.kernel.virtual_servers[KEY] != before


def test_sets_and_addresses_that_are_as_they_were_are_believed_to_be_there() -> None:
    node = running("10.244.0.1")
    node.observe(sets=None, addresses=None, interface_addresses=None)
    assert not node.plan().operations
    held = examples.entry(SetKind.CLUSTER_IP, KEY)
    node.observe(sets=None, some_sets={"KUBE-CLUSTER-IP": frozenset({held})})
    assert not node.plan().operations
    node.observe(sets=None, some_sets={"KUBE-CLUSTER-IP": None})
    lost = [operation.item for operation in node.plan().operations if operation.verb is Verb.ADD]
    assert IP_SETS["KUBE-CLUSTER-IP"] in lost
    assert examples.entry(SetKind.CLUSTER_IP, KEY) in lost


def test_node_ports_are_ours_by_the_addresses_that_were_read_last() -> None:
    node = running("10.244.0.1")
    stray = builders.frontend(builders.NODE_ADDRESS, 30001)
    node.kernel.sets["KUBE-NODE-PORT-TCP"].entries.add(SetEntry("KUBE-NODE-PORT-TCP", port=30001))
    node.observe(interface_addresses=(InterfaceAddress("eth0", stray.address, 16),))
    node.kernel.virtual_servers[stray] = examples.observed({})
    node.observe(interface_addresses=None)
    assert stray not in node.reconciler.claims.virtual_servers.foreign


def test_rules_of_a_family_that_was_not_read_are_believed_to_be_there() -> None:
    node = running("10.244.0.1")
    node.observe(skeletons={})
    assert not node.plan().operations


# Drift.


@pytest.mark.checklist(70, 93)
def test_everything_that_somebody_took_away_is_put_back_and_everything_added_is_taken_away() -> None:
    node = running("10.244.0.1")
    kernel = node.kernel
    stray = builders.frontend(builders.CLUSTER_IP, 9)
    kernel.virtual_servers[KEY] = examples.observed({TWO: 1}, settings=VirtualServerSettings("wlc"))
    kernel.virtual_servers[stray] = examples.observed({ONE: 1})
    kernel.sets["KUBE-CLUSTER-IP"].entries = {examples.entry(SetKind.CLUSTER_IP, stray)}
    del kernel.sets["KUBE-LOAD-BALANCER"]
    kernel.addresses = {parse_address("10.96.0.77")}
    kernel.chains[Family.IPV4].clear()
    kernel.sysctls[simulation.SYSCTL.path] = "0"
    node.observe()
    node.sync()
    assert kernel.virtual_servers == {KEY: examples.observed({ONE: 1})}
    assert kernel.sets["KUBE-CLUSTER-IP"].entries == {examples.entry(SetKind.CLUSTER_IP, KEY)}
    assert "KUBE-LOAD-BALANCER" in kernel.sets
    assert kernel.addresses == {KEY.address}
    assert kernel.chains[Family.IPV4]
    assert kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert not node.plan().operations


def test_a_device_that_is_gone_comes_back_with_its_addresses() -> None:
    node = running("10.244.0.1")
    node.kernel.device = False
    node.kernel.addresses.clear()
    node.observe()
    assert [kind.__name__ for _, kind in kinds(node.sync())] == ["Device", "BoundAddress"]


def test_a_virtual_server_that_vanished_comes_back_whole_as_soon_as_that_shows() -> None:
    node = running("10.244.0.1")
    del node.kernel.virtual_servers[KEY]
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    assert node.has_failed
    node.observe()
    node.sync(after_s=1)
    assert weights(node) == {ONE: 1, TWO: 1}
    assert not node.plan().operations


def test_a_virtual_server_that_vanished_while_it_was_drained_forgets_its_drains() -> None:
    node = draining()
    del node.kernel.virtual_servers[KEY]
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    node.sync(after_s=1)
    assert weights(node) == {ONE: 1, TWO: 1}
    assert len(node.reconciler.drains) == 0


def test_whatever_somebody_breaks_again_and_again_is_left_alone_for_a_while_but_not_for_another_wish() -> None:
    node = running("10.244.0.1")
    for _ in range(drift.FREE_HEALS + 1):
        _break_everything(node)
        node.observe()
        node.sync(after_s=1)
    everything = {"set_entry", "address", "set", "device", "sysctl", "rules", "virtual_server"}
    assert {place.kind for place in node.reconciler.drifts.take_news().left_alone} == everything
    assert node.applied == []
    found_s = node.now - 1
    assert node.reconciler.next_s() == found_s + drift.FIRST_PATIENCE_S
    node.put(*web("10.244.0.1", "10.244.0.2"))
    assert weights_given(node.plan().operations) == {ONE, TWO}, "the virtual server is wished otherwise"
    node.put(*dns("10.244.0.1"))
    assert (Verb.REMOVE, FlowCleaning) in kinds(node.sync()), "others have nothing to do with it"
    node.sync(after_s=drift.FIRST_PATIENCE_S)
    assert not node.plan().operations
    node.now += drift.CALM_S
    node.observe()
    assert not node.reconciler.drifts, "what was calm for long is forgotten"


def _break_everything(node: simulation.SimulatedNode) -> None:
    kernel = node.kernel
    kernel.virtual_servers[KEY].real_servers[ONE] = 0
    kernel.addresses.clear()
    kernel.device = False
    kernel.sets["KUBE-CLUSTER-IP"].entries.clear()
    kernel.sets.pop("KUBE-LOAD-BALANCER", None)
    kernel.chains[Family.IPV4].clear()
    kernel.sysctls[simulation.SYSCTL.path] = "0"


def weights_given(operations: Iterable[Operation]) -> set[RealServerKey]:
    return {one.item.key for one in operations if isinstance(one.item, RealServer) and one.item.weight}


# A change of policy.


def test_another_deadline_counts_for_drains_that_have_begun() -> None:
    node = draining()
    node.reconciler.adopt(Policy(drain_deadline_s=30))
    assert node.sync(after_s=29) == []
    assert node.sync(after_s=1) == [removal(ONE)]
    node = draining(drain_deadline_s=30)
    node.reconciler.adopt(Policy())
    assert node.sync(after_s=86400) == [], "by default, as long as it takes"


def test_what_is_in_ranges_that_are_excluded_no_more_goes() -> None:
    node = simulation.SimulatedNode(excluded=["10.96.0.0/16"])
    node.put(*web("10.244.0.1"))
    node.sync()
    node.remove("web")
    node.sync()
    assert KEY in node.kernel.virtual_servers
    node.reconciler.adopt(Policy())
    node.sync()
    assert node.kernel.virtual_servers == {}


# Failures.


def test_a_failure_is_reported_with_its_errno_and_stays_pending() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), errno.ENOMEM)
    node.put(*web("10.244.0.1"))
    node.sync()
    report = node.reports[0]
    assert report.failed["add", "virtual_server"] == 1
    assert not report.done["add", "address"], "the host itself would answer there"
    assert report.pending > 0
    assert report.errors[0].errno == errno.ENOMEM


def test_a_report_shows_a_few_failures_and_counts_all() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, IpSet), times=17)
    node.sync()
    assert node.reports[0].failed["add", "set"] == 17
    assert len(node.reports[0].errors) == 5


def test_what_fails_is_tried_again_later_and_later_and_does_not_stop_others() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: operation.item == BoundAddress(KEY.address), times=1000)
    node.put(*web("10.244.0.1"))
    node.sync()
    assert weights(node) == {ONE: 1}
    began, tries = node.now, []
    for _ in range(9):
        due_s = node.reconciler.next_s()
        assert due_s is not None
        assert node.sync(after_s=(due_s - node.now) / 2) == []
        assert len(node.sync(after_s=due_s - node.now)) == 1
        tries.append(node.now - began)
        began = node.now
    assert tries == [1, 2, 4, 8, 16, 32, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]
    node.put(*web("10.244.0.2"))
    assert Operation(Verb.ADD, RealServer(KEY, TWO, 1)) in node.sync()


def test_a_changed_wish_is_tried_at_once_and_the_same_one_is_not() -> None:
    node = running("10.244.0.1")
    sticky = builders.service("web", affinity_timeout_s=10800, created_s=5.0)
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), times=1)
    node.put(sticky, web("10.244.0.1")[1])
    node.sync()
    node.put(sticky, web("10.244.0.1")[1])
    assert node.sync() == []
    node.remove("web")
    assert (Verb.REMOVE, VirtualServer) in kinds(node.sync())


def test_changed_rules_are_tried_at_once_though_the_former_ones_failed() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, Skeleton), times=1)
    node.sync()
    node.put(*web("10.244.0.1"))
    assert (Verb.SET, Skeleton) in kinds(node.sync())


def test_rules_of_both_families_that_fail_wait_both() -> None:
    reconciler = Reconciler(Policy())
    for family in Family:
        reconciler.claims.put_skeleton(Skeleton(family=family, chains={}, jumps=()))
    failing = reconciler.plan(0).operations
    assert [operation.item.family for operation in failing if isinstance(operation.item, Skeleton)] == list(Family)
    reconciler.settle([Outcome(operation, "no such table", errno.ENOENT) for operation in failing], 0)
    assert not reconciler.plan(0).operations
    assert reconciler.plan(1).operations == failing


def test_cleanings_that_fail_wait_each_for_itself() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, FlowCleaning), times=100)
    _, slices = dns("10.244.0.1")
    node.put(builders.service("dns", builders.service_port(53, Protocol.UDP, node_port=30053)), slices)
    assert sum(isinstance(operation.item, FlowCleaning) for operation in node.sync()) == 2
    assert node.reconciler.pending == 2


def test_real_servers_that_fail_wait_each_for_itself() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, RealServer), times=100)
    node.put(*web("10.244.0.1", "10.244.0.2"))
    assert sum(isinstance(operation.item, RealServer) for operation in node.sync()) == 2
    assert sum(isinstance(operation.item, RealServer) for operation in node.sync(after_s=1)) == 2


def test_of_several_new_real_servers_one_that_fails_waits_alone() -> None:
    node = simulation.SimulatedNode()
    refused = builders.backend("10.244.0.2")
    node.kernel.fail(lambda operation: isinstance(operation.item, RealServer) and operation.item.key == refused, times=1)
    node.put(*web("10.244.0.1", "10.244.0.2", "10.244.0.3"))
    node.sync()
    assert node.kernel.virtual_servers[KEY].real_servers == {builders.backend(f"10.244.0.{one}"): 1 for one in (1, 3)}
    assert sum(report.failed["add", "real_server"] for report in node.reports) == 1
    assert node.sync(after_s=1) == [Operation(Verb.ADD, RealServer(KEY, refused))]


def test_new_real_servers_whose_answer_was_lost_are_failures_each_and_wait_together() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1", "10.244.0.2"))
    operations = node.plan().operations
    report = node.reconciler.settle([Outcome(one, "no answer") for one in operations], node.now)
    assert report.failed["add", "real_server"] == 2
    assert not node.plan().operations
    assert node.reconciler.next_s() == node.now + 1
    node.sync(after_s=1)
    assert len(node.kernel.virtual_servers[KEY].real_servers) == 2


def test_new_real_servers_are_told_nothing_by_the_failure_of_their_virtual_server() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1", "10.244.0.2"))
    for operation in node.plan().operations:
        missing = isinstance(operation.item, RealServers)
        failed = missing or isinstance(operation.item, VirtualServer)
        number = errno.ESRCH if missing else errno.ENOENT
        node.reconciler.settle([Outcome(operation, "no", number) if failed else Outcome(operation)], node.now)
    node.sync(after_s=1)
    assert len(node.kernel.virtual_servers[KEY].real_servers) == 2


def test_what_has_succeeded_since_wakes_nobody() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1"))
    failing = node.plan().operations[-1]
    node.reconciler.settle([Outcome(failing, "out of memory", errno.ENOMEM)], node.now)
    assert node.reconciler.next_s() == node.now + 1
    node.reconciler.settle([Outcome(failing)], node.now + 1)
    assert node.reconciler.next_s() is None


def test_what_could_not_be_removed_is_pending() -> None:
    node = running("10.244.0.1")
    node.kernel.fail(lambda operation: operation == Operation(Verb.REMOVE, BoundAddress(KEY.address)))
    node.remove("web")
    node.sync()
    assert node.reconciler.pending == 1


def test_a_failure_that_nobody_cares_about_any_more_does_not_wake_the_loop() -> None:
    node = running("10.244.0.1")
    node.kernel.fail(lambda operation: isinstance(operation.item, SetEntry), times=1)
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    assert node.reconciler.next_s() == node.now + 1
    node.put(*web("10.244.0.1"))
    node.sync()
    assert node.reconciler.next_s() is None


def test_real_servers_wait_for_a_virtual_server_that_failed_and_come_with_it() -> None:
    node = simulation.SimulatedNode()
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), times=2)
    node.put(*web("10.244.0.1"))
    node.sync()
    assert node.sync(after_s=0.5) == []
    node.sync(after_s=0.5)
    assert node.sync(after_s=1.9) == []
    node.sync(after_s=0.1)
    assert weights(node) == {ONE: 1}


def test_a_real_server_whose_virtual_server_vanished_does_not_wait_longer_than_the_first_delay() -> None:
    node = running("10.244.0.1")
    for endpoints in (("10.244.0.1", "10.244.0.2"), ("10.244.0.1",), ("10.244.0.1", "10.244.0.2")):
        del node.kernel.virtual_servers[KEY]
        node.put(*web(*endpoints))
        node.sync()
        node.sync(after_s=1)
    node.observe()
    node.sync()
    assert weights(node) == {ONE: 1, TWO: 1}


def test_a_virtual_server_stays_known_by_its_entries_while_its_removal_fails() -> None:
    node = running("10.244.0.1")
    node.kernel.fail(lambda operation: operation.verb is Verb.REMOVE and isinstance(operation.item, VirtualServer))
    node.remove("web")
    node.sync()
    assert examples.entry(SetKind.CLUSTER_IP, KEY) in node.kernel.sets["KUBE-CLUSTER-IP"].entries
    assert KEY.address in node.kernel.addresses
    fresh = simulation.SimulatedNode(node.kernel)
    fresh.sync()
    assert not fresh.kernel.virtual_servers
    assert not fresh.kernel.addresses


def test_a_setting_that_cannot_be_written_is_tried_again_when_it_changes_and_holds_up_nothing() -> None:
    kernel = simulation.new_kernel()
    kernel.fail(lambda operation: isinstance(operation.item, Sysctl), errno.EROFS, times=2)
    node = simulation.SimulatedNode(kernel)
    node.put(*web("10.244.0.1"))
    assert (Verb.SET, Sysctl) in kinds(node.sync())
    assert weights(node) == {ONE: 1}
    assert (node.reconciler.pending, set(node.reconciler.claims.settings_given_up)) == (0, {simulation.SYSCTL.path})
    assert node.reconciler.next_s() is None
    node.observe()
    assert kinds(node.sync(after_s=600)) == []
    kernel.sysctls[simulation.SYSCTL.path] = "2"
    node.observe()
    assert kinds(node.sync()) == [(Verb.SET, Sysctl)]
    assert kinds(node.sync(after_s=600)) == []
    kernel.sysctls[simulation.SYSCTL.path] = "3"
    node.observe()
    node.sync()
    assert kernel.sysctls == {simulation.SYSCTL.path: "1"}
    assert (node.reconciler.pending, node.reconciler.claims.settings_given_up) == (0, {})


def test_a_setting_that_was_refused_is_tried_again_when_another_value_is_wanted() -> None:
    kernel = simulation.new_kernel()
    kernel.fail(lambda operation: isinstance(operation.item, Sysctl), errno.EROFS)
    node = simulation.SimulatedNode(kernel)
    node.sync()
    assert kinds(node.sync()) == []
    node.reconciler.claims.put_node(tuple(Family), [simulation.SYSCTL._replace(value="2")], None)
    node.sync()
    assert kernel.sysctls == {simulation.SYSCTL.path: "2"}


def test_a_surprise_is_counted_and_what_was_asked_is_in_force() -> None:
    node = running("10.244.0.1")
    node.kernel.virtual_servers[KEY].real_servers[TWO] = 1
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    assert sum(report.surprises for report in node.reports) == 1
    assert not node.plan().operations


def test_an_outcome_for_a_virtual_server_that_is_not_there_changes_nothing() -> None:
    node = running()
    elsewhere = RealServer(builders.frontend("10.96.0.99", 80), ONE)
    report = node.reconciler.settle([Outcome(Operation(Verb.ADD, elsewhere))], node.now)
    assert report.done == {("add", "real_server"): 1}
    assert not node.plan().operations


def test_what_is_in_force_as_it_was_wanted_shares_its_weights_and_a_change_leaves_the_wish_alone() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    table = node.reconciler.claims.virtual_servers
    wanted = table.desired[KEY]
    assert table.observed[KEY].real_servers is wanted.weights
    node.put(*web("10.244.0.1"))
    node.sync()
    assert set(wanted.weights) == {builders.backend("10.244.0.1"), builders.backend("10.244.0.2")}
    assert set(table.observed[KEY].real_servers) == {builders.backend("10.244.0.1")}


def test_a_real_server_that_is_changed_with_its_virtual_server_leaves_the_wish_alone() -> None:
    node = simulation.SimulatedNode()
    node.put(*web("10.244.0.1"))
    outcomes = [Outcome(one) for one in node.plan().operations]
    gone = Outcome(Operation(Verb.REMOVE, RealServer(KEY, builders.backend("10.244.0.1"))))
    node.reconciler.settle([*outcomes, gone], node.now)
    assert node.reconciler.claims.virtual_servers.desired[KEY].weights == {builders.backend("10.244.0.1"): 1}
    assert node.reconciler.claims.virtual_servers.observed[KEY].real_servers == {}
