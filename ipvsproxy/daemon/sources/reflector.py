"""Lists and watches API objects of one kind: the requests, their order, and the reaction to each kind of failure.

Rule 1: a list is delivered as complete (``Listed``) only after its last page has been read.
Rule 2: a watch continues from the last resource version that was read. If the server cannot continue from that version (410),
everything is listed again. Everything is also listed again if a line of the watch could not be read, because the line may have
contained a change.
Rule 3: a server that was restored from a backup does not know the resource version that the reflector has read last. A restored
server answers 504, or the watch stays silent until the server's version reaches the reflector's version again. The watch receives
none of the changes that the restored server makes before that moment. To detect a restored server, the reflector queries the
server's version before it continues a watch that broke, or that ended without a line. (A working watch receives a bookmark once a
minute.)
Rule 4: a watch that is silent for ``LONGEST_SILENCE_S`` after its first bookmark counts as broken. Keepalive messages do not
count as data, because a proxy on the path may answer them in place of the server.
Rule 5: no request is repeated immediately, except after the regular end of a watch, and after a first 410. A broken watch begins
again at a random time within ``BROKEN_WATCH_SPREAD_S``, because the restart of an API server breaks the watches of all nodes.
Rule 6: lists are read from the watch cache of the server. The first list requests version 0, so the list may be old. Each later
list requests the last version that the reflector has read (even in an incomplete list) or a newer version. A list of the latest
state would need a quorum read of etcd. The reflector requests the latest state only if the server cannot give a list that is as
new as the reflector's version, or while a list is in doubt. A watch cache that lags behind cannot confirm a list that came from
the same cache.

The protocol is described on the page "Kubernetes API Concepts". Where the reflector of client-go has an interval or a limit, this
module uses the same value.
"""

import asyncio
import contextlib
import dataclasses
import math
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, assert_never

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.sources.queries import ANY_VERSION, LATEST, PAGE_ITEMS, Resource
from ipvsproxy.daemon.sources.source import ApiError, BehindError, Deliver, Trouble, WatchStatus
from ipvsproxy.model.service import Event, Gone, Listed, ListStarted, ObjectKey, ObjectKind, Put, Rejected
from ipvsproxy.translate.api import decode

LONGEST_LINE_BYTES = 64 << 20
MOST_DIGITS = 20
"""The largest number of digits of a resource version, which is an unsigned 64-bit number."""
FIRST_DELAY_S = 0.8
LONGEST_DELAY_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
CALM_S = 60.0
"""If the previous list ended more than this many seconds ago, the delays before new lists start again with the shortest delay."""
SHORTEST_WATCH_S = 1.0
"""A watch that the server ends without an error within this many seconds counts as failed, so that a pause follows.
Without the pause, the next watch would probably end as fast."""
LONGEST_SILENCE_S = 150.0
"""A watch that has received a bookmark counts as broken after a silence of this number of seconds.

A bookmark comes once a minute: two may be late or lost, but not three.
"""
BROKEN_WATCH_SPREAD_S = 4.0
"""The longest random delay, in seconds, that is added to the first back-off of a broken watch. The delay spreads the requests of
all nodes if a server breaks all watches at once."""
CONFIRMATION_SPREAD_S = 45.0
"""If all nodes doubt the same list, they spread their requests for a second list over this many seconds."""

MAY_BE_ANOTHER = frozenset({Trouble.DROPPED, Trouble.SILENT, Trouble.UNREACHABLE, Trouble.SERVER_ERROR})
"""The kinds of trouble after which the server may have been restored from a backup."""
LIST_AGAIN = frozenset({Trouble.EXPIRED, Trouble.GARBLED, Trouble.REFUSED, Trouble.DOUBTED})
"""The kinds of trouble after which a watch cannot continue from its last version."""


class LineBuffer:
    """Collects chunks of data, and returns the lines that each chunk completes."""

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self.pending = bytearray()
        """The received part of an incomplete line."""
        self._longest_bytes = longest_bytes

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that a chunk of data completes, without line ends and without empty lines.

        Raises:
            ApiError: a line is too long. The buffer must not be used after this error.
        """
        head, *tail = chunk.split(b"\n")
        self.pending += head
        if len(self.pending) > self._longest_bytes:
            raise ApiError(Trouble.GARBLED, f"a line of the watch is longer than {self._longest_bytes} bytes")
        if not tail:
            return []
        *lines, rest = bytes(self.pending), *tail
        self.pending = bytearray(rest)
        return [line for line in lines if line]


def number(version: str) -> int:
    """A resource version as a number for comparisons (KEP-5504).

    The result is 0 for a version that is not an integer, because such a version cannot be compared.
    """
    return int(version) if version.isdecimal() and len(version) <= MOST_DIGITS else 0


class ApiConnection(Protocol):
    """An authenticated connection to an API server.

    ApiError is the only exception that the methods ``body`` and ``stream`` raise.
    """

    def body(self, path: str) -> AsyncGenerator[bytes, None]:
        """The body of a response, in chunks as they arrive."""

    def stream(self, path: str, idle_s: float) -> AsyncGenerator[bytes, None]:
        """The body of an endless response, in chunks as they arrive.

        An empty first chunk means that the server has accepted the request. Raises ApiError with SILENT if no data arrives for
        ``idle_s`` seconds.
        """


Connect = Callable[[], contextlib.AbstractAsyncContextManager[ApiConnection]]
"""Makes a connection with newly read credentials; raises ApiError."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WatchPace:
    """The clock, the sleep function and the random numbers of a reflector, and the duration of its watches.

    The server is requested to end each watch after a random time between ``shortest_watch_s`` and ``longest_watch_s``. A watch
    that is still silent ``grace_s`` seconds after its requested end counts as dead.
    """

    shortest_watch_s: float = 300
    longest_watch_s: float = 600
    grace_s: float = 30
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    dice: random.Random = dataclasses.field(default_factory=random.Random)


class WatchObserver(Protocol):
    """Observes the lists and watches of reflectors, for the log and for metrics."""

    def listed(self, kind: ObjectKind, objects: int) -> None:
        """Called when a list has been read completely."""

    def watching(self, kind: ObjectKind) -> None:
        """Called when the server has accepted a watch."""

    def restarting(self, kind: ObjectKind, error: ApiError, delay_s: float) -> None:
        """Called when a list or watch has failed or has ended. The list or watch will start again after the delay."""


class Reflector:
    """Lists and watches the objects of one kind."""

    def __init__(self, kind: ObjectKind, resource: Resource, connect: Connect, observer: WatchObserver, pace: WatchPace) -> None:
        self.status = WatchStatus()
        self._kind = kind
        self._resource = resource
        self._connect = connect
        self._observer = observer
        self._pace = pace
        self._version = ""
        self._must_list = True
        self._needs_latest = False
        self._needs_one_page = False
        self._is_known_there = True
        self._gets_bookmarks = False
        self._asked_for_s = math.inf
        self._list_again_at_s = math.inf
        self._floor = 0
        """The resource version up to which all changes have arrived. It is set when a watch begins, and by each bookmark."""
        self._newest: dict[ObjectKey, int] = {}
        """The version of the last change of each object that has changed since ``_floor``."""
        self._retries = timing.Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=pace.dice)
        # Repeated lists have a separate back-off. A successful list resets the back-off of failures, but lists must not be
        # repeated in a tight loop.
        self._repeated_lists = timing.Backoff(first_s=FIRST_DELAY_S, longest_s=LONGEST_DELAY_S, dice=pace.dice)

    def list_again(self, at_s: float) -> None:
        """Request another list at the time ``at_s`` on the clock ``WatchPace.now``, or up to ``CONFIRMATION_SPREAD_S`` later.

        The next completed list fulfils the request, even if this list began before the request. If this next list is doubted as
        well, call this method again.
        """
        if at_s != self._asked_for_s or self._list_again_at_s == math.inf:
            self._asked_for_s = at_s
            self._list_again_at_s = at_s + self._pace.dice.uniform(0, CONFIRMATION_SPREAD_S)

    async def list_and_watch(self, deliver: Deliver) -> None:
        """Make one attempt: read a list if a list is needed, watch until the watch ends or fails, and pause.

        Each call of ``deliver`` gets the events from one part of a list, or from all watch lines that arrived together.
        """
        try:
            if self._must_list:
                await self._list(deliver)
            await self._watch(deliver)
        except ApiError as error:
            # The random delay is added to the server's delay, because the server sends the same delay to all clients.
            delay_s = self._delay_s(error) + min(error.retry_after_s, LONGEST_RETRY_AFTER_S)
            self.status.connected = False
            self.status.restarts[error.trouble] += 1
            self._observer.restarting(self._kind, error, delay_s)
            if delay_s:
                await self._pace.sleep(delay_s)

    def _delay_s(self, error: ApiError) -> float:
        """The pause between an error and the next attempt. Also decides whether the next attempt begins with a list."""
        trouble, was_listing, needed_latest = error.trouble, self._must_list, self._needs_latest
        is_expired = trouble is Trouble.EXPIRED
        self._is_known_there &= trouble not in MAY_BE_ANOTHER
        self._must_list |= trouble in LIST_AGAIN
        # After a 410 in a watch, a list that is not older than the reflector's version is enough. A 410 in a list means either
        # that the server has not reached the reflector's version, or that the continue token expired before the last page.
        self._needs_one_page |= was_listing and is_expired
        self._needs_latest |= isinstance(error, BehindError) or trouble is Trouble.REFUSED or self._needs_one_page
        if was_listing:
            return 0 if is_expired and not needed_latest else self._retries.next_s()
        if self._must_list:
            if self.status.listed_s is None or self._pace.now() - self.status.listed_s > CALM_S:
                self._repeated_lists.reset()
            delay_s = self._repeated_lists.next_s()
            return 0 if is_expired and self._repeated_lists.attempts == 1 else delay_s
        if trouble is Trouble.ENDED:
            return 0
        is_broken = self.status.connected and trouble in MAY_BE_ANOTHER
        return self._retries.next_s() + (self._pace.dice.uniform(0, BROKEN_WATCH_SPREAD_S) if is_broken else 0)

    async def _list(self, deliver: Deliver) -> None:
        """Read a whole list.

        The event that ends the list has the keys of all objects, including objects that cannot be parsed.
        """
        is_doubted = self._list_again_at_s < math.inf
        version = LATEST if self._needs_latest or is_doubted else self._version or ANY_VERSION
        # A list in one page needs no continue token, so no continue token can expire.
        limit = PAGE_ITEMS if version in {LATEST, ANY_VERSION} and not self._needs_one_page else 0
        keys: set[ObjectKey] = set()
        begins: tuple[Event, ...] = (ListStarted(self._kind),)
        token, has_more = "", True
        async with self._connect() as connection:
            while has_more:
                query = self._resource.list_query("" if token else version, limit=limit, continue_token=token)
                async with contextlib.aclosing(self._parts(connection, query)) as parts:
                    async for part in parts:
                        # The version is set before the list is complete: if the list breaks off, the next list must not be older
                        # than the delivered events.
                        self._version, token = part.resource_version, part.continue_token
                        self.status.contact_s = self._pace.now()
                        keys.update(event.key for event in part.events if event.key)
                        if part.events:
                            deliver((*begins, *part.events))
                            begins = ()
                self._is_known_there = True
                has_more = bool(token)
        self._must_list = self._needs_latest = self._needs_one_page = False
        self._retries.reset()
        self.status.listed_s = self._pace.now()
        self._observer.listed(self._kind, len(keys))
        self._list_again_at_s = math.inf  # the delivery may request a list, so the old request is deleted first
        deliver((Listed(self._kind, keys),))

    async def _parts(self, connection: ApiConnection, query: str) -> AsyncGenerator[decode.ListPage, None]:
        """Read one answer in parts, each of ``PAGE_ITEMS`` objects or a few more.

        The last part, which may be empty, has the continuation token.
        """
        reader = decode.ListReader(self._kind)
        events: list[Put | Rejected] = []
        async with contextlib.aclosing(connection.body(query)) as pieces:
            async for piece in pieces:
                events += reader.feed(piece)
                if len(events) >= PAGE_ITEMS:
                    yield decode.ListPage(tuple(events), reader.resource_version, "")
                    events.clear()
                    await asyncio.sleep(0)
        try:
            rest = reader.finish()
        except decode.UndecodableError as error:
            raise ApiError(Trouble.GARBLED, str(error)) from error
        yield rest._replace(events=(*events, *rest.events))

    async def _watch(self, deliver: Deliver) -> None:
        """Watch once. Always raises ApiError when the watch ends; ENDED means that the server ended the watch normally."""
        timeout_s = self._pace.dice.uniform(self._pace.shortest_watch_s, self._pace.longest_watch_s)
        query = self._resource.watch_query(self._version, timeout_s)
        self._floor, self._newest = number(self._version), {}
        lines = LineBuffer()
        if not self._is_known_there:
            await self._require_known()
        began_s = self._pace.now()
        async with (
            self._connect() as connection,
            contextlib.aclosing(connection.stream(query, timeout_s + self._pace.grace_s)) as chunks,
        ):
            try:
                async with asyncio.timeout(None) as limit:
                    self._bound(limit)
                    async for chunk in chunks:
                        self._note_contact()
                        self._read(lines, chunk, deliver)
                        self._bound(limit)
            except TimeoutError as error:
                raise self._out_of_time() from error
        if lines.pending:
            raise ApiError(Trouble.DROPPED, "the watch ended in the middle of a line")
        if self._pace.now() - began_s < SHORTEST_WATCH_S:
            raise ApiError(Trouble.DROPPED, "the watch was ended as soon as it had begun")
        raise ApiError(Trouble.ENDED, "the watch has reached its longest time")

    @property
    def _silent_at_s(self) -> float:
        is_bounded = self._gets_bookmarks and self.status.connected
        return (self.status.contact_s or 0) + LONGEST_SILENCE_S if is_bounded else math.inf

    def _bound(self, limit: asyncio.Timeout) -> None:
        """End the watch when a list is due, or when the longest allowed silence is over, whichever comes first."""
        end_s = min(self._list_again_at_s, self._silent_at_s)
        if end_s < math.inf:
            limit.reschedule(asyncio.get_running_loop().time() + end_s - self._pace.now())

    def _out_of_time(self) -> ApiError:
        if self._list_again_at_s <= self._silent_at_s:
            return ApiError(Trouble.DOUBTED, "the last list lacked too many objects, and is doubted")
        return ApiError(Trouble.SILENT, f"nothing was received for {LONGEST_SILENCE_S:.0f} s, and bookmarks come once a minute")

    async def _require_known(self) -> None:
        """Raise ApiError if the server does not answer.

        If the resource version of the server is older than the reflector's, the ApiError has the ``trouble`` EXPIRED.
        """
        query = self._resource.probe_query(self._version)
        async with self._connect() as connection, contextlib.aclosing(self._parts(connection, query)) as parts:
            version = [part.resource_version async for part in parts][-1]
        if number(version) < number(self._version):
            raise BehindError(f"the server is at version {version} again, after {self._version}")
        self._is_known_there = True

    def _note_contact(self) -> None:
        self.status.contact_s = self._pace.now()
        if not self.status.connected:
            self.status.connected = True
            self._is_known_there = False
            self._observer.watching(self._kind)

    def _read(self, lines: LineBuffer, chunk: bytes, deliver: Deliver) -> None:
        """Deliver the lines that a chunk completes.

        If a line ends the watch, ApiError is raised, and the lines after that line are not delivered.
        """
        events: list[Event] = []
        try:
            for line in lines.feed(chunk):
                self._read_line(line, events)
                self._is_known_there = True
                self._retries.reset()
        except decode.UndecodableError as error:
            raise ApiError(Trouble.GARBLED, str(error)) from error
        finally:
            if events:
                self.status.event_s = self.status.contact_s
                deliver(events)

    def _read_line(self, line: bytes, events: list[Event]) -> None:
        read = decode.decode_watch_line(self._kind, line)
        match read.event:
            case None:
                if 0 < number(read.resource_version) < number(self._version):
                    raise BehindError(f"a bookmark of version {read.resource_version}, after {self._version}")
                self._gets_bookmarks = True
                self._version = read.resource_version or self._version
                self._floor, self._newest = number(self._version), {}
            case decode.ServerError(code, message):
                raise ApiError.of_status(code, message)
            case Put() | Gone() | Rejected() as event:
                if event.key is None or self._is_new(event.key, number(read.resource_version)):
                    self._version = read.resource_version or self._version
                    events.append(event)
            case never:
                assert_never(never)

    def _is_new(self, key: ObjectKey, version: int) -> bool:
        """Whether a change is newer than all earlier changes of the same object.

        An API server to which the watch has just moved may send changes again or late. A change whose version cannot be compared
        counts as new.
        """
        if 0 < version <= self._newest.get(key, self._floor):
            return False
        if version:
            self._newest[key] = version
        return True
