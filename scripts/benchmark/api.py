"""An API server in memory: the program's own lists and watches, with everything measured but HTTP."""

import asyncio
import contextlib
import pathlib
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import cast

from ipvsproxy.daemon.sources import reflector
from ipvsproxy.model.service import Event, ObjectKind
from scripts.benchmark import workload

CHUNK_BYTES = 1 << 16
"""So much is read from a socket at once."""


class MemoryApi:
    """Answers lists with pages from a directory, and watches with what ``tell`` is given.

    All pages are read into one buffer, piece by piece. In service, fresh memory for each is the HTTP client's, which is left out.

    ``first_byte_s`` is when the first page was handed out; ``told`` counts the lines that a watch has handed out.
    """

    def __init__(self, pages: pathlib.Path) -> None:
        self.first_byte_s = 0.0
        self.told = 0
        self._pages = pages
        self._buffer = bytearray(b" ") * CHUNK_BYTES  # written, so that it is there
        self._watches: dict[str, asyncio.Queue[tuple[bytes, int] | asyncio.StreamReader]] = {
            kind: asyncio.Queue() for kind in workload.KINDS
        }

    def tell(self, kind: str, chunk: bytes, lines: int) -> None:
        """Have the watch of this kind hand out this chunk of whole lines."""
        self._watches[kind].put_nowait((chunk, lines))

    def feed(self, kind: str, lines: asyncio.StreamReader) -> None:
        """Have the watch of this kind hand out what comes from there, as a client reads it from its socket, until that ends."""
        self._watches[kind].put_nowait(lines)

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        """One page of a list, in pieces of ``CHUNK_BYTES``."""
        asked = urllib.parse.urlsplit(path)
        page = dict(urllib.parse.parse_qsl(asked.query)).get("continue", "0")
        self.first_byte_s = self.first_byte_s or time.perf_counter()
        with (self._pages / f"{_kind(asked.path)}-{page}").open("rb", buffering=0) as file:
            while size := file.readinto(self._buffer):
                # All kinds share the buffer: nobody else may have a turn before this piece is taken in.
                yield cast("bytes", memoryview(self._buffer)[:size])
                await asyncio.sleep(0)  # as a socket would, it lets others have their turn

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        """A watch; it never ends."""
        del idle_s
        queue = self._watches[_kind(urllib.parse.urlsplit(path).path)]
        yield b""
        while True:
            next_one = await queue.get()
            if isinstance(next_one, asyncio.StreamReader):
                while chunk := await next_one.read(CHUNK_BYTES):
                    self.told += chunk.count(b"\n")
                    yield chunk
            else:
                chunk, lines = next_one
                self.told += lines
                yield chunk

    @property
    def waiting(self) -> int:
        """Chunks that no watch has handed out yet."""
        return sum(queue.qsize() for queue in self._watches.values())


class Source:
    """The program's reflectors, connected to a ``MemoryApi``."""

    def __init__(self, api: MemoryApi) -> None:
        @contextlib.asynccontextmanager
        async def connect() -> AsyncIterator[reflector.Connection]:
            yield api

        pace = reflector.Pace(shortest_watch_s=86400, longest_watch_s=86400)
        self._reflectors = {
            kind: reflector.Reflector(kind, resource, connect, _Silent(), pace)
            for kind, resource in reflector.resources(workload.NODE).items()
        }

    async def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Deliver events for ever."""
        async with asyncio.TaskGroup() as group:
            for each in self._reflectors.values():
                group.create_task(each.list_and_watch(deliver))

    def describe(self) -> str:
        """What this is."""
        return "API server in memory"

    @property
    def post(self) -> None:
        """Events are not posted."""

    @property
    def statuses(self) -> Mapping[ObjectKind, reflector.WatchStatus]:
        """How each watch is doing."""
        return {kind: each.status for kind, each in self._reflectors.items()}


class _Silent:
    def listed(self, kind: ObjectKind, objects: int) -> None:
        pass

    def watching(self, kind: ObjectKind) -> None:
        pass

    def restarting(self, kind: ObjectKind, error: reflector.ApiError, delay_s: float) -> None:
        pass


def _kind(path: str) -> str:
    return path.rpartition("/")[2]
