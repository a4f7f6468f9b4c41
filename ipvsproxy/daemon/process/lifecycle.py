"""What run, --init-only and --dry-run have in common: how such a process begins, waits, is stopped, and says why it ended."""

import asyncio
import concurrent.futures
import ctypes
import pathlib
import sys
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

import structlog

from ipvsproxy.config.settings import Config, LogFormat
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.process.signals import Signals
from ipvsproxy.daemon.sources.source import CannotStartError

FAILED = 1
"""Exit status when an address cannot be listened on and the configuration says that this is the end, or --init-only failed."""
CANNOT_START = 2
"""Exit status when something is missing that this process cannot provide. Nothing was programmed."""
LAST_ANSWERS_S = 0.5
"""For how long a process that was asked to stop still says so to those who ask after its health."""
LARGE_BYTES = 1 << 20
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX in malloc.h

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def run(config: Config, main: Coroutine[None, None, int]) -> int:
    """Run to the end; returns the exit status, and says on standard error why it could not start."""
    set_up_log(config)
    try:
        return asyncio.run(_leaving_threads_behind(main))
    except CannotStartError as error:
        for reason in error.reasons:
            sys.stderr.write(f"ipvsproxy: {reason}\n")
        sys.stderr.write("ipvsproxy: nothing was programmed\n")
        return CANNOT_START
    except server.BindError as error:
        sys.stderr.write(f"ipvsproxy: {error}\n")
        return FAILED


class _LeftBehind(concurrent.futures.ThreadPoolExecutor):
    """Threads that nobody waits for at the end: what they wait for may hang, as a program of iptables does for a minute."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as in the library
        super().shutdown(wait=False, cancel_futures=cancel_futures)


async def _leaving_threads_behind(main: Coroutine[None, None, int]) -> int:
    asyncio.get_running_loop().set_default_executor(_LeftBehind())
    return await main


def begin(config: Config, signals: Signals) -> None:
    """Handle signals from now on, and tell what of the configuration is worth a word."""
    use_little_memory()
    signals.install(on_hangup=lambda: None)  # the file is read soon enough
    for notice in config.notices:
        log.warning("configuration_notice", notice=str(notice))
    if config.without_effect:
        log.info("settings_without_effect", settings=list(config.without_effect))


def set_up_log(config: Config) -> None:
    """Log as the configuration says."""
    logs.set_up(json=config.logging.format is LogFormat.JSON, verbosity=config.logging.verbosity)


def use_little_memory() -> None:
    """Have the C library keep little of what is freed.

    The kernel gets back each block of ``LARGE_BYTES`` and more as soon as it is freed. glibc begins so, but takes what is freed
    for a reason to keep larger ones from then on. A dictionary that has grown to a hundred thousand Services has left all its
    former sizes behind, and there are a dozen: 13 MB of holes.

    And all threads share one heap: Python has one of them allocate at a time, and what another one freed would stay its own.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_ARENA_MAX, 1)
    except AttributeError:
        log.debug("memory_left_to_c_library", reason="it has no mallopt")


def set_oom_score(score: int) -> None:
    """Tell the kernel how readily it may kill this process when memory is short (-1000..1000)."""
    try:
        pathlib.Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError as error:
        log.debug("oom_score_not_set", error=str(error))


async def until_stopped(
    stopping: asyncio.Event,
    status: Status,
    work: Iterable[Coroutine[None, None, None]],
    servers: Iterable[Coroutine[None, None, None]],
) -> None:
    """Run until asked to stop, or until one of them fails: what it raised is raised here.

    Servers stop last, and tell of it: those who are asked to stop answer for ``LAST_ANSWERS_S`` that this node is none to send
    traffic to. The kernel goes on serving it.
    """
    stopper = asyncio.create_task(stopping.wait())
    working, answering = [list(map(asyncio.create_task, coroutines)) for coroutines in (work, servers)]
    waiting: set[asyncio.Task[Any]] = {stopper, *working, *answering}
    try:
        while not stopper.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        status.stop()
        last_answers_s = LAST_ANSWERS_S if stopper.done() and answering else 0
        await _end([stopper, *working])
        await asyncio.sleep(last_answers_s)
        await _end(answering)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
