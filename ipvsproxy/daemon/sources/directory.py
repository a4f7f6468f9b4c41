"""The directory source: Services, EndpointSlices and Nodes from manifests in files, without an API server.

The best way to replace a file is to rename a complete one into place, as ConfigMaps and careful editors do. Changes are read
after the directory has been quiet for a moment, so that a file written in place is usually complete.

Rule: what could not be read is read again, with growing pauses, and its known objects stay meanwhile. The first list removes
whatever it lacks, so it waits for ``FIRST_READS`` of a file that cannot be read.
"""

import asyncio
import contextlib
import os
import pathlib
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import structlog

from ipvsproxy.daemon.base import inotify
from ipvsproxy.daemon.base.backoff import Backoff
from ipvsproxy.daemon.sources import manifests
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.model.service import Event, ObjectKind
from ipvsproxy.translate.api import targets
from ipvsproxy.translate.api.targets import Targets

SETTLE_S = 0.03
LONGEST_SETTLE_S = 1.0
POLL_S = 1.0
FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
FIRST_READS = 5

log = structlog.stdlib.get_logger(__name__)


class Stamp(NamedTuple):
    """The mark of a state of a file; all zero for an absent file."""

    modified_ns: int = 0
    changed_ns: int = 0
    size: int = 0
    inode: int = 0


class DirectorySource:
    """A directory of manifests: files ending in .yaml, .yml or .json, without hidden files and subdirectories.

    ``settle_s`` is the time without changes before the directory is read.
    """

    def __init__(self, directory: str, *, settle_s: float = SETTLE_S, poll_s: float = POLL_S) -> None:
        self._directory = directory
        self._settle_s = settle_s
        self._poll_s = poll_s
        self._stamps: dict[str, Stamp] = {}
        self._manifests = manifests.Manifests()
        self._is_listed = False
        self.problem = ""
        """As in ``Source``."""
        self._backoff = Backoff(first_s=FIRST_RETRY_S, longest_s=LONGEST_RETRY_S, dice=random.Random())  # noqa: S311 - no secret

    def list_again(self, kind: ObjectKind, at_s: float) -> None:
        """Do nothing: an object without a manifest has certainly been deleted."""

    def describe(self) -> str:
        """The directory and, if it or a file cannot be read, its problem."""
        return f"directory {self._directory}" + (f": {self.problem}" if self.problem else "")

    @property
    def post(self) -> None:
        """None, because a directory does not take objects."""

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        """Empty, because a directory has no watches."""
        return {}

    async def targets(self) -> Targets:
        """As ``Source``. A directory that cannot be read has none."""
        return await asyncio.to_thread(self._targets)

    def _targets(self) -> Targets:
        try:
            paths = self._paths()
        except OSError:
            return {}
        return targets.of_documents(document for path in paths for document in manifests.documents(path))

    async def run(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Deliver events for ever: first all objects and the ends of their lists, then differences."""
        with inotify.DirectoryChanges(self._directory, self._poll_s) as changes:
            await self.read(deliver)
            while True:
                await self._wait(changes, self._backoff.next_s() if self.problem else None)
                await self.read(deliver)

    async def read(self, deliver: Callable[[Sequence[Event]], None]) -> None:
        """Read new and changed files, and deliver the differences. A directory that cannot be read has none."""
        try:
            # In a thread: thousands of manifests take seconds.
            read, present, unread = await asyncio.to_thread(self._read_changed)
        except OSError as error:
            self._note(error.strerror or str(error))
            return
        self._note("; ".join(f"{name}: {reason}" for name, reason in sorted(unread.items())))
        if unread and not self._is_listed and self._backoff.attempts < FIRST_READS:
            self._stamps = {}
            return
        events = self._manifests.update(read, present)
        if not self._is_listed:
            self._is_listed = True
            log.info("listed", directory=self._directory, files=len(present), events=len(events))
            events += self._manifests.listed(events)
        if events:
            deliver(events)

    def _note(self, problem: str) -> None:
        """Log a problem that is not the last one. Without one, the pauses begin anew."""
        if problem and problem != self.problem:
            log.error("manifests_unreadable", directory=self._directory, error=problem, hint="known Services stay served")
        if not problem:
            self._backoff.reset()
        self.problem = problem

    def _read_changed(self) -> tuple[Mapping[str, manifests.FileContent], Collection[str], Mapping[str, str]]:
        """New and changed files, the names of all files, and why some of the former could not be read.

        Raises:
            OSError: the directory cannot be listed.
        """
        paths = self._paths()
        stamps = {path.name: _stamp(path) for path in paths}
        read: dict[str, manifests.FileContent] = {}
        unread: dict[str, str] = {}
        for path in paths:
            if self._stamps.get(path.name) != stamps[path.name]:
                try:
                    read[path.name] = manifests.read_file(path)
                except OSError as error:
                    unread[path.name] = error.strerror or str(error)
        self._stamps = {name: stamp for name, stamp in stamps.items() if name not in unread}
        return read, stamps.keys(), unread

    def _paths(self) -> list[pathlib.Path]:
        """The files of manifests. Raises OSError if the directory cannot be listed."""
        with os.scandir(self._directory) as entries:
            return [pathlib.Path(entry) for entry in entries if manifests.is_manifest(entry.name) and not entry.is_dir()]

    async def _wait(self, changes: inotify.DirectoryChanges, within_s: float | None) -> None:
        """Wait for a change or until ``within_s`` is over, and then until the directory is quiet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await changes.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_SETTLE_S):
                while await self._changes_again(changes):
                    pass

    async def _changes_again(self, changes: inotify.DirectoryChanges) -> bool:
        try:
            async with asyncio.timeout(self._settle_s):
                await changes.wait()
        except TimeoutError:
            return False
        return True


def _stamp(path: pathlib.Path) -> Stamp:
    try:
        status = path.stat()
    except OSError:  # A dangling link, which ``read_file`` reports.
        return Stamp()
    return Stamp(status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
