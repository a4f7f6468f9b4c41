"""The cost of a change from the watch line to the bytes for the kernel, counted, not timed.

The program's own code decodes, translates, reconciles and encodes; only sockets are left out. No count may depend on the number
of Services, or on the number of endpoints of a Service. scripts/bench has figures in seconds.
"""

import collections
import json
from collections.abc import Callable, Sequence

import pytest

from ipvsproxy.kernel.backend_drivers import Driver
from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset.driver import IpsetDriver
from ipvsproxy.kernel.ipvs.driver import IpvsDriver
from ipvsproxy.kernel.nftables.sets import NftSetsDriver
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import Gone, ObjectKind, Put, Service
from ipvsproxy.model.sets import SetEntries
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer
from ipvsproxy.translate.api import decode
from ipvsproxy.translate.services import state
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.fake_netlink import FakeSocket
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

FEW, MANY = 3, 1500
IPVS_FAMILY = 30
NEW_DESTINATION = 116
"""Bytes of a message that adds an IPv4 real server (netlink, generic netlink and IPVS attributes)."""


def _connect(_protocol: int) -> FakeSocket:
    return FakeSocket(lambda _data: ())


class Wire(FakeKernel):
    """An in-memory kernel that also encodes every operation, and counts the messages that would be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> None:
        super().__init__()
        self.host_addresses = [builders.interface_address("eth0", builders.NODE_ADDRESS)]
        self.counted: collections.Counter[str] = collections.Counter()
        monkeypatch.setattr(netlink, "resolve_family", lambda *_: IPVS_FAMILY)
        monkeypatch.setattr(netlink.Channel, "run", self._run)
        self.sysctls = {setting.path: "0" for setting in memory_node.SYSCTLS}
        ipvs = IpvsDriver(_connect)
        sets = NftSetsDriver(_connect) if backend is Backend.NFTABLES else IpsetDriver(_connect)
        self._drivers: dict[type, Driver] = {VirtualServer: ipvs, RealServers: ipvs, SetEntries: sets}

    def _run(self, messages: Sequence[bytes], _refusal: int | None = None) -> dict[int, int]:
        self.counted.update(sends=1, messages=len(messages), bytes=sum(map(len, messages)))
        return {}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        for kind, driver in self._drivers.items():
            chosen = [operation for operation in operations if type(operation.item) is kind]
            if chosen:
                driver.apply(chosen)
        return super().apply(operations)

    def observe(self, *arguments: object) -> object:  # type: ignore[override]  # handed on as they came
        self.counted["readings"] += 1
        return super().observe(*arguments)  # type: ignore[arg-type]  # as above


def service(number: int) -> Service:
    return builders.service(f"web-{number}", cluster=(f"10.96.{number // 250}.{number % 250 + 1}",))


def line(number: int, endpoints: int, version: int) -> bytes:
    """A watch line: the slice of a Service with this many endpoints, none of them on this node."""
    item = {
        "metadata": {
            "name": f"web-{number}-abc",
            "namespace": "default",
            "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": f"web-{number}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [f"10.244.{one // 250}.{one % 250 + 1}"], "conditions": {"ready": True}, "nodeName": "other"}
            for one in range(endpoints)
        ],
    }
    return json.dumps({"type": "MODIFIED", "object": item}).encode()


def deliver_line(served: MemoryNode, watch_line: bytes) -> None:
    event = decode.decode_watch_line(ObjectKind.ENDPOINT_SLICE, watch_line).event
    assert isinstance(event, Put | Gone)
    served.deliver([event])


@pytest.fixture(name="wire", params=[Backend.IPTABLES, Backend.NFTABLES])
def _wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Wire]:
    """Makes kernels whose sets are those of a backend."""
    return lambda: Wire(monkeypatch, request.param)


async def cost_of_one_more(monkeypatch: pytest.MonkeyPatch, wire: Wire, services: int, endpoints: int) -> dict[str, int]:
    """The counts when the first of this many Services, with this many endpoints, gets one more endpoint."""
    translated: collections.Counter[str] = collections.Counter()
    translate = state.translate

    def counting(*arguments: object, **choices: object) -> object:
        translated["translated"] += 1
        return translate(*arguments, **choices)  # type: ignore[arg-type]  # handed on as they came

    monkeypatch.setattr(state, "translate", counting)
    served = MemoryNode(wire)
    async with served.running():
        served.begin_with(*map(service, range(services)), builders.node())
        deliver_line(served, line(0, endpoints, 1))
        await served.quiet()
        wire.counted.clear()
        translated.clear()
        deliver_line(served, line(0, endpoints + 1, 2))
        await served.quiet()
    return dict(wire.counted + translated)


@in_virtual_time
async def test_an_added_endpoint_is_one_message_whatever_the_size_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, wire: Callable[[], Wire]
) -> None:
    expected = {"translated": 1, "sends": 1, "messages": 1, "bytes": NEW_DESTINATION}
    assert await cost_of_one_more(monkeypatch, wire(), FEW, 2) == expected
    assert await cost_of_one_more(monkeypatch, wire(), MANY, 2) == expected
    assert await cost_of_one_more(monkeypatch, wire(), FEW, 900) == expected


async def cost_of_a_service(wire: Wire, services: int) -> dict[str, int]:
    """The counts when a Service comes to this many, and when it goes again."""
    served = MemoryNode(wire)
    async with served.running():
        served.begin_with(*map(service, range(1, services)), builders.node())
        await served.quiet()
        wire.counted.clear()
        served.put(service(0))
        await served.quiet()
        served.remove(service(0))
        await served.quiet()
    return dict(wire.counted)


@in_virtual_time
async def test_a_service_costs_the_same_messages_whatever_the_size_of_the_cluster(wire: Callable[[], Wire]) -> None:
    counted = await cost_of_a_service(wire(), FEW)
    assert counted["messages"] >= 4, "a virtual server and an entry of a set, added and removed"
    assert await cost_of_a_service(wire(), MANY) == counted


@in_virtual_time
async def test_a_first_list_is_sent_in_few_large_parts(wire: Callable[[], Wire]) -> None:
    used = wire()
    served = MemoryNode(used)
    async with served.running():
        served.begin_with(*map(service, range(MANY)), builders.node())
        await served.quiet()
    assert MANY < used.counted["messages"] < 1.1 * MANY, "one for each virtual server; set entries share messages"
    assert used.counted["sends"] < MANY / 50
    assert used.counted["readings"] == 1


@in_virtual_time
async def test_a_change_reads_nothing_of_the_kernel(wire: Callable[[], Wire]) -> None:
    used = wire()
    served = MemoryNode(used)
    async with served.running():
        served.begin_with(*map(service, range(FEW)), builders.node())
        await served.quiet()
        used.counted.clear()
        for version in range(1, 10):
            deliver_line(served, line(0, version, version))
            await served.quiet()
    assert used.counted["readings"] == 0
    assert used.counted["messages"] == 9
