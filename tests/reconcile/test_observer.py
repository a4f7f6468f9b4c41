"""The reconciler on an in-memory kernel: observed objects, objects of other programs, and objects that could not be read."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from ipvsproxy.model.kernel import BoundAddresses, InterfaceAddress
from ipvsproxy.model.plan import Operation, Verb, kind_of
from ipvsproxy.model.sets import IP_SETS, SetEntries, SetEntry, SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, RealServers, VirtualServerKey
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.translate.translation_settings import Binding
from tests.reconcile import examples, simulation
from tests.reconcile.serving import BUSY, KEY, ONE, TWO, draining, running, set_weight, web, weights
from tests.support import builders

# Foreign objects.


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
def test_excluded_ranges_protect_only_virtual_servers_of_their_own_family(ranges: tuple[str, ...], kept: set[str]) -> None:
    stale = [builders.frontend("198.51.100.7", 80), builders.frontend("2001:db8::7", 80)]
    former = simulation.SimulatedNode()
    former.put_state(examples.state(examples.OLD, *stale, addresses=["198.51.100.7", "2001:db8::7"]))
    former.sync()
    node = simulation.SimulatedNode(former.kernel, excluded=ranges)
    node.sync()
    assert {str(key.address) for key in node.kernel.virtual_servers} == kept


@pytest.mark.checklist(73)
def test_an_excluded_virtual_server_is_written_only_while_a_service_desires_it() -> None:
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
@pytest.mark.parametrize("binding", Binding)
@pytest.mark.parametrize("lost", ["entries", "addresses", "nothing"])
def test_a_new_process_recognises_former_virtual_servers_even_if_set_entries_or_addresses_are_lost(
    lost: str, binding: Binding
) -> None:
    node = running("10.244.0.1")
    node.switch(binding)
    node.sync()
    if lost == "addresses":
        node.kernel.addresses.clear()
        node.kernel.routes.clear()
    if lost == "entries":
        for ip_set in node.kernel.sets.values():
            ip_set.entries.clear()
    fresh = simulation.SimulatedNode(node.kernel)
    fresh.sync()
    assert not fresh.kernel.virtual_servers


ALIKE = builders.frontend("203.0.113.9", 30080)


def beside_a_virtual_server_like_its_node_port() -> simulation.SimulatedNode:
    """A node that has programmed a node port.

    After that, another program has copied the node port's virtual server to another address.
    """
    node = simulation.SimulatedNode()
    node.put(builders.service("web", builders.service_port(80, node_port=30080)), web("10.244.0.1")[1])
    node.sync()
    node.observe()
    node.kernel.virtual_servers[ALIKE] = copy.deepcopy(node.kernel.virtual_servers[KEY])
    return node


def test_a_virtual_server_like_our_node_port_is_foreign_if_it_appears_after_the_first_read() -> None:
    node = beside_a_virtual_server_like_its_node_port()
    node.observe()
    assert set(node.reconciler._tables.virtual_servers.foreign) == {ALIKE}


def test_a_virtual_server_that_looks_like_a_node_port_counts_as_foreign_while_host_addresses_are_unknown() -> None:
    kernel = beside_a_virtual_server_like_its_node_port().kernel
    kernel.unreadable = {"interface_addresses"}
    fresh = simulation.SimulatedNode(kernel)
    assert ALIKE in fresh.reconciler._tables.virtual_servers.foreign
    kernel.unreadable.clear()
    fresh.observe()
    assert ALIKE not in fresh.reconciler._tables.virtual_servers.foreign


# Reads of the kernel in which some objects could not be read.


@pytest.mark.parametrize("part", ["virtual_servers", "sets", "addresses", "device", "sysctls", "interface_addresses"])
def test_observed_objects_stay_unchanged_if_a_read_of_the_kernel_fails(part: str) -> None:
    node = running("10.244.0.1")
    node.observe(**{part: None})
    assert not node.plan()


@pytest.mark.parametrize("part", ["virtual_servers", "sets", "addresses", "interface_addresses"])
def test_objects_of_a_former_process_are_removed_after_the_next_read_if_the_first_read_missed_them(part: str) -> None:
    former = simulation.SimulatedNode()
    former.put(builders.service("web", builders.service_port(80, node_port=30080)))
    former.sync()
    former.kernel.unreadable = {part}
    node = simulation.SimulatedNode(former.kernel)
    removed = [operation.item for operation in node.sync() if operation.verb is Verb.REMOVE]
    assert not [item for item in removed if isinstance(item, (SetEntries, BoundAddresses))]
    node.kernel.unreadable = set()
    node.observe()
    node.sync()
    assert not node.kernel.virtual_servers
    assert not node.kernel.addresses


@pytest.mark.parametrize(("number", "pauses"), [(ITEMS_AT_ONCE - 1, 0), (ITEMS_AT_ONCE, 3), (2 * ITEMS_AT_ONCE, 6)])
def test_a_poll_of_many_virtual_servers_lets_other_tasks_run_in_each_of_its_phases(number: int, pauses: int) -> None:
    node = simulation.SimulatedNode()
    keys = [builders.frontend(builders.CLUSTER_IP, port) for port in range(1, number + 1)]
    node.put_state(examples.state(examples.OLD, *keys))
    reading = Observation(virtual_servers={key: examples.observed({}) for key in keys})
    assert sum(1 for _ in node.reconciler.observer.observing(reading, node.now)) == pauses


def test_virtual_servers_that_are_identical_python_objects_are_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = running("10.244.0.1", "10.244.0.2")
    reading = dict(node.kernel.observe().virtual_servers or {})
    node.observe(virtual_servers=reading)
    compared: list[VirtualServerKey] = []
    touch = Table.touch

    def noted(table: Table[VirtualServerKey, Any, Any], key: VirtualServerKey) -> None:
        if table is node.reconciler._tables.virtual_servers:
            compared.append(key)
        touch(table, key)

    monkeypatch.setattr(Table, "touch", noted)
    node.observe(virtual_servers=dict(reading))
    assert not compared
    reading[KEY] = examples.observed({TWO: 1})
    node.observe(virtual_servers=reading)
    assert compared == [KEY]
    assert node.plan()


def poll(node: simulation.SimulatedNode, told: Mapping[VirtualServerKey, ObservedVirtualServer | None]) -> None:
    """Passes the virtual servers in ``told`` to the observer, as one part of a poll."""
    at_once(node.reconciler.observer.observing(Observation(some_virtual_servers=told), node.now))


def test_a_virtual_server_missing_in_an_audit_counts_as_gone_unless_it_was_written_meanwhile() -> None:
    node = running("10.244.0.1")
    node.put(
        builders.service("other", cluster=["10.96.0.7"]),
        builders.endpoint_slice(builders.endpoint("10.244.0.2"), service="other"),
    )
    node.sync()
    other = builders.frontend("10.96.0.7", 80)
    observed = node.reconciler._tables.virtual_servers.observed
    shown = dict(observed)
    node.reconciler.observer.begin_audit()
    poll(node, {KEY: shown[KEY]})
    at_once(node.reconciler.observer.observing(Observation(has_shown_virtual_servers=True), node.now))
    assert observed.keys() == {KEY}
    node.reconciler.observer.begin_audit()
    poll(node, {KEY: shown[KEY]})
    node.kernel.virtual_servers.pop(other)
    node.sync()
    at_once(node.reconciler.observer.observing(Observation(has_shown_virtual_servers=True), node.now))
    assert observed.keys() == {KEY, other}, "it was added after its part of the table was read"


def test_a_virtual_server_does_not_count_as_gone_if_a_change_of_it_fails_during_an_audit() -> None:
    """The audit does not see the virtual server, although it exists.

    While the audit read the virtual server's part of the table, another program may have replaced the virtual server.
    """
    node = running("10.244.0.1")
    node.reconciler.observer.begin_audit()
    node.kernel.fail(lambda operation: isinstance(operation.item, RealServers))
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    at_once(node.reconciler.observer.observing(Observation(has_shown_virtual_servers=True), node.now))
    assert KEY in node.reconciler._tables.virtual_servers.observed


def test_no_virtual_server_counts_as_gone_before_the_last_part_of_an_audit() -> None:
    node = running("10.244.0.1")
    node.reconciler.observer.begin_audit()
    poll(node, {})
    node.observe(virtual_servers=None)
    assert KEY in node.reconciler._tables.virtual_servers.observed


def test_a_changed_virtual_server_counts_as_drift_and_is_repaired_if_a_poll_finds_the_change() -> None:
    node = running("10.244.0.1", "10.244.0.2")
    poll(node, {KEY: examples.observed({ONE: 1, TWO: 7})})
    assert node.reconciler._drifts.take_news().drifted == {"virtual_server": 1}
    assert node.plan() == [set_weight(TWO, 1)]
    poll(node, {KEY: None})
    assert Operation(Verb.ADD, node.reconciler._tables.virtual_servers.desired[KEY]) in node.plan()


@pytest.mark.parametrize("kind", ["addresses", "routes"])
def test_a_new_address_or_route_in_one_part_of_a_reading_is_kept_until_the_reading_ends(kind: str) -> None:
    node = running("10.244.0.1")
    stray = builders.frontend("10.96.9.9", 80)
    poll(node, {stray: examples.observed({ONE: 1})})
    bound = frozenset({KEY.address, stray.address})
    part = Observation(addresses=bound, device=True) if kind == "addresses" else Observation(routes=frozenset({stray.address}))
    at_once(node.reconciler.observer.observing(part, node.now))
    assert node.reconciler.observer.newcomers
    assert not node.plan()
    for _ in node.reconciler.observer.concluding(node.now):
        pass
    assert not node.reconciler.observer.newcomers
    assert [kind_of(one.item) for one in node.plan()] == ["virtual_server"]


def test_no_object_counts_as_new_after_a_complete_read() -> None:
    node = running("10.244.0.1")
    stray = builders.frontend("10.96.9.9", 80)
    node.kernel.addresses.add(stray.address)
    at_once(node.reconciler.observer.observing(Observation(addresses=frozenset(node.kernel.addresses)), node.now))
    assert node.reconciler.observer.newcomers
    node.observe()
    assert not node.reconciler.observer.newcomers
    assert node.plan() == [Operation(Verb.REMOVE, BoundAddresses.of(stray.address))]


def test_a_drain_ends_when_a_poll_shows_that_its_virtual_server_no_longer_exists() -> None:
    node = draining()
    assert len(node.reconciler._drains) == 1
    poll(node, {KEY: None})
    assert len(node.reconciler._drains) == 0


def test_an_object_that_was_read_from_the_kernel_is_never_modified_later() -> None:
    node = running("10.244.0.1")
    reading = dict(node.kernel.observe().virtual_servers or {})
    node.observe(virtual_servers=reading)
    before = copy.deepcopy(reading[KEY])
    node.put(*web("10.244.0.1", "10.244.0.2"))
    node.sync()
    assert reading[KEY] == before
    assert node.kernel.virtual_servers[KEY] != before


def test_observed_sets_and_addresses_are_kept_if_a_read_reports_no_change() -> None:
    node = running("10.244.0.1")
    node.observe(sets=None, addresses=None, interface_addresses=None)
    assert not node.plan()
    ip_set = examples.entry(SetKind.CLUSTER_IP, KEY)
    node.observe(sets=None, some_sets={"KUBE-CLUSTER-IP": frozenset({ip_set})})
    assert not node.plan()
    node.observe(sets=None, some_sets={"KUBE-CLUSTER-IP": None})
    lost = [operation.item for operation in node.plan() if operation.verb is Verb.ADD]
    assert IP_SETS["KUBE-CLUSTER-IP"] in lost
    assert SetEntries.of(examples.entry(SetKind.CLUSTER_IP, KEY)) in lost


def test_ownership_of_node_ports_depends_on_the_addresses_that_were_read_last() -> None:
    node = running("10.244.0.1")
    stray = builders.frontend(builders.NODE_ADDRESS, 30001)
    node.kernel.sets["KUBE-NODE-PORT-TCP"].entries.add(SetEntry("KUBE-NODE-PORT-TCP", port=30001))
    node.observe(interface_addresses=(InterfaceAddress("eth0", stray.address, 16),))
    node.kernel.virtual_servers[stray] = examples.observed({})
    node.observe(interface_addresses=None)
    assert stray not in node.reconciler._tables.virtual_servers.foreign


def test_rules_are_not_written_again_if_the_rules_of_their_family_could_not_be_read() -> None:
    node = running("10.244.0.1")
    node.observe(skeletons={})
    assert not node.plan()
