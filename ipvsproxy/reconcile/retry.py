"""When a failed operation may be tried again."""

from typing import NamedTuple

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


class _Failure(NamedTuple):
    attempts: int
    due_s: float


class Retries:
    """Failures by what failed. Each further one doubles the delay, up to ``LONGEST_DELAY_S``. Nothing is ever given up."""

    def __init__(self) -> None:
        self._failures: dict[object, _Failure] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, what: object, now: float) -> None:
        """Book a failure."""
        attempts = self._failures[what].attempts + 1 if what in self._failures else 1
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(attempts - 1, 16))
        self._failures[what] = _Failure(attempts, now + delay_s)

    def forget(self, what: object) -> None:
        """It succeeded, or something else is wanted now: the next try is a first one."""
        self._failures.pop(what, None)

    def may_try(self, what: object, now: float) -> bool:
        """Whether there was no failure, or its delay is over."""
        failure = self._failures.get(what) if self._failures else None
        return failure is None or failure.due_s <= now

    def next_s(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.due_s for failure in self._failures.values()), default=None)
