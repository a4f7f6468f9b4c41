"""Reads the configuration file again after a change or a signal, and applies the file without a restart.

Rule 1: a file is applied completely or not at all. If a file is refused, the previous configuration remains in use.
Rule 2: if a configuration cannot be applied now, the previous configuration remains in use, and the new configuration is tried
again. A refused file is also tried again, because the file may have been unreadable for a moment, or only half written.
Rule 3: a setting that cannot change while the process runs keeps its value, and the log names the setting.
Rule 4: only the content decides whether the file has changed. A write, a rename, or the swapped link of a ConfigMap volume can
change the file. Polling finds changes that inotify does not report, such as changes of a file that is itself a mount point.
"""

import asyncio
import dataclasses
import math
import os
import pathlib
import random
from collections.abc import Awaitable, Callable

from ipvsproxy.config import catalogue
from ipvsproxy.config.option import ConfigError
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.base import inotify
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import Backoff
from ipvsproxy.kernel.base.errors import KernelError

POLL_S = 10.0
"""The interval at which the file is polled if no change is reported."""
SETTLE_S = 0.1
"""The seconds from a change of the file to the next reading of the file. A program that is writing the file can finish in this
time."""
FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
"""The bounds of the delay between a failed attempt and the next attempt."""


@dataclasses.dataclass(eq=False)
class Reloader:
    """Keeps the applied configuration equal to the file. ``config`` is the configuration that is in use now.

    ``read`` loads the configuration as the start of the process does, and may raise ConfigError.

    ``apply`` applies a configuration completely, or raises CannotStartError or KernelError and changes nothing. After each
    reading, ``on_outcome`` is called; its argument says whether the file has been applied.
    """

    config: Config
    read: Callable[[], Config]
    apply: Callable[[Config], Awaitable[None]]
    on_outcome: Callable[[bool], object] = lambda _: None

    def __post_init__(self) -> None:
        self._path = pathlib.Path(self.config.config_file) if self.config.config_file else None
        self._content: bytes | None = None
        self._is_accepted = True
        """Whether the file, as last read, is in force, except for settings that need a restart."""
        self._logged: tuple[str, Config | None] | None = None
        """The text of the last logged failure, and the configuration that could not be applied (None for a refused file)."""
        self._retry_due_s = math.inf
        self._retries = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, dice=random.Random())  # noqa: S311 - for random delays
        self._is_asked = asyncio.Event()

    def ask(self) -> None:
        """Request that the file be read again, even if it has not changed."""
        self._is_asked.set()

    async def run(self) -> None:
        """Apply the changes of the file until this task is cancelled."""
        if self._path is None:
            while True:
                await self._is_asked.wait()
                self._is_asked.clear()
                log.info("no_configuration_file", hint="there is no file to read again: flags stay in force until a restart")
        with inotify.DirectoryChanges(os.fspath(self._path.parent), POLL_S) as changes:
            while True:
                await self.check(self._path)
                await self._wait(changes)
                await asyncio.sleep(SETTLE_S)

    async def check(self, path: pathlib.Path) -> None:
        """Apply the file if it has changed, if ``ask`` was called, or if the next attempt is due."""
        try:
            content = await asyncio.to_thread(path.read_bytes)
        except OSError:
            content = b""  # ``_reload`` reads the file again, and reports the error together with the flag that names the file.
        was_asked = self._is_asked.is_set()
        self._is_asked.clear()
        if was_asked or content != self._content:
            self._retries.reset()
            if was_asked or (self._logged and self._logged[1] is None):
                self._logged = None
        elif asyncio.get_running_loop().time() < self._retry_due_s:
            return
        self._content = content
        delay_s = self._retries.next_s()
        self._is_accepted = await self._reload(was_asked=was_asked, retry_in_s=round(delay_s, 1))
        self._retry_due_s = math.inf if self._is_accepted else asyncio.get_running_loop().time() + delay_s
        if self._is_accepted:
            self._logged = None
        self.on_outcome(self._is_accepted)

    async def _reload(self, *, was_asked: bool, retry_in_s: float) -> bool:
        """Apply the file, except for settings that need a restart. Returns whether the file has been applied."""
        try:
            new = self.read()
        except ConfigError as error:
            hint = "the former configuration stays in force"
            self._log_failure("configuration_refused", str(error), None, hint=hint)
            return False
        before = self.config
        # the log shows the names of the changed fields
        changed = sorted(key for key, value in new.values.items() if value != before.values.get(key))
        if not changed:
            if was_asked or not self._is_accepted:
                log.info("configuration_unchanged", file=str(self._path))
            return True
        late = [key for key in changed if catalogue.BY_KEY[key].restart]
        applied = [key for key in changed if key not in late]
        if applied:
            after = self._without(new, late)
            try:
                await self.apply(after)
            except (CannotStartError, KernelError) as error:
                hint = "the former configuration stays in force; the new one is tried again until it can be applied"
                self._log_failure("reload_failed", str(error), after, settings=applied, retry_in_s=retry_in_s, hint=hint)
                return False
            self.config = after
            log.info("configuration_changed", applied=applied)
        for notice in set(new.notices) - set(before.notices):
            log.warning("configuration_notice", notice=str(notice))
        if late:
            log.warning("restart_needed", settings=late)
        return True

    def _log_failure(self, event: str, error: str, new: Config | None, **keys: object) -> None:
        """Log the reason for a failure once for each configuration; ``new`` is None for a refused file."""
        if (error, new) != self._logged:
            log.error(event, error=error, **keys)
        self._logged = (error, new)

    def _without(self, new: Config, late: list[str]) -> Config:
        """The new configuration, with the old values of the settings that need a restart."""
        kept = new.keeping(self.config, [catalogue.BY_KEY[key].to for key in late])
        return dataclasses.replace(kept, values={**new.values, **{key: self.config.values[key] for key in late}})

    async def _wait(self, changes: inotify.DirectoryChanges) -> None:
        """Wait until the directory changes, ``ask`` is called, or the next attempt is due, but for ``POLL_S`` seconds at most."""
        timeout_s = min(POLL_S, max(0.0, self._retry_due_s - asyncio.get_running_loop().time()))
        waiting = [asyncio.create_task(changes.wait()), asyncio.create_task(self._is_asked.wait())]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
