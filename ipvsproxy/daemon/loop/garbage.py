"""Decides when Python's garbage collector searches for reference cycles.

Objects that are not in a cycle are freed when their reference count becomes 0. The data about known API objects consists of about
a million values without cycles. With Python's default settings, the garbage collector would traverse this data again and again
during a start. After the start, changes create so many objects within seconds that collecting them all at once would block the
event loop for too long. ``docs/performance.md`` has the measurements.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping

YOUNG_OBJECTS = 2_000
"""The number of new objects after which the youngest generation of objects is collected.

Python's default is 700, but one change of a large Service creates several times as many objects.
"""
ROUNDS_BETWEEN = 0
"""The threshold for the collection of an older generation of objects. An older generation is collected after more than this many
collections of the next younger generation.

The largest of these collections takes 6 ms, because it visits ``3 * YOUNG_OBJECTS`` objects. With Python's default, it takes 400
ms.
"""
THAW_INTERVAL_S = 24 * 3600.0
"""The time in seconds between two collections of all objects. Each such collection takes half a second with 10,000 Services."""

_OLDEST = 2
_ROUNDS_HAVE_AGES = sys.version_info < (3, 14)
"""Whether Python collects all objects of a generation at once. Since version 3.14, Python collects old objects in several
steps."""


@contextlib.contextmanager
def in_short_rounds(clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[], None]]:
    """Makes small garbage collections run often inside the ``with`` block.

    After each collection of the oldest generation, all surviving objects are frozen (excluded from collections) until a thaw.
    Yields a function that the caller must call now and then. The yielded function thaws the frozen objects if a thaw is due.
    ``clock`` returns the present time in seconds.
    """
    thawed_s = clock()

    def pass_over_the_old(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == _OLDEST:
            gc.freeze()

    def collect_nothing() -> None:
        # Python begins the next full collection only when there is one new object for every four objects that survived the last
        # full collection. Full collections would become rare if many objects survived them. Therefore all objects are frozen
        # before this collection.
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
