"""Covers when the loop reads which parts of the kernel, and how it handles changes that arrive during a read."""

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
from tests.support.spoiling import OTHER, OTHER_KEY, change_weight, remove_address
from tests.support.virtual_time import loop


async def test_a_poll_that_finds_no_drift_does_not_count_as_a_sync() -> None:
    async with MemoryNode().serving(WEB, SLICE, after_s=1) as node:
        before = len(node.watcher.summaries)
        await node.quiet(AUDIT_INTERVAL_S - 2)
        assert node.kernel.polls == 9
        assert len(node.watcher.summaries) == before


async def test_polls_happen_less_often_if_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    begun = noting_readings(node, monkeypatch, poll_s=30)
    async with node.serving(WEB, SLICE, after_s=2000):
        pass
    assert intervals(begun, thorough=False) == [30 / reader.POLL_SHARE] * 3


@pytest.mark.parametrize(("audit_s", "interval_s"), [(1, 30), (2.9, 30), (27, 270)])
async def test_slow_audits_run_less_often_but_do_not_change_the_interval_of_polls(
    audit_s: float, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = MemoryNode(audit_interval_s=30)
    begun = noting_readings(node, monkeypatch, audit_s=audit_s, poll_s=0.5)
    async with node.serving(WEB, SLICE, after_s=1000):
        pass
    of_audits = intervals(begun, thorough=True)
    assert len(of_audits) >= 3
    assert set(of_audits) == {interval_s}
    of_polls = intervals(begun, thorough=False)
    assert min(of_polls) >= 10
    assert statistics.median(of_polls) == 10


async def test_one_very_slow_poll_does_not_prevent_later_polls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=30)
    begun = noting_readings(node, monkeypatch, poll_s=0.1)
    async with node.serving(WEB, SLICE, after_s=1):
        with monkeypatch.context() as once:
            noting_readings(node, once, poll_s=30 * reader.POLL_SHARE + 1)
            await node.quiet(5)
        begun.clear()
        await node.quiet(300)
    assert intervals(begun, thorough=False).count(3) > 50


def noting_readings(
    node: MemoryNode, monkeypatch: pytest.MonkeyPatch, *, poll_s: float = 0, audit_s: float = 0
) -> list[tuple[float, bool]]:
    """Make each full poll last ``poll_s`` seconds, and make each audit last ``audit_s`` seconds.

    Returns a list to which each full poll and each audit adds its start time, and whether it is an audit.
    """
    begun: list[tuple[float, bool]] = []
    poll = node.kernel.poll

    def poll_slowly(*arguments: Any, thorough: bool, whole: bool) -> Iterator[Observation]:
        if whole:
            begun.append((loop().time(), thorough))
            loop().pass_time(audit_s if thorough else poll_s)
        yield from poll(*arguments, thorough=thorough, whole=whole)

    monkeypatch.setattr(node.kernel, "poll", poll_slowly)
    return begun


def intervals(begun: Iterable[tuple[float, bool]], *, thorough: bool) -> list[int]:
    """The seconds between consecutive audits if ``thorough`` is true, otherwise between consecutive polls; rounded."""
    times_s = [at_s for at_s, is_audit in begun if is_audit is thorough]
    return [round(later - earlier) for earlier, later in itertools.pairwise(times_s)]


def slowly(node: MemoryNode, parts: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make each poll take one second, and divide the poll into this number of parts.

    Returns a list to which each poll adds the time of its end.
    """
    ends_s: list[float] = []

    def poll_slowly(*_: Any, **__: Any) -> Iterator[Observation]:
        for _part in range(parts):
            loop().pass_time(1 / parts)
            yield Observation()
        ends_s.append(loop().time())

    monkeypatch.setattr(node.kernel, "poll", poll_slowly)
    return ends_s


@pytest.mark.parametrize("audit_interval_s", [reader.POLL_INTERVAL_S, 10_000], ids=["audit", "poll"])
async def test_a_change_waits_for_only_one_part_of_a_poll(audit_interval_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryNode(audit_interval_s=audit_interval_s).serving(WEB, SLICE) as node:
        ends_s = slowly(node, 100, monkeypatch)
        began_s = loop().time()
        loop().call_at(began_s + reader.POLL_INTERVAL_S + 0.105, node.put, OTHER)
        await node.watcher.until(lambda: OTHER_KEY in node.kernel.virtual_servers)
        assert loop().time() - began_s == pytest.approx(reader.POLL_INTERVAL_S + 0.11, abs=0.02)
        assert not ends_s
        await node.quiet(1)
        assert len(ends_s) == 1, "the reading continues afterwards"


async def test_a_poll_is_completed_although_changes_arrive_endlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode(audit_interval_s=10_000)

    def takes_time(_: Operation) -> bool:
        loop().pass_time(0.001)
        return False

    node.kernel.fail(takes_time, times=10**6)
    async with node.serving(WEB, SLICE):
        ends_s = slowly(node, 100, monkeypatch)
        began_s = loop().time()
        number = 0
        while loop().time() < began_s + 20:
            number += 1
            node.put(builders.endpoint_slice(builders.endpoint(f"10.244.{number // 200}.{number % 200 + 1}")))
            await asyncio.sleep(0.001)
        assert ends_s
        assert len(node.watcher.syncing_s) > 100


async def test_a_notification_during_a_poll_causes_another_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE) as node:
        ends_s = slowly(node, 10, monkeypatch)
        began_s = loop().time()
        node.engine.kernel_changed()
        loop().call_at(began_s + 0.5, node.engine.kernel_changed)
        await node.quiet(6)
        assert [round(end_s - began_s) for end_s in ends_s] == [1, 5], "after a pause"


@pytest.mark.parametrize("min_interval_s", [0, 10])
async def test_drift_that_several_parts_of_a_poll_find_is_repaired_in_one_sync(min_interval_s: float) -> None:
    services = [builders.service(f"web-{number}", cluster=(f"10.96.1.{number}",)) for number in range(50)]
    async with MemoryNode(min_interval_s=min_interval_s, audit_interval_s=10_000).serving(*services, after_s=60) as node:
        node.kernel.virtual_servers.clear()
        before = len(node.watcher.summaries)
        await node.quiet(2 * reader.POLL_INTERVAL_S)
        assert len(node.kernel.virtual_servers) == 50
        assert len(node.watcher.summaries) == before + 1


async def test_the_kernel_is_read_again_if_another_program_changes_it_during_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    node = MemoryNode()
    observe = node.kernel.observe
    interruptions = iter([remove_address])

    def observe_and_change(*arguments: Any) -> Observation:
        observation = observe(*arguments)
        for change in interruptions:
            change(node.kernel)
            node.engine.kernel_changed()
        return observation

    async with node.serving(WEB, SLICE):
        monkeypatch.setattr(node.kernel, "observe", observe_and_change)
        node.engine.kernel_changed()
        await node.quiet()
        assert next(interruptions, None) is None
        assert_from_scratch(node)


@pytest.mark.parametrize(("interval_s", "polls", "whole_polls"), [(60, 200, 10), (1, 600, 600)], ids=["long", "short"])
async def test_only_one_poll_per_drift_check_interval_reads_more_than_the_cheap_parts(
    interval_s: float, polls: int, whole_polls: int
) -> None:
    async with MemoryNode(audit_interval_s=10_000, drift_check_interval_s=interval_s).serving(WEB, SLICE, after_s=1) as node:
        before = node.kernel.polls, node.kernel.whole_polls
        await node.quiet(600)
        assert node.kernel.polls - before[0] == pytest.approx(polls, abs=12)
        assert node.kernel.whole_polls - before[1] == pytest.approx(whole_polls, rel=0.02)


async def test_drift_that_cheap_polls_do_not_see_is_repaired_within_the_drift_check_interval() -> None:
    async with MemoryNode(audit_interval_s=10_000, drift_check_interval_s=20).serving(WEB, SLICE, after_s=1) as node:
        change_weight(node.kernel)
        await node.quiet(20.5)
        assert_from_scratch(node)


async def test_the_next_poll_reads_everything_if_a_cheap_poll_has_found_drift() -> None:
    async with MemoryNode(audit_interval_s=10_000, drift_check_interval_s=1000).serving(WEB, SLICE, after_s=10) as node:
        before = node.kernel.whole_polls
        remove_address(node.kernel)
        await node.quiet(10)
        assert node.kernel.whole_polls == before + 1
