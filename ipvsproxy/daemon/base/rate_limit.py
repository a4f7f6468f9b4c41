"""How often something may be said, so that whoever provokes it cannot fill a log or an API server."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)


class Bucket:
    """An allowance: ``burst`` at once, then one per ``refill_s``."""

    def __init__(self, burst: int, refill_s: float, now: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._left = float(burst)
        self._then_s = now

    def take(self, now: float) -> bool:
        """Whether one more is allowed; it then counts."""
        self._left = min(self._burst, self._left + (now - self._then_s) / self._refill_s)
        self._then_s = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RateLimits(Generic[Subject]):
    """An allowance for each subject; those of the ``most`` newest subjects are remembered."""

    def __init__(self, burst: int, refill_s: float, most: int) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._most = most
        self._buckets: dict[Subject, Bucket] = {}

    def take(self, subject: Subject, now: float) -> bool:
        """Whether one more is allowed about this subject; it then counts."""
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[subject] = Bucket(self._burst, self._refill_s, now)
        return bucket.take(now)
