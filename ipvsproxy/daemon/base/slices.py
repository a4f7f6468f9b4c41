"""Long work in the loop, in slices that keep other tasks waiting only briefly."""

import asyncio
from collections.abc import Callable, Iterable

SLICE_S = 0.002
"""The longest work without a pause. A timer can be late by three slices: its time comes in the first, the loop notices in the
second, and its task wakes after the third."""


async def in_slices(steps: Iterable[None], clock: Callable[[], float], now: float) -> None:
    """Do all steps, with a pause for other tasks after each ``SLICE_S``. ``now`` is the clock's time at the call."""
    slice_ends_s = now + SLICE_S
    for _ in steps:
        if clock() >= slice_ends_s:
            await asyncio.sleep(0)
            slice_ends_s = clock() + SLICE_S
