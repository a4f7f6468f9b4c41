"""List and watch of one kind of API objects: what is asked, in which order, and what follows each kind of trouble.

Rule 1: a list is told as complete (``Listed``) only when its last page has been read.
Rule 2: a watch goes on from the last resource version that was read. Where the server cannot do that (410), or a line
could not be read and so a change was missed, everything is listed again.
Rule 3: a server that was restored from a backup does not know the version that we have. It says so (504), or has the watch
wait without a word until it has come that far again, and what changes meanwhile is never told. So where a watch broke off, or
lasted its time without a line (bookmarks come once a minute), the server is asked first how far it is.
Rule 4: once bookmarks have come, a watch that is silent for ``LONGEST_SILENCE_S`` is broken, whatever keepalives say: a proxy
on the way may answer them in the server's place.
Rule 5: nothing is tried again at once, except after the ordinary end of a watch and the first 410 in a while. Watches that broke
off together are begun anew over ``BROKEN_WATCH_SPREAD_S``: all nodes lose theirs when an API server is restarted.
Rule 6: lists come out of the server's watch cache. The first one names version 0, and so may be old; later ones name the last
version that was read, also of a list that broke off, and are not older. The latest state costs a quorum read of etcd. It is asked
for where the server cannot list from our version on, and while a list is doubted: a cache that is behind cannot confirm itself.

The rules of the wire are those of the page "Kubernetes API Concepts"; figures are those of client-go's reflector where it has
them.
"""

import asyncio
import contextlib
import dataclasses
import enum
import math
import random
import time
import urllib.parse
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, assert_never

from ipvsproxy.daemon.base import backoff
from ipvsproxy.daemon.sources import stream
from ipvsproxy.model.service import Event, Gone, Listed, Listing, ObjectKey, ObjectKind, Put, Rejected
from ipvsproxy.translate import decode, list_reader

PAGE_ITEMS = 500
"""Of a page, and of a part of a list out of the watch cache, which may come as one page, whatever was asked for."""
ANY_VERSION, LATEST = "0", ""
FIRST_DELAY_S = 0.8
LONGEST_DELAY_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
CALM_S = 60.0
"""A list that must be repeated later than this after it ended is no part of a series of failures."""
SHORTEST_WATCH_S = 1.0
"""A watch that ends in order before this counts as failed: without a pause the next one would end as fast."""
LONGEST_SILENCE_S = 150.0
"""Of a watch, once bookmarks have come, of which the API server sends one a minute: two may be late or lost, not three."""
BROKEN_WATCH_SPREAD_S = 4.0
"""The kinds of all nodes come back over this time to a server that broke their watches off, after the first back-off of each."""
CONFIRMATION_SPREAD_S = 45.0
"""Where all nodes doubt the same list, their second lists are spread over this time."""
GATEWAY_TIMEOUT, TOO_LARGE = 504, "Too large resource version"
"""How a server says that it has not come as far as the version that it is asked for (page "Kubernetes API Concepts")."""

Deliver = Callable[[Sequence[Event]], None]
Post = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Asks the API server to create an object, given its path and its body. Raises ApiError."""


class Trouble(enum.StrEnum):
    """Why a list or watch had to be started again; the label of the metric."""

    ENDED = "ended"
    EXPIRED = "expired"
    DROPPED = "dropped"
    SILENT = "silent"
    GARBLED = "garbled"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    THROTTLED = "throttled"
    REFUSED = "refused"
    SERVER_ERROR = "server_error"
    UNREACHABLE = "unreachable"
    CREDENTIALS = "credentials"
    DOUBTED = "doubted"


MAY_BE_ANOTHER = frozenset({Trouble.DROPPED, Trouble.SILENT, Trouble.UNREACHABLE, Trouble.SERVER_ERROR})
"""After these the server may have been restored meanwhile."""
LIST_AGAIN = frozenset({Trouble.EXPIRED, Trouble.GARBLED, Trouble.REFUSED, Trouble.DOUBTED})
"""After these a watch cannot go on from where it was."""


class ApiError(Exception):
    """A request failed, or the stream that it opened. ``retry_after_s`` is what the server asked for, 0 if nothing."""

    def __init__(self, trouble: Trouble, message: str, retry_after_s: float = 0) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.retry_after_s = retry_after_s

    @classmethod
    def of_status(cls, code: int, message: str, retry_after_s: float = 0) -> "ApiError":
        """The error for an HTTP status, or for the code of an ERROR event."""
        troubles = {401: Trouble.UNAUTHORIZED, 403: Trouble.FORBIDDEN, 410: Trouble.EXPIRED, 429: Trouble.THROTTLED}
        if code == GATEWAY_TIMEOUT and TOO_LARGE in message:
            return BehindError(f"status {code}: {message}", retry_after_s)
        other = Trouble.REFUSED if code < 500 else Trouble.SERVER_ERROR  # noqa: PLR2004  # HTTP's classes of status
        return cls(troubles.get(code, other), f"status {code}: {message}", retry_after_s)


class BehindError(ApiError):
    """The server has not come as far as the version that it is asked for: it was restored, or it is late."""

    def __init__(self, message: str, retry_after_s: float = 0) -> None:
        super().__init__(Trouble.EXPIRED, message, retry_after_s)


class Connection(Protocol):
    """An authenticated way to the API server. Both methods raise ApiError, and nothing else."""

    def body(self, path: str) -> AsyncGenerator[bytes, None]:
        """The body of an answer, in pieces as it arrives."""

    def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        """A body that goes on, as it arrives; an empty chunk says that the request was accepted.

        SILENT after ``idle_s`` without data.
        """


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Connection]]
"""Makes a connection with credentials read at that moment; raises ApiError."""


class Resource(NamedTuple):
    """Where the objects of a kind are, and which of them are ours."""

    path: str
    label_selector: str = ""
    field_selector: str = ""

    def list_query(self, version: str, *, limit: int, continue_token: str = "") -> str:
        """One page; ``limit`` 0 means all.

        ``version`` is ``LATEST``, ``ANY_VERSION``, or one that the answer must not be older than: that one without a limit, with
        which the server would take it for the exact version that is asked for.
        """
        return self._query({"limit": str(limit) if limit else "", "continue": continue_token, "resourceVersion": version})

    def probe_query(self, version: str) -> str:
        """One object at most, out of the watch cache, by a server that has come as far as this version.

        By namespace and name, as far as the kind has them, the cache finds it without a look at others. It need not exist.
        """
        if not self.field_selector.startswith("metadata.name="):
            parent, _, plural = self.path.rpartition("/")
            one = Resource(f"{parent}/namespaces/default/{plural}", field_selector="metadata.name=kubernetes")
            return one.list_query(version, limit=0)
        return self.list_query(version, limit=0)

    def watch_query(self, version: str, timeout_s: float) -> str:
        """All changes after this version. The server is asked to end the watch after ``timeout_s``."""
        timeout = str(max(1, round(timeout_s)))
        return self._query({"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version, "timeoutSeconds": timeout})

    def _query(self, parameters: Mapping[str, str]) -> str:
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        given = {name: value for name, value in {**selectors, **parameters}.items() if value}
        return f"{self.path}?{urllib.parse.urlencode(given)}"


def resources(node_name: str) -> Mapping[ObjectKind, Resource]:
    """What a node's proxy watches, with the selectors of kube-proxy (``cmd/kube-proxy/app/server.go``)."""
    return {
        ObjectKind.SERVICE: Resource("/api/v1/services", "!service.kubernetes.io/service-proxy-name", "spec.clusterIP!=None"),
        ObjectKind.ENDPOINT_SLICE: Resource("/apis/discovery.k8s.io/v1/endpointslices", "!service.kubernetes.io/headless"),
        ObjectKind.NODE: Resource("/api/v1/nodes", field_selector=f"metadata.name={node_name}"),
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Time, waiting and chance, and how long watches last.

    The server is asked to end a watch after a random time between ``shortest_watch_s`` and ``longest_watch_s``. One that was
    silent for that long and ``grace_s`` more is dead: even without changes it should have ended.
    """

    shortest_watch_s: float = 300
    longest_watch_s: float = 600
    grace_s: float = 30
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    dice: random.Random = dataclasses.field(default_factory=random.Random)


@dataclasses.dataclass(slots=True, kw_only=True)
class WatchStatus:
    """How the watch of one kind is doing, in times of ``Pace.now``. Only its reflector writes it.

    ``connected``: a watch is open. ``listed_s``: when a list was last complete. ``contact_s``: when anything last came from
    the server. ``event_s``: when a change last came. ``restarts`` counts by reason.
    """

    connected: bool = False
    listed_s: float | None = None
    contact_s: float | None = None
    event_s: float | None = None
    restarts: dict[Trouble, int] = dataclasses.field(default_factory=dict)


class Observer(Protocol):
    """Who is told how it goes, for log and metrics."""

    def listed(self, kind: ObjectKind, objects: int) -> None:
        """A list was read completely."""

    def watching(self, kind: ObjectKind) -> None:
        """A watch was accepted."""

    def restarting(self, kind: ObjectKind, error: ApiError, delay_s: float) -> None:
        """A list or watch failed or ended; it is tried again after the delay."""


class Reflector:
    """One kind's list and watches."""

    def __init__(self, kind: ObjectKind, resource: Resource, connect: Connect, observer: Observer, pace: Pace) -> None:
        self.status = WatchStatus()
        self._kind = kind
        self._resource = resource
        self._connect = connect
        self._observer = observer
        self._pace = pace
        self._version = ""
        self._is_known_there = True
        self._needs_latest = False
        self._was_open = False  # the watch that ended last
        self._gets_bookmarks = False
        self._heard_s = -math.inf  # in the watch that is open, or when that was begun
        self._asked_for_s = math.inf
        self._list_again_at_s = math.inf
        self._freshness = stream.Freshness()
        self._retries = backoff.Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=pace.dice)
        # A sequence of its own: a list that succeeds resets the other one, and lists are what must not come in a tight loop.
        self._repeated_lists = backoff.Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=pace.dice)

    def list_again(self, at_s: float) -> None:
        """List once more, at this time (of ``Pace.now``) or at most ``CONFIRMATION_SPREAD_S`` later.

        A list that ends serves the request, whenever it began. While that list leaves the doubt, the request is to be made again.
        """
        if at_s != self._asked_for_s or self._list_again_at_s == math.inf:
            self._asked_for_s = at_s
            self._list_again_at_s = at_s + self._pace.dice.uniform(0, CONFIRMATION_SPREAD_S)

    async def list_and_watch(self, deliver: Deliver) -> None:
        """One list, then watches from it. Returns, after a pause, when the list has failed or must be repeated.

        Events are delivered as they are read: page by page, and all lines that arrived together as one batch.
        """
        try:
            await self._list(deliver)
        except ApiError as error:
            self._needs_latest |= _needs_latest(error)
            await self._pause(error, self._retries.next_s())
            return
        while True:
            self._was_open = False
            try:
                await self._watch(deliver)
            except ApiError as error:
                self._is_known_there &= error.trouble not in MAY_BE_ANOTHER
                if error.trouble in LIST_AGAIN:
                    self._needs_latest |= _needs_latest(error)
                    await self._pause(error, self._delay_before_list_s(error.trouble))
                    return
                await self._pause(error, self._delay_before_watch_s(error.trouble))

    async def _list(self, deliver: Deliver) -> None:
        async with self._connect() as connection:
            try:
                is_doubted = self._list_again_at_s < math.inf
                version = LATEST if self._needs_latest or is_doubted else self._version or ANY_VERSION
                limit = PAGE_ITEMS if version in {LATEST, ANY_VERSION} else 0
                keys = await self._pages(connection, version, limit, deliver)
            except ApiError as error:
                if error.trouble is not Trouble.EXPIRED:
                    raise
                # The server is not as far as our version, or the token died before the last page: in one piece none is needed.
                self._needs_latest = True
                await self._pause(error, 0)
                keys = await self._pages(connection, LATEST, 0, deliver)
        self._needs_latest = False
        self._retries.reset()
        self.status.listed_s = self._pace.now()
        self._observer.listed(self._kind, len(keys))
        self._list_again_at_s = math.inf  # Before the delivery, in which another list may be asked for.
        deliver((Listed(self._kind, keys),))

    async def _pages(self, connection: Connection, version: str, limit: int, deliver: Deliver) -> frozenset[ObjectKey]:
        """Reads a whole list; the keys of all that it holds, also of objects that cannot be read."""
        keys: set[ObjectKey] = set()
        begins: tuple[Event, ...] = (Listing(self._kind),)

        def deliver_some(events: Sequence[Put | Rejected], version: str) -> None:
            nonlocal begins
            self._version = version  # before the list is complete: should it break off, the next one must not take these back
            self.status.contact_s = self._pace.now()
            keys.update(event.key for event in events if event.key)
            deliver((*begins, *events))
            begins = ()

        token = ""
        while True:
            query = self._resource.list_query("" if token else version, limit=limit, continue_token=token)
            page = await self._page(connection, query, deliver_some)
            self.status.contact_s = self._pace.now()
            self._version, token, self._is_known_there = page.resource_version, page.continue_token, True
            if not token:
                return frozenset(keys)

    async def _page(
        self, connection: Connection, query: str, deliver: Callable[[Sequence[Put | Rejected], str], None]
    ) -> decode.ListPage:
        """Reads one answer, and delivers items in parts of ``PAGE_ITEMS`` or a little more, with the version of the list."""
        reader = list_reader.ListReader(self._kind)
        events: list[Put | Rejected] = []
        async with contextlib.aclosing(connection.body(query)) as pieces:
            async for piece in pieces:
                events += reader.feed(piece)
                if len(events) >= PAGE_ITEMS:
                    deliver(events, reader.resource_version)
                    events = []
                    await asyncio.sleep(0)
        try:
            page = reader.finish()
        except decode.UndecodableError as error:
            raise ApiError(Trouble.GARBLED, str(error)) from error
        events += page.events
        if events:
            deliver(events, page.resource_version)
        return page

    async def _watch(self, deliver: Deliver) -> None:
        """One watch. Always ends with an ApiError: ENDED if the server ended it in order."""
        timeout_s = self._pace.dice.uniform(self._pace.shortest_watch_s, self._pace.longest_watch_s)
        query = self._resource.watch_query(self._version, timeout_s)
        self._freshness.all_told(self._version)
        lines = stream.LineBuffer()
        if not self._is_known_there:
            async with self._connect() as connection:
                await self._require_known(connection)
        self._heard_s = began_s = self._pace.now()
        async with (
            self._connect() as connection,
            contextlib.aclosing(connection.stream(query, timeout_s + self._pace.grace_s)) as chunks,
        ):
            try:
                async with asyncio.timeout(None) as limit:
                    self._bound(limit)
                    async for chunk in chunks:
                        self._contact()
                        self._read(lines, chunk, deliver)
                        self._bound(limit)
            except TimeoutError as error:
                raise self._out_of_time() from error
            finally:
                self.status.connected = False
        if lines.pending_bytes:
            raise ApiError(Trouble.DROPPED, "the watch ended in the middle of a line")
        if self._pace.now() - began_s < SHORTEST_WATCH_S:
            raise ApiError(Trouble.DROPPED, "the watch was ended as soon as it had begun")
        raise ApiError(Trouble.ENDED, "the watch has lasted its time")

    @property
    def _silent_at_s(self) -> float:
        return self._heard_s + LONGEST_SILENCE_S if self._gets_bookmarks else math.inf

    def _bound(self, limit: asyncio.Timeout) -> None:
        """Have the watch end when a list is due, or when it has been silent for too long from now on."""
        end_s = min(self._list_again_at_s, self._silent_at_s)
        if end_s < math.inf:
            limit.reschedule(asyncio.get_running_loop().time() + end_s - self._pace.now())

    def _out_of_time(self) -> ApiError:
        if self._list_again_at_s <= self._silent_at_s:
            return ApiError(Trouble.DOUBTED, "the last list lacked too much to be believed")
        return ApiError(Trouble.SILENT, f"nothing was received for {LONGEST_SILENCE_S:.0f} s, and bookmarks come once a minute")

    async def _require_known(self, connection: Connection) -> None:
        """Raises ApiError: EXPIRED if the server has not come as far as our version."""
        page = await self._page(connection, self._resource.probe_query(self._version), lambda _, __: None)
        if stream.number(page.resource_version) < stream.number(self._version):
            raise BehindError(f"the server is at version {page.resource_version} again, after {self._version}")
        self._is_known_there = True

    def _contact(self) -> None:
        self.status.contact_s = self._heard_s = self._pace.now()
        if not self.status.connected:
            self.status.connected = self._was_open = True
            self._is_known_there = False
            self._observer.watching(self._kind)

    def _read(self, lines: stream.LineBuffer, chunk: bytes, deliver: Deliver) -> None:
        """Delivers what the chunk completes, up to the first line that ends the watch; raises ApiError for that."""
        events: list[Event] = []
        try:
            for line in lines.feed(chunk):
                self._read_line(line, events)
                self._is_known_there = True
                self._retries.reset()
        except (stream.LineTooLongError, decode.UndecodableError) as error:
            raise ApiError(Trouble.GARBLED, str(error)) from error
        finally:
            if events:
                self.status.event_s = self.status.contact_s
                deliver(events)

    def _read_line(self, line: bytes, events: list[Event]) -> None:
        read = decode.decode_watch_line(self._kind, line)
        match read.event:
            case decode.Bookmark():
                if 0 < stream.number(read.resource_version) < stream.number(self._version):
                    raise BehindError(f"a bookmark of version {read.resource_version}, after {self._version}")
                self._gets_bookmarks = True
                self._version = read.resource_version or self._version
                self._freshness.all_told(self._version)
            case decode.Expired(message):
                raise ApiError(Trouble.EXPIRED, message)
            case decode.ServerError(code, message):
                raise ApiError.of_status(code, message)
            case Put() | Gone() | Rejected() as event:
                if event.key is None or self._freshness.is_news(event.key, read.resource_version):
                    self._version = read.resource_version or self._version
                    events.append(event)
            case never:
                assert_never(never)

    def _delay_before_watch_s(self, trouble: Trouble) -> float:
        if trouble is Trouble.ENDED:
            return 0
        is_broken = self._was_open and trouble in MAY_BE_ANOTHER
        return self._retries.next_s() + (self._pace.dice.uniform(0, BROKEN_WATCH_SPREAD_S) if is_broken else 0)

    def _delay_before_list_s(self, trouble: Trouble) -> float:
        if self.status.listed_s is None or self._pace.now() - self.status.listed_s > CALM_S:
            self._repeated_lists.reset()
        delay_s = self._repeated_lists.next_s()
        return 0 if trouble is Trouble.EXPIRED and self._repeated_lists.attempts == 1 else delay_s

    async def _pause(self, error: ApiError, delay_s: float) -> None:
        self.status.restarts[error.trouble] = self.status.restarts.get(error.trouble, 0) + 1
        # Added, not the greater of both: all clients are asked to come back after the same second.
        delay_s += min(error.retry_after_s, LONGEST_RETRY_AFTER_S)
        self._observer.restarting(self._kind, error, delay_s)
        if delay_s:
            await self._pace.sleep(delay_s)


def _needs_latest(error: ApiError) -> bool:
    """Whether the next list must be the latest one. After a 410 one that is not older than our version will do."""
    return isinstance(error, BehindError) or error.trouble in {Trouble.REFUSED, Trouble.DOUBTED}
