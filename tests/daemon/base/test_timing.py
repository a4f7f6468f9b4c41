"""Covers rate limits, retry delays, and waits with a timeout.

``test_journal`` and ``test_events`` cover the code that uses rate limits.
"""

import asyncio
import random
from unittest.mock import Mock

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.base.timing import Bucket, RateLimits


def test_a_rate_limit_refills_up_to_its_burst() -> None:
    bucket = Bucket(2, 10.0, 0)
    assert [bucket.take(now) for now in (0, 0, 0, 9, 10, 19, 20)] == [True, True, False, False, True, False, True]
    assert [bucket.take(1000) for _ in range(3)] == [True, True, False]


def test_each_subject_has_its_own_rate_limit_but_only_the_newest_subjects_are_remembered() -> None:
    limits: RateLimits[str] = RateLimits(1, 10.0, 2)
    assert [limits.take(subject, 0) for subject in ("a", "a", "b", "b")] == [True, False, True, False]
    assert limits.take("c", 0)
    assert [limits.take(subject, 0) for subject in ("b", "a")] == [False, True]


async def test_a_wait_with_a_timeout_returns_whether_the_event_came_in_time() -> None:
    event = asyncio.Event()
    assert not await timing.comes_within(0.01, event.wait())
    asyncio.get_running_loop().call_soon(event.set)
    assert await timing.comes_within(None, event.wait())
    assert await timing.comes_within(10, event.wait())


HIGHEST = Mock(uniform=max)
"""A source of random numbers that always returns the upper bound."""


def test_retry_delays_double_up_to_the_upper_bound_and_start_again_after_a_success() -> None:
    delays = timing.Backoff(first_s=0.5, longest_s=3, dice=HIGHEST)
    assert [delays.next_s() for _ in range(5)] == [0.5, 1, 2, 3, 3]
    delays.reset()
    assert (delays.next_s(), delays.attempts) == (0.5, 1)


def test_retry_delays_are_random_and_at_least_half_as_long_as_their_upper_bound() -> None:
    delays = timing.Backoff(first_s=8, longest_s=8, dice=random.Random(1))
    drawn = [delays.next_s() for _ in range(200)]
    assert all(4 <= delay <= 8 for delay in drawn)
    assert max(drawn) - min(drawn) > 3.5


def test_retry_delays_do_not_overflow_after_an_outage_of_weeks() -> None:
    delays = timing.Backoff(first_s=0.8, longest_s=30, dice=HIGHEST)
    assert [delays.next_s() for _ in range(5000)][-1] == 30
