"""When a failed operation may be tried again."""

from collections.abc import Collection
from typing import NamedTuple

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


class _Failure(NamedTuple):
    wish: object
    attempts: int
    due_s: float


class Retries:
    """Failures by what failed. Each further one doubles the delay, up to ``LONGEST_DELAY_S``. Nothing is ever given up.

    A failure counts for what was wished then; where something else is wished now, the next try is a first one.
    """

    def __init__(self) -> None:
        self._failures: dict[object, _Failure] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, what: object, wish: object, now: float) -> None:
        """Book a failure."""
        last = self._failures.get(what)
        attempts = last.attempts + 1 if last and last.wish == wish else 1
        delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(attempts - 1, 16))
        self._failures[what] = _Failure(wish, attempts, now + delay_s)

    def forget(self, what: object) -> None:
        """It succeeded."""
        self._failures.pop(what, None)

    def keep_only(self, planned: Collection[object]) -> None:
        """Forget whatever nobody wants to try again."""
        for what in self._failures.keys() - planned:
            del self._failures[what]

    def may_try(self, what: object, wish: object, now: float) -> bool:
        """Whether this did not fail, or its delay is over."""
        failure = self._failures.get(what)
        return failure is None or failure.wish != wish or failure.due_s <= now

    def next_s(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.due_s for failure in self._failures.values()), default=None)
