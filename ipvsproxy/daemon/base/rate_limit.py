"""Rate limits, so that no cause of log lines or Kubernetes events can fill the log or the API server."""

from collections.abc import Hashable
from typing import Generic, TypeVar

Subject = TypeVar("Subject", bound=Hashable)


class Bucket:
    """A rate limit: ``burst`` at once, then one per ``refill_s``."""

    def __init__(self, burst: int, refill_s: float, now: float) -> None:
        self._burst = burst
        self._refill_s = refill_s
        self._left = float(burst)
        self._then_s = now

    def take(self, now: float) -> bool:
        """Whether one more is allowed. An allowed one counts."""
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
        """Whether one more is allowed for this subject. An allowed one counts."""
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= self._most:
                del self._buckets[next(iter(self._buckets))]
            bucket = self._buckets[subject] = Bucket(self._burst, self._refill_s, now)
        return bucket.take(now)
