"""The connections of an HTTP server: aiohttp's, within the bounds of ``server``, whose rules hold here, too."""

import asyncio
import functools
import logging

import structlog
from aiohttp import StreamReader, abc, http, web

from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.server import Answer

FAILED = Answer(500, b"internal error\n", server.TEXT)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_silent = logging.getLogger(f"{__name__}.requests")
_silent.disabled = True  # aiohttp would log a traceback for every client that does not speak HTTP.


class Connections(web.Server):
    """Makes the protocol of each new connection, and says to the room whether it is idle."""

    def __init__(self, handler: server.Handler, room: server.Room) -> None:
        super().__init__(
            functools.partial(_respond, handler, room),
            request_factory=_make_request,
            keepalive_timeout=server.IDLE_S,
            lingering_time=0,
            auto_decompress=False,
            max_headers=server.HEADERS,
            max_line_size=server.HEADER_BYTES,
            max_field_size=server.HEADER_BYTES,
            access_log=None,
            logger=_silent,
        )
        self._room = room

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """As in aiohttp."""
        super().connection_made(handler, transport)
        self._room.note(handler, transport, is_busy=False)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """As in aiohttp."""
        super().connection_lost(handler, exc)
        self._room.forget(handler)


class _Request(web.BaseRequest):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Remove the header with the versions of Python and aiohttp. aiohttp calls this before it sends headers."""
        response.headers.popall("Server", None)


def _make_request(
    message: http.RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: abc.AbstractStreamWriter,
    task: "asyncio.Task[None]",
) -> web.BaseRequest:
    return _Request(message, payload, protocol, writer, task, asyncio.get_running_loop())


def _begin(answer: Answer, method: str) -> web.StreamResponse:
    """A response with its body, or one whose body follows in parts."""
    if not answer.more or method == "HEAD":
        return web.Response(status=answer.status, body=answer.whole, headers=answer.headers)
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(answer.body) + sum(map(len, answer.more))
    return response


async def _respond(handler: server.Handler, room: server.Room, request: web.BaseRequest) -> web.StreamResponse:
    if transport := request.transport:
        room.note(request.protocol, transport, is_busy=True)
    try:
        return await _answer(handler, request)
    finally:
        if request.transport:
            room.note(request.protocol, request.transport, is_busy=False)


async def _answer(handler: server.Handler, request: web.BaseRequest) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in request.headers.items()}
    asked = server.Request(request.path, request.query, headers, request.method)
    try:
        async with asyncio.timeout(server.ANSWER_S):
            if asked.method == "PUT":
                asked = asked._replace(body=await _first_bytes(request))
            try:
                answer = await handler(asked)
            except Exception:  # of any kind: probes must still get answers
                log.exception("request_failed", path=asked.path)
                answer = FAILED
            response = _begin(answer, asked.method)
            await response.prepare(request)
            if not isinstance(response, web.Response):
                for part in filter(None, (answer.body, *answer.more)):
                    await response.write(part)
                    await asyncio.sleep(0)
            await response.write_eof()
    except TimeoutError:
        if request.transport:
            request.transport.abort()
        raise
    return response


async def _first_bytes(request: web.BaseRequest) -> bytes:
    """The part of the body that arrives at once. A body that breaks off or is malformed is the client's error."""
    try:
        return await request.content.read(server.BODY_BYTES)
    except Exception as error:
        raise web.HTTPBadRequest from error
