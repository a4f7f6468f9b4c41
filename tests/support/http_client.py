"""An HTTP client that returns unprocessed answers, and can violate the protocol."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from ipvsproxy.daemon.http.server import Answer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Response(NamedTuple):
    """An answer; its header names have the spelling in which the server sent them."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def whole(answer: Answer) -> bytes:
    """The body of an answer, joined from all parts of the answer."""
    return b"".join((answer.body, *answer.more))


async def ask(port: int, path: str, *, host: str = "127.0.0.1", method: str = "GET", headers: str = "") -> Response:
    """Send one request on a new connection."""
    async with connection(port, host) as (reader, writer):
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{headers}\r\n".encode())
        return await read_answer(reader, has_body=method != "HEAD")


@contextlib.asynccontextmanager
async def connection(port: int, host: str = "127.0.0.1") -> AsyncIterator[Streams]:
    """An open connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Response:
    """Read the next answer on a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["Content-Length"])) if has_body else b""
    return Response(int(head[0].split()[1]), headers, body)
