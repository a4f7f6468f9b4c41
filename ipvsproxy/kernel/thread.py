"""The one thread that owns the netlink sockets.

A netlink request does its work inside ``send()``, so asyncio gains nothing there; in a thread of their own the calls keep
neither the event loop nor each other's order waiting.
"""

import asyncio
import concurrent.futures
import sys
from collections.abc import Callable
from typing import Generic, ParamSpec, Self, TypeVar

TURN_S = 0.001
"""How long this thread may keep the interpreter from the event loop, where Python's own choice is five times as long."""

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class KernelThread(Generic[T]):
    """Makes an object in a thread of its own, and calls its methods there, one after the other."""

    def __init__(self, executor: concurrent.futures.ThreadPoolExecutor, target: T) -> None:
        self._executor = executor
        self.target = target

    @classmethod
    async def start(cls, make: Callable[[], T]) -> Self:
        """Start the thread and make the object in it; what ``make`` raises is raised here."""
        sys.setswitchinterval(TURN_S)
        executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel")
        try:
            target = await asyncio.get_running_loop().run_in_executor(executor, make)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        return cls(executor, target)

    async def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call in the thread; calls are served in the order in which they were made."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: method(*args, **kwargs))

    def standing_in(self, target: T) -> "KernelThread[T]":
        """The same thread with another object in the place of its own."""
        return KernelThread(self._executor, target)

    def stop(self) -> None:
        """Let the running call end, and take no more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
