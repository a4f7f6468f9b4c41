"""The Kubernetes source: Services, EndpointSlices and our Node, from an API server.

kubernetes-asyncio makes the TLS transport. Its model classes are never used: bytes go to ``decode`` as they are.

Every list and every watch has a connection of its own, made with what configuration and credential files hold at that
moment. So a rotated token, certificate or authority, and a changed server address, need no treatment of their own: they are in
force at the next connection, which is the one after a 401.
"""

import asyncio
import contextlib
import json
import pathlib
import re
import socket
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping

import aiohttp
import structlog

from ipvsproxy.daemon.sources import credentials, kubernetes_client, reflector
from ipvsproxy.daemon.sources.credentials import Credentials, SourceError
from ipvsproxy.daemon.sources.reflector import ApiError, Deliver, Trouble
from ipvsproxy.model.service import ObjectKind

CREDENTIALS_TIMEOUT_S = 30
"""For files, an issuer of tokens, or a credential plugin, which has a shorter bound of its own."""
ANSWER_TIMEOUT_S = 60
"""Until an answer begins, and between two parts of a list: the API server's own bound on a request."""
KEEPALIVE_AFTER_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 15, 5, 3
"""A peer that vanished without a word is noticed after 30 s, although a watch may be silent for minutes."""
REPEAT_LOG_S = 300.0
MOST_MESSAGES = 100
"""Different ones that are remembered as logged: others write them, so they may be endless."""
HEADERS = {"Accept": "application/json", "User-Agent": "ipvsproxy"}

HINTS: Mapping[Trouble, str] = {
    Trouble.UNAUTHORIZED: "check that the token or client certificate is valid; it is read again before each attempt",
    Trouble.FORBIDDEN: "our account must be allowed to list and watch this kind, as the ClusterRole system:node-proxier allows",
    Trouble.CREDENTIALS: "check the kubeconfig and the files that it names; they are read again before each attempt",
    Trouble.UNREACHABLE: "check address, port and certificate of the API server, and this node's route to it",
    Trouble.SILENT: "check load balancers and firewalls on the way to the API server for dropped connections",
    Trouble.GARBLED: "check what is on the way to the API server: this was not its language",
    Trouble.THROTTLED: "the API server is overloaded or limits us; see its priority and fairness metrics",
    Trouble.SERVER_ERROR: "see the log of the API server",
    Trouble.REFUSED: "see the log of the API server",
}

NO_ANSWER = "<error>"
"""What client-go's metrics put in the place of HTTP's code."""
OnRequest = Callable[[str, str, float, str], None]

_USER_INFO = re.compile(r"//[^/\s]*@")  # name and password: a proxy's URL may have them, and texts of aiohttp repeat it

log = structlog.stdlib.get_logger(__name__)


class KubernetesSource:
    """Lists and watches of an API server, with one reflector per kind.

    ``kubeconfig`` is a path; ``master`` a URL that goes before the kubeconfig's; with neither, the pod's service account is
    used. ``on_restart`` is told each time that a list or watch had to be started again. ``on_request`` is told of each request
    that was answered, or was not: host, HTTP's code or ``<error>``, how many seconds that took, and the method. ``statuses`` can
    be read any time.
    """

    def __init__(
        self,
        *,
        node_name: str,
        kubeconfig: str = "",
        master: str = "",
        service_account: str = credentials.SERVICE_ACCOUNT,
        on_restart: Callable[[ObjectKind, Trouble], None] = lambda _kind, _trouble: None,
        on_request: OnRequest = lambda _host, _code, _duration_s, _method: None,
        pace: reflector.Pace | None = None,
    ) -> None:
        self._credentials = Credentials(kubeconfig, master, pathlib.Path(service_account))
        self._on_restart = on_restart
        self._on_request = on_request
        self._pace = pace or reflector.Pace()
        self._server = ""
        self._logged: dict[str, float] = {}
        self._failing: dict[ObjectKind, str] = {}
        self._reflectors = {
            kind: reflector.Reflector(kind, resource, self._connect, self, self._pace)
            for kind, resource in reflector.resources(node_name).items()
        }

    @property
    def statuses(self) -> Mapping[ObjectKind, reflector.WatchStatus]:
        """How each watch is doing."""
        return {kind: each.status for kind, each in self._reflectors.items()}

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        """As ``Source`` says."""
        self._reflectors[kind].list_again(at_s)

    def describe(self) -> str:
        """Which API server that is, and what was last wrong with each watch that fails, in one line."""
        problems = "; ".join(dict.fromkeys(self._failing.values()))
        return f"API server {self._server}".rstrip() + (f": {problems}" if problems else "")

    async def check(self) -> None:
        """Read configuration and credentials once, without talking to the API server or to a credential plugin.

        Raises:
            SourceError: they cannot work.
        """
        self._server = (await self._credentials.check()).host or ""

    async def run(self, deliver: Deliver) -> None:
        """Deliver events for ever. An API server that is away is asked again and again; only a bug ends this."""
        async with asyncio.TaskGroup() as group:
            for kind, each in self._reflectors.items():
                group.create_task(_follow(each, deliver), name=f"watch {kind.value}")

    async def post(self, path: str, body: Mapping[str, object]) -> None:
        """Have an object created.

        Raises:
            ApiError: it was not.
        """
        async with self._connect() as connection:
            await connection.post(path, body)

    def listed(self, kind: ObjectKind, objects: int) -> None:
        """As ``Observer`` says."""
        log.info("listed", kind=kind.value, objects=objects, server=self._server)

    def watching(self, kind: ObjectKind) -> None:
        """As ``Observer`` says."""
        if kind in self._failing:
            del self._failing[kind]
            log.info("watch_resumed", kind=kind.value, server=self._server)
        if not self._failing:
            self._logged.clear()

    def restarting(self, kind: ObjectKind, error: ApiError, delay_s: float) -> None:
        """As ``Observer`` says. What is wrong is logged once, not once per kind and attempt, and then every few minutes."""
        self._on_restart(kind, error.trouble)
        message = credentials.one_line(str(error))
        event = {"kind": kind.value, "reason": error.trouble.value, "server": self._server, "retry_in_s": round(delay_s, 1)}
        hint = HINTS.get(error.trouble)
        if not hint:  # Part of the life of a watch.
            log.debug("watch_restarting", **event, error=message)
            return
        self._failing[kind] = message
        now = self._pace.now()
        if now - self._logged.get(message, -REPEAT_LOG_S) >= REPEAT_LOG_S:
            if len(self._logged) >= MOST_MESSAGES:
                self._logged.clear()
            self._logged[message] = now
            log.warning("watch_failed", **event, error=message, hint=hint)

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator["_HttpConnection"]:
        try:
            async with asyncio.timeout(CREDENTIALS_TIMEOUT_S):
                configuration = await self._credentials.read()
            transport = kubernetes_client.RESTClientObject(configuration)
        except TimeoutError as error:
            raise ApiError(Trouble.CREDENTIALS, f"credentials: nothing after {CREDENTIALS_TIMEOUT_S} s") from error
        except (SourceError, OSError) as error:
            raise ApiError(Trouble.CREDENTIALS, str(error)) from error
        self._server = configuration.host or ""
        try:
            yield _HttpConnection(transport, configuration, self._on_request)
        finally:
            await transport.close()


async def _follow(each: reflector.Reflector, deliver: Deliver) -> None:
    while True:
        await each.list_and_watch(deliver)


class _HttpConnection:
    """As ``Connection`` says, over the library's transport."""

    def __init__(
        self, transport: kubernetes_client.RESTClientObject, configuration: kubernetes_client.Configuration, on_request: OnRequest
    ) -> None:
        self._transport = transport
        self._on_request = on_request
        self._host = configuration.host or ""
        token = configuration.api_key.get("BearerToken", "").strip()
        self._headers = HEADERS | ({"Authorization": token} if token else {})

    async def body(self, path: str) -> AsyncGenerator[bytes, None]:
        async with self._request(path, ANSWER_TIMEOUT_S) as response:
            with _reading(ANSWER_TIMEOUT_S):
                async for piece in response.content.iter_any():
                    yield piece

    async def post(self, path: str, body: Mapping[str, object]) -> None:
        async with self._request(path, ANSWER_TIMEOUT_S, "POST", body) as response:
            with _reading(ANSWER_TIMEOUT_S):
                await response.read()

    async def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        async with self._request(path, idle_s) as response:
            _keep_alive(response)
            yield b""
            with _reading(idle_s):
                # Not by lines: the reader's bound on a line is far below what a Service with its annotations may have.
                async for chunk in response.content.iter_any():
                    yield chunk

    @contextlib.asynccontextmanager
    async def _request(
        self, path: str, idle_s: float, method: str = "GET", body: Mapping[str, object] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_TIMEOUT_S, sock_read=idle_s)
        began_s = time.monotonic()
        code = ""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                response: aiohttp.ClientResponse = await self._transport.request(
                    method,
                    self._host + path,
                    headers=dict(self._headers),
                    body=body,
                    _preload_content=False,
                    _request_timeout=timeout,
                )
            code = str(response.status)
        except TimeoutError as error:
            code = NO_ANSWER
            raise ApiError(Trouble.UNREACHABLE, f"no answer within {ANSWER_TIMEOUT_S} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            code = NO_ANSWER
            raise ApiError(Trouble.UNREACHABLE, _reason(error)) from error
        finally:
            if code:  # Not when it was us who gave it up.
                self._on_request(urllib.parse.urlsplit(self._host).netloc, code, time.monotonic() - began_s, method)
        async with response:
            if response.status not in (200, 201):
                with _reading(idle_s):
                    answer = await response.content.read(credentials.LONGEST_MESSAGE << 4)
                message = _status_message(answer) or response.reason or ""
                raise ApiError.of_status(response.status, message, _seconds(response.headers.get("Retry-After", "")))
            yield response


def _reason(error: Exception) -> str:
    return _USER_INFO.sub("//", str(error)) or type(error).__name__


@contextlib.contextmanager
def _reading(idle_s: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise ApiError(Trouble.SILENT, f"nothing was received for {idle_s:.0f} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise ApiError(Trouble.DROPPED, _reason(error)) from error


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    if response.connection is None or response.connection.transport is None:
        return
    connected = response.connection.transport.get_extra_info("socket")
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_AFTER_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _status_message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, LookupError, TypeError):
        return ""


def _seconds(retry_after: str) -> float:
    return float(retry_after) if retry_after.isdecimal() else 0
