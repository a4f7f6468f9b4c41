"""Covers how drift is observed and repaired."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.typing import EventDict

from ipvsproxy.daemon.loop import reader
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile import observation
from tests.daemon.loop.test_engine import SLICE, WEB, WEB_KEY, assert_from_scratch
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.memory_node import AUDIT_INTERVAL_S, MemoryNode
from tests.support.spoiling import (
    DRIFTS,
    OTHER,
    OTHER_KEY,
    STRAY_PORT,
    add_catch_all,
    add_real_server,
    add_stray_node_port,
    add_stray_on_our_device,
    adds_web,
)
from tests.support.virtual_time import loop


@pytest.mark.parametrize("is_notified", [False, True], ids=["poll", "notification"])
@pytest.mark.parametrize("spoil", [*DRIFTS, add_real_server])
async def test_drift_is_repaired_at_once_after_a_notification_or_by_the_next_poll(
    spoil: Callable[[FakeKernel], None], *, is_notified: bool
) -> None:
    async with MemoryNode().serving(WEB, SLICE, after_s=AUDIT_INTERVAL_S / 2) as node:
        spoil(node.kernel)
        node.kernel.forget()
        if is_notified:
            node.engine.kernel_changed()
        await node.quiet(0 if is_notified else reader.POLL_INTERVAL_S)
        assert node.done
        assert_from_scratch(node)


async def test_a_catch_all_element_that_another_program_adds_to_a_set_is_counted_and_logged_as_drift(
    logs: list[EventDict],
) -> None:
    async with MemoryNode().serving(WEB, SLICE, after_s=AUDIT_INTERVAL_S / 2) as node:
        count = len(node.kernel.sets)
        add_catch_all(node.kernel)
        node.kernel.forget()
        await node.quiet(reader.POLL_INTERVAL_S)
        assert sorted(node.done) == sorted(f"remove set_entry {name} *" for name in node.kernel.sets)
        assert [line["set_entry"] for line in logs if line["event"] == "drift_found"] == [count]
        assert sum(summary.drifted.get("set_entry", 0) for summary in node.watcher.summaries) == count
        assert_from_scratch(node)


@pytest.mark.parametrize("is_notified", [False, True], ids=["poll", "notification"])
@pytest.mark.parametrize("spoil", [add_stray_on_our_device, add_stray_node_port])
async def test_leftovers_of_kube_proxy_are_removed_whichever_part_of_the_kernel_is_read_first(
    spoil: Callable[[FakeKernel], None], *, is_notified: bool
) -> None:
    """Another kube-proxy has left a virtual server, and has left the server's address on our device or an entry in our set."""
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE, after_s=10) as node:
        spoil(node.kernel)
        if is_notified:
            node.engine.kernel_changed()
        await node.quiet(2 * reader.POLL_INTERVAL_S)
        assert_from_scratch(node)


async def test_a_leftover_set_entry_is_removed_only_later_if_a_service_arrives_during_a_kernel_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    poll = node.kernel.poll

    def poll_slowly(*arguments: Any, thorough: bool, whole: bool) -> Iterator[Observation]:
        for part in poll(*arguments, thorough=thorough, whole=whole):
            yield part
            loop().pass_time(0.5)

    monkeypatch.setattr(node.kernel, "poll", poll_slowly)
    async with node.serving(WEB, SLICE, after_s=10):
        add_stray_node_port(node.kernel)
        node.engine.kernel_changed()
        loop().call_later(0.2, node.put, OTHER)
        await node.watcher.until(lambda: OTHER_KEY in node.kernel.virtual_servers)
        assert STRAY_PORT in node.kernel.sets[STRAY_PORT.set].entries
        await node.quiet(30)
        assert_from_scratch(node)


async def test_a_foreign_virtual_server_counts_as_ours_as_soon_as_our_sets_have_an_entry_for_it() -> None:
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE, after_s=10) as node:
        add_stray_node_port(node.kernel)
        node.kernel.sets[STRAY_PORT.set].entries.clear()
        await node.quiet(10)
        assert len(node.kernel.virtual_servers) == 2, "it is foreign"
        node.kernel.sets[STRAY_PORT.set].entries.add(STRAY_PORT)
        await node.quiet(10)
        assert_from_scratch(node)


async def test_a_notification_causes_the_repair_of_a_changed_set_but_no_read_of_virtual_servers() -> None:
    async with MemoryNode(audit_interval_s=10_000, drift_check_interval_s=10_000).serving(WEB, SLICE, after_s=10) as node:
        polls, whole_polls = node.kernel.polls, node.kernel.whole_polls
        node.engine.rules_changed()
        await node.quiet()
        assert (node.kernel.polls, node.kernel.whole_polls) == (polls + 1, whole_polls)
        await node.quiet(10)
        node.kernel.sets["KUBE-CLUSTER-IP"].entries.clear()
        node.engine.rules_changed()
        await node.quiet()
        assert_from_scratch(node)


async def test_recurring_drift_is_repaired_less_and_less_often_until_the_desired_state_changes(
    monkeypatch: pytest.MonkeyPatch, logs: list[EventDict]
) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    repairs_s: list[float] = []
    observe = node.kernel.observe

    def observe_without_web(*arguments: Any) -> Observation:
        node.kernel.virtual_servers.pop(WEB_KEY, None)
        return observe(*arguments)

    def note_repair(operation: Operation) -> bool:
        if adds_web(operation):
            repairs_s.append(loop().time())
        return False

    async with node.serving(WEB, SLICE):
        node.kernel.fail(note_repair, times=1)
        monkeypatch.setattr(node.kernel, "observe", observe_without_web)
        node.engine.kernel_changed()
        await node.quiet(1800)
        first = next(line for line in logs if line["event"] == "drift_returns")
        assert (first["kind"], first["name"], first["times"]) == ("virtual_server", str(WEB_KEY), observation.FREE_HEALS + 1)
        monkeypatch.undo()
        assert WEB_KEY not in node.kernel.virtual_servers
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.7")))
        await node.quiet()
        assert_from_scratch(node)
    delays = [later - earlier for earlier, later in itertools.pairwise(repairs_s)]
    assert delays[:2] == pytest.approx([3, 3], abs=0.1), "the first ones are repaired when they are observed"
    assert delays[2:7] == pytest.approx([8, 12, 12, 12, 12], abs=3)
    assert max(delays) <= observation.LONGEST_PATIENCE_S + 2 * reader.POLL_INTERVAL_S


async def test_stopping_in_the_middle_of_a_sync_leaves_the_kernel_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryNode().serving(WEB, SLICE, after_s=100) as node:
        node.kernel.forget()
        before = memory_node.contents(node.kernel)
        node.remove(WEB)
    assert node.done == []
    assert memory_node.contents(node.kernel) == before
