"""Covers node ports while addresses of the node are added and removed."""

import contextlib
from collections.abc import AsyncIterator

import pytest
from structlog.typing import EventDict

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import LocalMode, Settings
from ipvsproxy.translate.view import GRACE_S
from tests.daemon.loop.test_engine import SLICE, assert_from_scratch, node_ports
from tests.daemon.process.test_reconfigure import choices
from tests.support import builders
from tests.support.memory_node import MemoryNode

ADDRESS = builders.interface_address("eth1", "172.16.0.9")
KEY = builders.frontend("172.16.0.9", 30080)


@contextlib.asynccontextmanager
async def node_with_lost_address() -> AsyncIterator[MemoryNode]:
    """A node that has just lost an address of eth1, and that served a node port at this address."""
    node = MemoryNode()
    node.kernel.host_addresses.append(ADDRESS)
    async with node.serving(node_ports(), SLICE):
        node.kernel.host_addresses.remove(ADDRESS)
        node.engine.interfaces_changed()
        node.kernel.forget()
        await node.quiet()
        assert KEY in node.kernel.virtual_servers
        yield node


@pytest.mark.parametrize("away_s", [0.3, GRACE_S - 0.5])
async def test_a_node_port_stays_during_a_short_absence_of_its_address(away_s: float) -> None:
    async with node_with_lost_address() as node:
        await node.quiet(away_s - 0.1)
        node.kernel.host_addresses.append(ADDRESS)
        node.engine.interfaces_changed()
        await node.quiet(3 * GRACE_S)
        assert node.done == [], "nothing was ever taken away"
        assert_from_scratch(node)


async def test_addresses_are_read_again_before_the_node_ports_of_a_lost_address_are_removed() -> None:
    async with node_with_lost_address() as node:
        await node.quiet(GRACE_S - 0.5)
        node.kernel.host_addresses.append(ADDRESS)
        await node.quiet(2 * GRACE_S)
        assert KEY in node.kernel.virtual_servers
        assert node.done == []


async def test_no_node_port_is_removed_while_the_addresses_of_the_host_cannot_be_read() -> None:
    async with node_with_lost_address() as node:
        node.kernel.unreadable = {"interface_addresses"}
        syncs = len(node.watcher.summaries)
        await node.quiet(10 * GRACE_S)
        assert KEY in node.kernel.virtual_servers
        assert len(node.watcher.summaries) - syncs <= 30, "it is not asked for without a pause"
        node.kernel.unreadable = set()
        await node.quiet(2 * GRACE_S)
        assert KEY not in node.kernel.virtual_servers
        assert_from_scratch(node)


async def test_a_deleted_service_loses_its_node_port_on_a_lost_address_at_once() -> None:
    async with node_with_lost_address() as node:
        node.remove(node_ports())
        await node.quiet()
        assert KEY not in node.kernel.virtual_servers
        assert_from_scratch(node)


async def test_a_reload_that_takes_node_ports_off_a_lost_address_removes_its_virtual_server_at_once() -> None:
    async with node_with_lost_address() as node:
        node.engine.reconfigure(choices(node, node_port_primary=True))
        await node.quiet()
        assert KEY not in node.kernel.virtual_servers


async def test_a_restart_removes_the_virtual_server_of_a_node_port_on_a_lost_address() -> None:
    async with node_with_lost_address() as node:
        pass
    async with MemoryNode(node.kernel).serving(node_ports(), SLICE) as again:
        assert KEY not in node.kernel.virtual_servers
        assert_from_scratch(again)


async def test_a_family_whose_local_pods_are_unknown_is_logged_only_once_even_if_addresses_change(
    logs: list[EventDict],
) -> None:
    settings = Settings(detect_local=LocalMode.CLUSTER_CIDR, cluster_networks=builders.networks("10.244.0.0/16"))
    async with MemoryNode(settings=settings).serving(node_ports(), SLICE) as node:
        for number in range(5):
            node.kernel.host_addresses.append(builders.interface_address("eth1", f"172.16.0.{number}"))
            node.engine.interfaces_changed()
            await node.quiet()
    lines = [line for line in logs if line["event"] == "local_pods_unknown"]
    assert [(line["field"], line["families"]) for line in lines] == [("clusterCIDR", [Family.IPV6.label])]


async def test_a_missing_pod_range_of_the_node_is_logged_again_if_it_was_present_in_the_meantime(
    logs: list[EventDict],
) -> None:
    one_range, both = (builders.node(pod_networks=ranges) for ranges in (["10.244.1.0/24"], ["10.244.1.0/24", "fd00:1::/64"]))
    async with MemoryNode(settings=Settings(detect_local=LocalMode.NODE_CIDR)).serving(one_range) as node:
        for changed in (both, one_range):
            node.put(changed)
            await node.quiet()
    assert [line["field"] for line in logs if line["event"] == "local_pods_unknown"] == ["spec.podCIDRs of the Node"] * 2
