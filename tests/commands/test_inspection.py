"""The inspecting commands behave like ``run`` if the kernel lacks the scheduler, or if the first list of objects is empty."""

from collections.abc import Callable, Sequence
from typing import cast

import pytest
import structlog.testing

from ipvsproxy.commands import dry_run, inspection, plan
from ipvsproxy.commands.inspection import Comparison, Inspected, UnknownStateError
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.daemon.sources.directory import DirectorySource
from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.service import Event, ObjectKind
from ipvsproxy.store.guard import CONFIRMED_AFTER_S
from tests.config import loading
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.inspected_node import WEB, synced_kernel
from tests.support.summaries import Clock


async def inspected(kernel: FakeKernel, *flags: str) -> Inspected:
    config = loading.from_flags(f"--hostname-override={builders.THIS_NODE}", *flags)
    as_real: NodeKernel = cast("NodeKernel", kernel)  # the code calls only methods that the in-memory kernel has
    return await inspection.inspect(config, KernelThread(memory_node.InlineExecutor(), as_real), EmptySource())


@pytest.mark.parametrize(
    ("state", "used"),
    [(state, "rr" if state is ModuleState.MISSING else "wlc") for state in ModuleState],
)
async def test_commands_that_inspect_a_node_use_the_scheduler_rr_if_the_kernel_lacks_the_configured_one(
    monkeypatch: pytest.MonkeyPatch, state: ModuleState, used: str
) -> None:
    asked: list[str] = []

    def module_state(name: str) -> ModuleState:
        asked.append(name)
        return state

    monkeypatch.setattr(modules, "module_state", module_state)
    with structlog.testing.capture_logs() as logs:
        node = await inspected(FakeKernel(), "--ipvs-scheduler=wlc")
    assert node.choices.translation.scheduler == used
    assert asked == ["ip_vs_wlc"]
    assert [(line["event"], line["used"]) for line in logs] == ([("scheduler_not_found", "rr")] if used == "rr" else [])


class EmptySource(DirectorySource):
    """An API server that has just started and has no objects yet."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.asked_again: dict[ObjectKind, float] = {}

    async def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        deliver([memory_node.listed(kind, ()) for kind in ObjectKind])

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        self.asked_again[kind] = at_s


async def test_no_command_relies_on_an_empty_first_list_before_a_second_list_confirms_it() -> None:
    kernel = await synced_kernel(*WEB)
    node, source = await inspected(kernel), EmptySource()
    async with inspection.following(source, node.store):
        assert source.asked_again.keys() == {ObjectKind.SERVICE, ObjectKind.ENDPOINT_SLICE}
        assert min(source.asked_again.values()) > CONFIRMED_AFTER_S
        with pytest.raises(UnknownStateError, match="is empty; it does not count"):
            await Comparison(node).read()
        operations, _ = await plan.plan(node)
    assert [one for one in operations if one.verb is Verb.REMOVE] == []


async def test_an_empty_manifest_directory_is_accepted_without_a_second_read() -> None:
    node = await inspected(FakeKernel(), "--manifests=/nowhere")
    async with inspection.following(EmptySource(), node.store):
        assert not node.store.may_lack_all


async def test_a_dry_run_compares_nothing_until_an_empty_first_list_is_confirmed() -> None:
    node, clock = await inspected(await synced_kernel(*WEB)), Clock()
    status = Status(families=tuple(Family), sync_period_s=30, clock=clock, wall_clock=clock)
    async with inspection.following(EmptySource(), node.store):
        with structlog.testing.capture_logs() as logs:
            await dry_run.DryRun(node, status, Metrics()).compare()
    assert [line["event"] for line in logs] == ["first_list_not_believed"]
    assert status.updated_s is None
