"""HTTP servers that no client can keep from answering others: their sockets. ``connections`` answers.

Rule 1: bounds limit a client: the number of connections, the time for its request and for reading its answer, and the size of
its headers. The server waits for no body except the first bytes of a PUT.
Rule 2: at the largest number of connections, a new one closes the oldest one. So a client with many connections cannot keep
others out.
Rule 3: a server listens at once, and loads what answers at the first connection: aiohttp's server takes 12 ms (100 on the test
kernel), and a start needs no answer of ours.
"""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import structlog

from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.model.net import Address, Family, host_port

if TYPE_CHECKING:
    from ipvsproxy.daemon.http import connections

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
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


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

    def __init__(self, server: asyncio.Server, connections: "_Connections") -> None:
        self._server = server
        self._connections = connections

    @property
    def port(self) -> int:
        """The port number, also if ``listen`` was called with port 0."""
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, then close every connection; running answers have ``CLOSE_S`` to end."""
        self._server.close()
        await self._connections.close()


class _Connections:
    """Makes the protocol of each connection. What it needs is imported for the first one (rule 3)."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._made: connections.Connections | None = None

    def __call__(self) -> asyncio.Protocol:
        if self._made is None:
            from ipvsproxy.daemon.http import connections  # noqa: PLC0415 - rule 3

            self._made = connections.Connections(self._handler)
        return self._made()

    async def close(self) -> None:
        if self._made is not None:
            self._made.pre_shutdown()
            await self._made.shutdown(CLOSE_S)


async def listen(address: Address, port: int, handler: Handler, *, one_family: bool = False) -> Listener:
    """Answer HTTP on an address.

    The unspecified address of either family stands for all addresses of both, as in Go programs; with ``one_family`` for all
    addresses of its own family.

    Raises:
        OSError: the address cannot be bound.
    """
    bound = _bind(address, port, one_family=one_family)
    made = _Connections(handler)
    try:
        server = await asyncio.get_running_loop().create_server(made, sock=bound)
    except BaseException:
        bound.close()
        raise
    return Listener(server, made)


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
