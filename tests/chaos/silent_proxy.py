"""A TCP proxy that can stop forwarding but keep its connections open, so that keepalives are still answered."""

import asyncio
import contextlib
from collections.abc import Callable

_CHUNK_BYTES = 1 << 16


class SilentProxy:
    """Listens on ``port`` of the local host, and forwards to ``target_port``."""

    def __init__(self) -> None:
        self.port = 0
        self._target_port = 0
        self._are_open: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, target_port: int) -> None:
        """Start to listen."""
        self._target_port = target_port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def hush(self) -> int:
        """Stop forwarding through the present connections; return their number. Later connections work."""
        count = len(self._are_open)
        for is_flowing in self._are_open:
            is_flowing.clear()
        return count

    async def close(self) -> None:
        """End all connections, and stop listening."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        is_flowing = asyncio.Event()
        is_flowing.set()
        self._are_open.add(is_flowing)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            with contextlib.closing(upstream_writer):
                down = asyncio.create_task(_forward(upstream_reader, writer, is_flowing.is_set))
                up = asyncio.create_task(_forward(reader, upstream_writer, is_flowing.is_set))
                try:
                    await asyncio.wait((down, up), return_when=asyncio.FIRST_COMPLETED)
                    if not is_flowing.is_set():
                        await up  # the end of the server's connection stays hidden until the client ends its own connection
                finally:
                    down.cancel()
                    up.cancel()
        self._are_open.discard(is_flowing)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_flowing: Callable[[], bool]) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            if is_flowing():
                writer.write(data)
                await writer.drain()
