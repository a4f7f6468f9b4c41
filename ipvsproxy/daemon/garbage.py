"""When Python looks for garbage in cycles. Everything else is freed at once, by its reference count.

The known objects are a million values without a cycle among them. While they are made, each of a hundred rounds of the collector
walks all that were made before, which takes a third of a start's time; later a full round over them holds the loop for
longer than any change may wait. ``docs/performance.md`` has the figures.
"""

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 10_000
"""New objects before the youngest are looked at. Python's 700 are reached several times by one change of a large Service."""


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Collect nothing inside the block; what it made and left behind is never looked at again, but freed as ever."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
        gc.enable()
