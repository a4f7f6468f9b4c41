"""Covers the sequence of delays. The waiting itself is tested with the users of the module."""

import random

from ipvsproxy.daemon.base import backoff


class Highest(random.Random):
    """Always the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


def test_delays_double_up_to_the_bound() -> None:
    delays = backoff.Backoff(first_s=0.5, longest_s=3, dice=Highest())
    assert [delays.next_s() for _ in range(5)] == [0.5, 1, 2, 3, 3]


def test_delays_begin_anew_after_a_success() -> None:
    delays = backoff.Backoff(first_s=0.5, longest_s=3, dice=Highest())
    delays.next_s()
    delays.next_s()
    delays.reset()
    assert (delays.next_s(), delays.attempts) == (0.5, 1)


def test_delays_are_spread_over_the_upper_half_of_their_bound() -> None:
    delays = backoff.Backoff(first_s=8, longest_s=8, dice=random.Random(1))
    drawn = [delays.next_s() for _ in range(200)]
    assert all(4 <= delay <= 8 for delay in drawn)
    assert max(drawn) - min(drawn) > 3.5


def test_an_outage_of_weeks_does_not_overflow() -> None:
    delays = backoff.Backoff(first_s=0.8, longest_s=30, dice=Highest())
    assert [delays.next_s() for _ in range(5000)][-1] == 30
