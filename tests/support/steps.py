"""Counts what a piece of code does, where a clock would tell more of the machine than of the code."""

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
"""How often a loop wakes up is chance, and nothing that grows with the work."""


class Steps:
    """Steps of Python: calls, and lines as often as they are run, each round of a loop or a comprehension among them."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self._of: Counter[int] = Counter()

    @property
    def here(self) -> int:
        """In the thread that counts, which is the loop's."""
        return self._of[self._here]

    @property
    def all(self) -> int:
        """In this thread and in those that were started since."""
        return sum(self._of.values())

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        """As ``sys.settrace`` wants it."""
        if frame.f_code.co_filename.startswith(_WAITING):
            return None
        if event in ("call", "line"):
            self._of[threading.get_ident()] += 1
        return self.trace


@contextlib.contextmanager
def counted() -> Iterator[Steps]:
    """Count the steps of what is called in the block, here and in threads that it starts."""
    steps = Steps()
    before = sys.gettrace()
    threading.settrace(steps.trace)
    sys.settrace(steps.trace)
    try:
        yield steps
    finally:
        sys.settrace(before)
        threading.settrace(before)
