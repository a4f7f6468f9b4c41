"""Covers how new settings are applied to a running loop, which changes its kernel objects in place.

The kernel is an in-memory kernel.
"""

import dataclasses

from ipvsproxy.config.settings import Choices, EngineSettings
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, Rule, SetMark
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate import nat
from ipvsproxy.translate.translation_settings import Settings
from tests.support import builders, memory_node
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

SERVICES = tuple(builders.service(f"web-{number}", cluster=[f"10.96.0.{number}"]) for number in (1, 2))
SLICES = tuple(builders.endpoint_slice(builders.endpoint(f"10.244.0.{number}"), service=f"web-{number}") for number in (1, 2))


def settings(*sysctls: Sysctl, audit_interval_s: float = memory_node.AUDIT_INTERVAL_S) -> EngineSettings:
    return EngineSettings(
        node_name=builders.THIS_NODE,
        min_interval_s=0,
        audit_interval_s=audit_interval_s,
        drift_check_interval_s=memory_node.DRIFT_CHECK_INTERVAL_S,
        sysctls=sysctls or memory_node.SYSCTLS,
        timeouts=memory_node.TIMEOUTS,
    )


def policy(*excluded: str) -> Policy:
    return Policy(excluded=builders.networks(*excluded))


async def begun(node: MemoryNode) -> None:
    node.begin_with(*SERVICES, *SLICES, builders.node())
    await node.quiet()
    node.kernel.forget()


@in_virtual_time
async def test_a_changed_scheduler_is_set_in_place_and_nothing_else_changes() -> None:
    node = MemoryNode()
    async with node.running():
        await begun(node)
        node.engine.reconfigure(Choices(settings(), dataclasses.replace(node.settings, scheduler="wrr"), policy()))
        await node.quiet()
        assert node.done == [f"set virtual_server TCP 10.96.0.{number}:80" for number in (1, 2)]
        assert {server.settings.scheduler for server in node.kernel.virtual_servers.values()} == {"wrr"}


@in_virtual_time
async def test_a_changed_masquerade_bit_changes_only_rules() -> None:
    node = MemoryNode()
    async with node.running():
        await begun(node)
        node.engine.reconfigure(Choices(settings(), dataclasses.replace(node.settings, masquerade_bit=3), policy()))
        await node.quiet()
        assert node.done == ["set rules IPv4 rules", "set rules IPv6 rules"]
        marking = ChainKey("nat", nat.MARK_MASQUERADE)
        assert node.kernel.chains[Family.IPV6][marking] == (Rule(target=SetMark(0x8)),)


@in_virtual_time
async def test_a_kernel_setting_that_is_no_longer_desired_keeps_its_value_and_a_new_one_is_written() -> None:
    node = MemoryNode()
    node.kernel.sysctls["net/ipv4/conf/all/arp_ignore"] = "0"
    async with node.running():
        await begun(node)
        node.engine.reconfigure(Choices(settings(Sysctl("net/ipv4/conf/all/arp_ignore", "1")), node.settings, policy()))
        await node.quiet()
        assert node.done == ["set sysctl net/ipv4/conf/all/arp_ignore = 1"]
        assert node.kernel.sysctls["net/ipv4/ip_forward"] == "1"


@in_virtual_time
async def test_settings_that_change_before_the_first_lists_apply_from_the_start() -> None:
    node = MemoryNode()
    async with node.running():
        node.engine.reconfigure(Choices(settings(), dataclasses.replace(node.settings, scheduler="lc"), policy()))
        await node.quiet()
        assert node.kernel.applied == []
        await begun(node)
        assert {server.settings.scheduler for server in node.kernel.virtual_servers.values()} == {"lc"}


@in_virtual_time
async def test_applying_the_same_settings_again_changes_nothing() -> None:
    node = MemoryNode()
    async with node.running():
        await begun(node)
        before = memory_node.contents(node.kernel)
        node.engine.reconfigure(Choices(settings(audit_interval_s=5), Settings(), policy()))
        await node.quiet()
        assert node.kernel.applied == []
        assert memory_node.contents(node.kernel) == before
