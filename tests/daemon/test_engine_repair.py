"""The loop when something is not as it should be: drift, failures, surprises, and a kernel that cannot be read."""

import asyncio
import errno
import itertools
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import pytest
import structlog.testing

from ipvsproxy.daemon import engine, reading
from ipvsproxy.model.kernel import RealServer, SetEntry, VirtualServer, VirtualServerSettings
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile import drift
from ipvsproxy.translate import view
from tests import builders, memory_node
from tests.daemon.test_engine import KUBERNETES, PARTS, SLICE, WEB, WEB_KEY, assert_from_scratch
from tests.fake_kernel import FakeKernel, HeldVirtualServer
from tests.memory_node import AUDIT_INTERVAL_S, MemoryNode
from tests.virtual_time import in_virtual_time, loop

OTHER = builders.service("other", cluster=("10.96.0.20",))
OTHER_KEY = builders.frontend("10.96.0.20", 80)
BACKEND = builders.backend("10.244.0.5")


def remove_virtual_server(kernel: FakeKernel) -> None:
    del kernel.virtual_servers[WEB_KEY]


def change_settings(kernel: FakeKernel) -> None:
    held = kernel.virtual_servers[WEB_KEY]
    held.settings = held.settings._replace(scheduler="lc")


def change_weight(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers[BACKEND] = 7


def remove_real_server(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers.clear()


def add_real_server(kernel: FakeKernel) -> None:
    kernel.virtual_servers[WEB_KEY].real_servers[builders.backend("10.244.0.6")] = 1


def flush_set(kernel: FakeKernel) -> None:
    kernel.sets["KUBE-CLUSTER-IP"].entries.clear()


def add_entry(kernel: FakeKernel) -> None:
    held = kernel.sets["KUBE-6-CLUSTER-IP"]
    held.entries.add(SetEntry("KUBE-6-CLUSTER-IP", parse_address("fd00::1"), WEB_KEY.protocol, 80))


def destroy_set(kernel: FakeKernel) -> None:
    del kernel.sets["KUBE-LOAD-BALANCER"]


def flush_rules(kernel: FakeKernel) -> None:
    kernel.chains[Family.IPV4].clear()
    kernel.jumps[Family.IPV4].clear()


def change_a_rule(kernel: FakeKernel) -> None:
    key = next(iter(kernel.chains[Family.IPV6]))
    kernel.chains[Family.IPV6][key] = ("-j ACCEPT",)


def remove_address(kernel: FakeKernel) -> None:
    kernel.addresses.discard(WEB_KEY.address)


def add_address(kernel: FakeKernel) -> None:
    kernel.addresses.update(builders.addresses("192.0.2.99"))


def remove_device(kernel: FakeKernel) -> None:
    kernel.device = False
    kernel.addresses.clear()


def change_sysctl(kernel: FakeKernel) -> None:
    kernel.sysctls["net/ipv4/ip_forward"] = "0"


DRIFTS: Collection[Callable[[FakeKernel], None]] = (
    remove_virtual_server,
    change_settings,
    change_weight,
    remove_real_server,
    flush_set,
    add_entry,
    destroy_set,
    flush_rules,
    change_a_rule,
    remove_address,
    add_address,
    remove_device,
    change_sysctl,
)


@pytest.mark.parametrize("spoil", [*DRIFTS, add_real_server])
@in_virtual_time
async def test_drift_is_found_by_the_next_look_and_repaired(spoil: Callable[[FakeKernel], None]) -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(AUDIT_INTERVAL_S / 2)
        spoil(node.kernel)
        node.kernel.forget()
        await node.quiet(reading.LOOK_INTERVAL_S)
        assert node.done
        assert_from_scratch(node)


@in_virtual_time
async def test_scheduler_flags_are_found_by_the_next_audit() -> None:
    node = MemoryNode(settings=view.Settings(scheduler="mh"))
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(AUDIT_INTERVAL_S / 2)
        held = node.kernel.virtual_servers[WEB_KEY]
        held.settings = held.settings._replace(flags=0)
        node.kernel.forget()
        await node.quiet(AUDIT_INTERVAL_S / 2 - 1)
        assert node.done == [], "a look does not show them"
        await node.quiet(1)
        assert_from_scratch(node)


@in_virtual_time
async def test_looks_that_find_nothing_are_no_syncs() -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(1)
        before = len(node.watcher.summaries)
        await node.quiet(AUDIT_INTERVAL_S - 2)
        assert node.kernel.looks == 9
        assert len(node.watcher.summaries) == before


@in_virtual_time
async def test_looks_that_take_long_come_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    begun = noting_readings(node, monkeypatch, look_s=30)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(2000)
    assert intervals(begun, thorough=False) == [30 / reading.LOOK_SHARE] * 3


@pytest.mark.parametrize(("audit_s", "interval_s"), [(1, 30), (2.9, 30), (27, 270)])
@in_virtual_time
async def test_audits_that_take_long_come_more_seldom_than_asked_for_and_looks_as_often_as_their_own_share_allows(
    audit_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = MemoryNode(audit_interval_s=30)
    begun = noting_readings(node, monkeypatch, audit_s=audit_s, look_s=0.5)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(1000)
    of_audits = intervals(begun, thorough=True)
    assert len(of_audits) >= 3
    assert set(of_audits) == {interval_s}
    of_looks = intervals(begun, thorough=False)
    assert min(of_looks) >= 10
    assert statistics.median(of_looks) == 10


@in_virtual_time
async def test_one_look_that_takes_longer_than_audits_allow_for_does_not_keep_the_others_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=30)
    begun = noting_readings(node, monkeypatch, look_s=0.1)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(1)
        with monkeypatch.context() as once:
            noting_readings(node, once, look_s=30 * reading.LOOK_SHARE + 1)
            await node.quiet(5)
        begun.clear()
        await node.quiet(300)
    assert intervals(begun, thorough=False).count(3) > 50


def noting_readings(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch, *, look_s: float = 0, audit_s: float = 0
) -> list[tuple[float, bool]]:
    """Have looks and audits take so long; returns when each one began, and whether it is an audit."""
    begun: list[tuple[float, bool]] = []
    look = node.kernel.look

    def look_slowly(*arguments: Any, thorough: bool) -> Iterator[Observation]:
        begun.append((loop().time(), thorough))
        loop().pass_time(audit_s if thorough else look_s)
        yield from look(*arguments, thorough=thorough)

    monkeypatch.setattr(node.kernel, "look", look_slowly)
    return begun


def intervals(begun: Iterable[tuple[float, bool]], *, thorough: bool) -> list[int]:
    """Between the audits, or the looks, in whole seconds."""
    times_s = [at_s for at_s, is_audit in begun if is_audit is thorough]
    return [round(later - earlier) for earlier, later in itertools.pairwise(times_s)]


def slowly(node: MemoryNode, parts: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have each look take a second, in so many parts; returns the times at which it comes to its end."""
    ends_s: list[float] = []

    def look_slowly(*_: Any, **__: Any) -> Iterator[Observation]:
        for _part in range(parts):
            loop().pass_time(1 / parts)
            yield Observation()
        ends_s.append(loop().time())

    monkeypatch.setattr(node.kernel, "look", look_slowly)
    return ends_s


@pytest.mark.parametrize("audit_interval_s", [reading.LOOK_INTERVAL_S, 10_000], ids=["audit", "look"])
@in_virtual_time
async def test_a_change_waits_for_one_part_of_a_reading_and_not_for_all(
    audit_interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = MemoryNode(audit_interval_s=audit_interval_s)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        ends_s = slowly(node, 100, monkeypatch)
        began_s = loop().time()
        loop().call_at(began_s + reading.LOOK_INTERVAL_S + 0.105, node.put, OTHER)
        await node.watcher.until(lambda: OTHER_KEY in node.kernel.virtual_servers)
        assert loop().time() - began_s == pytest.approx(reading.LOOK_INTERVAL_S + 0.11, abs=0.02)
        assert not ends_s
        await node.quiet(1)
        assert len(ends_s) == 1, "it goes on afterwards"


@in_virtual_time
async def test_a_look_comes_to_its_end_though_changes_never_do(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode(audit_interval_s=10_000)

    def takes_time(_: Operation) -> bool:
        loop().pass_time(0.001)
        return False

    node.kernel.fail(takes_time, times=10**6)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        ends_s = slowly(node, 100, monkeypatch)
        began_s = loop().time()
        number = 0
        while loop().time() < began_s + 20:
            number += 1
            node.put(builders.endpoint_slice(builders.endpoint(f"10.244.{number // 200}.{number % 200 + 1}")))
            await asyncio.sleep(0.001)
        assert ends_s
        assert len(node.watcher.syncing_s) > 100


@in_virtual_time
async def test_what_is_told_while_a_look_is_under_way_has_it_look_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        ends_s = slowly(node, 10, monkeypatch)
        began_s = loop().time()
        node.engine.kernel_changed()
        loop().call_at(began_s + 0.5, node.engine.kernel_changed)
        await node.quiet(6)
        assert [round(end_s - began_s) for end_s in ends_s] == [1, 5], "after a pause"


@pytest.mark.parametrize("min_interval_s", [0, 10])
@in_virtual_time
async def test_what_was_found_by_several_parts_is_healed_in_one_sync(min_interval_s: float) -> None:
    node = MemoryNode(min_interval_s=min_interval_s, audit_interval_s=10_000)
    services = [builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)) for number in range(50)]
    async with node.running():
        node.begin_with(*services, builders.node())
        await node.quiet(60)
        node.kernel.virtual_servers.clear()
        before = len(node.watcher.summaries)
        await node.quiet(2 * reading.LOOK_INTERVAL_S)
        assert len(node.kernel.virtual_servers) == 50
        assert len(node.watcher.summaries) == before + 1


STRAY_PORT = SetEntry("KUBE-NODE-PORT-TCP", port=30080)


def add_stray_on_our_device(kernel: FakeKernel) -> None:
    key = builders.frontend("10.96.0.77", 80)
    kernel.addresses.add(key.address)
    kernel.virtual_servers[key] = HeldVirtualServer(VirtualServerSettings("rr"), {BACKEND: 1})


def add_stray_node_port(kernel: FakeKernel) -> None:
    kernel.sets[STRAY_PORT.set].entries.add(STRAY_PORT)
    kernel.virtual_servers[builders.frontend(builders.NODE_ADDRESS, 30080)] = HeldVirtualServer(
        VirtualServerSettings("rr"), {BACKEND: 1}
    )


@pytest.mark.parametrize("is_told", [False, True], ids=["found", "told"])
@pytest.mark.parametrize("spoil", [add_stray_on_our_device, add_stray_node_port])
@in_virtual_time
async def test_a_virtual_server_goes_with_its_witness_whichever_part_finds_it(
    spoil: Callable[[FakeKernel], None], *, is_told: bool
) -> None:
    """As another kube-proxy leaves it: with an address on our device, or an entry in our set, by which it is ours."""
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(10)
        spoil(node.kernel)
        if is_told:
            node.engine.kernel_changed()
        await node.quiet(2 * reading.LOOK_INTERVAL_S)
        assert_from_scratch(node)


@in_virtual_time
async def test_a_witness_stays_while_the_reading_that_found_it_is_under_way_whatever_the_api_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    look = node.kernel.look

    def look_slowly(*arguments: Any, thorough: bool) -> Iterator[Observation]:
        for part in look(*arguments, thorough=thorough):
            yield part
            loop().pass_time(0.5)

    monkeypatch.setattr(node.kernel, "look", look_slowly)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(10)
        add_stray_node_port(node.kernel)
        node.engine.kernel_changed()
        loop().call_later(0.2, node.put, OTHER)
        await node.watcher.until(lambda: OTHER_KEY in node.kernel.virtual_servers)
        assert STRAY_PORT in node.kernel.sets[STRAY_PORT.set].entries
        await node.quiet(30)
        assert_from_scratch(node)


@in_virtual_time
async def test_a_witness_stays_as_long_as_virtual_servers_can_not_be_read() -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(10)
        node.kernel.unreadable = {"virtual_servers"}
        add_stray_node_port(node.kernel)
        await node.quiet(20)
        assert STRAY_PORT in node.kernel.sets[STRAY_PORT.set].entries
        node.kernel.unreadable = set()
        await node.quiet(100)
        assert_from_scratch(node)


@in_virtual_time
async def test_a_virtual_server_of_others_is_ours_when_a_witness_of_it_appears() -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(10)
        add_stray_node_port(node.kernel)
        node.kernel.sets[STRAY_PORT.set].entries.clear()
        await node.quiet(10)
        assert len(node.kernel.virtual_servers) == 2, "somebody else's"
        node.kernel.sets[STRAY_PORT.set].entries.add(STRAY_PORT)
        await node.quiet(10)
        assert_from_scratch(node)


@pytest.mark.parametrize("spoil", DRIFTS)
@in_virtual_time
async def test_drift_that_is_told_is_repaired_at_once(spoil: Callable[[FakeKernel], None]) -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(AUDIT_INTERVAL_S / 2)
        spoil(node.kernel)
        node.engine.kernel_changed()
        await node.quiet()
        assert_from_scratch(node)


@in_virtual_time
async def test_what_changes_while_the_kernel_is_read_has_it_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode()
    observe = node.kernel.observe
    interruptions = iter([remove_address])

    def observe_and_change(*arguments: Any) -> Observation:
        seen = observe(*arguments)
        for change in interruptions:
            change(node.kernel)
            node.engine.kernel_changed()
        return seen

    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        monkeypatch.setattr(node.kernel, "observe", observe_and_change)
        node.engine.kernel_changed()
        await node.quiet()
        assert next(interruptions, None) is None
        assert_from_scratch(node)


@pytest.mark.parametrize("part", PARTS)
@in_virtual_time
async def test_a_failed_reading_deletes_nothing_and_is_repeated_with_patience(part: str) -> None:
    node = MemoryNode(min_interval_s=0)
    async with node.running():
        node.begin_with(WEB, SLICE, KUBERNETES, builders.node())
        await node.quiet()
        node.kernel.forget()
        node.kernel.unreadable = {part}
        began_s = loop().time()
        with structlog.testing.capture_logs() as logs:
            await node.quiet(AUDIT_INTERVAL_S + 29)
        assert node.done == []
        failures = [line["error"] for line in logs if line["log_level"] == "error"]
        assert failures == [f"{part} cannot be read"] * 6, "after 3, 4, 6, 10, 18 and 34 s"
        assert len([at for at in node.watcher.syncing_s if at > began_s]) == 5, "the first of them was but a look"
        node.put(OTHER)
        await node.quiet()
        assert OTHER_KEY in node.kernel.virtual_servers, "what is wanted anew is programmed all the same"
        for spoil in (remove_virtual_server, flush_set, flush_rules, remove_device, change_sysctl):
            spoil(node.kernel)
        node.kernel.unreadable = set()
        await node.quiet(AUDIT_INTERVAL_S)
        assert_from_scratch(node)


@in_virtual_time
async def test_while_a_part_can_not_be_read_drift_in_the_others_is_healed_within_seconds() -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        node.kernel.unreadable = {"skeletons"}
        await node.quiet(500)
        remove_virtual_server(node.kernel)
        with structlog.testing.capture_logs() as logs:
            await node.quiet(reading.LOOK_INTERVAL_AFTER_FAILURE_S)
        assert WEB_KEY in node.kernel.virtual_servers
        assert len([line for line in logs if line["event"] == "kernel could not be read"]) <= 1, "looks do not repeat it"


@in_virtual_time
async def test_patience_begins_anew_once_the_kernel_could_be_read() -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, builders.node())
        await node.quiet()
        for _ in range(2):
            node.kernel.unreadable = {"sets"}
            node.engine.kernel_changed()
            with structlog.testing.capture_logs() as logs:
                await node.quiet(8)
            assert len([line for line in logs if line["event"] == "kernel could not be read"]) == 4, "after 0, 1, 3 and 7 s"
            node.kernel.unreadable = set()
            await node.quiet(60)


@in_virtual_time
async def test_addresses_that_cannot_be_read_are_read_again_soon() -> None:
    node = MemoryNode()
    async with node.running():
        service = builders.service("web", builders.service_port(node_port=30080))
        node.begin_with(service, SLICE, builders.node())
        await node.quiet()
        node.kernel.forget()
        node.kernel.host_addresses.append(builders.interface_address("eth1", "172.16.0.9"))
        node.kernel.unreadable = {"interface_addresses"}
        node.engine.interfaces_changed()
        with structlog.testing.capture_logs() as logs:
            await node.quiet()
        assert [line["event"] for line in logs] == ["addresses could not be read"]
        assert node.done == []
        node.kernel.unreadable = set()
        await node.quiet(1)
        assert builders.frontend("172.16.0.9", 30080) in node.kernel.virtual_servers
        assert_from_scratch(node)


def adds_web(operation: Operation) -> bool:
    return isinstance(operation.item, VirtualServer) and operation.item.key == WEB_KEY


@in_virtual_time
async def test_a_failing_operation_is_tried_again_with_growing_patience_while_others_go_on() -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(builders.node())
        await node.quiet()
        began_s = loop().time()
        tries_s: list[float] = []

        def is_web(operation: Operation) -> bool:
            if adds_web(operation):
                tries_s.append(round(loop().time() - began_s))
            return adds_web(operation)

        node.kernel.fail(is_web, errno.ENOMEM, times=5)
        with structlog.testing.capture_logs() as logs:
            node.put(WEB, SLICE, OTHER)
            await node.quiet()
            assert WEB_KEY not in node.kernel.virtual_servers
            assert OTHER_KEY in node.kernel.virtual_servers, "one that fails does not hold up others"
            assert node.watcher.summaries[-1].report.pending
            await node.quiet(40)
        assert_from_scratch(node)
    assert tries_s == [0, 1, 3, 7, 15]
    failed = [line for line in logs if line["event"] == "operation failed" and "virtual_server" in line["operation"]]
    assert [(line["operation"], line["errno"]) for line in failed] == [
        ("add virtual_server TCP 10.96.0.10:80", errno.ENOMEM),
    ] * 5


@in_virtual_time
async def test_a_service_that_changes_does_not_wait_for_its_failed_operation() -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(builders.node())
        await node.quiet()
        node.kernel.fail(lambda operation: isinstance(operation.item, RealServer), times=4)
        node.put(WEB, SLICE)
        await node.quiet(10)
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.7")))
        await node.quiet()
        assert list(node.kernel.virtual_servers[WEB_KEY].real_servers) == [builders.backend("10.244.0.7")]
        assert_from_scratch(node)


@in_virtual_time
async def test_many_failures_of_one_sync_are_not_all_logged() -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(builders.node())
        await node.quiet()
        node.kernel.fail(lambda operation: isinstance(operation.item, VirtualServer), times=20)
        with structlog.testing.capture_logs() as logs:
            node.put(*(builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)) for number in range(20)))
            await node.quiet()
    assert len([line for line in logs if line["event"] == "operation failed"]) == engine.ERRORS_SHOWN
    assert [line["failed"] for line in logs if line["event"] == "synced"] == [20]


@in_virtual_time
async def test_after_a_surprise_the_kernel_is_read_again_soon() -> None:
    node = MemoryNode(audit_interval_s=10_000)
    async with node.running():
        node.begin_with(WEB, SLICE, OTHER, builders.node())
        await node.quiet(60)
        node.kernel.virtual_servers.clear()
        node.remove(OTHER)
        await node.quiet()
        assert WEB_KEY not in node.kernel.virtual_servers
        await node.quiet(reading.FIRST_RESYNC_DELAY_S)
        assert_from_scratch(node)


@in_virtual_time
async def test_what_somebody_undoes_again_and_again_is_healed_ever_more_seldom_until_the_wish_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    heals_s: list[float] = []
    observe = node.kernel.observe

    def observe_without_web(*arguments: Any) -> Observation:
        node.kernel.virtual_servers.pop(WEB_KEY, None)
        seen = observe(*arguments)
        assert isinstance(seen.virtual_servers, dict)
        return seen

    def is_heal(operation: Operation) -> bool:
        if adds_web(operation):
            heals_s.append(loop().time())
        return False

    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet()
        node.kernel.fail(is_heal, times=1)
        monkeypatch.setattr(node.kernel, "observe", observe_without_web)
        node.engine.kernel_changed()
        with structlog.testing.capture_logs() as logs:
            await node.quiet(1800)
        fights = [line for line in logs if line["event"] == "fought over, healed ever more seldom"]
        assert fights[0] == {
            "event": fights[0]["event"],
            "log_level": "warning",
            "kind": "virtual_server",
            "name": "TCP 10.96.0.10:80",
            "times": drift.FREE_HEALS + 1,
        }
        monkeypatch.undo()
        assert WEB_KEY not in node.kernel.virtual_servers
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.7")))
        await node.quiet()
        assert_from_scratch(node)
    delays = [later - earlier for earlier, later in itertools.pairwise(heals_s)]
    assert delays[:2] == pytest.approx([3, 3], abs=0.1), "the first ones are healed as soon as they are seen"
    assert delays[2:7] == pytest.approx([8, 12, 12, 12, 12], abs=3)
    assert max(delays) <= drift.LONGEST_PATIENCE_S + 2 * reading.LOOK_INTERVAL_S


@in_virtual_time
async def test_stopping_leaves_the_kernel_as_it_is_even_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(100)
        node.kernel.forget()
        held = memory_node.contents(node.kernel)
        node.remove(WEB)
    assert node.done == []
    assert memory_node.contents(node.kernel) == held
