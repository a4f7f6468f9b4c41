"""An in-memory API server. The program lists and watches as usual, so that everything except HTTP is measured."""

import asyncio
import contextlib
import importlib
import pathlib
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import cast

from ipvsproxy.daemon.sources import queries, reflector, source
from ipvsproxy.model.service import Event, ObjectKind, ServiceName
from ipvsproxy.translate.api.targets import Targets
from scripts.benchmark import workload

CHUNK_BYTES = 1 << 16
"""The maximum number of bytes that one read from a socket returns."""


class MemoryApi:
    """The server answers list requests with pages from a directory, and watch requests with the lines passed to ``send``.

    All pages are read into the same buffer, chunk by chunk. Measurements therefore leave out the memory in which an HTTP client
    would hold a whole page.

    ``first_byte_s`` is the time (of ``time.perf_counter``) when the server began to send the first page. ``sent_lines`` counts
    the lines sent to watches.
    """

    def __init__(self, pages: pathlib.Path) -> None:
        self.first_byte_s = 0.0
        self.sent_lines = 0
        self._pages = pages
        self._buffer = bytearray(b" ") * CHUNK_BYTES  # each byte is written, so that the kernel allocates the memory
        self._watches: dict[str, asyncio.Queue[tuple[bytes, int] | asyncio.StreamReader]] = {
            kind: asyncio.Queue() for kind in workload.KINDS
        }

    def send(self, kind: str, chunk: bytes, lines: int) -> None:
        """Send this chunk of whole lines to the watch of this kind."""
        self._watches[kind].put_nowait((chunk, lines))

    def feed(self, kind: str, lines: asyncio.StreamReader) -> None:
        """Send all data of a stream to the watch of this kind, until the stream ends."""
        self._watches[kind].put_nowait(lines)

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yields one page of a list in chunks of ``CHUNK_BYTES``."""
        asked = urllib.parse.urlsplit(path)
        page = dict(urllib.parse.parse_qsl(asked.query)).get("continue", "0")
        self.first_byte_s = self.first_byte_s or time.perf_counter()
        with (self._pages / f"{_kind(asked.path)}-{page}").open("rb", buffering=0) as file:
            while size := file.readinto(self._buffer):
                # All kinds share the buffer, so no other task may run before the caller has read this chunk.
                yield cast("bytes", memoryview(self._buffer)[:size])
                await asyncio.sleep(0)  # the pause lets other tasks run, as reading from a socket does

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of a watch, which never ends."""
        del idle_s
        queue = self._watches[_kind(urllib.parse.urlsplit(path).path)]
        yield b""
        while True:
            next_one = await queue.get()
            if isinstance(next_one, asyncio.StreamReader):
                while chunk := await next_one.read(CHUNK_BYTES):
                    self.sent_lines += chunk.count(b"\n")
                    yield chunk
            else:
                chunk, lines = next_one
                self.sent_lines += lines
                yield chunk

    @property
    def waiting(self) -> int:
        """The number of chunks that are not sent yet."""
        return sum(queue.qsize() for queue in self._watches.values())


class Source:
    """The program's reflectors (list and watch clients), connected to a ``MemoryApi``."""

    problem = ""

    def __init__(self, api: MemoryApi, *, all_nodes: bool = False) -> None:
        @contextlib.asynccontextmanager
        async def connect() -> AsyncIterator[reflector.ApiConnection]:
            yield api

        importlib.import_module("ipvsproxy.daemon.sources.watch")  # an ipvsproxy on a real node also has this module in memory
        pace = reflector.WatchPace(shortest_watch_s=86400, longest_watch_s=86400)
        self._reflectors = {
            kind: reflector.Reflector(kind, resource, connect, _Silent(), pace)
            for kind, resource in queries.watched(workload.NODE, all_nodes=all_nodes).items()
        }

    async def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Deliver events until this task is cancelled."""
        async with asyncio.TaskGroup() as group:
            for each in self._reflectors.values():
                group.create_task(each.list_and_watch(deliver))

    def describe(self) -> str:
        """The name of this source in the log."""
        return "API server in memory"

    async def targets(self, service: ServiceName | None = None) -> Targets:
        """Returns no targets, because no viewer opens the page."""
        del service
        return {}

    @property
    def post(self) -> None:
        """None, because a benchmark posts no Kubernetes events."""

    @property
    def statuses(self) -> Mapping[ObjectKind, source.WatchStatus]:
        """The status of each watch."""
        return {kind: each.status for kind, each in self._reflectors.items()}


class _Silent:
    def listed(self, kind: ObjectKind, objects: int) -> None:
        pass

    def watching(self, kind: ObjectKind) -> None:
        pass

    def restarting(self, kind: ObjectKind, error: source.ApiError, delay_s: float) -> None:
        pass


def _kind(path: str) -> str:
    return path.rpartition("/")[2]
