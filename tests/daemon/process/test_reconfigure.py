"""Covers how new settings are applied to a running loop. The loop changes existing kernel objects in place.

The kernel is an in-memory kernel.
"""

import dataclasses
from typing import Any

import pytest

from ipvsproxy.config.settings import Choices
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey, Rule, SetMark
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate import nat
from tests.support import builders, memory_node
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

SERVICES = tuple(builders.service(f"web-{number}", cluster=[f"10.96.0.{number}"]) for number in (1, 2))
SLICES = tuple(builders.endpoint_slice(builders.endpoint(f"10.244.0.{number}"), service=f"web-{number}") for number in (1, 2))


def choices(node: MemoryNode, settings: dict[str, Any] | None = None, **translation: Any) -> Choices:
    """The ``Choices`` of a node, with new values for the loop (``settings``) and for the translation."""
    changed = dataclasses.replace(node.engine.choices.settings, **settings or {})
    return Choices(changed, dataclasses.replace(node.settings, **translation), Policy())


def schedulers(node: MemoryNode) -> set[str]:
    return {server.settings.scheduler for server in node.kernel.virtual_servers.values()}


@pytest.mark.parametrize(
    ("changed", "done"),
    [
        ({"scheduler": "wrr"}, [f"set virtual_server TCP 10.96.0.{number}:80" for number in (1, 2)]),
        ({"masquerade_bit": 3}, ["set rules IPv4 rules", "set rules IPv6 rules"]),
        ({"settings": {"audit_interval_s": 5}}, []),
    ],
)
@in_virtual_time
async def test_changed_settings_change_only_dependent_kernel_objects_and_recreate_no_object(
    changed: dict[str, Any], done: list[str]
) -> None:
    async with MemoryNode().serving(*SERVICES, *SLICES) as node:
        node.kernel.forget()
        before = memory_node.contents(node.kernel)
        node.engine.reconfigure(choices(node, **changed))
        await node.quiet()
        assert node.done == done
        assert (memory_node.contents(node.kernel) == before) == (not done)
        assert schedulers(node) == {changed.get("scheduler", "rr")}
        marking = node.kernel.chains[Family.IPV6][ChainKey("nat", nat.MARK_MASQUERADE)]
        assert (marking == (Rule(target=SetMark(0x8)),)) == ("masquerade_bit" in changed)


@in_virtual_time
async def test_only_newly_desired_kernel_settings_are_written_when_the_configuration_changes() -> None:
    async with MemoryNode().serving() as node:
        node.kernel.forget()
        node.kernel.sysctls["net/ipv4/conf/all/arp_ignore"] = "0"
        node.engine.reconfigure(choices(node, {"sysctls": (Sysctl("net/ipv4/conf/all/arp_ignore", "1"),)}))
        await node.quiet()
        assert node.done == ["set sysctl net/ipv4/conf/all/arp_ignore = 1"]
        assert node.kernel.sysctls["net/ipv4/ip_forward"] == "1"


@in_virtual_time
async def test_new_settings_apply_from_the_start_if_they_arrive_before_the_first_lists() -> None:
    node = MemoryNode()
    async with node.running():
        node.engine.reconfigure(choices(node, scheduler="lc"))
        await node.quiet()
        assert node.kernel.applied == []
        node.begin_with(*SERVICES, *SLICES, builders.node())
        await node.quiet()
        assert schedulers(node) == {"lc"}
