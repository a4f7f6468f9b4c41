"""Removes what the other backend of the rules holds of ours: a former process, or another configuration, has left it behind.

A failed removal is repeated with growing pauses. One log line says so if something resists.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection

import structlog

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.reconcile.operations import retry

SETS_SHOWN = 3
USED_SETS_PATIENCE = 5
"""So many removals may meet sets in use without a word: the rules that use them go at the same time."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class OtherBackend:
    """Removes what the other backend of the rules holds of ours, once the rules and sets of all served families are in force.

    It looks again after each audit: another program may bring back what was removed, as by loading a saved ruleset.
    """

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._is_in_force = False
        self._is_done = False
        self._failures = 0
        """The failures of the present removal in a row."""
        self._reason = ""
        """Why the present removal fails, once that is told; empty if it does not."""

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        self._is_in_force = not summary.not_in_force
        if summary.is_audit:
            self._is_done = False
        if self._is_in_force and not self._is_done and not self._failures:
            self._wake.set()

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence that says why something stays; empty while nothing resists removal."""
        return (f"what the other backend holds of ours stays: {self._reason}",) if self._reason else ()

    async def run(self, remove: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Remove until nothing is left. ``remove`` returns the sets that rules still use.

        A failed removal is repeated with growing pauses.
        """
        while True:
            await self._pause()
            if not self._is_in_force:
                continue
            try:
                used = await remove()
            except (KernelError, OSError) as error:
                self._fail(str(error), patience=1)
                continue
            self._is_done = not used
            if used:
                self._fail(f"a rule still uses {_listed(used)}", patience=USED_SETS_PATIENCE)
            else:
                self._failures = 0
                self._reason = ""

    async def _pause(self) -> None:
        """Wait for a sync after which something may be left or, after a failure, until the next attempt is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(retry.delay_s(self._failures) if self._failures else None):
                await self._wake.wait()
        self._wake.clear()

    def _fail(self, reason: str, patience: int) -> None:
        """A removal has failed. That is told once so many have failed in a row."""
        self._wake.clear()  # a sync during the removal does not shorten the pause
        self._failures += 1
        if self._failures >= patience:
            if not self._reason:
                log.warning("other_backend_not_removed", error=reason, hint="it is tried again; packets meet its rules")
            self._reason = reason


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SETS_SHOWN])
    return f"{shown} and {len(names) - SETS_SHOWN} other sets" if len(names) > SETS_SHOWN else shown
