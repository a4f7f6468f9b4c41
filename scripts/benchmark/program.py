"""Runs the whole program in this process, on the real kernel, with an in-memory API server."""

import asyncio
import contextlib
import dataclasses
import importlib
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from unittest import mock

from ipvsproxy.config import load
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon import app
from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.daemon.loop.summary import SyncSummary, Watcher
from ipvsproxy.daemon.process.lifecycle import Signals
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.store.objects import Changes
from scripts.benchmark import workload
from scripts.benchmark.api import MemoryApi, Source

METRICS_PORT = 10249
CLUSTER_CIDR = "10.128.0.0/10,fd00:128::/32"
"""The ranges of all pods of the workload."""


class Sync(NamedTuple):
    """A finished sync. ``sent_lines`` counts the lines that were sent to watches before the sync began."""

    began_s: float
    ended_s: float
    sent_lines: int
    summary: SyncSummary


class Watching(Watcher):
    """The program's own observer of syncs, which also keeps a list of the syncs."""

    def __init__(self, watcher: Watcher, api: MemoryApi) -> None:
        self.syncs: list[Sync] = []
        self.synced_event = asyncio.Event()
        self._watcher = watcher
        self._api = api
        self._began_s = 0.0
        self._sent_lines = 0

    def queued(self, now: float) -> None:
        """A change waits."""
        self._watcher.queued(now)

    def syncing(self, now: float) -> None:
        """A sync begins."""
        self._began_s, self._sent_lines = time.perf_counter(), self._api.sent_lines
        self._watcher.syncing(now)

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has finished."""
        self._watcher.synced(summary)
        # ``changes`` is dropped, because the program does not keep it either. For a hundred thousand Services, ``changes`` takes
        # five megabytes.
        kept = dataclasses.replace(summary, changes=Changes())
        self.syncs.append(Sync(self._began_s, time.perf_counter(), self._sent_lines, kept))
        self.synced_event.set()


class Running(NamedTuple):
    """The running program."""

    engine: Engine
    watching: Watching
    api: MemoryApi

    async def synced(self) -> Sync:
        """Wait for the next sync to finish."""
        self.watching.synced_event.clear()
        await self.watching.synced_event.wait()
        return self.watching.syncs[-1]


@contextlib.asynccontextmanager
async def running(api: MemoryApi, *flags: str) -> AsyncIterator[Running]:
    """Start the program. The ``async with`` block begins after the program's first sync."""
    made: asyncio.Future[Running] = asyncio.get_running_loop().create_future()

    class MeasuredEngine(Engine):
        def __init__(self, *, watcher: Watcher, **others: Any) -> None:
            watching = Watching(watcher, api)
            super().__init__(watcher=watching, **others)
            made.set_result(Running(self, watching, api))

    async def make_source(config: Config, *_: object) -> Source:
        return Source(api, all_nodes=config.takes_direct_return)

    importlib.import_module("ipvsproxy.daemon.sources.watch")  # an ipvsproxy on a real node also has this module in memory
    with (
        mock.patch.object(app, "Engine", MeasuredEngine),
        mock.patch.object(sources, "make", make_source),
    ):
        config = configuration(*flags)
        task = asyncio.create_task(app._serve(config, lambda: config, Signals()))
        try:
            await _first(made, task)
            program = made.result()
            while not program.watching.syncs:
                await _first(asyncio.ensure_future(program.synced()), task)
            yield program
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _first(event: asyncio.Future[Any], task: "asyncio.Task[int]") -> None:
    await asyncio.wait((event, task), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
        raise RuntimeError("the program ended")


def configuration(*flags: str) -> Config:
    """Returns the configuration for a command line with these flags."""
    arguments = [
        "--proxy-mode=ipvs",
        f"--hostname-override={workload.NODE}",
        f"--cluster-cidr={CLUSTER_CIDR}",
        "--ipvs-min-sync-period=0s",
        "--ipvs-sync-period=24h",  # No audit runs during a measurement, because audits are measured separately.
        "--conntrack-max-per-core=0",  # This setting is writable only in the host's first network namespace.
        *flags,
    ]
    return load.load(arguments, hostname=workload.NODE, read_file=lambda _: b"")
