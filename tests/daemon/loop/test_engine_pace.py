"""Covers the removal of more real servers than may be removed at once."""

import asyncio

import pytest

from ipvsproxy.reconcile import attempts
from tests.support import builders
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

WEB = builders.service("web")
KEY = builders.frontend(builders.CLUSTER_IP, 80)
OLD, NEW = ([f"10.244.{part}.{number}" for number in range(1, 11)] for part in (0, 1))
ROOM = 3


@in_virtual_time
async def test_real_servers_beyond_the_limit_are_removed_when_the_kernel_has_freed_earlier_removed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "MOST_KEPT", ROOM)
    monkeypatch.setattr(attempts, "FEWEST_KEPT", ROOM)
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, builders.endpoint_slice(*map(builders.endpoint, OLD)), builders.node())
        await node.quiet()
        node.kernel.forget()
        node.put(builders.endpoint_slice(*map(builders.endpoint, NEW)))
        await node.quiet()
        assert sum(one.startswith("remove real_server") for one in node.done) == ROOM
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [0] * (len(OLD) - ROOM) + [1] * len(NEW)
        await asyncio.sleep(3 * (attempts.KEPT_S + 60))
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [1] * len(NEW)
