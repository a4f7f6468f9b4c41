"""When Python's collector searches for cycles. Objects without cycles are freed by their reference count.

The known objects are a million values without cycles. During a start, a hundred rounds of the collector would walk all known
objects again and again, for a third of its time. Later, one round over the objects of some seconds of churn would hold the loop
for too long. ``docs/performance.md`` has the figures.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping

YOUNG_OBJECTS = 2_000
"""The number of new objects that starts a round over the youngest objects.

One change of a large Service reaches Python's default of 700 several times.
"""
ROUNDS_BETWEEN = 0
"""The number of rounds over objects of one age before a round over the next older age.

The largest round walks three times ``YOUNG_OBJECTS`` in 6 ms (with Python's default: 400 ms).
"""
THAW_INTERVAL_S = 24 * 3600.0
"""Once a day a round walks everything, half a second at 10,000 Services."""

_OLDEST = 2
_ROUNDS_HAVE_AGES = sys.version_info < (3, 14)
"""The first version of Python that walks old objects in steps."""


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Collect nothing inside the block, and freeze its objects until the next thaw."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def in_short_rounds(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Inside the block, collect often and little: an object that has outlived a round of each age is frozen until a thaw.

    Yields a function to call now and then: it thaws when that is due by ``clock`` (seconds).
    """
    thawed_s = clock()

    def pass_over_the_old(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == _OLDEST:
            gc.freeze()

    def collect_nothing() -> None:
        # Python postpones the next full round until a quarter is added to what the last round left, so that must be nothing.
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
