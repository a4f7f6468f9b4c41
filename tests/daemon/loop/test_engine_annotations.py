"""Covers settings that Services choose by annotations while the loop runs.

The settings are the scheduler and slow start. Also covers a change of the annotations that Services may use.
"""

import dataclasses
from typing import Any

from structlog.typing import EventDict

from ipvsproxy.commands.inspection import Comparison, Inspected
from ipvsproxy.config.settings import Choices
from ipvsproxy.daemon.sources.directory import DirectorySource
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation, ServiceAnnotations
from ipvsproxy.model.service import Service
from ipvsproxy.model.virtual_servers import VirtualServerSettings
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate.translation_settings import Settings
from tests.config import loading
from tests.support import builders, memory_node
from tests.support.memory_node import MemoryNode

KEY = builders.frontend(builders.CLUSTER_IP, 80)
ONE, TWO = (builders.endpoint(f"10.244.0.{number}") for number in (1, 2))
FIELD = "metadata.annotations[ipvsproxy.io/scheduler]"


def web(**values: Any) -> Service:
    return builders.with_options(builders.service(), annotations=ServiceAnnotations(given=ALL_ANNOTATIONS, **values))


def settings(node: MemoryNode) -> VirtualServerSettings:
    return node.kernel.virtual_servers[KEY].settings


async def test_the_kernel_is_queried_once_for_each_scheduler_that_an_annotation_names() -> None:
    async with MemoryNode().serving(builders.service()) as node:
        assert node.kernel.asked_schedulers == []
        for name in ("one", "two"):
            chosen = web(scheduler="wrr").options.annotations
            node.put(builders.with_options(builders.service(name, cluster=["10.96.0.11"]), annotations=chosen))
            await node.quiet()
        assert node.kernel.asked_schedulers == ["wrr"]
        node.kernel.forget()
        node.put(web(scheduler="wrr"))
        await node.quiet()
        assert node.done == ["set virtual_server TCP 10.96.0.10:80"]
        assert settings(node).scheduler == "wrr"


async def test_the_replacement_of_a_scheduler_that_the_kernel_lacks_is_reported_with_its_reason(
    logs: list[EventDict],
) -> None:
    kernel = memory_node.new_kernel()
    kernel.schedulers = frozenset({"rr", "wrr"})
    async with MemoryNode(kernel).serving(web(scheduler="fo")) as node:
        assert settings(node).scheduler == "rr"
    (line,) = (line for line in logs if line["event"] == "part_not_used")
    assert (line["field"], line["reason"]) == (FIELD, "the kernel has no scheduler 'fo'; rr is used")
    complaints = [one for summary in node.watcher.summaries for one in summary.changes.complaints]
    assert [(one.name, one.skipped[0].field) for one in complaints] == [("default/web", FIELD)]


async def test_a_kernel_that_cannot_answer_whether_it_has_a_scheduler_is_queried_again() -> None:
    node = MemoryNode()
    node.kernel.unreadable = {"schedulers"}
    async with node.serving(web(scheduler="wrr")):
        assert settings(node).scheduler == "rr"
        node.kernel.unreadable = set()
        await node.quiet(memory_node.AUDIT_INTERVAL_S + 1)
        assert settings(node).scheduler == "wrr"


async def test_a_change_of_the_annotations_that_services_may_use_is_applied_without_a_restart() -> None:
    async with MemoryNode().serving(web(scheduler="wrr")) as node:
        assert settings(node).scheduler == "wrr"
        allowed = dataclasses.replace(node.settings, annotations=frozenset({Annotation.WEIGHTS}))
        node.kernel.forget()
        node.engine.reconfigure(Choices(node.engine.choices.settings, allowed, Policy()))
        await node.quiet()
        assert settings(node).scheduler == "rr"
        assert node.kernel.counts["remove", "virtual_server"] == 0
        node.engine.reconfigure(Choices(node.engine.choices.settings, node.settings, Policy()))
        await node.quiet()
        assert settings(node).scheduler == "wrr"
        assert node.kernel.asked_schedulers == ["wrr"] * 3, "a module may have come"


async def test_slow_start_raises_the_weight_over_time_and_causes_no_sync_after_the_last_rise() -> None:
    slow = web(scheduler="wlc", slow_start_s=80)
    async with MemoryNode(audit_interval_s=10_000).serving(slow, builders.endpoint_slice(ONE)) as node:
        node.put(builders.endpoint_slice(ONE, TWO))
        await node.quiet()
        node.kernel.forget()
        real_servers, key = node.kernel.virtual_servers[KEY].real_servers, builders.backend("10.244.0.2")
        assert real_servers[key] == 1
        await node.quiet(41)
        assert real_servers[key] == 50
        await node.quiet(40)
        assert real_servers[key] == 100
        assert node.done == ["set real_server TCP 10.96.0.10:80 -> 10.244.0.2:8080"] * 8
        syncs = len(node.watcher.summaries)
        await node.quiet(1000)
        assert len(node.watcher.summaries) == syncs, "nothing is due any more"


async def test_an_inspecting_command_loads_no_module_and_finds_no_difference_during_a_slow_start() -> None:
    slow = web(scheduler="wlc", slow_start_s=80)
    async with MemoryNode().serving(slow, builders.endpoint_slice(ONE)) as node:
        node.put(builders.endpoint_slice(ONE, TWO))
        await node.quiet(41)
        seen = Inspected(
            config=loading.from_flags(),
            store=node.store,
            kernel=KernelThread(memory_node.InlineExecutor(), node.kernel),
            choices=Choices(node.engine.choices.settings, Settings(), Policy()),
            source=DirectorySource("/nowhere"),
        )
        comparison = Comparison(seen, clock=node._now)
        for _ in range(2):
            node.store.touch_all(0)
            await comparison.read()
            assert not [one for one in comparison.differences() if one.kind in {"virtual_server", "real_server"}]
            await node.quiet(15)
        assert comparison.translation.missing_schedulers == {}
