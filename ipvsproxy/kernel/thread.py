"""The thread that owns all netlink sockets.

The kernel handles a netlink request inside ``send()``, so sockets of asyncio would have no advantage. A separate thread keeps the
requests in order, and does not block the event loop.
"""

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable
from typing import Generic, Self, TypeVar

TURN_S = 0.001
"""The longest time for which this thread may hold the interpreter lock while the event loop waits. Python's default is five times
as long."""

SLOW_S = 5.0
"""A call that takes longer than this is reported while it runs. The kernel usually answers within milliseconds, so the answer to
such a call was probably lost."""

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")
R = TypeVar("R")


class KernelThread(Generic[T_co]):
    """Creates an object in a separate thread, and runs all calls of the object in the same thread, one call after the other."""

    def __init__(self, executor: concurrent.futures.Executor, target: T_co, on_slow: Callable[[], None] = lambda: None) -> None:
        """``executor`` must run only one call at a time.

        ``on_slow`` is called once, in the event loop, if a call is running and no call has ended for ``SLOW_S``.
        """
        self._executor = executor
        self._target = target
        self._on_slow = on_slow
        # The thread itself writes these counters, because a call that has begun continues even if its caller stops waiting. A
        # call that was cancelled while it waited never begins.
        self._begun = 0
        self._ended = 0
        self._awaited = 0
        # One timer serves many calls, because a timer for each call would read the clock each time.
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, make: Callable[[], T_co], on_slow: Callable[[], None] = lambda: None) -> Self:
        """Start the thread, and create the object in the new thread. Raises the exceptions of ``make``."""
        sys.setswitchinterval(TURN_S)
        executor = concurrent.futures.ThreadPoolExecutor(1, "kernel")
        try:
            target = await asyncio.get_running_loop().run_in_executor(executor, make)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(executor, target, on_slow)

    async def call(self, do: Callable[[T_co], R]) -> R:
        """Call ``do`` with the object, in the object's thread. The calls run in the order in which they were requested.

        Raises:
            RuntimeError: the thread has been stopped.
        """
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._timer = loop.call_later(SLOW_S, self._watch, self._ended)
        self._awaited += 1
        try:
            return await loop.run_in_executor(self._executor, self._run, do)
        finally:
            self._awaited -= 1

    def _run(self, do: Callable[[T_co], R]) -> R:
        self._begun += 1
        try:
            return do(self._target)
        finally:
            self._ended += 1

    def _watch(self, ended: int) -> None:
        """Call ``on_slow`` if a call is running and the number of ended calls is still ``ended``.

        If ``on_slow`` was not called, but a call is running or waiting, schedule another check.
        """
        self._timer = None
        is_running = self._begun != self._ended
        if is_running and self._ended == ended:
            self._on_slow()
        elif is_running or self._awaited:
            self._timer = asyncio.get_running_loop().call_later(SLOW_S, self._watch, self._ended)

    def standing_in(self, target: U) -> "KernelThread[U]":
        """Make a ``KernelThread`` for the object ``target``.

        The calls of the new ``KernelThread`` run in the same thread as the calls of this ``KernelThread``.

        ``target`` may be a part of the object of this ``KernelThread``.
        """
        return KernelThread(self._executor, target, self._on_slow)

    def stop(self) -> None:
        """Cancel the calls that are waiting, and accept no further calls.

        Stopping does not wait for the running call, which continues to its end.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
