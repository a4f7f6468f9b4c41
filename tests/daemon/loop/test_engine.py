"""Covers changes while the loop runs: the operations that they cause, the times of these operations, and the log lines.

``test_engine_start`` covers the start, ``test_engine_repair`` covers drift, ``test_engine_failures`` covers failures and
retries, and ``test_reader`` covers how the kernel is read.
"""

import asyncio
import itertools
from collections.abc import Generator, Sequence
from typing import Any

import pytest
from structlog.typing import EventDict

from ipvsproxy.daemon.loop import engine
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.service import EndpointSlice, ObjectKind, Service, ServiceName, ServiceType
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.virtual_servers import ConnectionCounts
from ipvsproxy.translate.services import desired_state
from tests.support import builders, memory_node
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import loop

WEB = builders.service("web")
WEB_KEY = builders.frontend(builders.CLUSTER_IP, 80)
SLICE = builders.endpoint_slice(builders.endpoint("10.244.0.5"))
KUBERNETES = builders.service("kubernetes", builders.service_port(443), cluster=("10.96.0.1",))
PARTS = ("virtual_servers", "sets", "device", "addresses", "interface_addresses", "skeletons", "sysctls")


def assert_from_scratch(node: MemoryNode) -> None:
    """Assert that the node's kernel equals a newly programmed kernel, and that no operation is pending."""
    assert memory_node.contents(node.kernel) == memory_node.from_scratch(node.store, node.settings, node.kernel)
    assert node.engine._reconciler.pending == 0


async def test_a_change_causes_exactly_the_operations_that_it_needs() -> None:
    async with MemoryNode().serving(WEB, SLICE, KUBERNETES) as node:
        node.kernel.forget()
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.5"), builders.endpoint("10.244.1.6", builders.OTHER_NODE)))
        await node.quiet()
        assert node.done == ["add real_server TCP 10.96.0.10:80 -> 10.244.1.6:8080"]
        node.kernel.forget()
        node.remove(WEB)
        await node.quiet()
        assert node.done == [
            "remove virtual_server TCP 10.96.0.10:80",
            "remove set_entry KUBE-LOOP-BACK 10.244.0.5,tcp:8080,10.244.0.5",
            "set rules IPv4 rules",  # no endpoint is on this node any more, so no endpoint can connect to itself
            "remove set_entry KUBE-CLUSTER-IP 10.96.0.10,tcp:80",
            "remove set_entry KUBE-IPVS-IPS 10.96.0.10",
            "remove address 10.96.0.10",
        ]
        assert_from_scratch(node)
        node.kernel.forget()
        node.put(SLICE, KUBERNETES)
        await node.quiet()
        assert node.done == [], "nothing has changed"


async def test_a_sync_waits_for_the_minimum_interval_and_then_applies_all_waiting_changes() -> None:
    async with MemoryNode(min_interval_s=5).serving() as node:
        for number in range(10):
            node.put(builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)))
            await node.quiet(1)
        await node.quiet(5)
        assert_from_scratch(node)
    begins = node.watcher.syncing_s
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(begins))
    served = [len(summary.changes.services) for summary in node.watcher.summaries]
    assert served == [0, 5, 5]
    assert [round(summary.waited_s) for summary in node.watcher.summaries] == [0, 5, 5]


@pytest.mark.parametrize(("sync_s", "rest_s"), [(0.002, 0.008), (0.01, 0.04), (0.2, engine.LONGEST_REST_S)])
async def test_changes_during_the_minimum_interval_after_a_sync_are_collected_for_the_next_sync(
    monkeypatch: pytest.MonkeyPatch, sync_s: float, rest_s: float
) -> None:
    async with MemoryNode().serving() as node:
        let_translations_take(sync_s, monkeypatch)
        node.put(WEB)
        await node.watcher.until(lambda: WEB_KEY in node.kernel.virtual_servers)
        first_ends_s = node.watcher.syncing_s[-1] + sync_s
        node.put(SLICE)
        node.put(KUBERNETES)
        await node.quiet(1)
        assert node.watcher.syncing_s[-1] - first_ends_s == pytest.approx(rest_s)
        assert len(node.watcher.summaries) == 3, "both came together"
        node.put(builders.service("late", cluster=("10.96.0.77",)))
        await node.quiet(1)
        assert node.watcher.summaries[-1].waited_s == 0, "after a long rest a change is served at once"


def let_translations_take(each_s: float, monkeypatch: pytest.MonkeyPatch) -> list[ServiceName]:
    """Let each translation of a Service take this long; returns a list that gets the name of each translated Service."""
    translated: list[ServiceName] = []
    real = desired_state.translating

    def translating(service: Service, *arguments: object, **choices: object) -> Generator[None, None, ServiceState]:
        translated.append(service.name)
        loop().pass_time(each_s)
        return real(service, *arguments, **choices)  # type: ignore[arg-type]  # the wrapper passes on its arguments

    monkeypatch.setattr(desired_state, "translating", translating)
    return translated


async def test_a_change_during_a_sync_is_programmed_by_the_next_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode()
    late = builders.service("late", cluster=("10.96.0.77",))
    apply = node.kernel.apply

    def apply_and_interrupt(operations: Sequence[Operation]) -> list[Outcome]:
        if ServiceName("default", "late") not in node.store.services:
            node.put(late)
        return apply(operations)

    async with node.serving():
        monkeypatch.setattr(node.kernel, "apply", apply_and_interrupt)
        node.put(WEB)
        await node.quiet()
        assert [list(summary.changes.services) for summary in node.watcher.summaries[-2:]] == [[WEB.name], [late.name]]
        assert_from_scratch(node)


@pytest.mark.parametrize(
    ("count", "endpoints", "each_s", "most"), [(5000, 0, 0.00001, 300), (1000, 50, 0.0002, 12), (500, 200, 0.001, 3)]
)
async def test_other_tasks_run_while_many_services_are_translated(
    monkeypatch: pytest.MonkeyPatch, count: int, endpoints: int, each_s: float, most: int
) -> None:
    translated = let_translations_take(each_s, monkeypatch)
    node = MemoryNode()
    turns: list[int] = []

    async def take_turns() -> None:
        while True:
            turns.append(len(translated))
            await asyncio.sleep(0)

    names = [(f"web-{number}", f"10.97.{number >> 8}.{number & 255}") for number in range(count)]
    each = [builders.endpoint(f"10.244.1.{number}") for number in range(endpoints)]
    slices = [builders.endpoint_slice(*each, service=name) for name, _ in names]
    async with node.running():
        turning = asyncio.create_task(take_turns())
        services = [builders.service(name, cluster=(address,)) for name, address in names]
        node.begin_with(*services, *slices, builders.node())
        await node.watcher.until(lambda: bool(node.watcher.summaries))
        turning.cancel()
    assert len(translated) == count
    at_once = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert max(at_once) <= most, "2 ms of work, and what is done until the time is asked for again"
    assert sum(map(bool, at_once)) >= count / most


def node_ports(name: str = "web") -> Service:
    return builders.service(name, builders.service_port(node_port=30080), kind=ServiceType.NODE_PORT)


async def test_waiting_removals_are_planned_again_less_often_than_once_per_batch_of_changed_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "SERVICES_AT_ONCE", 2)
    number_of_services = 64
    node = MemoryNode()
    planned: list[int] = []
    planning = node.engine._reconciler.planning

    def counting(now: float, *, only_additions: bool) -> Generator[None, None, Sequence[Operation]]:
        planned.append(node.engine._reconciler.unequal)
        return planning(now, only_additions=only_additions)

    monkeypatch.setattr(node.engine._reconciler, "planning", counting)
    services = [builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)) for number in range(number_of_services)]
    async with node.serving(*services, *(_slice_of(one, "10.244.1.5") for one in services)):
        assert len(planned) > number_of_services / 2, "each batch is applied before the next one is translated"
        planned.clear()
        node.put(*(_slice_of(one, "10.244.1.6") for one in services))
        await node.quiet()
        assert_from_scratch(node)
    assert sum(planned) < 4 * number_of_services, "not half of the Services for each batch"


def _slice_of(service: Service, endpoint: str) -> EndpointSlice:
    return builders.endpoint_slice(builders.endpoint(endpoint, builders.OTHER_NODE), service=service.name.name)


async def test_an_external_address_is_bound_to_our_device_unless_another_interface_has_it() -> None:
    address = parse_address("203.0.113.9")
    async with MemoryNode().serving(builders.service("web", external=("203.0.113.9",)), SLICE) as node:
        assert address in node.kernel.addresses
        node.kernel.host_addresses.append(builders.interface_address("eth1", "203.0.113.9"))
        node.engine.interfaces_changed()
        await node.quiet()
        assert address not in node.kernel.addresses
        assert builders.frontend("203.0.113.9", 80) in node.kernel.virtual_servers
        node.kernel.host_addresses.pop()
        node.engine.interfaces_changed()
        await node.quiet()
        assert address in node.kernel.addresses
        assert_from_scratch(node)


async def test_a_changed_zone_of_the_node_causes_every_service_to_be_translated_again(logs: list[EventDict]) -> None:
    near, far = builders.endpoint("10.244.0.5", zones=["zone-a"]), builders.endpoint("10.244.1.6", "node-b", zones=["zone-b"])
    async with MemoryNode().serving(WEB, builders.endpoint_slice(near, far)) as node:
        assert set(node.kernel.virtual_servers[WEB_KEY].real_servers) == {builders.backend("10.244.0.5")}
        logs.clear()
        node.put(builders.node(zone="zone-b"))
        await node.quiet()
        assert builders.backend("10.244.1.6") in node.kernel.virtual_servers[WEB_KEY].real_servers
        assert [line["zone"] for line in logs if line["event"] == "node_changed"] == ["zone-b"]
        assert node.watcher.summaries[-1].changes.counts[ObjectKind.NODE]
        assert list(node.watcher.summaries[-1].changes.services) == [WEB.name]
        assert_from_scratch(node)


async def test_replacing_an_endpoint_needs_one_call_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[str] = []
    call = KernelThread.call

    async def noted(thread: KernelThread[Any], method: Any, *arguments: Any) -> Any:
        trips.append(method.__name__)
        return await call(thread, method, *arguments)

    async with MemoryNode().serving(WEB, builders.endpoint_slice(builders.endpoint("10.244.1.5", builders.OTHER_NODE))) as node:
        node.kernel.forget()
        monkeypatch.setattr(KernelThread, "call", noted)
        node.put(builders.endpoint_slice(builders.endpoint("10.244.1.6", builders.OTHER_NODE)))
        await node.quiet(1)
    assert node.done == [
        "add real_server TCP 10.96.0.10:80 -> 10.244.1.6:8080",
        "set real_server TCP 10.96.0.10:80 -> 10.244.1.5:8080",
        "remove real_server TCP 10.96.0.10:80 -> 10.244.1.5:8080",
    ]
    assert len(trips) == 1


async def test_a_failed_removal_of_a_real_server_that_already_has_weight_0_is_retried() -> None:
    async with MemoryNode().serving(WEB, SLICE) as node:
        node.kernel.fail(lambda operation: str(operation) == "remove real_server TCP 10.96.0.10:80 -> 10.244.0.5:8080")
        node.put(builders.endpoint_slice(builders.endpoint("10.244.1.6", builders.OTHER_NODE)))
        await node.quiet()
        assert node.kernel.virtual_servers[WEB_KEY].real_servers[builders.backend("10.244.0.5")] == 0
        await node.quiet(5)
        assert_from_scratch(node)


async def test_the_connections_of_a_draining_real_server_are_read_until_they_have_ended() -> None:
    leaving = builders.backend("10.244.0.5")
    async with MemoryNode().serving(WEB, SLICE) as node:
        node.kernel.connection_counts[WEB_KEY, leaving] = ConnectionCounts(1, 0)
        node.put(builders.endpoint_slice())
        await node.quiet(200)
        assert node.kernel.virtual_servers[WEB_KEY].real_servers == {leaving: 0}
        node.kernel.connection_counts.clear()
        await node.quiet(30)
        assert_from_scratch(node)


async def test_an_address_conflict_of_two_services_is_logged_once(logs: list[EventDict]) -> None:
    young = builders.service("young", created_s=builders.CREATED_S + 1)
    async with MemoryNode().serving(WEB, young) as node:
        node.put(SLICE)
        await node.quiet(100)
    assert [line["waiting"] for line in logs if line["event"] == "address_conflict"] == [["default/young"]]


async def test_a_family_is_reported_as_incomplete_if_the_device_or_a_set_or_an_entry_is_missing() -> None:
    async with MemoryNode().serving(WEB) as node:
        assert node.watcher.summaries[-1].not_in_force == set()
        node.kernel.fail(lambda operation: "add set_entry KUBE-CLUSTER-IP" in str(operation), times=1)
        node.put(builders.service("other", cluster=("10.96.0.98",)))
        await node.quiet()
        assert (node.watcher.summaries[-1].not_in_force, node.watcher.summaries[-1].lacking) == ({Family.IPV4}, set())
        await node.quiet(5)
        assert node.watcher.summaries[-1].not_in_force == set()
        node.kernel.sets.pop("KUBE-6-CLUSTER-IP")
        node.kernel.fail(lambda operation: "KUBE-6-CLUSTER-IP" in str(operation), times=1000)
        await node.quiet(memory_node.AUDIT_INTERVAL_S)
        assert node.watcher.summaries[-1].lacking == {Family.IPV6}
        node.kernel.device = False
        node.kernel.fail(lambda operation: "kube-ipvs0" in str(operation), times=1000)
        await node.quiet(memory_node.AUDIT_INTERVAL_S)
        assert node.watcher.summaries[-1].lacking == frozenset(Family)
