"""The one thread that owns the netlink sockets.

A netlink request does its work inside ``send()``, so asyncio has no advantage there. In a thread of their own, requests do not
block the event loop, and stay in order.
"""

import asyncio
import atexit
import collections
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

TURN_S = 0.001
"""How long this thread may hold the interpreter lock while the event loop waits. Python's default is five times as long."""

SLOW_S = 5.0
"""A call that takes longer is reported while it runs: the kernel answers within milliseconds, or an answer was lost."""

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
R = TypeVar("R")


class Worker(Protocol):
    """Runs jobs one after the other, in their order."""

    def put(self, future: asyncio.Future[Any], job: Callable[[], object]) -> None:
        """Run this job, and pass its result or exception to the future.

        Raises:
            RuntimeError: the worker has been stopped.
        """

    def stop(self) -> None:
        """Let the running job end, and cancel waiting jobs."""


class ThreadWorker:
    """Runs jobs in a thread. Only the thread of the event loop may use this object.

    An executor of ``concurrent.futures`` does the same; a trip to its thread and back takes 0.6 ms more on the test kernel, and
    0.1 ms elsewhere, for locks and futures of its own (docs/performance.md).
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[asyncio.Future[Any], Callable[[], object]] | None] = collections.deque()
        """The waiting jobs; None at the end stops the thread."""
        # One count for each entry: the wait for it releases the interpreter lock in one system call, and no lock is needed.
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kernel", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def put(self, future: asyncio.Future[Any], job: Callable[[], object]) -> None:
        """As in ``Worker``."""
        if self._is_stopped:
            raise RuntimeError("the kernel's thread has been stopped")
        self._append((future, job))

    def stop(self) -> None:
        """As in ``Worker``."""
        if self._is_stopped:
            return
        self._is_stopped = True
        # Cancelled jobs stay in the queue: with more counts than entries, the thread could find the end and close the descriptor
        # before the last write to it. Meanwhile the thread takes jobs from the other end.
        with contextlib.suppress(IndexError):
            for back in range(1, len(self._jobs) + 1):
                _cancel(self._jobs[-back])
        self._append(None)

    def _append(self, entry: tuple[asyncio.Future[Any], Callable[[], object]] | None) -> None:
        self._jobs.append(entry)
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while self._serve():
            pass
        os.close(self._bell)
        atexit.unregister(self._leave)

    def _serve(self) -> bool:
        """Wait for a job and run it; false at the end. No reference to the job is kept while waiting for the next one."""
        try:
            os.eventfd_read(self._bell)
        except InterruptedError:  # by a signal in this thread: Python does not resume the wait by itself here
            return True
        entry = self._jobs.popleft()
        if entry is None:
            return False
        future, job = entry
        if future.cancelled():
            return True
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing waits for the result
            future.get_loop().call_soon_threadsafe(_resolve, future, *_result(job))
        del entry, future  # an exception keeps the variables of all running calls, and would be part of a reference cycle
        return True

    def _leave(self) -> None:
        """Before the process ends, let the running job end."""
        self.stop()
        self._thread.join()


def _cancel(entry: tuple[asyncio.Future[Any], Callable[[], object]] | None) -> None:
    if entry and not entry[0].get_loop().is_closed():
        entry[0].cancel()


def _result(job: Callable[[], object]) -> tuple[object, BaseException | None]:
    """The result or the exception of a job."""
    try:
        return job(), None
    except BaseException as error:  # noqa: BLE001 - any exception is the caller's
        return None, error


def _resolve(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class KernelThread(Generic[T_co]):
    """Makes an object in a thread of its own, and runs every call with it there, one after the other."""

    def __init__(self, worker: Worker, target: T_co, on_slow: Callable[[], None] = lambda: None) -> None:
        """``on_slow`` is called in the loop, once, when no call has ended for ``SLOW_S`` although one is running."""
        self._worker = worker
        self._target = target
        self._on_slow = on_slow
        self._under_way = 0
        self._ended = 0
        # One timer for many calls: a timer for each call would read the clock each time.
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, make: Callable[[], T_co], on_slow: Callable[[], None] = lambda: None) -> Self:
        """Start the thread and make the object in it. An exception of ``make`` is raised here."""
        sys.setswitchinterval(TURN_S)
        worker = ThreadWorker()
        try:
            target = await _done(worker, make)
        except BaseException:
            worker.stop()
            raise
        return cls(worker, target, on_slow)

    async def call(self, do: Callable[[T_co], R]) -> R:
        """Call ``do`` with the object in the thread. Calls run in the order in which they were made.

        Raises:
            RuntimeError: the thread has been stopped.
        """
        self._under_way += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, self._ended)
        try:
            return await _done(self._worker, functools.partial(do, self._target))
        finally:
            self._under_way -= 1
            self._ended += 1

    def _watch(self, ended: int) -> None:
        """Report if no call has ended since then. Continue while calls are running, and stop without one."""
        self._timer = None
        if self._under_way and self._ended == ended:
            self._on_slow()
        elif self._under_way:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, self._ended)

    def standing_in(self, target: U) -> "KernelThread[U]":
        """The same thread with another object, which may be a part of this one."""
        return KernelThread(self._worker, target, self._on_slow)

    def stop(self) -> None:
        """Let the running call end, and accept no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._worker.stop()


async def _done(worker: Worker, job: Callable[[], R]) -> R:
    future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
    worker.put(future, job)
    try:
        return await future
    finally:
        del future  # as in ``_serve``
