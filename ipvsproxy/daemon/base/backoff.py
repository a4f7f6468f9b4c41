"""How long to wait before trying again: exponential, bounded, jittered."""

import random


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
