"""Creates the configured source of Services, EndpointSlices and the Node, waits for its first lists, and detects a silent source.

Rule 1: while a first list is missing, each page of the list counts as contact with the source. The wait for a long or slow list
continues while pages arrive, because starting a new list would only take longer.
Rule 2: ``run`` waits for the API server without a time limit, and logs that it waits. After a power failure, all nodes start
before their API server. If a process ended itself, its supervisor might delay the restart beyond the time when the API server
becomes available. ``run`` also waits after the statuses 401 and 403, because a token or a role may be created later than the
node. If a configuration cannot work, ``make`` ends the process before the wait.
Rule 3: a command gives up if it has no contact for ``PATIENCE_S``, because a person or a script waits for its answer.
Rule 4: a stale watch is no reason for a restart. A new process could not start without the API server, whereas this process
continues to serve the Services that it knows. A stale watch turns load balancers away only with ``--stale-watch-unhealthy``.
If this flag were the default, a failure of the API server would make all nodes turn load balancers away at the same time, and no
traffic would arrive any longer.
"""

import asyncio
import dataclasses
import enum
import pathlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.log import log
from ipvsproxy.model.kind import counted
from ipvsproxy.model.service import Event, ObjectKind, ServiceName
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api.targets import Targets

GATEWAY_TIMEOUT, TOO_LARGE = 504, "Too large resource version"
"""The status and message with which an API server answers if it has not reached the requested resource version (see the page
"Kubernetes API Concepts")."""

Deliver = Callable[[Sequence[Event]], None]
Post = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Creates an object on the API server. The arguments are the path of the request and the object. Raises ApiError."""


class Trouble(enum.StrEnum):
    """The reason why a list or watch starts again. The value is the label ``reason`` of ``ipvsproxy_watch_restarts_total``."""

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


class ApiError(Exception):
    """A request, or the stream of its response, has failed.

    ``retry_after_s`` is the pause that the server requests; 0 means that the server requests no pause.
    """

    def __init__(self, trouble: Trouble, message: str, retry_after_s: float = 0) -> None:
        super().__init__(message)
        self.trouble = trouble
        self.retry_after_s = retry_after_s

    @classmethod
    def of_status(cls, code: int, message: str, retry_after_s: float = 0) -> "ApiError":
        """The error for an HTTP status, or for the code in an ERROR event of a watch."""
        troubles = {401: Trouble.UNAUTHORIZED, 403: Trouble.FORBIDDEN, 410: Trouble.EXPIRED, 429: Trouble.THROTTLED}
        if code == GATEWAY_TIMEOUT and TOO_LARGE in message:
            return BehindError(f"status {code}: {message}", retry_after_s)
        other = Trouble.REFUSED if code < 500 else Trouble.SERVER_ERROR  # noqa: PLR2004 - the classes of HTTP status codes
        return cls(troubles.get(code, other), f"status {code}: {message}", retry_after_s)


OnRequest = Callable[[str, str, float, str], None]
"""Called after each request. The arguments are the request's host, the HTTP status (``<error>`` without an answer), the duration
in seconds, and the request's method."""


class BehindError(ApiError):
    """The server has not reached the requested version, because it was restored from a backup or lags behind."""

    def __init__(self, message: str, retry_after_s: float = 0) -> None:
        super().__init__(Trouble.EXPIRED, message, retry_after_s)


@dataclasses.dataclass(slots=True, kw_only=True)
class WatchStatus:
    """The status of the watch of one kind; its times come from ``WatchPace.now``.

    Only the reflector of the kind changes the status. ``connected`` says whether a watch is open now. ``listed_s`` is the time of
    the last complete list, ``contact_s`` the time of the last data from the server, and ``event_s`` the time of the last change.
    ``restarts`` counts the restarts by reason.
    """

    connected: bool = False
    listed_s: float | None = None
    contact_s: float | None = None
    event_s: float | None = None
    restarts: Counter[Trouble] = dataclasses.field(default_factory=Counter)


class Source(Protocol):
    """A source of Services, EndpointSlices and the Node.

    ``problem`` describes the part of the source that cannot be read now; empty if all parts can be read.
    """

    problem: str = ""

    async def run(self, deliver: Deliver) -> None:
        """Deliver events until this task is cancelled."""

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        """List a kind again at the given monotonic time or soon after, because its last list may have missed objects."""
        del kind, at_s

    async def targets(self, service: ServiceName | None = None) -> Targets:
        """Read the pods behind all endpoints, or behind the endpoints of one Service, to show the pods to people.

        Raises:
            ApiError: the pods could not be read.
        """

    def describe(self) -> str:
        """The location of the source and, if the source does not answer, its last problem."""

    @property
    def post(self) -> Post | None:
        """A function that creates an object in the source; None if the source cannot create objects."""
        return None

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        """The status of each watch; empty if the source has no watches."""
        return {}


async def make(config: Config, on_request: OnRequest = lambda *_: None) -> Source:
    """Create the configured source; a source that is an API server calls ``on_request`` after each request.

    This function imports only the module of the configured source, because a process needs only one source. Importing the client
    library takes 90 ms (600 ms on the test kernel).

    Raises:
        CannotStartError: the configured source cannot work.
    """
    if config.source.manifests:
        if not await asyncio.to_thread(pathlib.Path(config.source.manifests).is_dir):
            raise CannotStartError(f"--manifests: {config.source.manifests} is not a directory")
        from ipvsproxy.daemon.sources.directory import DirectorySource  # noqa: PLC0415 - slow import

        return DirectorySource(config.source.manifests)
    from ipvsproxy.daemon.sources.credentials import SourceError  # noqa: PLC0415
    from ipvsproxy.daemon.sources.watch import KubernetesSource  # noqa: PLC0415

    source = KubernetesSource(
        node_name=config.node_name,
        all_nodes=config.takes_direct_return,
        kubeconfig=config.source.kubeconfig,
        master=config.source.api_server,
        on_request=on_request,
    )
    try:
        await source.check()
    except SourceError as error:
        raise CannotStartError(error) from error
    return source


CHECK_INTERVAL_S = 5.0


@dataclasses.dataclass(eq=False)
class Staleness:
    """Detects stale watches.

    ``clock`` must be the clock from which the times in ``watches`` come. With a ``limit_s`` of 0, watches never count as stale.
    """

    watches: Callable[[], Mapping[ObjectKind, WatchStatus]]
    limit_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began_s = self.clock()
        self._logged: Collection[ObjectKind] = ()

    def stale(self) -> Collection[ObjectKind]:
        """The kinds whose watch is stale at the moment."""
        if not self.limit_s:
            return []
        oldest_s = self.clock() - self.limit_s
        return [kind for kind, one in self.watches().items() if (one.contact_s or self._began_s) <= oldest_s]

    def check(self) -> None:
        """Log the watches that have become stale since the last check, and the watches that are no longer stale."""
        stale = self.stale()
        for kind in stale:
            if kind not in self._logged:
                log.error("watch_stale", kind=kind.value, silent_for_s=round(self.limit_s), hint="see watch_failed")
        for kind in self._logged:
            if kind not in stale:
                log.info("watch_no_longer_stale", kind=kind.value)
        self._logged = stale

    async def run(self) -> None:
        """Check the watches until this task is cancelled."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)


PATIENCE_S = 20.0
"""The longest time in seconds to wait for contact with the API server while the first lists are incomplete. After this time,
``run`` logs that the API server is silent, and a command gives up."""
PROGRESS_S = 5.0
"""The pause between two lines about the progress of a command."""
REPEAT_S = 300.0
"""The pause between two log lines while the API server stays silent."""
ANSWERS = frozenset({Trouble.UNAUTHORIZED, Trouble.FORBIDDEN, Trouble.THROTTLED, Trouble.SERVER_ERROR})
"""The kinds of trouble which show that this node reaches the server, although the server does not send a list."""


async def wait_for_lists(
    store: Store,
    source: Source,
    *,
    silent: Callable[[str], object],
    waiting: Callable[[str], object] = lambda _: None,
    heal: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Wait until the first list of every kind is complete.

    Every ``PROGRESS_S``, ``waiting`` is called with a sentence that names the missing lists. After ``PATIENCE_S`` without
    contact, and then every ``REPEAT_S``, ``silent`` is called with a sentence that names the missing lists. The function
    ``silent`` may raise an exception. ``heal`` is called after ``silent``, to remove objects that may hide the API server from
    this node. The function ``heal`` is not called if the server has refused or postponed a request, because the server is not
    hidden then.
    """
    loop = asyncio.get_running_loop()
    last_contact_s = loop.time()
    progress_s, silent_s = last_contact_s + PROGRESS_S, last_contact_s + PATIENCE_S
    while not store.is_complete:
        missing = ", ".join(f"{kind}s" for kind in store.missing)
        contact_s = _last_contact_s(store, source)
        if contact_s > last_contact_s:
            last_contact_s, silent_s = contact_s, contact_s + PATIENCE_S
        if loop.time() >= silent_s:
            silent(f"no complete list of {missing} within {PATIENCE_S:.0f} s from {source.describe()}")
            if heal is not None and not any(ANSWERS & status.restarts.keys() for status in source.statuses.values()):
                await heal()
            silent_s = loop.time() + REPEAT_S
        if loop.time() >= progress_s:
            waiting(
                f"waiting for the list of {missing} from {source.describe()}; {counted(len(store.services), 'Service')} so far"
            )
            progress_s = loop.time() + PROGRESS_S
        await asyncio.sleep(max(0.0, min(progress_s, silent_s) - loop.time()))


def give_up(sentence: str) -> None:
    """End a command with the error ``sentence``, which says that the source is silent.

    Raises:
        CannotStartError: always.
    """
    raise CannotStartError(sentence)


def log_silence(sentence: str) -> None:
    """Log that the source is silent, and that the first lists of some kinds of objects are therefore still missing."""
    log.warning(
        "first_lists_missing", error=sentence, hint="the process waits, and programs nothing before these lists are complete"
    )


def _last_contact_s(store: Store, source: Source) -> float:
    """The monotonic time of the last data from the source about a kind without a first list; 0 if there was none."""
    statuses = source.statuses
    return max((statuses[kind].contact_s or 0 for kind in store.missing if kind in statuses), default=0)
