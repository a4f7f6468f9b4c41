"""The lifetime of a process with the command ``run`` or the flag ``--init-only`` or ``--dry-run``.

This module starts the process, waits, handles signals, stops the process, and reports why the process ended.
"""

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

from ipvsproxy.config.settings import Config, Format
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.cannot_start import CannotStartError, complain
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.health import Status

FAILED = 1
"""The exit status if bindAddressHardFail is set and an address cannot be bound, or if --init-only has failed."""
CANNOT_START = 2
"""The exit status if a requirement of this process is not met. Nothing was programmed."""
LAST_ANSWERS_S = 0.5
"""The time for which a process that is about to stop still answers requests, and reports itself as unhealthy."""
DESCRIPTORS_INTERVAL_S = 5.0
STOP_WITHIN_S = 1.7
"""The maximum number of seconds from SIGTERM or SIGINT to the end of the process, even if a call to the kernel or another program
hangs."""
LARGE_BYTES = 1 << 20
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8  # the options M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h

T = TypeVar("T")


class Signals:
    """Signals: SIGTERM and SIGINT end the process, and SIGHUP reloads its configuration.

    The signals are handled from ``install`` until ``close``. ``end`` is the function that ends the process immediately.
    """

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.stopping = asyncio.Event()
        self._end = end
        self._deadline: threading.Timer | None = None

    def install(self, on_hangup: Callable[[], object]) -> None:
        """Handle signals in the running event loop.

        SIGHUP calls ``on_hangup``; another call of this method replaces ``on_hangup``.
        """
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
        """Cancel the forced end of the process, because the process has stopped in time."""
        if self._deadline is not None:
            self._deadline.cancel()


class _AbandonedThreads(concurrent.futures.ThreadPoolExecutor):
    """A pool of threads that need not end before the process ends.

    A thread of this kind may hang, for example because an iptables program hangs for a minute. If the limit of processes is
    reached, no thread can be started, and ``submit`` raises an ``OSError``, so that the caller can try again.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "concurrent.futures.Future[T]":
        """Submits work as ``ThreadPoolExecutor.submit`` does, but raises OSError if no thread can be started."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as in the library
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def run(config: Config, main: Callable[[Signals], Coroutine[None, None, int]], end: Callable[[int], object] = os._exit) -> int:
    """Run ``main`` until it ends; returns the exit status. If the process cannot start, the reason is written to standard error.

    ``end`` must end the process immediately. It is called if the process has not stopped in time after a signal.
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
    signals.install(on_hangup=lambda: None)  # the reloader reads the configuration file soon anyway
    for notice in config.notices:
        log.warning("configuration_notice", notice=notice)
    if config.without_effect:
        log.info("settings_without_effect", settings=list(config.without_effect))
    return await main(signals)


def set_up_log(config: Config) -> None:
    """Set up logging as the configuration requires."""
    logs.set_up(json=config.logging.format is Format.JSON, verbosity=config.logging.verbosity)


def use_little_memory() -> None:
    """Make the C library return most of the freed memory to the system.

    After this call, the C library returns each block of ``LARGE_BYTES`` or more to the kernel when the block is freed. By
    default, glibc raises the threshold for large blocks whenever it frees a large block. With a raised threshold, a dictionary
    that has grown to a hundred thousand Services would leave 13 MB of unused memory.

    All threads share one heap. Separate heaps would not be faster, because Python lets only one thread allocate at a time. If
    each thread had a separate heap, threads could not use the memory that other threads have freed.
    """
    try:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_ARENA_MAX, 1)
    except AttributeError:
        log.debug("memory_left_to_c_library", reason="the C library has no mallopt")


def take_all_descriptors() -> None:
    """Raise the limit on open file descriptors to the hard limit, as every Go program does.

    Programs that this process starts inherit the raised limit, which helps programs that open many files. Programs that wait with
    ``select`` still work: they inherit only the standard streams, and the kernel assigns the lowest free descriptors.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.debug("descriptor_limit_not_raised", error=str(error))


async def watch_descriptors() -> None:
    """Log when the share of used file descriptors rises above three quarters, or falls below three quarters.

    Runs until the task is cancelled.
    """
    was_near = False
    while True:
        limit = server.descriptors()
        is_near = lowest_free_descriptor() > limit * 3 // 4
        if is_near and not was_near:
            hint = "health-check node ports and their connections may use so many"
            log.warning("descriptors_near_limit", limit=limit, hint=hint)
        elif was_near and not is_near:
            log.info("descriptors_no_longer_near_limit", limit=limit)
        was_near = is_near
        await asyncio.sleep(DESCRIPTORS_INTERVAL_S)


def lowest_free_descriptor() -> int:
    """The lowest file descriptor that is not in use, which is a lower bound of the number of used descriptors.

    If all descriptors are in use, the result is the limit on descriptors.
    """
    try:
        number = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return server.descriptors()
    os.close(number)
    return number


def set_oom_score(score: int) -> None:
    """Set how likely the kernel is to kill this process when memory is short (-1000..1000)."""
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
    """Run until ``stopping`` is set, or until a coroutine fails; raises the exception of the coroutine.

    Servers are stopped last: for ``LAST_ANSWERS_S`` after ``stopping`` is set, they answer that load balancers should use other
    nodes. While the servers give this answer, the kernel continues to forward traffic.
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
