"""The loop when somebody else has changed what is ours: it is found, and healed."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog.testing

from ipvsproxy.daemon.loop import reader
from ipvsproxy.model.plan import Operation
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile import drift
from ipvsproxy.translate import view
from tests.daemon.loop.test_engine import SLICE, WEB, WEB_KEY, assert_from_scratch
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.memory_node import AUDIT_INTERVAL_S, MemoryNode
from tests.support.spoiling import (
    DRIFTS,
    OTHER,
    OTHER_KEY,
    STRAY_PORT,
    add_real_server,
    add_stray_node_port,
    add_stray_on_our_device,
    adds_web,
)
from tests.support.virtual_time import in_virtual_time, loop


@pytest.mark.parametrize("spoil", [*DRIFTS, add_real_server])
@in_virtual_time
async def test_drift_is_found_by_the_next_look_and_repaired(spoil: Callable[[FakeKernel], None]) -> None:
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, SLICE, builders.node())
        await node.quiet(AUDIT_INTERVAL_S / 2)
        spoil(node.kernel)
        node.kernel.forget()
        await node.quiet(reader.POLL_INTERVAL_S)
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
        await node.quiet(2 * reader.POLL_INTERVAL_S)
        assert_from_scratch(node)


@in_virtual_time
async def test_a_witness_stays_while_the_reading_that_found_it_is_under_way_whatever_the_api_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = MemoryNode(audit_interval_s=10_000)
    look = node.kernel.poll

    def look_slowly(*arguments: Any, thorough: bool) -> Iterator[Observation]:
        for part in look(*arguments, thorough=thorough):
            yield part
            loop().pass_time(0.5)

    monkeypatch.setattr(node.kernel, "poll", look_slowly)
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
        fights = [line for line in logs if line["event"] == "drift_returns"]
        assert fights[0] == {
            "event": fights[0]["event"],
            "log_level": "warning",
            "kind": "virtual_server",
            "name": "TCP 10.96.0.10:80",
            "times": drift.FREE_HEALS + 1,
            "hint": fights[0]["hint"],
        }
        monkeypatch.undo()
        assert WEB_KEY not in node.kernel.virtual_servers
        node.put(builders.endpoint_slice(builders.endpoint("10.244.0.7")))
        await node.quiet()
        assert_from_scratch(node)
    delays = [later - earlier for earlier, later in itertools.pairwise(heals_s)]
    assert delays[:2] == pytest.approx([3, 3], abs=0.1), "the first ones are healed as soon as they are seen"
    assert delays[2:7] == pytest.approx([8, 12, 12, 12, 12], abs=3)
    assert max(delays) <= drift.LONGEST_PATIENCE_S + 2 * reader.POLL_INTERVAL_S


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
