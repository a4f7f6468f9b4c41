"""Which lists are accepted, and when. ``test_objects`` has the consequences for the objects."""

import pytest

from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.mass_deletion import CONFIRMED_AFTER_S, LEAST, Guard

KIND = ObjectKind.SERVICE


@pytest.mark.parametrize(
    ("percent", "missing", "known", "accepted"),
    [
        (50, 51, 100, False),
        (50, 50, 100, True),
        (50, LEAST - 1, LEAST - 1, True),
        (50, LEAST, LEAST, False),
        (0, 1000, 1000, True),
        (100, 1000, 1000, True),
        (99, 1000, 1000, False),
    ],
)
def test_a_list_that_lacks_more_than_the_share_is_doubted(percent: int, missing: int, known: int, accepted: bool) -> None:  # noqa: FBT001
    assert Guard(percent).accepts(KIND, missing=missing, known=known, now=0) is accepted


def test_a_second_list_confirms_it_when_enough_time_has_passed() -> None:
    guard = Guard(50)
    assert not guard.accepts(KIND, missing=100, known=100, now=0)
    assert not guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S - 1), "too soon"
    assert guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S)
    assert guard.doubts == {}


def test_a_second_list_that_has_all_again_ends_the_doubt() -> None:
    guard = Guard(50)
    assert not guard.accepts(KIND, missing=100, known=100, now=0)
    assert guard.accepts(KIND, missing=0, known=100, now=30)
    assert not guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S + 1), "a new doubt, not a confirmation"


def test_kinds_are_doubted_on_their_own() -> None:
    guard = Guard(50)
    assert not guard.accepts(KIND, missing=100, known=100, now=0)
    assert not guard.accepts(ObjectKind.ENDPOINT_SLICE, missing=100, known=100, now=CONFIRMED_AFTER_S)
    assert guard.accepts(KIND, missing=100, known=100, now=CONFIRMED_AFTER_S)
