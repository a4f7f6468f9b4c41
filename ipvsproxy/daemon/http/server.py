"""HTTP servers that no client can keep from answering others.

Rule 1: bounds limit a client: the number of connections, the time for its request and for reading its answer, and the size of
its headers. The server waits for no body except the first bytes of a PUT.
Rule 2: at the largest number of connections, a new one closes the oldest one. So a client with many connections cannot keep
others out.
"""

import asyncio
import errno
import functools
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import structlog
from aiohttp import StreamReader, abc, http, web

from ipvsproxy.daemon.http import answers
from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.model.net import Address, Family, host_port

CONNECTIONS = 64
IDLE_S = 75.0
"""The longest time for a request, counted from the answer before it."""
ANSWER_S = 10.0
"""The longest time for an answer, until the client has read it."""
CLOSE_S = 0.5
"""The longest wait for a running answer when a server closes."""
HEADERS = 64
HEADER_BYTES = 8190
BODY_BYTES = 64
BACKLOG = 128
RETRY_S = 5.0
"""The pause between two attempts to listen, as in kube-proxy."""
FAILED = Answer(500, b"internal error\n", answers.TEXT)
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
_silent = logging.getLogger(f"{__name__}.requests")
_silent.disabled = True  # aiohttp would log a traceback for every client that does not speak HTTP.


class Request(NamedTuple):
    """A client's request. Header names are in lower case. ``body`` is for a PUT only: the part that arrives at once."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes = b""


Handler = Callable[[Request], Awaitable[Answer]]


class BindError(Exception):
    """A server cannot listen on its address."""


class Listener:
    """A listening socket with its HTTP server."""

    def __init__(self, server: asyncio.Server, connections: web.Server) -> None:
        self._server = server
        self._connections = connections

    @property
    def port(self) -> int:
        """The port number, also if ``listen`` was called with port 0."""
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, then close every connection; running answers have ``CLOSE_S`` to end."""
        self._server.close()
        self._connections.pre_shutdown()
        await self._connections.shutdown(CLOSE_S)


async def listen(address: Address, port: int, handler: Handler, *, one_family: bool = False) -> Listener:
    """Answer HTTP on an address.

    The unspecified address of either family stands for all addresses of both, as in Go programs; with ``one_family`` for all
    addresses of its own family.

    Raises:
        OSError: the address cannot be bound.
    """
    bound = _bind(address, port, one_family=one_family)
    try:
        connections = _Server(
            functools.partial(_respond, handler),
            request_factory=_make_request,
            keepalive_timeout=IDLE_S,
            lingering_time=0,
            auto_decompress=False,
            max_headers=HEADERS,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            access_log=None,
            logger=_silent,
        )
        server = await asyncio.get_running_loop().create_server(connections, sock=bound)
    except BaseException:
        bound.close()
        raise
    return Listener(server, connections)


async def serve(name: str, address: Address, port: int, handler: Handler, *, hard_fail: bool = False) -> None:
    """Answer HTTP on an address for ever. An address that cannot be bound is tried again every ``RETRY_S``.

    Raises:
        BindError: the address cannot be bound, and ``hard_fail`` is set.
    """
    where = host_port(address, port)
    while True:
        try:
            listener = await listen(address, port, handler)
            break
        except OSError as error:
            reason = _explain(error)
            if hard_fail:
                raise BindError(f"the {name} server cannot listen on {where}: {reason}") from error
            log.error("server_cannot_listen", server=name, address=where, error=reason, retry_in_s=RETRY_S)
        await asyncio.sleep(RETRY_S)
    log.debug("server_listening", server=name, address=where)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await listener.close()


def _explain(error: OSError) -> str:
    reason = error.strerror or str(error)
    taken = error.errno == errno.EADDRINUSE
    return f"{reason}; is kube-proxy still running on this node?" if taken else reason


def _bind(address: Address, port: int, *, one_family: bool) -> socket.socket:
    if address.is_unspecified and not one_family:
        try:
            return _bind_to(Address(bytes(16)), port, only_ipv6=False)
        except OSError as error:
            if error.errno not in _NO_IPV6:
                raise
            address = Address(bytes(4))
    return _bind_to(address, port, only_ipv6=True)


def _bind_to(address: Address, port: int, *, only_ipv6: bool) -> socket.socket:
    bound = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family is Family.IPV6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        bound.bind((str(address), port))
        # With SO_REUSEADDR, two sockets can bind one port; only ``listen`` fails for the second one.
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


class _Server(web.Server):
    """Makes the protocol of each new connection. Its connections are in the order of their beginning."""

    def __call__(self) -> web.RequestHandler:
        connections = self.connections
        for oldest in connections[: max(0, len(connections) + 1 - CONNECTIONS)]:
            oldest.force_close()
        return super().__call__()


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


async def _respond(handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in request.headers.items()}
    asked = Request(request.path, request.query, headers, request.method)
    try:
        async with asyncio.timeout(ANSWER_S):
            try:
                if asked.method == "PUT":
                    asked = asked._replace(body=await request.content.read(BODY_BYTES))
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
