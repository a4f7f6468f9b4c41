"""The life of a process of run, --init-only and --dry-run: how it begins, waits, stops, and reports why it ended; its signals."""

import asyncio
import concurrent.futures
import ctypes
import errno
import os
import pathlib
import resource
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

from ipvsproxy.config.settings import Config, Format
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.errors import CannotStartError, complain
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.health import Status

FAILED = 1
"""Exit status if an address cannot be bound with bindAddressHardFail, or if --init-only has failed."""
CANNOT_START = 2
"""Exit status if a requirement is missing that this process cannot provide. Nothing was programmed."""
LAST_ANSWERS_S = 0.5
"""How long a stopping process still answers that it is unhealthy."""
DESCRIPTORS_INTERVAL_S = 5.0
STOP_WITHIN_S = 1.7
"""The longest time from the signal to the end.

The end of the process does not wait longer for a kernel or a program that hangs.
"""
LARGE_BYTES = 1 << 20
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # M_MMAP_THRESHOLD and M_ARENA_MAX in malloc.h

T = TypeVar("T")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Signals:
    """Signals: SIGTERM and SIGINT end the process, SIGHUP reloads its configuration.

    The signals are handled from ``install`` until ``close``. ``end`` ends the process at once.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.stopping = asyncio.Event()
        self._end = end
        self._deadline: threading.Timer | None = None

    def install(self, on_hangup: Callable[[], object]) -> None:
        """Handle signals in the running loop. Another call replaces ``on_hangup``, which SIGHUP calls."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _stop(self) -> None:
        self.stopping.set()
        if self._deadline is None:
            self._deadline = threading.Timer(STOP_WITHIN_S, self._end, (0,))
            self._deadline.daemon = True
            self._deadline.start()

    def close(self) -> None:
        """Cancel the forced end, because the process has stopped in time."""
        if self._deadline is not None:
            self._deadline.cancel()


class _AbandonedThreads(concurrent.futures.ThreadPoolExecutor):
    """Threads that the end of the process does not wait for: their work may hang, as a program of iptables does for a minute.

    A thread that cannot be started, at the limit of processes, is an ``OSError``: the caller's work has failed, for now.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[T]":
        """As in the library, except for the error that it raises."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as in the library
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(config: Config, main: Callable[[Signals], Coroutine[None, None, int]], end: Callable[[int], object] = os._exit) -> int:
    """Run ``main`` to its end; returns the exit status. Writes to standard error why the process could not start.

    ``end`` ends the process at once if a signal has not ended it in time.
    """
    set_up_log(config)
    signals = Signals(end)
    try:
        with logs.written_by_a_thread():
            return asyncio.run(_run(config, main, signals))
    except CannotStartError as error:
        complain(*error.reasons, "nothing was programmed")
        return CANNOT_START
    except server.BindError as error:
        complain(error)
        return FAILED
    finally:
        signals.close()


async def _run(config: Config, main: Callable[[Signals], Coroutine[None, None, int]], signals: Signals) -> int:
    asyncio.get_running_loop().set_default_executor(_AbandonedThreads())
    use_little_memory()
    take_all_descriptors()
    signals.install(on_hangup=lambda: None)  # the configuration file is read soon anyway
    for notice in config.notices:
        log.warning("configuration_notice", notice=notice)
    if config.without_effect:
        log.info("settings_without_effect", settings=list(config.without_effect))
    return await main(signals)


def set_up_log(config: Config) -> None:
    """Set up the log as configured."""
    logs.set_up(json=config.logging.format is Format.JSON, verbosity=config.logging.verbosity)


def use_little_memory() -> None:
    """Make the C library keep little of the freed memory.

    The C library then returns each block of ``LARGE_BYTES`` or more to the kernel when the block is freed. By default, glibc
    raises the threshold for such blocks whenever it frees one. A dictionary that has grown to a hundred thousand Services leaves
    blocks of its dozen former sizes: 13 MB of holes.

    All threads share one heap: Python lets only one thread allocate at a time, and a heap of its own would keep freed memory for
    its thread alone.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_ARENA_MAX, 1)
    except AttributeError:
        log.debug("memory_left_to_c_library", reason="the C library has no mallopt")


def take_all_descriptors() -> None:
    """Raise the number of descriptors to the hard limit, as every Go program does.

    Programs that this process starts inherit the limit. The limit helps programs that open many files. It does not harm programs
    that wait by ``select``, because they get standard streams alone, and the kernel gives out the lowest free numbers.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.debug("descriptor_limit_not_raised", error=str(error))


async def watch_descriptors() -> None:
    """Log when three quarters of the descriptors are in use, and when they no longer are, until it is cancelled."""
    was_near = False
    while True:
        limit = server.descriptors()
        is_near = lowest_free_descriptor() > limit * 3 // 4
        if is_near and not was_near:
            log.warning("descriptors_near_limit", limit=limit, hint="health-check node ports have three quarters at most")
        elif was_near and not is_near:
            log.info("descriptors_no_longer_near_limit", limit=limit)
        was_near = is_near
        await asyncio.sleep(DESCRIPTORS_INTERVAL_S)


def lowest_free_descriptor() -> int:
    """The lowest descriptor that is not in use, which is at most the number of those in use; the limit if all are in use."""
    try:
        number = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return server.descriptors()
    os.close(number)
    return number


def set_oom_score(score: int) -> None:
    """Set how readily the kernel kills this process when memory is short (-1000..1000)."""
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
    """Run until ``stopping`` is set, or until a coroutine fails: its exception is raised here.

    Servers stop last: after ``stopping`` they answer for ``LAST_ANSWERS_S`` that load balancers should use other nodes. The
    kernel goes on forwarding traffic.
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
