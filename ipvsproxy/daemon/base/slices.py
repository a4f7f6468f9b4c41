"""Long work in the loop, in slices short enough for whoever waits for it."""

import asyncio
from collections.abc import Callable, Iterable

SLICE_S = 0.002
"""How long the loop may be kept without a pause. Who waits for a time is kept by three such slices: that in which it comes, that
in which the loop sees it, that in which the waiting task wakes."""


async def in_slices(steps: Iterable[None], clock: Callable[[], float], now: float) -> None:
    """Take the steps, with a pause for others as often as they have kept the loop for ``SLICE_S``; it is ``now`` at first."""
    slice_ends_s = now + SLICE_S
    for _ in steps:
        if clock() >= slice_ends_s:
            await asyncio.sleep(0)
            slice_ends_s = clock() + SLICE_S
