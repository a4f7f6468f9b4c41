"""Covers the rate limits alone. ``test_journal`` and ``test_recorder`` cover their use."""

from ipvsproxy.daemon.base.rate_limit import Bucket, RateLimits


def test_a_rate_limit_refills_up_to_its_burst() -> None:
    bucket = Bucket(2, 10.0, 0)
    assert [bucket.take(now) for now in (0, 0, 0, 9, 10, 19, 20)] == [True, True, False, False, True, False, True]
    assert [bucket.take(1000) for _ in range(3)] == [True, True, False]


def test_each_subject_has_its_own_rate_limit_and_the_oldest_is_forgotten() -> None:
    limits: RateLimits[str] = RateLimits(1, 10.0, 2)
    assert [limits.take(subject, 0) for subject in ("a", "a", "b", "b")] == [True, False, True, False]
    assert limits.take("c", 0)
    assert [limits.take(subject, 0) for subject in ("b", "a")] == [False, True]
