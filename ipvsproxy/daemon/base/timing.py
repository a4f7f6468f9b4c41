"""Rate limits, delays between attempts, functions that wait, and pauses in long work that let other tasks run."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Generator, Hashable
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)
Result = TypeVar("Result")


class Bucket:
    """A rate limit, so that one problem cannot fill the log with lines or flood the API server with events.

    A bucket allows ``burst`` lines or events at once, and then one per ``refill_s`` seconds.
    """

    def __init__(self, burst: int, refill_s: float, now: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._left = float(burst)
        self._then_s = now

    def take(self, now: float) -> bool:
        """Whether the rate limit allows one more event now; an allowed event is counted."""
        self._left = min(self._burst, self._left + (now - self._then_s) / self._refill_s)
        self._then_s = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RateLimits(Generic[Subject]):
    """A rate limit for each subject; only the ``most`` newest subjects are remembered."""

    def __init__(self, burst: int, refill_s: float, most: int) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._most = most
        self._buckets: dict[Subject, Bucket] = {}

    def take(self, subject: Subject, now: float) -> bool:
        """Whether the subject's rate limit allows one more event now; an allowed event is counted."""
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[subject] = Bucket(self._burst, self._refill_s, now)
        return bucket.take(now)

    def forget(self) -> None:
        """Reset the rate limit of every subject."""
        self._buckets.clear()


class Backoff:
    """A sequence of delays that double up to a maximum; ``reset`` starts the sequence again.

    Each delay is a random time between half of its upper bound and the upper bound. Because of the random times, a thousand nodes
    that lose the same server do not reconnect at the same moment.
    """

    def __init__(self, *, first_s: float, longest_s: float, dice: random.Random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._dice = dice
        self.attempts = 0
        """The number of delays since the last reset."""

    def reset(self) -> None:
        """After a success, start the sequence of delays again."""
        self.attempts = 0

    def next_s(self) -> float:
        """The next delay of the sequence, in seconds."""
        # An API server may be unreachable for weeks, so without a limit on the exponent, the computation of the delay would
        # overflow.
        bound_s = min(self._first_s * 2.0 ** min(self.attempts, 64), self._longest_s)
        self.attempts += 1
        return bound_s * self._dice.uniform(0.5, 1.0)


async def comes_within(longest_s: float | None, wait: Awaitable[object]) -> bool:
    """Await ``wait`` for at most ``longest_s`` seconds; None means that there is no limit.

    Returns whether ``wait`` returned in that time.
    """
    try:
        async with asyncio.timeout(longest_s):
            await wait
    except TimeoutError:
        return False
    return True


async def until_readable(descriptor: int) -> None:
    """Wait until a file descriptor has something to read."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


SLICE_S = 0.002
"""The longest time, in seconds, for which a long task runs before it lets other tasks run.

A timer can be late by three slices: the timer expires during the first slice, the event loop runs the timer's callback after the
second slice, and the waiting task runs after the third slice.
"""


async def in_slices(steps: Generator[None, None, Result], clock: Callable[[], float]) -> Result:
    """Run all steps of a generator, and let other tasks run whenever ``SLICE_S`` seconds have passed.

    Returns the result of the generator.
    """
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
