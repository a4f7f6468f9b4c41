"""The configured source of Services, EndpointSlices and the Node."""

import asyncio
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

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
