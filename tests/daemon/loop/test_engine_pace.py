"""Covers the removal of more real servers than may go at once."""

import asyncio

import pytest

from ipvsproxy.reconcile.operations import pace
from tests.support import builders
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

WEB = builders.service("web")
KEY = builders.frontend(builders.CLUSTER_IP, 80)
OLD, NEW = ([f"10.244.{part}.{number}" for number in range(1, 11)] for part in (0, 1))
ROOM = 3


@in_virtual_time
async def test_some_removals_happen_at_once_and_others_as_the_kernel_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MOST_KEPT", ROOM)
    monkeypatch.setattr(pace, "FEWEST_KEPT", ROOM)
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, builders.endpoint_slice(*map(builders.endpoint, OLD)), builders.node())
        await node.quiet()
        node.kernel.forget()
        node.put(builders.endpoint_slice(*map(builders.endpoint, NEW)))
        await node.quiet()
        assert sum(one.startswith("remove real_server") for one in node.done) == ROOM
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [0] * (len(OLD) - ROOM) + [1] * len(NEW)
        await asyncio.sleep(3 * (pace.KEPT_S + 60))
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [1] * len(NEW)


@in_virtual_time
async def test_connections_are_not_read_during_a_storm_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "MOST_KEPT", 0)
    monkeypatch.setattr(pace, "FEWEST_KEPT", 0)
    node = MemoryNode()
    async with node.running():
        node.begin_with(WEB, builders.endpoint_slice(*map(builders.endpoint, OLD)), builders.node())
        await node.quiet()
        questions = node.kernel.connection_queries
        questions.clear()
        for count in range(1, len(OLD) + 1):
            node.put(builders.endpoint_slice(*map(builders.endpoint, OLD[count:] + NEW[:count])))
            await node.quiet()
        assert not questions
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [0] * len(OLD) + [1] * len(NEW)
        monkeypatch.setattr(pace, "MOST_KEPT", 100)
        await asyncio.sleep(60)
        assert questions == [1], "one question is for all real servers of a virtual server"
        assert sorted(node.kernel.virtual_servers[KEY].real_servers.values()) == [1] * len(NEW)
