"""Long computations in steps: a generator yields after each step, so that its caller can do other work between two steps."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

ITEMS_AT_ONCE = 100
"""The number of items in one step: a few tenths of a millisecond of work."""

T = TypeVar("T")
R = TypeVar("R")


def each(do: Callable[[T], object], items: Iterable[T]) -> Generator[None, None, None]:
    """Calls a function with each item, ``ITEMS_AT_ONCE`` items in each step."""
    for number, item in enumerate(items, 1):
        do(item)
        if number % ITEMS_AT_ONCE == 0:
            yield


def choosing(is_chosen: Callable[[T], object], items: Iterable[T]) -> Generator[None, None, list[T]]:
    """Examines ``ITEMS_AT_ONCE`` items in each step. Returns the items for which ``is_chosen`` returns a true value."""
    chosen: list[T] = []
    for number, item in enumerate(items, 1):
        if is_chosen(item):
            chosen.append(item)
        if number % ITEMS_AT_ONCE == 0:
            yield
    return chosen


def at_once(steps: Generator[None, None, R]) -> R:
    """Runs a generator to its end, and returns the result of the generator."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: R = end.value
            return result
