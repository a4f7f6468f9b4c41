"""The source for a Kubernetes API server: it provides Services, EndpointSlices and this process's Node.

The library kubernetes-asyncio provides the TLS transport. The model classes of the client library are never used, because
``decode`` parses the bytes of an answer.

Each list and each watch uses a separate connection, made with the current configuration and credential files. Because of the
separate connections, no special code is needed for a rotated token, certificate or authority, or for a changed server address.
The next connection uses the new files, and a 401 leads to a new connection.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping

import aiohttp

from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import RateLimits
from ipvsproxy.daemon.sources import credentials, queries, reflector, source
from ipvsproxy.daemon.sources.credentials import Credentials, SourceError
from ipvsproxy.daemon.sources.source import ApiError, Deliver, Trouble
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ApiServersFound, ObjectKind, ServiceName
from ipvsproxy.translate.api import targets
from ipvsproxy.translate.api.decode import UndecodableError
from ipvsproxy.translate.api.targets import Targets

NAMES_TIMEOUT_S = 5
"""The longest time to resolve the API server's name.

If the name is not resolved in that time, the only known address of an API server is the address of the open connection.
"""
CREDENTIALS_TIMEOUT_S = 30
"""The longest time in seconds to get credentials from files, an issuer of tokens, or a plugin. The program of a plugin has a
shorter time limit of its own, ``PLUGIN_TIMEOUT_S``."""
ANSWER_TIMEOUT_S = 60
"""The longest wait for the beginning of an answer or for the next part of a list, in seconds. The API server has the same time
limit for a request."""
KEEPALIVE_AFTER_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 15, 5, 3
"""The settings of TCP keepalive: the idle time and the interval between probes, both in seconds, and the number of probes. A
server that has disappeared without closing the connection is noticed after 30 s, although a watch may be silent for minutes."""
REPEAT_LOG_S = 300.0
MOST_MESSAGES = 100
"""For at most this many messages, the program remembers when it last logged the message. The limit exists because the API server
may send any number of different messages."""
HEADERS = {"Accept": "application/json;drop=metadata.managedFields, application/json", "User-Agent": "ipvsproxy"}
"""The HTTP headers of each request. The parameter ``drop`` requests objects without managedFields, which make up about a third of
a list (KEP-5958).

A server that does not know the parameter ``drop`` sends whole objects.
"""

HINTS: Mapping[Trouble, str] = {
    Trouble.UNAUTHORIZED: "check that the token or client certificate is valid; it is read again before each attempt",
    Trouble.FORBIDDEN: "our account must be allowed to list and watch this kind, as the ClusterRole system:node-proxier allows",
    Trouble.CREDENTIALS: "check the kubeconfig and the files that it names; they are read again before each attempt",
    Trouble.UNREACHABLE: "check address, port and certificate of the API server, and this node's route to it",
    Trouble.SILENT: "check load balancers and firewalls on the way to the API server for dropped connections",
    Trouble.GARBLED: "check proxies and load balancers on the way to the API server: the answer was not in its format",
    Trouble.THROTTLED: "the API server is overloaded or limits us; see its priority and fairness metrics",
    Trouble.SERVER_ERROR: "see the log of the API server",
    Trouble.REFUSED: "see the log of the API server",
}

NO_ANSWER = "<error>"
"""The code that client-go's metrics have for a request without an answer."""
PORTS: Mapping[str, int] = {"http": 80, "https": 443}
_SocketAddress = tuple[str, int]

_USER_INFO = re.compile(r"//[^/\s]*@")  # aiohttp's messages contain the user name and password in an HTTP proxy's URL


class KubernetesSource(source.Source):
    """Lists and watches the objects of an API server, with one reflector per kind.

    ``kubeconfig`` is a path, and ``master`` is a URL that overrides the URL in the kubeconfig. If both ``kubeconfig`` and
    ``master`` are empty, the service account of the pod is used. The caller may read ``statuses`` at any time.
    """

    def __init__(
        self,
        *,
        node_name: str,
        all_nodes: bool = False,
        kubeconfig: str = "",
        master: str = "",
        service_account: str = credentials.SERVICE_ACCOUNT,
        on_request: source.OnRequest = lambda *_: None,
        pace: reflector.WatchPace | None = None,
    ) -> None:
        self._credentials = Credentials(kubeconfig, master, pathlib.Path(service_account))
        self._on_request = on_request
        self._pace = pace or reflector.WatchPace()
        self._server = ""
        self._messages = RateLimits[str](1, REPEAT_LOG_S, MOST_MESSAGES)
        self._failing: dict[ObjectKind, str] = {}
        resources = queries.watched(node_name, all_nodes=all_nodes)
        self._slices = resources[ObjectKind.ENDPOINT_SLICE]
        self._api_servers: frozenset[RealServerKey] = frozenset()
        self._deliver: Deliver = lambda _events: None
        self._reflectors = {
            kind: reflector.Reflector(kind, resource, self.connect, self, self._pace) for kind, resource in resources.items()
        }

    @property
    def statuses(self) -> Mapping[ObjectKind, source.WatchStatus]:
        """The status of the watch of each kind."""
        return {kind: each.status for kind, each in self._reflectors.items()}

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        """As ``Source``."""
        self._reflectors[kind].list_again(at_s)

    def describe(self) -> str:
        """The API server and the last problem of each failing watch, in one line."""
        problems = "; ".join(dict.fromkeys(self._failing.values()))
        return f"API server {self._server}".rstrip() + (f": {problems}" if problems else "")

    async def check(self) -> None:
        """Read the configuration and the credentials once, without contacting the API server or running a credential plugin.

        Raises:
            SourceError: the configuration or the credentials cannot work.
        """
        self._server = (await self._credentials.read(ask_plugin=False)).host or ""

    async def run(self, deliver: Deliver) -> None:
        """Deliver events until this task is cancelled.

        Requests to an API server that does not answer are repeated; only a bug in ipvsproxy can end this method.
        """
        self._deliver = deliver
        async with asyncio.TaskGroup() as group:
            for kind, each in self._reflectors.items():
                group.create_task(_follow(each, deliver), name=f"watch {kind.value}")

    async def targets(self, service: ServiceName | None = None) -> Targets:
        """Implements the method of ``Source``.

        Requests one list with all EndpointSlices, or with the EndpointSlices of one Service, without pages. The list is decoded
        in a thread.

        Raises:
            ApiError: the list of EndpointSlices could not be read.
        """
        resource = self._slices.of_service(service) if service else self._slices
        query = resource.list_query(queries.ANY_VERSION, limit=0)
        async with self.connect() as connection, contextlib.aclosing(connection.body(query)) as pieces:
            body = b"".join([piece async for piece in pieces])
        try:
            return await asyncio.to_thread(targets.of_list, body)
        except UndecodableError as error:
            raise ApiError(Trouble.GARBLED, str(error)) from error

    async def post(self, path: str, body: Mapping[str, object]) -> None:
        """Create an object at the API server.

        Raises:
            ApiError: the object was not created.
        """
        async with self.connect() as connection:
            await connection.post(path, body)

    def listed(self, kind: ObjectKind, objects: int) -> None:
        """Implements the method of ``WatchObserver``."""
        log.info("listed", kind=kind.value, objects=objects, server=self._server)

    def watching(self, kind: ObjectKind) -> None:
        """Implements the method of ``WatchObserver``."""
        if kind in self._failing:
            del self._failing[kind]
            log.info("watch_resumed", kind=kind.value, server=self._server)
        if not self._failing:
            self._messages.forget()

    def restarting(self, kind: ObjectKind, error: ApiError, delay_s: float) -> None:
        """Implements the method of ``WatchObserver``.

        An error is logged at once. The same error is then logged only every few minutes, even if it occurs for another kind or at
        another attempt.
        """
        message = credentials.one_line(str(error))
        event = {"kind": kind.value, "reason": error.trouble.value, "server": self._server, "retry_in_s": round(delay_s, 1)}
        hint = HINTS.get(error.trouble)
        if not hint:  # nobody needs to act, for example if the watch has reached its longest time
            log.debug("watch_restarting", **event, error=message)
            return
        self._failing[kind] = message
        if self._messages.take(message, self._pace.now()):
            log.warning("watch_failed", **event, error=message, hint=hint)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator["HttpConnection"]:
        """A connection that uses newly read credentials.

        Raises:
            ApiError: the credentials cannot be read at the moment.
        """
        try:
            async with asyncio.timeout(CREDENTIALS_TIMEOUT_S):
                configuration = await self._credentials.read()
            transport = credentials.RESTClientObject(configuration)
        except TimeoutError as error:
            raise ApiError(Trouble.CREDENTIALS, f"credentials: nothing after {CREDENTIALS_TIMEOUT_S} s") from error
        except (SourceError, OSError) as error:
            raise ApiError(Trouble.CREDENTIALS, str(error)) from error
        self._server = configuration.host or ""
        try:
            self._found(*await _addresses_of(configuration))
            yield HttpConnection(transport, configuration, self._on_request, self._found)
        finally:
            await transport.close()

    def _found(self, *servers: _SocketAddress) -> None:
        """Deliver the addresses of API servers that were not known before."""
        found = (RealServerKey.of(parse_address(host.partition("%")[0]), port) for host, port in servers)
        new = frozenset(found) - self._api_servers
        if new:
            self._api_servers |= new
            self._deliver((ApiServersFound(new),))


async def _addresses_of(configuration: credentials.Configuration) -> Collection[_SocketAddress]:
    """The addresses to which the name of the API server, or of the HTTP proxy before the API server, resolves.

    The result is empty if the name cannot be resolved.
    """
    server = urllib.parse.urlsplit(configuration.host or "")
    bypasses = urllib.request.proxy_bypass(server.hostname or "")
    proxy = configuration.proxy or ("" if bypasses else urllib.request.getproxies().get(server.scheme, ""))
    found: list[_SocketAddress] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NAMES_TIMEOUT_S):
            for url in (server, urllib.parse.urlsplit(proxy)):
                with contextlib.suppress(OSError, ValueError):  # ``port`` raises ValueError if the URL's port is not a number
                    port = url.port or PORTS.get(url.scheme)
                    if url.hostname and port:
                        answers = await asyncio.get_running_loop().getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
                        found += [(str(place[0]), int(place[1])) for *_, place in answers]
    return found


async def _follow(each: reflector.Reflector, deliver: Deliver) -> None:
    while True:
        await each.list_and_watch(deliver)


@dataclasses.dataclass(eq=False)
class HttpConnection:
    """An ``ApiConnection`` that uses the transport of the library kubernetes-asyncio.

    ApiError is the only exception that the methods raise.
    """

    transport: credentials.RESTClientObject
    configuration: credentials.Configuration
    on_request: source.OnRequest
    on_peer: Callable[[_SocketAddress], None]

    def __post_init__(self) -> None:
        self._host = self.configuration.host or ""
        token = self.configuration.api_key.get("BearerToken", "").strip()
        self._headers = HEADERS | ({"Authorization": token} if token else {})

    async def answer(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """The status and the body of an answer; the answer may come from a program behind the API server.

        Redirects are not followed. Raises ApiError with GARBLED if the body is longer than ``most_bytes``.
        """
        async with self._response(path, ANSWER_TIMEOUT_S, follow=False) as response:
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > most_bytes:
                    raise ApiError(Trouble.GARBLED, f"the answer is longer than {most_bytes} bytes")
            return response.status, bytes(body)

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        """Implements the method of ``ApiConnection``."""
        async with self._request(path, ANSWER_TIMEOUT_S) as response:
            async for piece in response.content.iter_any():
                yield piece

    async def post(self, path: str, body: Mapping[str, object]) -> None:
        """Create an object at the API server."""
        async with self._request(path, ANSWER_TIMEOUT_S, "POST", body) as response:
            await response.read()

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        """Implements the method of ``ApiConnection``."""
        async with self._request(path, idle_s) as response:
            _keep_alive(response, self.on_peer)
            yield b""
            # The data is not read by lines, because a Service with its annotations may be far longer than the reader's limit for
            # a line.
            async for chunk in response.content.iter_any():
                yield chunk

    @contextlib.asynccontextmanager
    async def _request(
        self, path: str, idle_s: float, method: str = "GET", body: Mapping[str, object] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._response(path, idle_s, method, body) as response:
            if response.status not in (200, 201):
                answer = await response.content.read(credentials.LONGEST_MESSAGE << 4)
                message = status_message(answer) or response.reason or ""
                raise ApiError.of_status(response.status, message, _seconds(response.headers.get("Retry-After", "")))
            yield response

    @contextlib.asynccontextmanager
    async def _response(
        self, path: str, idle_s: float, method: str = "GET", body: Mapping[str, object] | None = None, *, follow: bool = True
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT_S, sock_read=idle_s)
        began_s = time.monotonic()
        code = ""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                # The request does not use the transport's own method, because that method follows redirects.
                response: aiohttp.ClientResponse = await self.transport.pool_manager.request(
                    method,
                    self._host + path,
                    headers=self._headers,
                    json=body,
                    timeout=timeout,
                    allow_redirects=follow,
                    proxy=self.transport.proxy,
                    proxy_headers=self.transport.proxy_headers,
                    server_hostname=self.transport.server_hostname,
                )
            code = str(response.status)
        except TimeoutError as error:
            code = NO_ANSWER
            raise ApiError(Trouble.UNREACHABLE, f"no answer within {ANSWER_TIMEOUT_S} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            code = NO_ANSWER
            raise ApiError(Trouble.UNREACHABLE, _reason(error)) from error
        finally:
            if code:  # A request that ipvsproxy itself has cancelled is not reported.
                self.on_request(urllib.parse.urlsplit(self._host).netloc, code, time.monotonic() - began_s, method)
        async with response:
            try:
                yield response
            except TimeoutError as error:
                raise ApiError(Trouble.SILENT, f"nothing was received for {idle_s:.0f} s") from error
            except (aiohttp.ClientError, OSError) as error:
                raise ApiError(Trouble.DROPPED, _reason(error)) from error


def _reason(error: Exception) -> str:
    return _USER_INFO.sub("//", str(error)) or type(error).__name__


def _keep_alive(response: aiohttp.ClientResponse, on_peer: Callable[[_SocketAddress], None]) -> None:
    if response.connection is None or response.connection.transport is None:
        return
    connected = response.connection.transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_AFTER_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    peer = response.connection.transport.get_extra_info("peername")  # None if the connection was already closed
    if peer:
        on_peer((peer[0], peer[1]))


def status_message(answer: bytes) -> str:
    """The message in the API server's Status object; empty if the answer contains none."""
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0
