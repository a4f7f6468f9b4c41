"""Limits of work in time: how often, when again after a failure, and for how long before other tasks have their turn."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Hashable
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)
Result = TypeVar("Result")


class Bucket:
    """A rate limit, so that no cause of log lines or events can fill the log or the API server.

    It allows ``burst`` lines or events at once, then one per ``refill_s``.
    """

    def __init__(self, burst: int, refill_s: float, now: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._left = float(burst)
        self._then_s = now

    def take(self, now: float) -> bool:
        """Whether one more event is allowed; if so, it counts."""
        self._left = min(self._burst, self._left + (now - self._then_s) / self._refill_s)
        self._then_s = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RateLimits(Generic[Subject]):
    """A rate limit for each subject, remembered for the ``most`` newest subjects."""

    def __init__(self, burst: int, refill_s: float, most: int) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._most = most
        self._buckets: dict[Subject, Bucket] = {}

    def take(self, subject: Subject, now: float) -> bool:
        """Whether one more event is allowed for this subject; if so, it counts."""
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[subject] = Bucket(self._burst, self._refill_s, now)
        return bucket.take(now)

    def forget(self) -> None:
        """Let the rate limit of every subject begin anew."""
        self._buckets.clear()


class Backoff:
    """A sequence of delays that doubles up to a bound, and begins anew after ``reset``.

    Each delay is random between half of its bound and the bound, so that a thousand nodes that lost one server do not return
    to it together.
    """

    def __init__(self, *, first_s: float, longest_s: float, dice: random.Random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._dice = dice
        self.attempts = 0
        """The number of delays since the last reset."""

    def reset(self) -> None:
        """Begin anew, after a success."""
        self.attempts = 0

    def next_s(self) -> float:
        """The next delay, in seconds."""
        # Without a bound the exponent overflows a float: an API server may be gone for weeks.
        bound_s = min(self._first_s * 2.0 ** min(self.attempts, 64), self._longest_s)
        self.attempts += 1
        return bound_s * self._dice.uniform(0.5, 1.0)


async def comes_within(longest_s: float | None, wait: Awaitable[object]) -> bool:
    """Wait for at most ``longest_s`` seconds (None: without a bound). Returns whether ``wait`` ended in that time."""
    try:
        async with asyncio.timeout(longest_s):
            await wait
    except TimeoutError:
        return False
    return True


SLICE_S = 0.002
"""The longest time that work may take without a pause.

A timer can be late by three slices: its time comes in the first, the loop notices in the second, and its task wakes after the
third.
"""


async def in_slices(steps: Generator[None, None, Result], clock: Callable[[], float]) -> Result:
    """Do all steps, with a pause for other tasks after each ``SLICE_S``. Returns their result."""
    slice_ends_s = clock() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if clock() >= slice_ends_s:
            await asyncio.sleep(0)
            slice_ends_s = clock() + SLICE_S
