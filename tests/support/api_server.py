"""An API server for tests: list and watch over real HTTP on loopback, in the test's process, with faults on demand.

The server has Services, EndpointSlices and Nodes of all namespaces, and accepts events. Tests change objects by calling methods
of the server (``put``, ``delete``). ``test_api_server`` tests which requests the server refuses.
"""

import asyncio
import collections
import contextlib
import dataclasses
import enum
import json
import pathlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import NamedTuple, Self

import yaml
from aiohttp import web

from tests.support import api_store
from tests.support.api_store import NODES, RESOURCES, Change, Object, Resource, StatusError
from tests.support.commands import run


class Request(NamedTuple):
    """A received request."""

    resource: Resource
    watch: bool
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Refusal(NamedTuple):
    """An answer with an HTTP status other than 200. ``verb`` is ``list`` or ``watch``; an empty string means both."""

    code: int
    verb: str = ""
    resource: Resource | None = None
    retry_after: str = ""


class _End(enum.Enum):
    NORMAL = enum.auto()
    CUT = enum.auto()


@dataclasses.dataclass(eq=False)
class _Watcher:
    """One open watch, with the lines that have not been sent yet."""

    resource: Resource
    matches: api_store.Matches
    transport: asyncio.Transport
    bookmarks: bool
    after_revision: int
    drops: bool
    queue: asyncio.Queue[bytes | _End] = dataclasses.field(default_factory=asyncio.Queue)

    def notify(self, change: Change) -> None:
        event = change.event(self.matches) if change.resource is self.resource else None
        if event and change.revision > self.after_revision:
            self.queue.put_nowait(line(_bare(event) if self.drops else event))


def _bare(event: Object) -> Object:
    """A watch event whose object has no managed fields."""
    return event | {"object": _without_managed_fields(event["object"])}


def _without_managed_fields(item: Object) -> Object:
    return item | {"metadata": {key: value for key, value in item["metadata"].items() if key != "managedFields"}}


def line(event: Object) -> bytes:
    """A watch event as bytes."""
    return json.dumps(event).encode() + b"\n"


class ApiServer:
    """Start the server with ``async with``; ``url`` is its address.

    ``token``: the required bearer token; an empty string means that no token is required.
    ``waits_for_revision``: a watch from a future revision waits silently for this revision, and does not get HTTP 504.
    ``knows_drop``: the server leaves managed fields out on request (KEP-5958). ``lists_open``: while this event is cleared, lists
    are not answered. ``requests``: all requests, in order. ``events``: all created events.
    """

    def __init__(self, *, tls: "Certificates | None" = None, token: str = "") -> None:
        self.store = api_store.Store()
        self.token = token
        self.waits_for_revision = True
        self.knows_drop = True
        self.lists_open = asyncio.Event()
        self.lists_open.set()
        self.requests: list[Request] = []
        self.events: list[Object] = []
        self.url = ""
        self._tls = tls
        self._refusals: collections.deque[Refusal] = collections.deque()
        self._watchers: list[_Watcher] = []
        self._changed = asyncio.Condition()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        self._paths = {resource.path: resource for resource in RESOURCES}
        self._paths |= {_in_default(resource): resource for resource in RESOURCES if resource is not NODES}
        for path in self._paths:
            app.router.add_get(path, self._answer)
        app.router.add_post("/apis/events.k8s.io/v1/namespaces/{namespace}/events", self._create_event)
        await self._listen(app, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _listen(self, app: web.Application, port: int) -> None:
        # Without ``handler_cancellation``, a handler whose client has disconnected would count as a watcher forever.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0)
        await self._runner.setup()
        context = self._tls.server_context() if self._tls else None
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context)
        await site.start()
        bound = self._runner.addresses[0][1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{bound}"

    async def listen_on(self, listening: socket.socket) -> None:
        """Accept connections on this additional socket."""
        assert self._runner
        await web.SockSite(self._runner, listening).start()

    async def close(self) -> None:
        """Stop listening and drop all connections; from now on ``url`` refuses connections."""
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    # Changes of the cluster

    def put(self, resource: Resource, item: Object) -> Object:
        """Create or update an object; return the stored object."""
        change = self.store.put(resource, item)
        self._tell(change)
        assert change.new is not None
        return change.new

    def delete(self, resource: Resource, name: str, namespace: str = "default") -> None:
        """Delete an object."""
        self._tell(self.store.delete(resource, name, "" if resource is NODES else namespace))

    def _tell(self, change: Change) -> None:
        for watcher in self._watchers:
            watcher.notify(change)

    def bookmark(self) -> None:
        """Send a bookmark of the present revision to all watches that requested bookmarks."""
        for watcher in self._watchers:
            if watcher.bookmarks and self.store.revision >= watcher.after_revision:
                bare = {
                    "kind": watcher.resource.kind,
                    "apiVersion": watcher.resource.api_version,
                    "metadata": {"resourceVersion": str(self.store.revision)},
                }
                watcher.queue.put_nowait(line({"type": "BOOKMARK", "object": bare}))

    # Trouble on demand

    def refuse(self, *refusals: Refusal) -> None:
        """For each refusal, refuse one request: the next request that has the refusal's verb and resource."""
        self._refusals.extend(refusals)

    def send(self, resource: Resource, raw: bytes) -> None:
        """Send these bytes to the open watches of a resource.

        The bytes may be a garbled line, a duplicate, or an event out of order.
        """
        for watcher in self._of(resource):
            watcher.queue.put_nowait(raw)

    def expire_watches(self, resource: Resource) -> None:
        """Compact the history, and end the open watches of a resource with an ERROR event of code 410."""
        self.store.forget_history()
        self.send(resource, line({"type": "ERROR", "object": StatusError(410, "Expired", "too old resource version").body}))
        self.end_watches(resource)

    def restore(self, backup: api_store.Store) -> None:
        """Replace the store by a backup, which has an earlier state and revision.

        All watches are disconnected, as after a restart of the server.
        """
        self.store = backup
        for resource in RESOURCES:
            self.cut_watches(resource)

    def end_watches(self, resource: Resource) -> None:
        """End the open watches normally, as a server does after ``timeoutSeconds``."""
        self._end(resource, _End.NORMAL)

    def cut_watches(self, resource: Resource, half_line: bytes = b"") -> None:
        """Send these bytes to the open watches, then drop their connections."""
        self.send(resource, half_line)
        self._end(resource, _End.CUT)

    def _end(self, resource: Resource, how: _End) -> None:
        for watcher in self._of(resource):
            watcher.queue.put_nowait(how)
            # The watcher is removed before the end of the watch is written, because later changes must not be sent to this watch.
            self._watchers.remove(watcher)

    def stall(self) -> None:
        """From now on, write nothing to any watch, not even the message that ends a watch; the connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """End ``stall``."""
        self._flowing.set()

    # Functions for tests that wait for requests or check them

    def _of(self, resource: Resource) -> list[_Watcher]:
        return [watcher for watcher in self._watchers if watcher.resource is resource]

    async def watched(self, resource: Resource, *, from_present: bool = False) -> None:
        """Wait until a client watches this resource.

        With ``from_present``, a watch that begins at a future revision does not count.
        """

        def is_watched() -> bool:
            return any(not from_present or one.after_revision <= self.store.revision for one in self._of(resource))

        async with self._changed:
            await self._changed.wait_for(is_watched)

    async def asked(self, resource: Resource, *, watch: bool, times: int) -> None:
        """Wait until clients have sent this number of list requests for the resource.

        If ``watch`` is true, watch requests count instead.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.queries(resource, watch=watch)) >= times)

    def queries(self, resource: Resource, *, watch: bool) -> list[Mapping[str, str]]:
        """The URL queries of all lists (or watches) of a resource, including requests for one object."""
        return [request.query for request in self.requests if request.resource is resource and request.watch is watch]

    # HTTP

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        resource = self._paths[request.path]
        watch = request.query.get("watch", "") in {"1", "true"}
        async with self._changed:
            self.requests.append(Request(resource, watch, dict(request.query), dict(request.headers)))
            self._changed.notify_all()
        try:
            self._check(request, resource, watch=watch)
            if watch:
                return await self._watch(request, resource)
            await self.lists_open.wait()
            return self._list(request, resource)
        except StatusError as error:
            return web.json_response(error.body, status=error.code, headers=error.headers)

    async def event_count(self, count: int) -> None:
        """Wait until this many events were created."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.events) >= count)

    async def _create_event(self, request: web.Request) -> web.StreamResponse:
        try:
            self._authenticate(request)
            event = await request.json()
            api_store.check_event(event, request.match_info["namespace"], self.events)
        except StatusError as error:
            return web.json_response(error.body, status=error.code, headers=error.headers)
        async with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        return web.json_response(event, status=201)

    def _authenticate(self, request: web.Request) -> None:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise StatusError(401, "Unauthorized", "Unauthorized")

    def _check(self, request: web.Request, resource: Resource, *, watch: bool) -> None:
        self._authenticate(request)
        for refusal in self._refusals:
            if refusal.verb in {"", "watch" if watch else "list"} and refusal.resource in {None, resource}:
                self._refusals.remove(refusal)
                raise StatusError(refusal.code, "", f"refused with {refusal.code}", refusal.retry_after)

    def _list(self, request: web.Request, resource: Resource) -> web.Response:
        query, namespace = request.query, "" if request.path == resource.path else "default"
        is_selected = api_store.selector(query)
        version, limit, token = query.get("resourceVersion", ""), int(query.get("limit") or 0), query.get("continue", "")
        if token and version not in {"", "0"}:
            raise StatusError(400, "BadRequest", "specifying resource version is not allowed when using continue")
        self._require_reached(_revision(query))
        if version not in {"", "0"} and limit and int(version) != self.store.revision:  # a limit asks for this exact version
            raise StatusError(410, "Expired", f"The resourceVersion for the provided list is too old: {version}")
        if version == "0":
            limit = 0  # the watch cache does not divide lists into pages
        page = self.store.page(
            resource,
            lambda item: is_selected(item) and namespace in {"", item["metadata"].get("namespace")},
            limit=limit,
            continue_token=token,
        )
        if self._drops(request):
            page |= {"items": [_without_managed_fields(item) for item in page["items"]]}
        return web.Response(content_type="application/json", body=_compact(page))

    def _drops(self, request: web.Request) -> bool:
        """Whether the answer to a request has objects without managed fields.

        The request lists media types; the first of them that the server knows determines the form of the answer.
        """
        return self.knows_drop and request.headers.get("Accept", "").startswith("application/json;drop=metadata.managedFields")

    def _require_reached(self, revision: int) -> None:
        if revision > self.store.revision:
            message = f"Timeout: Too large resource version: {revision}, current: {self.store.revision}"
            raise StatusError(504, "Timeout", message)

    async def _watch(self, request: web.Request, resource: Resource) -> web.StreamResponse:
        query = request.query
        matches = api_store.selector(query)
        drops = self._drops(request)
        first = self._first_lines(resource, matches, _revision(query), _bare if drops else lambda event: event)
        if not self.waits_for_revision:
            self._require_reached(_revision(query))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        assert isinstance(request.transport, asyncio.Transport)
        bookmarks = query.get("allowWatchBookmarks", "") in {"1", "true"}
        after = _revision(query)
        watcher = _Watcher(resource, matches, request.transport, bookmarks, after, drops)
        for item in first:
            watcher.queue.put_nowait(item)
        timeout_s = float(query.get("timeoutSeconds") or 3600)
        timer = asyncio.get_running_loop().call_later(timeout_s, watcher.queue.put_nowait, _End.NORMAL)
        async with self._open(watcher):
            try:
                await response.prepare(request)
                with contextlib.suppress(ConnectionResetError):
                    async for chunk in self._chunks(watcher):
                        await response.write(chunk)
            finally:
                timer.cancel()
        return response

    def _first_lines(
        self, resource: Resource, matches: api_store.Matches, revision: int, form: Callable[[Object], Object]
    ) -> Iterator[bytes]:
        """The first lines of a watch: the changes since a revision, or the current state if no revision is given."""
        if not revision:
            objects = [item for item in self.store.objects(resource) if matches(item)]
            return iter([line(form({"type": "ADDED", "object": item})) for item in objects])
        events = [change.event(matches) for change in self.store.changes_since(resource, revision)]
        return iter([line(form(event)) for event in events if event])

    @contextlib.asynccontextmanager
    async def _open(self, watcher: _Watcher) -> AsyncIterator[None]:
        # There must be no ``await`` between the reading of the history and this registration. Otherwise, a change could be lost.
        self._watchers.append(watcher)
        async with self._changed:
            self._changed.notify_all()
        try:
            yield
        finally:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    async def _chunks(self, watcher: _Watcher) -> AsyncIterator[bytes]:
        """Yields chunks until the watch ends; each chunk joins all lines that are queued."""
        while True:
            items = [await watcher.queue.get()]
            await self._flowing.wait()
            while not watcher.queue.empty():
                items.append(watcher.queue.get_nowait())
            text = b"".join(item for item in items if isinstance(item, bytes))
            if text:
                yield text
            if _End.CUT in items:
                watcher.transport.abort()
            if _End.CUT in items or _End.NORMAL in items:
                return


def _compact(body: object) -> bytes:
    """JSON without spaces, as an API server writes it."""
    return json.dumps(body, separators=(",", ":")).encode()


def _in_default(resource: Resource) -> str:
    """The API path of a resource's objects in the namespace ``default``."""
    parent, _, plural = resource.path.rpartition("/")
    return f"{parent}/namespaces/default/{plural}"


def _revision(query: Mapping[str, str]) -> int:
    text = query.get("resourceVersion") or "0"
    if not text.isdecimal():
        raise StatusError(400, "BadRequest", f"invalid resource version: {text}")
    return int(text)


class Certificates:
    """A certificate authority and a server certificate for 127.0.0.1, created by openssl in this directory."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.authority = directory / "ca.crt"
        self._certificate, self._key, authority_key = (directory / name for name in ("server.crt", "server.key", "ca.key"))
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        ca = ["-subj", "/CN=test authority", "-addext", "keyUsage=critical,keyCertSign"]
        leaf = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
        signed = ["-CA", str(self.authority), "-CAkey", str(authority_key)]
        run(*new, *ca, "-keyout", str(authority_key), "-out", str(self.authority))
        run(*new, *leaf, *signed, "-keyout", str(self._key), "-out", str(self._certificate))

    def server_context(self) -> ssl.SSLContext:
        """The TLS context of the server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, self._key)
        return context


def write_kubeconfig(
    path: pathlib.Path, server: str, *, token_file: str = "", authority: str = "", user: Object | None = None
) -> str:
    """Write a kubeconfig for this server; return its path. ``user`` replaces the whole user section of the kubeconfig."""
    cluster: Object = {"server": server} | ({"certificate-authority": authority} if authority else {})
    if user is None:
        user = {"tokenFile": token_file} if token_file else {}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)
