"""Which addresses of Services belong to nodes, and how few lookups are needed to find this out."""

from collections.abc import Iterable

import pytest

from ipvsproxy.model.net import Address
from ipvsproxy.model.service import ApiObject, EndpointSliceName, Gone, ObjectKind, ServiceName
from ipvsproxy.store.node_addresses import FEW
from ipvsproxy.store.objects import Store
from tests.support import builders, memory_node
from tests.support.builders import OTHER_NODE, THIS_NODE, endpoint

TAKEN = "192.168.0.11"


def _store(*objects: ApiObject) -> Store:
    store = Store(0, here=THIS_NODE)
    store.deliver(map(memory_node.put, objects), 0)
    return store


def _others(store: Store) -> dict[str, str]:
    return {str(address): node for address, node in store.other_nodes.items()}


def _service(*external: str, name: str = "web", balancer: Iterable[str] = ()) -> ApiObject:
    return builders.service(name, external=external, load_balancer=balancer)


def _slice(address: str = TAKEN, node: str = OTHER_NODE, suffix: str = "1") -> ApiObject:
    return builders.endpoint_slice(endpoint("10.244.1.9", OTHER_NODE), endpoint(address, node), service="agent", suffix=suffix)


@pytest.mark.parametrize("first", [0, 1])
def test_a_node_address_is_recognised_whether_the_service_or_the_endpoint_slice_arrives_first(first: int) -> None:
    objects = [_service(TAKEN, "203.0.113.9"), _slice()]
    store = _store(objects[first])
    assert _others(store) == {}
    store.deliver([memory_node.put(objects[1 - first])], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}


def test_load_balancer_addresses_are_looked_up_but_cluster_ips_are_not_looked_up() -> None:
    cluster = builders.service("cluster", cluster=["10.244.1.9"])
    assert _others(_store(cluster, _service(balancer=[TAKEN]), _slice())) == {TAKEN: OTHER_NODE}


@pytest.mark.parametrize("node", [THIS_NODE, ""])
def test_an_address_belongs_to_no_other_node_if_its_endpoint_is_on_this_node_or_has_no_node(node: str) -> None:
    assert _others(_store(_service(TAKEN), _slice(node=node))) == {}


def test_the_node_of_an_address_is_forgotten_after_the_endpoint_slice_is_deleted() -> None:
    service, item = _service(TAKEN), _slice()
    store = _store(service, item)
    assert _others(store) == {TAKEN: OTHER_NODE}
    store.deliver([memory_node.put(_slice("10.244.1.10"))], 0)
    assert _others(store) == {}
    store.deliver([memory_node.put(item)], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}
    store.deliver([Gone(ObjectKind.ENDPOINT_SLICE, EndpointSliceName("default", "agent-1"))], 0)
    assert _others(store) == {}
    store.deliver([memory_node.put(item), memory_node.put(_service(name="web"))], 0)
    assert _others(store) == {}
    store.deliver([memory_node.put(service)], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}
    store.deliver([Gone(ObjectKind.SERVICE, ServiceName("default", "web"))], 0)
    assert _others(store) == {}


def test_an_address_of_another_node_stays_known_while_a_slice_or_node_object_still_has_it() -> None:
    store = _store(_service(TAKEN), _slice(), _slice(suffix="2"), builders.node(TAKEN, name=OTHER_NODE))
    assert _others(store) == {TAKEN: OTHER_NODE}
    for event in (
        Gone(ObjectKind.ENDPOINT_SLICE, EndpointSliceName("default", "agent-1")),
        memory_node.put(_slice("10.244.1.10", suffix="2")),
    ):
        store.deliver([event], 0)
        assert _others(store) == {TAKEN: OTHER_NODE}
    store.deliver([memory_node.put(builders.node("192.168.0.12", name=OTHER_NODE))], 0)
    assert _others(store) == {}


def test_the_addresses_of_a_node_object_count_as_node_addresses_until_the_object_is_deleted() -> None:
    other = builders.node(TAKEN, name=OTHER_NODE)
    for objects in ((_service(TAKEN), other), (other, _service(TAKEN))):
        store = _store(*objects)
        assert _others(store) == {TAKEN: OTHER_NODE}
        store.deliver([Gone(ObjectKind.NODE, memory_node.key_of(other))], 0)
        assert _others(store) == {}


def test_an_endpoint_slice_is_counted_once_if_it_arrives_before_a_service_with_the_same_address() -> None:
    store = _store(_slice())
    store.deliver([memory_node.put(_service(TAKEN)), memory_node.put(_slice(suffix="2"))], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}
    for suffix in "12":
        store.deliver([Gone(ObjectKind.ENDPOINT_SLICE, EndpointSliceName("default", f"agent-{suffix}"))], 0)
    assert _others(store) == {}


def test_many_new_addresses_are_looked_up_in_one_pass() -> None:
    many = [f"192.168.1.{number}" for number in range(1, FEW + 3)]
    slices = [_slice(address, f"node-{address}", address) for address in many[1:]]
    assert _others(_store(_service(*many), *slices)) == {address: f"node-{address}" for address in many[1:]}


def test_an_address_is_not_found_if_its_bytes_are_the_end_of_one_address_and_the_beginning_of_the_next() -> None:
    packed = Address(bytes([1, 9, 192, 168]))
    assert _others(_store(_service(str(packed)), _slice("192.168.0.1"))) == {}


def test_a_node_address_stays_known_if_one_of_two_services_with_this_address_is_deleted() -> None:
    store = _store(_service(TAKEN), _service(TAKEN, name="api"), _slice())
    assert _others(store) == {TAKEN: OTHER_NODE}
    store.deliver([Gone(ObjectKind.SERVICE, ServiceName("default", "web"))], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}


def test_touching_an_external_address_retranslates_only_the_services_with_this_address() -> None:
    store = _store(_service(TAKEN), _service("203.0.113.9", name="api"), _service(balancer=[TAKEN], name="shop"))
    store.take()
    store.touch_external([Address(bytes([192, 168, 0, 11]))], 5)
    assert {name.name: now for name, now in store.take().services.items()} == {"web": 5, "shop": 5}


def test_only_endpoint_slices_with_the_address_of_a_new_service_show_the_node_of_this_address() -> None:
    store = _store(_slice("192.168.0.12", suffix="2"), _slice())
    store.deliver([memory_node.put(_service(TAKEN))], 0)
    assert _others(store) == {TAKEN: OTHER_NODE}
