"""A source that follows the tests' API server over HTTP. The pauses of the source are recorded and skipped."""

import asyncio
import contextlib
import dataclasses
import pathlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from ipvsproxy.daemon.sources import reflector, watch
from ipvsproxy.daemon.sources.source import Trouble
from ipvsproxy.model.service import ApiServersFound, Event, Gone, Listed, ListStarted, ObjectKind, Put, Rejected
from tests.support import api_server
from tests.support.api_server import ApiServer
from tests.support.api_store import ENDPOINT_SLICES, NODES, SERVICES, Object

KIND_OF = {ObjectKind.SERVICE: SERVICES, ObjectKind.ENDPOINT_SLICE: ENDPOINT_SLICES, ObjectKind.NODE: NODES}
DEADLINE_S = 60


def service(name: str, address: str = "10.0.0.1", **metadata: Any) -> Object:
    return {"metadata": {"name": name, **metadata}, "spec": {"clusterIP": address, "ports": [{"port": 80}]}}


def endpoint_slice(name: str, **labels: str) -> Object:
    metadata = {"name": name, "labels": {"kubernetes.io/service-name": "web", **labels}}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": [], "ports": []}


class Sink:
    """The receiver of events: a minimal store that can wait for changes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.objects: dict[ObjectKind, dict[str, object]] = {kind: {} for kind in ObjectKind}
        self._arrived = asyncio.Event()

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Put(kind, key, item):
                    self.objects[kind][key.name] = item
                case Gone(kind, key):
                    self.objects[kind].pop(key.name, None)
                case Listed(kind, keys):
                    kept = {key.name for key in keys}
                    self.objects[kind] = {name: item for name, item in self.objects[kind].items() if name in kept}
                case Rejected() | ListStarted() | ApiServersFound():
                    pass
        self._arrived.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    def has(self, *names: str) -> Callable[[], bool]:
        return lambda: set(self.objects[ObjectKind.SERVICE]) == set(names)

    def lists(self, kind: ObjectKind = ObjectKind.SERVICE) -> int:
        return sum(isinstance(event, Listed) and event.kind is kind for event in self.events)

    def has_all_lists(self) -> bool:
        return all(map(self.lists, ObjectKind))


@dataclasses.dataclass
class Setup:
    """A server, a source that follows it, and the source's notifications."""

    server: ApiServer
    source: watch.KubernetesSource
    sink: Sink
    sleeps: list[float]

    @property
    def restarts(self) -> int:
        return sum(status.restarts.total() for status in self.source.statuses.values())

    def troubles(self) -> list[Trouble]:
        """The reasons why the watch of Services has started again; the oldest reason comes first."""
        return list(self.source.statuses[ObjectKind.SERVICE].restarts.elements())


def pace(sleeps: list[float], *, idle_s: float = 600) -> reflector.WatchPace:
    async def sleep(delay_s: float) -> None:
        sleeps.append(delay_s)
        await asyncio.sleep(0)

    return reflector.WatchPace(
        shortest_watch_s=idle_s / 2, longest_watch_s=idle_s / 2, grace_s=idle_s / 2, sleep=sleep, dice=random.Random(3)
    )


@contextlib.asynccontextmanager
async def running_task(coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run a coroutine that never ends by itself, such as a source, while the block runs."""
    task = asyncio.create_task(coroutine)
    try:
        yield
        assert not task.done(), "the task has ended"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def following(
    server: ApiServer, kubeconfig: str | pathlib.Path, *, idle_s: float = 600, **user: Any
) -> AsyncIterator[Setup]:
    """Follow a server.

    ``kubeconfig`` is a file name, or the ``Path`` of a directory into which ``write_kubeconfig`` writes the file.
    """
    if isinstance(kubeconfig, pathlib.Path):
        kubeconfig = api_server.write_kubeconfig(kubeconfig / "kubeconfig", server.url, **user)
    sleeps: list[float] = []
    source = watch.KubernetesSource(node_name="n1", kubeconfig=kubeconfig, pace=pace(sleeps, idle_s=idle_s))
    sink = Sink()
    async with running_task(source.run(sink.deliver)):
        yield Setup(server, source, sink, sleeps)


async def web_arrives(server: ApiServer, directory: pathlib.Path, **user: Any) -> None:
    """Put the Service ``web`` on an API server, and follow the server until the Service has arrived."""
    server.put(SERVICES, service("web"))
    async with following(server, directory, **user) as running:
        await running.sink.until(running.sink.has("web"))


async def wait_for_trouble(running: Setup, trouble: Trouble) -> None:
    await eventually(lambda: trouble in running.troubles())


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition that no event signals."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # no event signals it
            await asyncio.sleep(0.001)
