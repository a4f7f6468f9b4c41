"""How long to wait before trying again: exponential, bounded, jittered."""

import random


class Backoff:
    """A sequence of delays that doubles up to a bound, and begins anew after ``reset``.

    Each delay is spread evenly over the upper half of its step, so that a thousand nodes that lost one server do not come
    back to it together.
    """

    def __init__(self, *, first_s: float, longest_s: float, dice: random.Random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._dice = dice
        self.attempts = 0
        """Delays given since the last reset."""

    def reset(self) -> None:
        """What was tried has succeeded."""
        self.attempts = 0

    def next_s(self) -> float:
        """The next delay, in seconds."""
        # The exponent is bounded because a float is: an API server may be gone for weeks.
        step = min(self._first_s * 2.0 ** min(self.attempts, 64), self._longest_s)
        self.attempts += 1
        return step * self._dice.uniform(0.5, 1.0)
