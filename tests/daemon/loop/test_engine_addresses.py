"""Covers node ports while addresses of the node are added and removed."""

import pytest
import structlog.testing

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import LocalMode, Settings
from ipvsproxy.translate.view import GRACE_S
from tests.daemon.loop.test_engine import SLICE, assert_from_scratch, node_ports
from tests.daemon.process.test_reconfigure import choices
from tests.support import builders
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time


class OnLostAddress:
    """A node that has just lost an address of eth1 on which it serves a node port."""

    def __init__(self) -> None:
        self.node = MemoryNode()
        self.key = builders.frontend("172.16.0.9", 30080)
        self.addresses = self.node.kernel.host_addresses
        self.address = builders.interface_address("eth1", "172.16.0.9")

    async def lose(self) -> None:
        """Serve the node port on the address, and then remove the address."""
        self.addresses.append(self.address)
        self.node.begin_with(node_ports(), SLICE, builders.node())
        await self.node.quiet()
        assert self.is_served()
        self.addresses.remove(self.address)
        self.node.engine.interfaces_changed()
        self.node.kernel.forget()
        await self.node.quiet()
        assert self.is_served()

    def is_served(self) -> bool:
        return self.key in self.node.kernel.virtual_servers


@pytest.mark.parametrize("away_s", [0.3, GRACE_S - 0.5])
@in_virtual_time
async def test_a_node_port_stays_during_a_short_absence_of_its_address(away_s: float) -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
        await lost.node.quiet(away_s - 0.1)
        lost.addresses.append(lost.address)
        lost.node.engine.interfaces_changed()
        await lost.node.quiet(3 * GRACE_S)
        assert lost.is_served()
        assert lost.node.done == [], "nothing was ever taken away"
        assert_from_scratch(lost.node)


@in_virtual_time
async def test_addresses_are_read_again_before_the_node_ports_of_a_lost_address_are_removed() -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
        await lost.node.quiet(GRACE_S - 0.5)
        lost.addresses.append(lost.address)
        await lost.node.quiet(2 * GRACE_S)
        assert (lost.is_served(), lost.node.done) == (True, [])


@in_virtual_time
async def test_no_node_port_is_removed_while_the_addresses_of_the_host_cannot_be_read() -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
        lost.node.kernel.unreadable = {"interface_addresses"}
        syncs = len(lost.node.watcher.summaries)
        await lost.node.quiet(10 * GRACE_S)
        assert lost.is_served()
        assert len(lost.node.watcher.summaries) - syncs <= 30, "it is not asked for without a pause"
        lost.node.kernel.unreadable = set()
        await lost.node.quiet(2 * GRACE_S)
        assert not lost.is_served()
        assert_from_scratch(lost.node)


@in_virtual_time
async def test_the_grace_period_of_a_lost_address_delays_no_other_removal() -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
        lost.node.remove(node_ports())
        await lost.node.quiet()
        assert not lost.is_served()
        assert_from_scratch(lost.node)


@in_virtual_time
async def test_a_new_node_port_range_that_excludes_the_lost_address_applies_at_once() -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
        lost.node.engine.reconfigure(choices(lost.node, node_port_primary=True))
        await lost.node.quiet()
        assert not lost.is_served()


@in_virtual_time
async def test_a_restart_while_an_address_is_lost_removes_the_node_port_of_that_address() -> None:
    lost = OnLostAddress()
    async with lost.node.running():
        await lost.lose()
    async with MemoryNode(lost.node.kernel).serving(node_ports(), SLICE) as again:
        assert not lost.is_served()
        assert_from_scratch(again)


@in_virtual_time
async def test_a_family_whose_local_pods_are_unknown_is_logged_only_once_even_if_addresses_change() -> None:
    ranges = builders.networks("10.244.0.0/16")
    with structlog.testing.capture_logs() as logged:
        async with MemoryNode(settings=Settings(detect_local=LocalMode.CLUSTER_CIDR, cluster_networks=ranges)).serving(
            node_ports(), SLICE
        ) as node:
            for number in range(5):
                node.kernel.host_addresses.append(builders.interface_address("eth1", f"172.16.0.{number}"))
                node.engine.interfaces_changed()
                await node.quiet()
    lines = [line for line in logged if line["event"] == "local_pods_unknown"]
    assert [(line["field"], line["families"]) for line in lines] == [("clusterCIDR", [Family.IPV6.label])]


@in_virtual_time
async def test_missing_pod_ranges_of_the_node_object_are_logged_again_after_they_were_present() -> None:
    with structlog.testing.capture_logs() as logged:
        async with MemoryNode(settings=Settings(detect_local=LocalMode.NODE_CIDR)).serving(
            node_ports(), SLICE, builders.node(pod_networks=["10.244.1.0/24"])
        ) as node:
            for ranges in (["10.244.1.0/24", "fd00:1::/64"], ["10.244.1.0/24"]):
                node.put(builders.node(pod_networks=ranges))
                await node.quiet()
    assert [line["field"] for line in logged if line["event"] == "local_pods_unknown"] == ["spec.podCIDRs of the Node"] * 2
