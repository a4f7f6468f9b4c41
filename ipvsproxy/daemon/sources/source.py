"""The configured source of Services, EndpointSlices and the Node; and whether it has been silent for too long.

A stale watch is no reason for a restart: a new process could not begin without the API server, while this one serves the Services
that it knows. Load balancers are turned away only if the operator has chosen that: without an API server, all nodes would turn
them away at once, and an outage of the control plane would become an outage of the traffic.
"""

import asyncio
import pathlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import structlog

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base.errors import CannotStartError
from ipvsproxy.daemon.sources.reflector import Post, Trouble, WatchStatus
from ipvsproxy.model.service import Event, ObjectKind
from ipvsproxy.translate.api.targets import Targets


class Source(Protocol):
    """A source of Services, EndpointSlices and the Node.

    ``problem`` says what of it cannot be read now, although it is at hand; empty if that is nothing.
    """

    problem: str

    async def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Deliver events for ever."""

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        """List a kind once more at this time (of a monotonic clock), or soon after."""

    async def targets(self) -> Targets:
        """The pods behind all endpoints, read now, for people.

        Raises:
            ApiError: they could not be read.
        """

    def describe(self) -> str:
        """The place of the source and, if it does not answer, its last problem."""

    @property
    def post(self) -> Post | None:
        """Creates an object in the source; None if that is impossible."""

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        """The status of each watch; empty without watches."""


class Listener(Protocol):
    """Observes requests to an API server: metrics."""

    def watch_restarted(self, kind: ObjectKind, trouble: Trouble) -> None:
        """A list or watch was started again."""

    def requested(self, host: str, code: str, duration_s: float, method: str) -> None:
        """A request has ended, with or without an answer."""


async def make(config: Config, listener: Listener) -> Source:
    """Make the configured source.

    Raises:
        CannotStartError: it cannot work.
    """
    if config.source.manifests:
        if not await asyncio.to_thread(pathlib.Path(config.source.manifests).is_dir):
            raise CannotStartError(f"--manifests: {config.source.manifests} is not a directory")
        from ipvsproxy.daemon.sources.directory import DirectorySource  # noqa: PLC0415 - as below

        return DirectorySource(config.source.manifests)
    # Not at the top: a process needs one of the two, and the client library takes 90 ms (600 on the test kernel).
    from ipvsproxy.daemon.sources.credentials import SourceError  # noqa: PLC0415
    from ipvsproxy.daemon.sources.watch import KubernetesSource  # noqa: PLC0415

    source = KubernetesSource(
        node_name=config.node_name,
        kubeconfig=config.source.kubeconfig,
        master=config.source.api_server,
        on_restart=listener.watch_restarted,
        on_request=listener.requested,
    )
    try:
        await source.check()
    except SourceError as error:
        raise CannotStartError(error) from error
    return source


CHECK_INTERVAL_S = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Staleness:
    """Detects stale watches. ``clock`` is the one of the watches. With ``limit_s`` 0, no watch is ever stale."""

    def __init__(
        self, watches: Callable[[], Mapping[ObjectKind, WatchStatus]], *, limit_s: float, clock: Callable[[], float]
    ) -> None:
        self._watches = watches
        self._limit_s = limit_s
        self._clock = clock
        self._began_s = clock()
        self._logged: Collection[ObjectKind] = ()

    def stale(self) -> Collection[ObjectKind]:
        """The kinds whose watch is stale now."""
        if not self._limit_s:
            return []
        oldest_s = self._clock() - self._limit_s
        return [kind for kind, one in self._watches().items() if (one.contact_s or self._began_s) <= oldest_s]

    def check(self) -> None:
        """Log watches that have become stale since the last check, and watches that are no longer stale."""
        stale = self.stale()
        for kind in stale:
            if kind not in self._logged:
                log.error("watch_stale", kind=kind.value, silent_for_s=round(self._limit_s), hint="see watch_failed")
        for kind in self._logged:
            if kind not in stale:
                log.info("watch_no_longer_stale", kind=kind.value)
        self._logged = stale

    async def run(self) -> None:
        """Check for ever."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)
