"""Waits for the first lists, in the same way for ``run`` and for the commands.

Rule 1: a page of a missing kind is contact. The wait for a long or slow list goes on while its pages arrive, because a new list
would only take longer.
Rule 2: ``run`` waits without end, and logs it. After a power cut, all nodes start before their API server does; a process that
had ended would be in a pause of its supervisor when the API server comes. ``run`` also waits after 401 and 403: a token or a role
may come later than the node. A configuration that cannot work has ended the process before (``source.make``).
Rule 3: a command gives up after ``PATIENCE_S`` without contact, because a person or a script waits for its answer.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import structlog

from ipvsproxy.daemon.base.errors import CannotStartError
from ipvsproxy.daemon.sources.reflector import Trouble, WatchStatus
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.objects import Store

PATIENCE_S = 20.0
"""The longest silence of the first lists before it is logged, or a command gives up."""
PROGRESS_S = 5.0
"""The pause between two lines of progress of a command."""
REPEAT_S = 300.0
"""The pause between two log lines about the same silence."""
ANSWERS = frozenset({Trouble.UNAUTHORIZED, Trouble.FORBIDDEN, Trouble.THROTTLED, Trouble.SERVER_ERROR})
"""Only a server that this node reaches answers so, although it gives no list."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Watched(Protocol):
    """The part of a ``Source`` that shows whether lists arrive."""

    def describe(self) -> str:
        """As ``Source``."""

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        """As ``Source``."""


async def wait(
    store: Store,
    source: Watched,
    *,
    silent: Callable[[str], object],
    waiting: Callable[[str], object],
    heal: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Wait until every kind is listed.

    ``waiting`` gets a sentence every ``PROGRESS_S``; ``silent`` gets one after ``PATIENCE_S`` without contact, and again every
    ``REPEAT_S`` after that. It may raise. ``heal`` is called after it, to remove what may cause the silence, unless the server
    has refused or postponed a request: then nothing hides it.
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
            waiting(f"waiting for the list of {missing} from {source.describe()}; {len(store.services)} Services have come")
            progress_s = loop.time() + PROGRESS_S
        await asyncio.sleep(max(0.0, min(progress_s, silent_s) - loop.time()))


async def serve_later(store: Store, source: Watched, heal: Callable[[], Awaitable[None]]) -> None:
    """As ``wait`` for a serving process: without end, and with log lines about silence."""
    await wait(store, source, silent=log_silence, waiting=lambda _: None, heal=heal)


def give_up(sentence: str) -> None:
    """End a command after a silence.

    Raises:
        CannotStartError: always.
    """
    raise CannotStartError(sentence)


def show_progress(sentence: str) -> None:
    """Show the progress of a command on standard error, because standard output is for its answer."""
    sys.stderr.write(f"ipvsproxy: {sentence}\n")


def log_silence(sentence: str) -> None:
    """Log a silence of the first lists."""
    log.warning(
        "first_lists_missing", error=sentence, hint="nothing is programmed before they are complete; the process waits for them"
    )


def _last_contact_s(store: Store, source: Watched) -> float:
    """The time of the last contact of the missing kinds, by a monotonic clock; 0 without any."""
    statuses = source.statuses
    return max((statuses[kind].contact_s or 0 for kind in store.missing if kind in statuses), default=0)
