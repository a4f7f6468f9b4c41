"""The two methods by which Service addresses become local, and the switch between them.

During a switch, no address stops being local.
"""

import itertools

import pytest

from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import VirtualServer
from ipvsproxy.reconcile.kinds.declaration import MISSING, STALE
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers.drain import Drains
from ipvsproxy.translate.translation_settings import Binding
from tests.reconcile import simulation
from tests.support import builders

ADDRESSES = ("10.96.0.1", "10.96.0.2", "192.0.2.10")
WEB = builders.service("web", builders.service_port(80), cluster=("10.96.0.1",), load_balancer=("192.0.2.10",))
SHOP = builders.service("shop", builders.service_port(80), cluster=("10.96.0.2",))
LOCAL = frozenset(map(parse_address, ADDRESSES))
ITEMS = {Binding.ADDRESSES: BoundAddresses, Binding.ROUTES: LocalRoutes}
OTHER = {Binding.ADDRESSES: Binding.ROUTES, Binding.ROUTES: Binding.ADDRESSES}
BINDINGS = pytest.mark.parametrize("binding", Binding)


def running(binding: Binding) -> simulation.SimulatedNode:
    node = simulation.SimulatedNode(binding=binding)
    for service in (WEB, SHOP):
        node.put(service, builders.endpoint_slice(builders.endpoint("10.244.0.5"), service=service.name.name))
    node.sync()
    return node


def local(node: simulation.SimulatedNode) -> dict[Binding, frozenset[object]]:
    return {Binding.ADDRESSES: frozenset(node.kernel.addresses), Binding.ROUTES: frozenset(node.kernel.routes)}


def bindings_of(operations: list[Operation]) -> list[tuple[Verb, type]]:
    kinds = tuple(ITEMS.values())
    return list(dict.fromkeys((verb, type(item)) for verb, item in operations if isinstance(item, kinds)))


@BINDINGS
def test_a_switch_of_binding_adds_all_addresses_before_it_removes_any_address(binding: Binding) -> None:
    node = running(binding)
    assert local(node) == {binding: LOCAL, OTHER[binding]: frozenset()}
    node.switch(OTHER[binding])
    done = node.sync()
    assert bindings_of(done) == [(Verb.ADD, ITEMS[OTHER[binding]]), (Verb.REMOVE, ITEMS[binding])]
    assert local(node) == {OTHER[binding]: LOCAL, binding: frozenset()}
    assert {type(item) for _, item in done} == set(ITEMS.values()), "nothing else changes"


@BINDINGS
@pytest.mark.parametrize("steps", range(8))
def test_every_address_stays_local_if_the_process_is_killed_during_a_switch_of_the_binding(binding: Binding, steps: int) -> None:
    for last in Binding:
        node = running(binding)
        node.switch(OTHER[binding])
        for operation in itertools.islice(_one_by_one(node), steps):
            node.apply([operation])
            assert frozenset().union(*local(node).values()) == LOCAL
        node.switch(last)
        node.restart()
        node.sync()
        assert not node.has_failed
        assert local(node) == {last: LOCAL, OTHER[last]: frozenset()}
        assert node.reconciler.pending == 0


def _one_by_one(node: simulation.SimulatedNode) -> list[Operation]:
    """Returns, in order, the operations of a switch from the other binding to the binding of ``node``."""
    copy = running(OTHER[node.binding])
    copy.switch(node.binding)
    return copy.sync()


@BINDINGS
def test_each_binding_makes_an_address_local_only_after_its_virtual_server_exists(binding: Binding) -> None:
    node = simulation.SimulatedNode(binding=binding)
    node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), times=1)
    node.put(SHOP)
    node.sync()
    assert local(node)[binding] == frozenset()
    node.sync(after_s=1)
    assert local(node)[binding] == {parse_address("10.96.0.2")}


@BINDINGS
def test_each_binding_removes_an_undesired_address_only_after_its_virtual_server(binding: Binding) -> None:
    node = running(binding)
    node.kernel.fail(lambda operation: operation.verb is Verb.REMOVE and isinstance(operation.item, VirtualServer), times=1)
    node.remove("shop")
    node.sync()
    assert local(node)[binding] == LOCAL, "it shows that the virtual server is ours"
    node.sync(after_s=1)
    assert local(node)[binding] == LOCAL - {parse_address("10.96.0.2")}


@BINDINGS
def test_with_each_binding_changes_by_other_programs_are_reported_as_drift_and_repaired(binding: Binding) -> None:
    node = running(binding)
    held = {Binding.ADDRESSES: node.kernel.addresses, Binding.ROUTES: node.kernel.routes}
    stray = parse_address("10.96.7.7")
    held[binding].discard(parse_address("10.96.0.1"))
    held[OTHER[binding]].add(stray)
    node.observe()
    kinds = {Binding.ADDRESSES: "address", Binding.ROUTES: "route"}
    assert dict(node.reconciler.take_drift_news().drifted) == dict.fromkeys(kinds.values(), 1)
    found = {(one.kind, one.name, one.desired, one.observed) for one in node.reconciler.survey.differences()}
    assert found == {
        (kinds[binding], "10.96.0.1", "present", MISSING),
        (kinds[OTHER[binding]], "10.96.7.7", STALE, "present"),
    }
    node.sync()
    assert local(node) == {binding: LOCAL, OTHER[binding]: frozenset()}


def test_routes_of_a_family_that_is_not_served_are_kept() -> None:
    tables = NodeTables(Drains(), lambda _: False, lambda family: family is Family.IPV4)
    both = parse_address("10.96.0.1"), parse_address("fd00:96::1")
    list(tables.routes.observing(dict.fromkeys(both, True)))
    assert list(tables.routes.surplus) == [both[0]]


def test_the_rule_for_routes_covers_only_addresses_that_have_or_will_get_a_route() -> None:
    node = running(Binding.ADDRESSES)
    keys = [builders.frontend(address, 80) for address in ADDRESSES]
    routed = node.reconciler.survey.routed
    assert (routed(keys), routed(keys, settled=True)) == (frozenset(), frozenset())
    node.switch(Binding.ROUTES)
    assert (routed(keys), routed(keys, settled=True)) == (frozenset(keys), frozenset(keys))
    node.sync()
    node.switch(Binding.ADDRESSES)
    assert (routed(keys), routed(keys, settled=True)) == (frozenset(keys), frozenset()), "the routes are still there"
    node.sync()
    assert routed(keys) == frozenset()
