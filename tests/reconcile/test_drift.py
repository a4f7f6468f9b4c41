"""Repairs of drift: new drift is repaired at once, and returning drift after a delay.

A changed desired value is written at once.
"""

import pytest

from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.sets import SetEntry
from ipvsproxy.reconcile import observation
from ipvsproxy.reconcile.observation import DriftPlace, Drifts

PLACE = DriftPlace("virtual_server", "TCP 10.96.0.10:80")
OTHER = DriftPlace("virtual_server", "TCP 10.96.0.11:80")


def contested(times: int, *, every_s: float = 10) -> tuple[Drifts, float]:
    """The record of an object that has drifted this many times, and the time of its last drift."""
    drifts = Drifts()
    for number in range(times):
        drifts.note(PLACE, "wish", number * every_s)
    return drifts, (times - 1) * every_s


def test_the_first_three_drifts_of_an_object_are_repaired_without_delay() -> None:
    drifts, now = contested(3)
    assert not drifts
    assert contested(4)[0]
    assert drifts.may_heal(PLACE, "wish", now)
    assert drifts.next_s() is None


def test_if_drift_keeps_returning_repairs_are_delayed_by_5_s_and_then_always_by_10_s() -> None:
    waits = []
    for times in range(observation.FREE_HEALS + 1, observation.FREE_HEALS + 10):
        drifts, now = contested(times)
        assert not drifts.may_heal(PLACE, "wish", now)
        due_s = drifts.next_s()
        assert due_s is not None
        drifts.begin_round()
        assert drifts.may_heal(PLACE, "wish", due_s)
        assert drifts.next_s() is None, "what may be healed is waited for no more"
        waits.append(due_s - now)
    assert waits == [5, 10, 10, 10, 10, 10, 10, 10, 10]


def test_repairs_are_no_longer_delayed_after_the_desired_value_has_changed() -> None:
    drifts, now = contested(observation.FREE_HEALS + 3)
    assert drifts.may_heal(PLACE, "another wish", now)
    drifts.note(PLACE, "another wish", now + 1)
    assert drifts.may_heal(PLACE, "another wish", now + 1)
    assert not drifts, "nothing is left alone any more"


def test_the_drift_of_an_object_is_forgotten_after_a_long_time_without_drift() -> None:
    drifts, now = contested(observation.FREE_HEALS + 1)
    assert not drifts.may_heal(PLACE, "wish", now)
    drifts.forget_calm(now + observation.CALM_S)
    assert drifts
    drifts.forget_calm(now + observation.CALM_S + 1)
    assert not drifts
    drifts.begin_round()
    assert drifts.next_s() is None


def test_rare_drift_is_always_repaired_at_once() -> None:
    drifts, now = contested(20, every_s=observation.CALM_S + 1)
    assert drifts.may_heal(PLACE, "wish", now)
    assert contested(20, every_s=observation.CALM_S)[0]


def test_the_same_drift_is_reported_only_once() -> None:
    drifts, _ = contested(observation.FREE_HEALS + 1)
    assert drifts.take_news() == ({"virtual_server": observation.FREE_HEALS + 1}, {PLACE: observation.FREE_HEALS + 1})
    assert drifts.take_news() == ({}, {})


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (PLACE, "TCP 10.96.0.10:80"),
        (DriftPlace("rules", Family.IPV6), "IPv6"),
        (
            DriftPlace("set_entry", SetEntry("KUBE-CLUSTER-IP", parse_address("10.96.0.1"), Protocol.TCP, 443)),
            "KUBE-CLUSTER-IP 10.96.0.1,tcp:443",
        ),
    ],
)
def test_drift_is_reported_with_the_name_that_people_use_to_find_the_object(place: DriftPlace, name: str) -> None:
    assert str(place) == name
