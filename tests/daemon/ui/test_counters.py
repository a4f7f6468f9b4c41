"""Covers how many may look."""

from ipvsproxy.daemon.ui.counters import IDLE_S, MOST_VIEWERS, NAME, VIEWER_S, Viewers


def test_so_many_may_look_and_no_more_until_one_has_gone() -> None:
    viewers = Viewers()
    for number in range(MOST_VIEWERS):
        assert viewers.admit(str(number), number / 100)
    assert not viewers.admit("late", 1)
    assert viewers.admit("3", 1)
    assert viewers.admit("late", VIEWER_S)


def test_nobody_looks_some_time_after_the_last_request() -> None:
    viewers = Viewers()
    assert viewers.idle_at_s() is None
    viewers.admit("", 5)
    assert viewers.idle_at_s() == 5 + IDLE_S


def test_names_are_short_and_plain() -> None:
    assert NAME.fullmatch("a" * 32)
    assert not NAME.fullmatch("a" * 33)
    assert not NAME.fullmatch("<b>")
