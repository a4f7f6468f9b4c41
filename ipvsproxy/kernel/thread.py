"""The one thread that owns the netlink sockets.

A netlink request does its work inside ``send()``, so asyncio gains nothing there; in a thread of their own the calls keep
neither the event loop nor each other's order waiting.
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
"""How long this thread may keep the interpreter from the event loop, where Python's own choice is five times as long."""

SLOW_S = 5.0
"""A call that takes longer is reported while it goes on: the kernel answers within milliseconds, or an answer was lost."""

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
R = TypeVar("R")


class Worker(Protocol):
    """Does jobs one after the other, in the order in which they come."""

    def put(self, future: asyncio.Future[Any], job: Callable[[], object]) -> None:
        """Do this job, and tell the future what came of it.

        Raises:
            RuntimeError: it has been stopped.
        """

    def stop(self) -> None:
        """Let the running job end, and cancel those that wait."""


class ThreadWorker:
    """Does them in a thread. It belongs to the thread of the event loop.

    An executor of ``concurrent.futures`` does the same; a trip to its thread and back takes 0.6 ms more on the test kernel, and
    0.1 ms elsewhere, for locks and futures of its own (docs/performance.md).
    """

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[asyncio.Future[Any], Callable[[], object]] | None] = collections.deque()
        """Those that wait, and None behind them when that is the end."""
        # One for each of them: to wait for it lets go of the interpreter in one system call, and nothing has to be locked.
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
        # They stay where they are: were there more rings than jobs, the thread could find the end, and close the bell, before it
        # is rung for the last time. It takes jobs from the other side meanwhile.
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
        """Wait for a job and do it; false at the end. Nothing of it is kept until the next one."""
        try:
            os.eventfd_read(self._bell)
        except InterruptedError:  # by a signal that came to this thread: Python does not wait again by itself here
            return True
        entry = self._jobs.popleft()
        if entry is None:
            return False
        future, job = entry
        if future.cancelled():
            return True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
            future.get_loop().call_soon_threadsafe(_tell, future, *_result(job))
        del entry, future  # an error keeps the variables of all calls that were under way: it would lead back to itself
        return True

    def _leave(self) -> None:
        """The process ends: not in the middle of a job."""
        self.stop()
        self._thread.join()


def _cancel(entry: tuple[asyncio.Future[Any], Callable[[], object]] | None) -> None:
    if entry and not entry[0].get_loop().is_closed():
        entry[0].cancel()


def _result(job: Callable[[], object]) -> tuple[object, BaseException | None]:
    """What it returns, or what it raises."""
    try:
        return job(), None
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
        return None, error


def _tell(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class KernelThread(Generic[T_co]):
    """Makes an object in a thread of its own, and has everything that is done with it done there, one after the other."""

    def __init__(self, worker: Worker, target: T_co, on_slow: Callable[[], None] = lambda: None) -> None:
        """``on_slow`` is called in the loop, once, when no call has ended for ``SLOW_S`` although there is one."""
        self._worker = worker
        self._target = target
        self._on_slow = on_slow
        self._under_way = 0
        self._ended = 0
        # One timer for many calls: to set one for each would ask for the time each time.
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, make: Callable[[], T_co], on_slow: Callable[[], None] = lambda: None) -> Self:
        """Start the thread and make the object in it; an exception of ``make`` is raised here."""
        sys.setswitchinterval(TURN_S)
        worker = ThreadWorker()
        try:
            target = await _done(worker, make)
        except BaseException:
            worker.stop()
            raise
        return cls(worker, target, on_slow)

    async def call(self, do: Callable[[T_co], R]) -> R:
        """Call ``do`` with the object in the thread; calls are served in the order in which they were made.

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
        """Report if no call has ended since then; go on while there are calls, and rest without one."""
        self._timer = None
        if self._under_way and self._ended == ended:
            self._on_slow()
        elif self._under_way:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, self._ended)

    def standing_in(self, target: U) -> "KernelThread[U]":
        """The same thread with another object, which may be a part of its own."""
        return KernelThread(self._worker, target, self._on_slow)

    def stop(self) -> None:
        """Let the running call end, and take no more."""
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
