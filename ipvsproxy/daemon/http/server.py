"""HTTP servers built on aiohttp, with limits that prevent a client from blocking the answers to other clients.

Rule 1: each server limits the number of connections, the size of headers, and the time for sending a request and reading the
answer. The server does not wait for request bodies, except for the first bytes of a PUT.
Rule 2: when the maximum number of connections is reached, a new connection replaces the connection that has been idle for the
longest time. Because of this replacement, a client with many connections cannot prevent other clients from connecting. The new
connection is accepted only when the number of connections is below the maximum again. Until a connection has a file descriptor,
it waits in the kernel's queue.
"""

import asyncio
import errno
import functools
import logging
import operator
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from aiohttp import web

from ipvsproxy.daemon.base.log import log
from ipvsproxy.model.net import Address, Family, host_port

OK = 200
BAD_REQUEST = 400
NOT_FOUND = 404
NOT_ACCEPTABLE = 406
UNAVAILABLE = 503
JSON = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
TEXT = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
HTML = {"Content-Type": "text/html; charset=utf-8", "X-Content-Type-Options": "nosniff"}
CONNECTIONS = 64
"""The largest number of connections of each of the two servers. Each server also uses at most a sixteenth of the process's file
descriptors."""
IDLE_S = 75.0
"""If the next request has not arrived within this many seconds after an answer, the server closes the connection."""
ANSWER_S = 10.0
"""The longest time from the arrival of a request until the client has read the answer."""
CLOSE_S = 0.5
"""The longest time for which a closing server waits for requests that it is answering."""
HEADERS = 64
HEADER_BYTES = 8190
BODY_BYTES = 64
BACKLOG = 128
RETRY_S = 5.0
"""The pause in seconds between two attempts to listen on an address; kube-proxy has the same pause."""
NO_ROOM_S = 0.1
"""The pause in seconds before connections are accepted again, after the host had no file descriptor or no memory for a
connection."""
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

_silent = logging.getLogger(f"{__name__}.requests")
_silent.disabled = True  # Without this logger, aiohttp would log a traceback for every client that does not speak HTTP.


class Answer(NamedTuple):
    """An HTTP response.

    A long response continues after ``body`` with the parts in ``more``, each of some ten kilobytes. If the whole response were
    handled at once, the event loop would be blocked.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]
    more: Sequence[bytes] = ()


FAILED = Answer(500, b"internal error\n", TEXT)
NOT_FOUND_PAGE = Answer(NOT_FOUND, b"404 page not found\n", TEXT)


class Request(NamedTuple):
    """A client's request. The names of headers are in lower case.

    ``body`` is set only for a PUT, and has only the bytes of the request body that arrive first.
    """

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    method: str = "GET"
    body: bytes = b""


Handler = Callable[[Request], Awaitable[Answer]]


class BindError(Exception):
    """Raised if a server cannot listen on its address."""


def descriptors() -> int:
    """The maximum number of file descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class Room:
    """The limit on the number of connections, shared by one or more servers."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.beginning = set[asyncio.Task[None]]()
        """Accepted connections that have no transport yet."""
        self._open: dict[object, tuple[bool, asyncio.Transport]] = {}
        """For each open connection: whether it is busy with a request, and its transport. The connection whose state has not
        changed for the longest time comes first."""

    def is_free(self) -> bool:
        """Whether the limit allows another connection now.

        If the limit does not allow another connection, an existing connection is closed, preferably an idle connection.
        """
        if len(self.beginning) + len(self._open) < self._most:
            return True
        idle_first = sorted(self._open.values(), key=operator.itemgetter(0))
        if longest_idle := next((transport for _, transport in idle_first if not transport.is_closing()), None):
            longest_idle.abort()
        return False

    def begin(self, make: Callable[[], asyncio.Protocol], client: socket.socket) -> None:
        """Count an accepted connection until it ends."""

        async def connect() -> None:
            try:
                await asyncio.get_running_loop().connect_accepted_socket(make, client)
            except OSError:
                client.close()
            finally:
                self.beginning.discard(task)

        task = asyncio.create_task(connect())
        self.beginning.add(task)

    def note(self, connection: object, transport: asyncio.Transport, *, is_busy: bool) -> None:
        """Record whether a connection is now idle, or busy with a request."""
        self.forget(connection)
        self._open[connection] = (is_busy, transport)

    def forget(self, connection: object) -> None:
        """Called when a connection has ended."""
        self._open.pop(connection, None)


class _Connections(web.Server):
    """Creates the protocol object of each new connection, and reports to the ``Room`` whether the connection is idle."""

    def __init__(self, handler: Handler, room: Room) -> None:
        super().__init__(
            functools.partial(_respond, handler, room),
            request_factory=functools.partial(_Request, loop=asyncio.get_running_loop()),
            keepalive_timeout=IDLE_S,
            lingering_time=0,
            auto_decompress=False,
            max_headers=HEADERS,
            max_line_size=HEADER_BYTES,
            max_field_size=HEADER_BYTES,
            access_log=None,
            logger=_silent,
        )
        self._room = room

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Overrides the aiohttp method of this name."""
        super().connection_made(handler, transport)
        self._room.note(handler, transport, is_busy=False)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Overrides the aiohttp method of this name."""
        super().connection_lost(handler, exc)
        self._room.forget(handler)


class _Request(web.BaseRequest):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """Removes the header with the versions of Python and aiohttp, before aiohttp sends the headers."""
        response.headers.popall("Server", None)


async def _respond(handler: Handler, room: Room, request: web.BaseRequest) -> web.StreamResponse:
    if transport := request.transport:
        room.note(request.protocol, transport, is_busy=True)
    try:
        return await _answer(handler, request)
    finally:
        if request.transport:
            room.note(request.protocol, request.transport, is_busy=False)


async def _answer(handler: Handler, request: web.BaseRequest) -> web.StreamResponse:
    headers = {name.lower(): value for name, value in request.headers.items()}
    asked = Request(request.path, request.query, headers, request.method)
    try:
        async with asyncio.timeout(ANSWER_S):
            if asked.method == "PUT":
                asked = asked._replace(body=await _first_bytes(request))
            try:
                answer = await handler(asked)
            except Exception:  # a health probe must get an answer even if a page fails
                log.exception("request_failed", path=asked.path)
                answer = FAILED
            response = web.StreamResponse(status=answer.status, headers=answer.headers)
            response.content_length = len(answer.body) + sum(map(len, answer.more))
            await response.prepare(request)
            for part in filter(None, () if asked.method == "HEAD" else (answer.body, *answer.more)):
                await response.write(part)
                await asyncio.sleep(0)
            await response.write_eof()
    except TimeoutError:
        if request.transport:
            request.transport.abort()
        raise
    return response


async def _first_bytes(request: web.BaseRequest) -> bytes:
    """The part of the request body that arrives first, at most ``BODY_BYTES``.

    If the body is incomplete or malformed, the request is answered with status 400, because the client is at fault.
    """
    try:
        return await request.content.read(BODY_BYTES)
    except Exception as error:
        raise web.HTTPBadRequest from error


class Listener:
    """A listening socket with its HTTP server."""

    def __init__(self, bound: socket.socket, handler: Handler, room: Room) -> None:
        self._bound = bound
        self._room = room
        self._loop = asyncio.get_running_loop()
        self._connections = _Connections(handler, room)
        self._pause: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        self._listen()

    @property
    def port(self) -> int:
        """The port on which the server listens; if ``listen`` was called with port 0, the kernel has chosen the port."""
        return int(self._bound.getsockname()[1])

    async def close(self) -> None:
        """Stop listening, then close every connection. Requests in progress have ``CLOSE_S`` seconds to finish."""
        if self._pause:
            self._pause.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()
        if self._room.beginning:
            await asyncio.wait(self._room.beginning)
        self._connections.pre_shutdown()
        await self._connections.shutdown(CLOSE_S)

    def _listen(self) -> None:
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        if not self._room.is_free():
            return  # the event loop calls this function again at once
        try:
            client, _ = self._bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._bound)
            self._pause = self._loop.call_later(NO_ROOM_S, self._listen)
            return
        client.setblocking(False)
        self._room.begin(self._connections, client)


async def listen(
    address: Address, port: int, handler: Handler, *, one_family: bool = False, room: Room | None = None
) -> Listener:
    """Answer HTTP requests on an address. If ``room`` is None, the server has its own limit on connections.

    The unspecified address of either IP family means all addresses of both families, as in Go programs. With ``one_family``, the
    unspecified address means all addresses of its IP family.

    Raises:
        OSError: the address cannot be bound.
    """
    bound = _bind(address, port, one_family=one_family)
    return Listener(bound, handler, room or Room(max(1, min(CONNECTIONS, descriptors() // 16))))


async def serve(name: str, address: Address, port: int, handler: Handler, *, hard_fail: bool = False) -> None:
    """Answer HTTP requests on an address until this task is cancelled.

    If the address cannot be bound, binding is tried again every ``RETRY_S`` seconds.

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
        # With SO_REUSEADDR, two sockets can bind the same port; the second socket fails only when ``listen`` is called.
        bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound
