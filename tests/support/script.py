"""A scripted API server that is also the connection, the clock and the observer of a reflector."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any

from ipvsproxy.daemon.sources import queries, reflector
from ipvsproxy.daemon.sources.source import ApiError
from ipvsproxy.model.service import ApiServersFound, Event, Listed, ListStarted, ObjectKind, ServiceName

Json = dict[str, Any]
WEB = ServiceName("default", "web")
PIECE_BYTES = 64
"""The size of the pieces in which a list arrives; a piece is smaller than an item."""


def service(name: str, version: int = 0, address: str = "10.0.0.1") -> Json:
    return {
        "metadata": {"name": name, "namespace": "default", "resourceVersion": str(version)},
        "spec": {"clusterIP": address, "ports": [{"port": 80}]},
    }


def page(*items: Json, version: int = 100, more: str = "") -> bytes:
    body = {"metadata": {"resourceVersion": str(version), "continue": more}, "items": items}
    return json.dumps(body, separators=(",", ":")).encode()


def line(kind: str, item: Json) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def bookmark(version: int) -> bytes:
    return line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})


GONE = ApiError.of_status(410, "too old resource version")
GONE_LINE = line("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})


class ScriptEndError(Exception):
    """Raised at the end of the script; the test then checks the events so far."""


Answer = bytes | ApiError | Sequence[bytes | float | ApiError]


class World:
    """One object that acts as the connection, the clock and the observer of a reflector.

    A script is the list of the answers in the order in which the server sends them: each answer is a page, or the fragments of a
    watch.

    In a watch, a float advances the clock by this number of seconds, and an exception is raised. ``served_versions`` are the
    resource versions with which the server answers probes. By default, the answer is newer than every version that a reflector
    has.
    """

    def __init__(self, *script: Answer, served_versions: Iterable[int] = ()) -> None:
        self.script = list(script)
        self.served_versions = list(served_versions)
        self.clock = 1000.0
        self.asked: list[str] = []
        self.sleeps: list[float] = []
        self.idle: list[float] = []
        self.delivered: list[Event] = []
        self.batches: list[int] = []
        self.progress: list[str] = []
        self.watched = asyncio.Event()
        self.connections = 0
        self.probes = 0
        pace = reflector.WatchPace(now=lambda: self.clock, sleep=self.sleep, dice=random.Random(7))
        resource = queries.watched("n1")[ObjectKind.SERVICE]
        self.reflector = reflector.Reflector(ObjectKind.SERVICE, resource, self.connect, self, pace)

    async def sleep(self, delay_s: float) -> None:
        self.sleeps.append(delay_s)
        self.clock += delay_s

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator["World"]:
        self.connections += 1
        yield self

    def next(self, path: str) -> Any:
        self.asked.append(path)
        if not self.script:
            raise ScriptEndError
        answer = self.script.pop(0)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        if "/namespaces/default/" in path:
            self.probes += 1
            yield page(service("any"), version=self.served_versions.pop(0) if self.served_versions else 999999)
            return
        answer = self.next(path)
        assert isinstance(answer, bytes), "the request is a list, the script has a watch"
        for begin in range(0, len(answer), PIECE_BYTES):
            yield answer[begin : begin + PIECE_BYTES]

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        self.idle.append(idle_s)
        parts = self.next(path)
        assert not isinstance(parts, bytes), "the request is a watch, the script has a list"
        yield b""
        for part in parts:
            match part:
                case bytes():
                    yield part
                case ApiError():
                    raise part
                case seconds:
                    self.clock += seconds

    def listed(self, kind: ObjectKind, objects: int) -> None:
        self.progress.append(f"listed {objects}")

    def watching(self, kind: ObjectKind) -> None:
        self.progress.append("watching")
        self.watched.set()

    def restarting(self, kind: ObjectKind, error: ApiError, delay_s: float) -> None:
        self.progress.append(error.trouble.value)

    def deliver(self, events: Sequence[Event]) -> None:
        self.batches.append(len(events))
        self.delivered += events

    async def run(self) -> None:
        with contextlib.suppress(ScriptEndError):
            while True:
                await self.reflector.list_and_watch(self.deliver)

    @property
    def lists(self) -> list[str]:
        return [path for path in self.asked if "watch=1" not in path]

    @property
    def watches(self) -> list[str]:
        return [path for path in self.asked if "watch=1" in path]


async def run_script(*script: Answer, served_versions: Iterable[int] = ()) -> World:
    """Run a reflector with the answers of this script until the script ends."""
    world = World(*script, served_versions=served_versions)
    await world.run()
    return world


def names(events: Iterable[Event]) -> list[str]:
    return [
        f"{type(event).__name__} {event.key.name}"
        for event in events
        if not isinstance(event, ListStarted | Listed | ApiServersFound) and event.key
    ]
