"""The cost of a change must depend on the change, not on the number of Services. The tests count calls and measure no times."""

import collections

import pytest

from ipvsproxy.model.kernel import BoundAddresses
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
    """Counts the comparisons of keys (``touch``), and the comparisons of virtual servers (``differs``)."""
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


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        pytest.param(numbered(1, "10.244.0.1", "10.244.0.2"), [RealServers], id="an endpoint"),
        pytest.param(
            numbered(5000, "10.244.0.1"), [SetEntries, SetEntries, VirtualServer, RealServers, BoundAddresses], id="a Service"
        ),
    ],
)
def test_the_cost_of_adding_a_service_or_an_endpoint_does_not_depend_on_the_number_of_services(
    change: tuple[Service, EndpointSlice], kinds: list[type], calls: collections.Counter[str]
) -> None:
    spent = []
    for count in (2, MANY):
        node = serving(count)
        calls.clear()
        node.put(*change)
        assert [type(operation.item) for operation in node.sync()] == kinds
        spent.append(dict(calls))
    assert spent[0] == spent[1]
    assert 0 < spent[0]["touch"] < 10
