"""Covers an hour of virtual time without an API server: nothing is removed, drift is repaired, and requests become rarer.

Reflectors, store and loop are real; the connection and the kernel are test doubles.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from unittest.mock import Mock

from ipvsproxy.daemon.loop import reader
from ipvsproxy.daemon.sources import queries, reflector
from ipvsproxy.daemon.sources.source import ApiError, Staleness, Trouble
from ipvsproxy.model.service import ObjectKind
from tests.support import api_store, builders, following, memory_node
from tests.support.virtual_time import in_virtual_time, loop

HOUR_S = 3600.0
STALE_AFTER_S = 900.0
WEB_KEY = builders.frontend("10.96.0.1", 80)


class Server:
    """An API server that is present or absent; ``connections`` counts the attempts to connect."""

    def __init__(self) -> None:
        self.store = api_store.Store()
        self.store.put(api_store.NODES, {"metadata": {"name": builders.THIS_NODE}})
        self.add_service("web", 1)
        self.connections = 0
        self._is_away = False
        self._left = asyncio.Event()

    def add_service(self, name: str, number: int) -> None:
        self.store.put(api_store.SERVICES, following.service(name, f"10.96.0.{number}"))
        endpoints = {"endpoints": [{"addresses": [f"10.244.0.{number}"]}], "ports": [{"port": 8080}]}
        item = following.endpoint_slice(name, **{"kubernetes.io/service-name": name})
        self.store.put(api_store.ENDPOINT_SLICES, item | endpoints)

    def leave(self) -> None:
        """Make the API server absent from now on; all its watches break."""
        self._is_away = True
        self._left.set()

    def return_(self) -> None:
        """Make the API server available again, without its history of changes, so that clients must list all objects again."""
        self._is_away = False
        self._left.clear()
        self.store.forget_history()

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator["Server"]:
        self.connections += 1
        if self._is_away:
            raise ApiError(Trouble.UNREACHABLE, "connection refused")
        yield self

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        yield json.dumps(self.store.page(self._resource(path), lambda _: True)).encode()

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        try:
            self.store.changes_since(self._resource(path), int(path.partition("resourceVersion=")[2].partition("&")[0]))
        except api_store.StatusError as error:
            raise ApiError.of_status(error.code, "too old") from error
        yield b""
        await self._left.wait()
        raise ApiError(Trouble.DROPPED, "connection reset")

    @staticmethod
    def _resource(path: str) -> api_store.Resource:
        plain = path.replace("/namespaces/default", "")  # ``probe_query`` adds the namespace to the path
        return next(one for one in api_store.RESOURCES if plain.startswith(f"{one.path}?"))


async def follow(one: reflector.Reflector, here: memory_node.MemoryNode) -> None:
    while True:
        await one.list_and_watch(here.deliver)


@in_virtual_time
async def test_an_hour_without_the_api_server_removes_nothing_and_missed_changes_arrive_afterwards() -> None:
    server, here = Server(), memory_node.MemoryNode()
    pace = reflector.WatchPace(now=loop().time, dice=random.Random(5))
    reflectors = {
        kind: reflector.Reflector(kind, resource, server.connect, Mock(), pace)
        for kind, resource in queries.watched(builders.THIS_NODE).items()
    }
    stale = Staleness(lambda: {kind: one.status for kind, one in reflectors.items()}, limit_s=STALE_AFTER_S, clock=loop().time)
    async with contextlib.AsyncExitStack() as running:
        await running.enter_async_context(here.running())
        for one in reflectors.values():
            await running.enter_async_context(following.running_task(follow(one, here)))
        await here.quiet(1)
        before_outage = memory_node.contents(here.kernel)
        assert len(here.kernel.virtual_servers) == 1

        server.leave()
        here.kernel.forget()
        before = server.connections
        await here.quiet(HOUR_S / 2)
        assert here.done == []
        assert memory_node.contents(here.kernel) == before_outage
        del here.kernel.virtual_servers[WEB_KEY]
        await here.quiet(reader.POLL_INTERVAL_S)
        assert memory_node.contents(here.kernel) == before_outage
        await here.quiet(HOUR_S / 2)
        assert memory_node.contents(here.kernel) == before_outage
        assert set(stale.stale()) == set(ObjectKind)
        # After the pauses have grown, each kind is requested every 15 to 30 s.
        assert 3 * HOUR_S / 30 < server.connections - before < 3 * (HOUR_S / 15 + 10)

        server.add_service("new", 2)
        server.return_()
        await here.quiet(reflector.LONGEST_DELAY_S + 1)
        assert len(here.kernel.virtual_servers) == 2
        assert list(stale.stale()) == []
