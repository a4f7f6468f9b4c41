"""Covers failed operations, operations with an unexpected outcome, and a kernel that cannot be read."""

import errno

import pytest
from structlog.typing import EventDict

from ipvsproxy.daemon.loop import reader
from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS, Sysctl
from ipvsproxy.reconcile import attempts
from tests.daemon.loop.test_engine import KUBERNETES, PARTS, SLICE, WEB, WEB_KEY, assert_from_scratch, node_ports
from tests.support import builders
from tests.support.memory_node import AUDIT_INTERVAL_S, MemoryNode
from tests.support.spoiling import (
    OTHER,
    OTHER_KEY,
    STRAY_PORT,
    add_stray_node_port,
    change_sysctl,
    flush_rules,
    flush_set,
    remove_device,
    remove_virtual_server,
)
from tests.support.virtual_time import loop


async def test_no_entry_is_removed_from_our_sets_while_virtual_servers_cannot_be_read() -> None:
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE, after_s=10) as node:
        node.kernel.unreadable = {"virtual_servers"}
        add_stray_node_port(node.kernel)
        await node.quiet(20)
        assert STRAY_PORT in node.kernel.sets[STRAY_PORT.set].entries
        node.kernel.unreadable = set()
        await node.quiet(100)
        assert_from_scratch(node)


@pytest.mark.parametrize("part", PARTS)
async def test_a_failed_read_of_the_kernel_removes_nothing_and_is_repeated_after_pauses(part: str, logs: list[EventDict]) -> None:
    async with MemoryNode(min_interval_s=0).serving(WEB, SLICE, KUBERNETES) as node:
        node.kernel.forget()
        node.kernel.unreadable = {part}
        began_s = loop().time()
        await node.quiet(AUDIT_INTERVAL_S + 29)
        assert node.done == []
        failures = [line["error"] for line in logs if line["log_level"] == "error"]
        assert failures == [f"{part} cannot be read"], "one line, however often it fails"
        assert node.engine.unreadable == {f"{part} cannot be read"}
        assert node.kernel.audits == 5, "after 4, 6, 10, 18 and 34 s"
        assert len([at for at in node.watcher.syncing_s if at > began_s]) == 5, "the first of them was but a look"
        node.put(OTHER)
        await node.quiet()
        assert OTHER_KEY in node.kernel.virtual_servers, "a newly desired object is still programmed"
        for spoil in (remove_virtual_server, flush_set, flush_rules, remove_device, change_sysctl):
            spoil(node.kernel)
        node.kernel.unreadable = set()
        await node.quiet(AUDIT_INTERVAL_S)
        assert_from_scratch(node)


async def test_drift_is_repaired_within_seconds_even_while_an_unreadable_part_makes_polls_rarer() -> None:
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE) as node:
        node.kernel.unreadable = {"skeletons"}
        await node.quiet(500)
        before = node.kernel.polls
        await node.quiet(60)
        assert node.kernel.polls - before <= 60 / reader.POLL_INTERVAL_AFTER_FAILURE_S
        remove_virtual_server(node.kernel)
        await node.quiet(reader.POLL_INTERVAL_AFTER_FAILURE_S)
        assert WEB_KEY in node.kernel.virtual_servers


async def test_pauses_between_reads_of_the_kernel_are_short_again_after_a_successful_read() -> None:
    async with MemoryNode().serving(WEB) as node:
        for _ in range(2):
            node.kernel.unreadable = {"sets"}
            node.engine.kernel_changed()
            begun = node.kernel.audits
            await node.quiet(8)
            assert node.kernel.audits - begun == 3, "after 1, 3 and 7 s"
            node.kernel.unreadable = set()
            await node.quiet(60)


async def test_unreadable_addresses_of_the_host_are_read_again_soon(logs: list[EventDict]) -> None:
    async with MemoryNode().serving(node_ports(), SLICE) as node:
        node.kernel.forget()
        logs.clear()
        node.kernel.host_addresses.append(builders.interface_address("eth1", "172.16.0.9"))
        node.kernel.unreadable = {"interface_addresses"}
        node.engine.interfaces_changed()
        await node.quiet()
        assert [line["event"] for line in logs] == ["addresses_unreadable"]
        assert node.done == []
        node.kernel.unreadable = set()
        await node.quiet(1)
        assert builders.frontend("172.16.0.9", 30080) in node.kernel.virtual_servers
        assert_from_scratch(node)


async def test_the_kernel_is_read_again_soon_after_an_operation_with_an_unexpected_outcome() -> None:
    async with MemoryNode(audit_interval_s=10_000).serving(WEB, SLICE, OTHER, after_s=60) as node:
        node.kernel.virtual_servers.clear()
        node.remove(OTHER)
        await node.quiet()
        assert WEB_KEY not in node.kernel.virtual_servers
        await node.quiet(attempts.FIRST_DELAY_S)
        assert_from_scratch(node)


async def test_the_summary_names_the_families_for_which_an_indispensable_setting_cannot_be_corrected() -> None:
    async with MemoryNode().serving(WEB, SLICE) as node:
        assert not node.watcher.summaries[-1].lacking
        node.kernel.fail(lambda operation: isinstance(operation.item, Sysctl), times=1000, number=errno.EROFS)
        for path, families in INDISPENSABLE_SETTINGS.items():
            node.kernel.sysctls[path] = "0"
            await node.quiet(AUDIT_INTERVAL_S)
            assert node.watcher.summaries[-1].lacking == families
            assert node.watcher.summaries[-1].unmet_settings == {path: "0"}
            node.kernel.sysctls[path] = "1"  # the operator
            await node.quiet(AUDIT_INTERVAL_S)
            assert not node.watcher.summaries[-1].lacking
            assert not node.watcher.summaries[-1].unmet_settings
