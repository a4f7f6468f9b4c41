"""Counts the executed steps of code, because times depend more on the machine than on the code."""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import selectors
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WAITING = (
    str(pathlib.Path(asyncio.__file__).parent),
    str(pathlib.Path(concurrent.futures.__file__).parent),
    selectors.__file__,
    threading.__file__,
)
"""Files whose steps are not counted. The number of these steps depends on how often a loop wakes up, which is random and does not
grow with the work."""


class _Thread:
    """Counts the executed steps of one thread."""

    def __init__(self) -> None:
        self.steps = 0

    def trace(self, _frame: FrameType, event: str, _argument: object) -> Any:
        """The trace function for the lines of a call."""
        if event == "line":
            self.steps += 1
        return self.trace


class Steps:
    """Counts steps of Python: calls and executed lines. A line in a loop or comprehension counts in each iteration."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self._threads = defaultdict[int, _Thread](_Thread)
        self._waiting = dict[str, bool]()

    @property
    def here(self) -> int:
        """The steps of the thread that started counting, which is the event loop's thread."""
        return self._threads[self._here].steps

    @property
    def all(self) -> int:
        """The steps of this thread and of threads started since counting began."""
        return sum(thread.steps for thread in self._threads.values())

    def trace(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """The function for ``sys.settrace``."""
        file = frame.f_code.co_filename
        if (is_waiting := self._waiting.get(file)) is None:
            is_waiting = self._waiting[file] = file.startswith(_WAITING)
        if is_waiting:
            return None
        thread = self._threads[threading.get_ident()]
        thread.steps += 1
        return thread.trace


@contextlib.contextmanager
def counted() -> Iterator[Steps]:
    """Count the steps that run during the ``with`` block: in calls of this thread, and in threads that start meanwhile."""
    steps = Steps()
    before = sys.gettrace()
    threading.settrace(steps.trace)
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
        threading.settrace(before)
