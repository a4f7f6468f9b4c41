"""When Python looks for garbage in cycles. Everything else is freed at once, by its reference count.

The known objects are a million values without a cycle among them. While they are made, each of a hundred rounds of the collector
walks all that were made before, which takes a third of a start's time. Later a round over what a few seconds of churn have made
holds the loop for longer than any change may wait. ``docs/performance.md`` has the figures.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping

YOUNG_OBJECTS = 5_000
"""New objects before the youngest are looked at. Python's 700 are reached several times by one change of a large Service."""
ROUNDS_BETWEEN = 0
"""Between rounds of the next older age: the largest walks three times ``YOUNG_OBJECTS``, 20 ms; by Python's own choice 400 ms."""
THAW_INTERVAL_S = 24 * 3600.0
"""Cycles among what is old are looked for once a day: that round walks everything, half a second at 10,000 Services."""

_OLDEST = 2


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
def in_short_rounds(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Inside the block, collect often and little: what has outlived a round of each age is not looked at again before a thaw."""
    thawed_s = clock()

    def after_round(phase: str, info: Mapping[str, int]) -> None:
        nonlocal thawed_s
        if phase != "stop" or info["generation"] != _OLDEST:
            return
        if clock() < thawed_s + THAW_INTERVAL_S:
            gc.freeze()
        else:
            thawed_s = clock()
            gc.unfreeze()

    gc.freeze()
    gc.collect()  # of nothing: Python puts the next full round off until there is a quarter more than the last one left
    before = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, ROUNDS_BETWEEN, ROUNDS_BETWEEN)
    gc.callbacks.append(after_round)
    try:
        yield
    finally:
        gc.callbacks.remove(after_round)
        gc.set_threshold(*before)
