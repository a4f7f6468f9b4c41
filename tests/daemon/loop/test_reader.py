"""The loop and its readings of the kernel: how often, in which parts, and what goes on meanwhile."""

import asyncio
import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from ipvsproxy.daemon.loop import reader
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.state import Observation
from tests.daemon.loop.test_engine import SLICE, WEB, assert_from_scratch
from tests.support import builders
from tests.support.memory_node import AUDIT_INTERVAL_S, MemoryNode
from tests.support.spoiling import OTHER, OTHER_KEY, remove_address
from tests.support.virtual_time import in_virtual_time, loop


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
    assert intervals(begun, thorough=False) == [30 / reader.POLL_SHARE] * 3


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
            noting_readings(node, once, look_s=30 * reader.POLL_SHARE + 1)
            await node.quiet(5)
        begun.clear()
        await node.quiet(300)
    assert intervals(begun, thorough=False).count(3) > 50


def noting_readings(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch, *, look_s: float = 0, audit_s: float = 0
) -> list[tuple[float, bool]]:
    """Have looks and audits take so long; returns when each one began, and whether it is an audit."""
    begun: list[tuple[float, bool]] = []
    look = node.kernel.poll

    def look_slowly(*arguments: Any, thorough: bool) -> Iterator[Observation]:
        begun.append((loop().time(), thorough))
        loop().pass_time(audit_s if thorough else look_s)
        yield from look(*arguments, thorough=thorough)

    monkeypatch.setattr(node.kernel, "poll", look_slowly)
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

    monkeypatch.setattr(node.kernel, "poll", look_slowly)
    return ends_s


@pytest.mark.parametrize("audit_interval_s", [reader.POLL_INTERVAL_S, 10_000], ids=["audit", "poll"])
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
        loop().call_at(began_s + reader.POLL_INTERVAL_S + 0.105, node.put, OTHER)
        await node.watcher.until(lambda: OTHER_KEY in node.kernel.virtual_servers)
        assert loop().time() - began_s == pytest.approx(reader.POLL_INTERVAL_S + 0.11, abs=0.02)
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
        await node.quiet(2 * reader.POLL_INTERVAL_S)
        assert len(node.kernel.virtual_servers) == 50
        assert len(node.watcher.summaries) == before + 1


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
