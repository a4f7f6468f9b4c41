"""When Python looks for garbage in cycles. Everything else is freed at once, by its reference count.

The known objects are a million values without a cycle among them. While they are made, each of a hundred rounds of the collector
walks all that were made before, which takes a third of a start's time. Later a round over what a few seconds of churn have made
holds the loop for longer than any change may wait. ``docs/performance.md`` has the figures.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping

YOUNG_OBJECTS = 2_000
"""New objects before the youngest are looked at. Python's 700 are reached several times by one change of a large Service."""
ROUNDS_BETWEEN = 0
"""Between rounds of the next older age: the largest walks three times ``YOUNG_OBJECTS``, 6 ms; by Python's own choice 400 ms."""
THAW_INTERVAL_S = 24 * 3600.0
"""Cycles among what is old are looked for once a day: that round walks everything, half a second at 10,000 Services."""

_OLDEST = 2
_ROUNDS_HAVE_AGES = sys.version_info < (3, 14)
"""From then on Python walks what is old bit by bit."""


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Collect nothing inside the block; what it made and left behind is not looked at again before a thaw."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def in_short_rounds(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Inside the block, collect often and little: what has outlived a round of each age is not looked at again before a thaw.

    Yields what is to be called now and then: it thaws when that is due, by ``clock``, which tells seconds.
    """
    thawed_s = clock()

    def pass_over_the_old(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == _OLDEST:
            gc.freeze()

    def collect_nothing() -> None:
        # Python puts the next full round off until there is a quarter more than the last one left: it is to have left nothing.
        gc.freeze()
        gc.collect()

    def thaw_if_due() -> None:
        nonlocal thawed_s
        if clock() >= thawed_s + THAW_INTERVAL_S:
            thawed_s = clock()
            gc.unfreeze()
            gc.collect()
            collect_nothing()

    before = gc.get_threshold()
    collect_nothing()
    gc.set_threshold(YOUNG_OBJECTS, *((ROUNDS_BETWEEN, ROUNDS_BETWEEN) if _ROUNDS_HAVE_AGES else before[1:]))
    gc.callbacks.append(pass_over_the_old)
    try:
        yield thaw_if_due
    finally:
        gc.callbacks.remove(pass_over_the_old)
        gc.set_threshold(*before)
