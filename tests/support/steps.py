"""Counts the steps of code, because a clock would measure the machine more than the code."""

import asyncio
import concurrent.futures
import contextlib
import pathlib
import selectors
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

_WAITING = (
    str(pathlib.Path(asyncio.__file__).parent),
    str(pathlib.Path(concurrent.futures.__file__).parent),
    selectors.__file__,
    threading.__file__,
)
"""How often a loop wakes up is random, and does not grow with the work."""


class Steps:
    """Steps of Python: calls and executed lines, including each round of a loop or a comprehension."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self._of: Counter[int] = Counter()

    @property
    def here(self) -> int:
        """Steps of the counting thread, which is the loop's."""
        return self._of[self._here]

    @property
    def all(self) -> int:
        """Steps of this thread and of threads started since."""
        return sum(self._of.values())

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        """The function for ``sys.settrace``."""
        if frame.f_code.co_filename.startswith(_WAITING):
            return None
        if event in ("call", "line"):
            self._of[threading.get_ident()] += 1
        return self.trace


@contextlib.contextmanager
def counted() -> Iterator[Steps]:
    """Count the steps of calls in the block, in this thread and in threads that it starts."""
    steps = Steps()
    before = sys.gettrace()
    threading.settrace(steps.trace)
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
        threading.settrace(before)
