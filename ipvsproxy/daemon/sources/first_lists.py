"""Waiting for the first lists, the same way for ``run`` and for the commands.

Rule 1: a page of a kind that is still missing is contact. A list that is long, or slow, is waited for as long as its pages come:
begun anew, it would only take longer.
Rule 2: ``run`` waits without end, and says so: after a power cut all nodes come up before their API server does, and a process
that ended would sit in the pauses of its supervisor when it comes. 401 and 403 are waited out as well: a token, or a role, may
come later than the node. A configuration that cannot work has ended the process before (``source.make``).
Rule 3: a command gives up after ``PATIENCE_S`` without contact: somebody waits for its answer.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.daemon.sources.source import CannotStartError
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.objects import Store

PATIENCE_S = 20.0
"""How long nothing may come of the first lists before the silence is told, or a command gives up."""
PROGRESS_S = 5.0
"""Between two lines of a command about what has come."""
REPEAT_S = 300.0
"""Between two log lines about the same silence."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Watched(Protocol):
    """The part of a ``Source`` that shows whether lists arrive."""

    def describe(self) -> str:
        """As ``Source``."""

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        """As ``Source``."""


async def wait(store: Store, source: Watched, *, silent: Callable[[str], object], waiting: Callable[[str], object]) -> None:
    """Return when every kind is listed.

    ``waiting`` gets a sentence every ``PROGRESS_S``; ``silent`` gets one when nothing has come for ``PATIENCE_S``, every
    ``REPEAT_S`` from then on, and may raise.
    """
    loop = asyncio.get_running_loop()
    heard_s = loop.time()
    tell_s, silent_s = heard_s + PROGRESS_S, heard_s + PATIENCE_S
    while not store.is_complete:
        missing = ", ".join(f"{kind}s" for kind in store.missing)
        contact_s = _last_contact_s(store, source)
        if contact_s > heard_s:
            heard_s, silent_s = contact_s, contact_s + PATIENCE_S
        if loop.time() >= silent_s:
            silent(f"no complete list of {missing} within {PATIENCE_S:.0f} s from {source.describe()}")
            silent_s = loop.time() + REPEAT_S
        if loop.time() >= tell_s:
            waiting(f"waiting for the list of {missing} from {source.describe()}; {len(store.services)} Services have come")
            tell_s = loop.time() + PROGRESS_S
        await asyncio.sleep(min(tell_s, silent_s) - loop.time())


async def serve_later(store: Store, source: Watched) -> None:
    """As ``wait``, for a process that serves: without end, and with a log line where nothing comes."""
    await wait(store, source, silent=log_silence, waiting=lambda _: None)


def give_up(sentence: str) -> None:
    """What a command does about silence.

    Raises:
        CannotStartError: always.
    """
    raise CannotStartError(sentence)


def say(sentence: str) -> None:
    """What a command says while it waits: standard output is for its answer."""
    sys.stderr.write(f"ipvsproxy: {sentence}\n")


def log_silence(sentence: str) -> None:
    """What a process that serves says about silence."""
    log.warning("first_lists_missing", error=sentence, hint="nothing is programmed before they are complete; they are waited for")


def _last_contact_s(store: Store, source: Watched) -> float:
    """When something last came of a kind that is missing, by a monotonic clock; 0 for never."""
    statuses = source.statuses
    return max((statuses[kind].contact_s or 0 for kind in store.missing if kind in statuses), default=0)
