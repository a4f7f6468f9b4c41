"""Long work in steps, between which its caller may do something else: a generator yields after each of them."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

ITEMS_AT_ONCE = 100
"""Items without a pause: a few tenths of a millisecond of work."""

T = TypeVar("T")
R = TypeVar("R")


def each(do: Callable[[T], object], items: Iterable[T]) -> Generator[None, None, None]:
    """Does something with each item, with a pause after ``ITEMS_AT_ONCE``."""
    for number, item in enumerate(items, 1):
        do(item)
        if number % ITEMS_AT_ONCE == 0:
            yield


def at_once(steps: Generator[None, None, R]) -> R:
    """Does all steps without a pause. Returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: R = end.value
            return result
