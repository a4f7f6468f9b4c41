"""The cost of a change must depend on the change, not on the number of Services. The tests count calls and measure no times."""

import collections

import pytest

from ipvsproxy.model.kernel import BoundAddresses
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.service import EndpointSlice, Service
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.reconcile.kinds.virtual_server_kind import VirtualServers
from ipvsproxy.reconcile.tables import table
from tests.reconcile import simulation
from tests.support import builders

MANY = 2000


def numbered(number: int, *endpoints: str) -> tuple[Service, EndpointSlice]:
    name, address = f"web-{number}", f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}"
    slices = builders.endpoint_slice(*(builders.endpoint(one, "node-b") for one in endpoints), service=name)
    return builders.service(name, cluster=(address,)), slices


def serving(count: int) -> simulation.SimulatedNode:
    node = simulation.SimulatedNode()
    for number in range(count):
        node.put(*numbered(number, "10.244.0.1"))
    node.sync()
    assert len(node.kernel.virtual_servers) == count
    return node


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """The number of comparisons of keys and of values."""
    counted: collections.Counter[str] = collections.Counter()
    touch, compare = table.Table.touch, VirtualServers.differs

    def counting_touch(self: table.Table[object, object, object], key: object) -> None:
        counted["touch"] += 1
        touch(self, key)

    def counting_differs(*arguments: object) -> bool:
        counted["differs"] += 1
        return compare(*arguments)  # type: ignore[arg-type]  # the arguments are passed on unchanged

    monkeypatch.setattr(table.Table, "touch", counting_touch)
    monkeypatch.setattr(VirtualServers, "differs", counting_differs)
    return counted


def test_one_additional_endpoint_among_many_services_takes_one_operation(calls: collections.Counter[str]) -> None:
    spent = []
    for count in (2, MANY):
        node = serving(count)
        calls.clear()
        node.put(*numbered(1, "10.244.0.1", "10.244.0.2"))
        key = builders.frontend("10.96.0.1", 80)
        assert node.sync() == [Operation(Verb.ADD, RealServers.of(key, builders.backend("10.244.0.2"), 1))]
        spent.append(dict(calls))
    assert spent[0] == spent[1]
    assert 0 < spent[0]["touch"] < 10


def test_one_additional_service_among_many_takes_only_its_own_operations(calls: collections.Counter[str]) -> None:
    spent = []
    for count in (2, MANY):
        node = serving(count)
        calls.clear()
        node.put(*numbered(5000, "10.244.0.1"))
        made = node.sync()
        assert {type(operation.item) for operation in made} == {VirtualServer, RealServers, SetEntries, BoundAddresses}
        assert len(made) == 5
        spent.append(dict(calls))
    assert spent[0] == spent[1]


def test_an_audit_that_finds_one_damaged_object_among_many_repairs_only_this_object() -> None:
    node = serving(MANY)
    node.kernel.addresses.discard(parse_address("10.96.0.7"))
    node.observe()
    assert node.sync() == [Operation(Verb.ADD, BoundAddresses.of(parse_address("10.96.0.7")))]
