"""Covers stale watches: their detection, their log lines, and their effect on health."""

import pytest
from structlog.testing import capture_logs

from ipvsproxy.daemon.http import answers
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.daemon.sources.source import Staleness
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from tests.support import builders
from tests.support.summaries import Clock, summary

LIMIT_S = 900.0


class Scene:
    """Two watches with a clock and their observers. The process began at second 1000."""

    def __init__(self, *, limit_s: float = LIMIT_S, turns_away: bool = False) -> None:
        self.clock = Clock(1000.0)
        self.watches = {ObjectKind.SERVICE: WatchStatus(contact_s=1000.0), ObjectKind.NODE: WatchStatus()}
        self.staleness = Staleness(lambda: self.watches, limit_s=limit_s, clock=self.clock)
        self.status = Status(
            families=[Family.IPV4],
            sync_period_s=30,
            clock=self.clock,
            wall_clock=self.clock,
            stale=self.staleness.stale,
            stale_turns_away=turns_away,
        )
        self.status.node = builders.node()
        self.status.syncing(self.clock.now)
        self.status.synced(summary())

    def codes(self) -> tuple[int, int]:
        health = self.status.health()
        return answers.healthz(health).status, answers.livez(health).status


def test_a_watch_without_contact_is_stale_after_the_limit_also_without_a_first_contact() -> None:
    scene = Scene()
    scene.clock.now += LIMIT_S - 1
    assert list(scene.staleness.stale()) == []
    scene.clock.now += 1
    assert list(scene.staleness.stale()) == [ObjectKind.SERVICE, ObjectKind.NODE]
    scene.watches[ObjectKind.NODE].contact_s = scene.clock.now
    assert list(scene.staleness.stale()) == [ObjectKind.SERVICE]


def test_with_limit_zero_no_watch_is_ever_stale() -> None:
    scene = Scene(limit_s=0)
    scene.clock.now += 1e6
    assert list(scene.staleness.stale()) == []


def test_staleness_is_logged_once_and_its_end_once() -> None:
    scene = Scene()
    scene.clock.now += LIMIT_S
    with capture_logs() as lines:
        scene.staleness.check()
        scene.staleness.check()
        scene.watches[ObjectKind.SERVICE].contact_s = scene.clock.now
        scene.staleness.check()
    assert [(line["event"], line["kind"]) for line in lines] == [
        ("watch_stale", "Service"),
        ("watch_stale", "Node"),
        ("watch_no_longer_stale", "Service"),
    ]


@pytest.mark.parametrize(("turns_away", "codes"), [(False, (200, 200)), (True, (503, 200))])
def test_a_stale_watch_turns_load_balancers_away_only_if_configured_and_demands_no_restart(
    *, turns_away: bool, codes: tuple[int, int]
) -> None:
    scene = Scene(turns_away=turns_away)
    assert scene.codes() == (200, 200)
    scene.clock.now += LIMIT_S
    assert scene.codes() == codes
    assert scene.status.is_turned_away is turns_away
    assert answers.healthz(scene.status.health()).body.endswith(b',"staleWatches":["Node","Service"]}')
    for watch in scene.watches.values():
        watch.contact_s = scene.clock.now
    assert scene.codes() == (200, 200)
    assert b"stale" not in answers.healthz(scene.status.health()).body
