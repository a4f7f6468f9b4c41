"""Covers the start of the loop: the order of its steps, the lists that it waits for, and kernel objects of an earlier process."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from structlog.typing import EventDict

from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ApiObject, ObjectKind
from ipvsproxy.store.guard import CONFIRMED_AFTER_S
from ipvsproxy.translate.translation_settings import Settings
from tests.daemon.loop.test_engine import KUBERNETES, PARTS, SLICE, WEB, WEB_KEY, assert_from_scratch, node_ports
from tests.reconcile import examples
from tests.support import builders, memory_node
from tests.support.memory_node import MemoryNode

OLD = builders.service("old", cluster=("10.96.0.99",))
DNS = builders.service("kube-dns", builders.service_port(53), namespace="kube-system", cluster=("10.96.0.53",))


@pytest.mark.parametrize("order", list(itertools.permutations(ObjectKind)), ids="-".join)
async def test_nothing_is_read_or_programmed_before_all_kinds_of_objects_are_listed(
    order: Sequence[ObjectKind], logs: list[EventDict]
) -> None:
    node = MemoryNode()
    objects: tuple[ApiObject, ...] = (WEB, SLICE, builders.node())
    node.kernel.unreadable = set(PARTS)  # if the loop read the kernel before the lists, it would log errors
    async with node.running():
        node.put(*objects)
        for kind in order[:2]:
            await node.quiet(100)
            node.deliver([memory_node.listed(kind, objects)])
        await node.quiet(100)
        assert node.done == []
        node.kernel.unreadable = set()
        node.deliver([memory_node.listed(order[2], objects)])
        await node.quiet()
        assert_from_scratch(node)
    assert not [line for line in logs if line["log_level"] == "error"]
    waiting = [line["missing"] for line in logs if line["event"] == "waiting_for_first_lists"]
    assert waiting == [[kind.value for kind in ObjectKind if kind not in order[:number]] for number in range(3)]


async def restarted(*objects: ApiObject, **options: Any) -> MemoryNode:
    """A new process that has not started yet, on a node where an earlier process has served these objects."""
    async with MemoryNode().serving(*objects) as before:
        pass
    before.kernel.forget()
    return MemoryNode(before.kernel, **options)


async def test_the_kubernetes_and_dns_services_are_programmed_before_other_services_and_before_removals() -> None:
    node = await restarted(OLD, WEB, SLICE)
    new = builders.service("new", cluster=("10.96.0.98",))
    async with node.serving(new, WEB, SLICE, DNS, KUBERNETES):
        assert_from_scratch(node)
    others = [place for place, line in enumerate(node.done) if "10.96.0.98" in line or line.startswith("remove")]
    firsts = [place for place, line in enumerate(node.done) if "10.96.0.1:" in line or "10.96.0.53" in line]
    assert firsts
    assert others
    assert max(firsts) < min(others)
    assert "remove virtual_server TCP 10.96.0.99:80" in node.done
    assert not [line for line in node.done if builders.CLUSTER_IP in line], "what was in force is not touched"


async def test_the_report_of_the_first_sync_includes_operations_for_the_kubernetes_and_dns_services(
    logs: list[EventDict],
) -> None:
    node = MemoryNode()
    node.kernel.fail(lambda operation: "10.96.0.1:443" in str(operation))
    async with node.serving(KUBERNETES, WEB):
        pass
    report = node.watcher.summaries[0].report
    assert sum(report.done.values()) + sum(report.failed.values()) == len(node.kernel.applied)
    assert sum(report.failed.values()) == 1
    assert [line["error"] for line in logs if line["event"] == "operation_failed"] == [report.errors[0].error]


async def test_all_services_are_programmed_together_if_there_is_no_kubernetes_or_dns_service(logs: list[EventDict]) -> None:
    async with MemoryNode().serving(WEB, SLICE) as node:
        assert node.done.count("set rules IPv4 rules") == 1
        assert_from_scratch(node)
    assert not [line for line in logs if line["event"] == "first_services_programmed"]


@pytest.mark.parametrize("part", PARTS)
async def test_an_unreadable_part_of_the_kernel_delays_only_removals_in_that_part(part: str, logs: list[EventDict]) -> None:
    node = await restarted(OLD, KUBERNETES)
    node.kernel.unreadable = {part}
    async with node.serving(KUBERNETES, WEB, SLICE, after_s=100):
        assert node.kernel.virtual_servers[WEB_KEY].real_servers, "what is desired is programmed"
        if part in {"virtual_servers", "sets", "addresses", "interface_addresses"}:
            assert not [line for line in node.done if line.startswith(("remove set_entry", "remove address"))]
        errors = [line["error"] for line in logs if line["event"] == "kernel_unreadable"]
        assert errors == [f"{part} cannot be read"], "one line, however often it is tried"
        assert node.engine.unreadable == {f"{part} cannot be read"}
        node.kernel.unreadable = set()
        await node.quiet(60)
        assert_from_scratch(node)
        assert not node.engine.unreadable
    assert [line for line in logs if line["event"] == "kernel_readable"]


@pytest.mark.parametrize("unreadable", [{"interface_addresses"}, {"interface_addresses", "addresses", "device"}], ids=len)
async def test_node_ports_stay_while_the_addresses_of_this_host_cannot_be_read(unreadable: set[str]) -> None:
    node = await restarted(node_ports(), SLICE)
    node.kernel.unreadable = unreadable
    rules = memory_node.contents(node.kernel)["chains"]
    async with node.serving(node_ports(), SLICE, after_s=100):
        assert not [line for line in node.done if line.startswith("remove")]
        assert memory_node.contents(node.kernel)["chains"] == rules
        node.kernel.unreadable = set()
        await node.quiet(60)
        assert not [line for line in node.done if line.startswith("remove")]
        assert_from_scratch(node)


async def test_objects_of_a_family_that_is_not_served_are_not_removed() -> None:
    dual = builders.service("dual", cluster=("10.96.0.40", "fd00::40"))
    node = await restarted(dual, WEB, SLICE, settings=Settings(families=frozenset({Family.IPV4})))
    async with node.serving(dual, WEB, SLICE, after_s=100):
        assert not [line for line in node.done if line.startswith("remove")]
        assert node.engine._reconciler.pending == 0
        assert "fd00::40" in {str(key.address) for key in node.kernel.virtual_servers}
        assert "fd00::40" in {str(address) for address in node.kernel.addresses}


async def test_the_process_ends_without_any_change_of_the_kernel_if_the_primary_family_is_not_served() -> None:
    node = MemoryNode(settings=Settings(families=frozenset({Family.IPV6})))
    node.begin_with(WEB, SLICE, builders.node("192.168.0.10", "fd00:10::10"))
    with pytest.raises(CannotStartError, match="IPv4, the family of this node's primary address, cannot be served"):
        await node.engine.run()
    assert node.done == []


async def test_an_empty_first_list_removes_nothing_from_the_kernel_until_another_list_confirms_it(
    logs: list[EventDict],
) -> None:
    node = await restarted(WEB, SLICE, guard_percent=50)
    new = builders.service("new", cluster=("10.96.0.98",))
    async with node.serving(after_s=CONFIRMED_AFTER_S):
        assert node.done == ["set timeouts timeouts 600 0 0"]  # every start writes the timeouts, because writing them is cheap
        assert set(node.watcher.summaries[-1].not_in_force) == set(Family)
        node.put(new)
        await node.quiet()
        assert "add virtual_server TCP 10.96.0.98:80" in node.done
        assert not [line for line in node.done if line.startswith("remove")]
        for kind in (ObjectKind.SERVICE, ObjectKind.ENDPOINT_SLICE):
            node.deliver([memory_node.listed(kind, [new])])
        await node.quiet()
        assert "remove virtual_server TCP 10.96.0.10:80" in node.done
        assert not node.watcher.summaries[-1].not_in_force
        assert_from_scratch(node)
    doubted = sorted(line["kind"] for line in logs if line["event"] == "first_list_not_believed")
    assert doubted == ["EndpointSlice", "Service"]


async def test_nothing_counts_as_missing_or_pending_while_an_empty_first_list_is_unconfirmed() -> None:
    async with MemoryNode(guard_percent=50).serving(KUBERNETES, after_s=CONFIRMED_AFTER_S / 2) as node:
        summary = node.watcher.summaries[-1]
        assert (list(summary.lacking), summary.report.pending) == ([], 0)


async def test_a_virtual_server_of_another_program_stays_if_our_node_ports_do_not_use_its_address() -> None:
    """If node ports use only the primary address, keepalived can have a virtual server on a second address of eth0."""
    kernel = memory_node.new_kernel()
    kernel.host_addresses.append(builders.interface_address("eth0", "172.18.0.77"))
    foreign, served = builders.frontend("172.18.0.77", 30080), builders.frontend(builders.NODE_ADDRESS, 30080)
    kernel.virtual_servers[foreign] = examples.observed({builders.backend("192.0.2.50"): 1})
    for _ in range(2):
        async with MemoryNode(kernel, settings=Settings(node_port_primary=True)).serving(
            builders.service("web", builders.service_port(node_port=30080)), after_s=10
        ):
            assert {foreign, served} <= kernel.virtual_servers.keys()
