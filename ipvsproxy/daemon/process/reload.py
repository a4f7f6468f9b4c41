"""The configuration file, read again in place: when it changes, and when a signal asks for it.

Rule 1: what the file says counts as a whole or not at all. One that is refused leaves the one before in force.
Rule 2: one that cannot be put in force just now leaves the one before in force too, and is tried again. So is one that is
refused: perhaps it could not be read just now, or was half written.
Rule 3: what cannot change while the process runs keeps its value, and is named.
Rule 4: whether the file has changed is told by its content. How it got there (a write, a rename, the swapped link of a ConfigMap
volume) does not matter, nor whether the kernel tells of it: a file that is mounted by itself is looked at again and again.
"""

import asyncio
import dataclasses
import math
import os
import pathlib
import random
from collections.abc import Awaitable, Callable

import structlog

from ipvsproxy.config.given import ConfigError
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base import inotify
from ipvsproxy.daemon.base.backoff import Backoff

POLL_S = 10.0
"""How often the file is looked at when nothing is told of it."""
SETTLE_S = 0.1
"""How long a change is given to be whole before it is read."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
"""Bounds of the delay before a configuration is tried again that could not be put in force."""

NEED_RESTART = frozenset(
    {
        "bindAddressHardFail",
        "clientConnection.kubeconfig",
        "healthzBindAddress",
        "hostnameOverride",
        "metricsBindAddress",
    }
)
"""Fields of the file that are read once: who we are, where Services come from, where we listen. So are those of ``ipvsproxy:``
but for ``APPLIED``."""
APPLIED = frozenset({"ipvsproxy.drainDeadline"})
"""Fields of our own that take effect at once."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def needs_restart(key: str) -> bool:
    """Whether a field of the file keeps its value while the process runs."""
    return key in NEED_RESTART or (key.startswith("ipvsproxy.") and key not in APPLIED)


class CannotApplyError(Exception):
    """A configuration cannot be put in force now; nothing of it was."""


class Reloader:
    """Keeps the configuration in force equal to the file. ``config`` is the one in force."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        apply: Callable[[Config], Awaitable[None]],
        on_outcome: Callable[[bool], object] = lambda _: None,
    ) -> None:
        """``read`` does what was done at the start, and raises ConfigError as then.

        ``apply`` puts a configuration in force as a whole, or raises CannotApplyError and changes nothing. ``on_outcome`` is told
        after each reading whether the file is in force.
        """
        self.config = config
        self._path = pathlib.Path(config.config_file) if config.config_file else None
        self._read = read
        self._apply = apply
        self._on_outcome = on_outcome
        self._content: bytes | None = None
        self._is_in_force = True
        """Whether the file was put in force, but for what needs a restart, when it was last read."""
        self._told: tuple[str, Config | None] | None = None
        """Why which configuration could not be put in force, as was told last; None for one that is refused."""
        self._retry_due_s = math.inf
        self._retries = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, dice=random.Random())  # noqa: S311 - no secret
        self._is_asked = asyncio.Event()

    def ask(self) -> None:
        """Have the file read again, changed or not."""
        self._is_asked.set()

    async def run(self) -> None:
        """Follow the file for ever."""
        if self._path is None:
            while True:
                await self._is_asked.wait()
                self._is_asked.clear()
                log.info("no_configuration_file", hint="there is nothing to read again: flags count until a restart")
        with inotify.DirectoryChanges(os.fspath(self._path.parent), POLL_S) as changes:
            while True:
                await self.check(self._path)
                await self._stirred(changes)
                await asyncio.sleep(SETTLE_S)

    async def check(self, path: pathlib.Path) -> None:
        """Read the file if it has changed, if that was asked for, or if it is time to try again."""
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except OSError:
            content = b""  # Reading it again will say what is wrong, with the flag that names it.
        was_asked = self._is_asked.is_set()
        self._is_asked.clear()
        if was_asked or content != self._content:
            self._retries.reset()
            if was_asked or (self._told and self._told[1] is None):
                self._told = None
        elif asyncio.get_running_loop().time() < self._retry_due_s:
            return
        self._content = content
        self._retry_due_s = math.inf
        self._is_in_force = await self._reload(was_asked=was_asked)
        if self._is_in_force:
            self._told = None
        self._on_outcome(self._is_in_force)

    async def _reload(self, *, was_asked: bool) -> bool:
        """Put in force what the file says, but for what needs a restart; returns whether it is."""
        try:
            new = self._read()
        except ConfigError as error:
            self._retry_later()
            if (str(error), None) != self._told:
                log.error("configuration_refused", error=str(error), hint="the one before stays in force")
            self._told = (str(error), None)
            return False
        changed = sorted(key for key, value in new.values.items() if value != self.config.values.get(key))
        if not changed:
            if was_asked or not self._is_in_force:
                log.info("configuration_unchanged", file=str(self._path))
            return True
        late = [key for key in changed if needs_restart(key)]
        applied = [key for key in changed if key not in late]
        before, after = self.config, self._without(new, late)
        if applied:
            try:
                await self._apply(after)
            except CannotApplyError as error:
                self._try_again_later(str(error), after, applied)
                return False
            self.config = after
        for notice in set(new.notices) - set(before.notices):
            log.warning("configuration_notice", notice=str(notice))
        if applied:
            log.info("configuration_changed", applied=applied)
        if late:
            log.warning("restart_needed", settings=late)
        return True

    def _try_again_later(self, reason: str, wanted: Config, settings: list[str]) -> None:
        """The same reason for the same configuration is told once: again it says nothing new."""
        delay_s = self._retry_later()
        if (reason, wanted) != self._told:
            log.error(
                "reload_failed",
                error=reason,
                settings=settings,
                retry_in_s=round(delay_s, 1),
                hint="the configuration before stays in force; this one is tried again until it can be applied",
            )
        self._told = (reason, wanted)

    def _retry_later(self) -> float:
        """Have the file read again, changed or not; returns after how many seconds."""
        delay_s = self._retries.next_s()
        self._retry_due_s = asyncio.get_running_loop().time() + delay_s
        return delay_s

    def _without(self, new: Config, late: list[str]) -> Config:
        """The new configuration with the old values of what needs a restart."""
        old = self.config
        return dataclasses.replace(
            new,
            node_name=old.node_name,
            source=old.source,
            servers=old.servers,
            traffic_metrics=old.traffic_metrics,
            values={**new.values, **{key: old.values[key] for key in late if key in old.values}},
        )

    async def _stirred(self, changes: inotify.DirectoryChanges) -> None:
        """Returns when the directory has changed, when asked, when it is time to try again, and from time to time."""
        timeout_s = min(POLL_S, max(0.0, self._retry_due_s - asyncio.get_running_loop().time()))
        waiting = [asyncio.create_task(changes.wait()), asyncio.create_task(self._is_asked.wait())]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
