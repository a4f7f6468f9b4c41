"""Covers the wait for the first lists, and how stale watches are detected, logged, and reported by ``/healthz``."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import structlog
from structlog.testing import capture_logs

from ipvsproxy.daemon.base.cannot_start import CannotStartError, complain
from ipvsproxy.daemon.http import paths
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.daemon.sources.directory import DirectorySource
from ipvsproxy.daemon.sources.source import Staleness, Trouble, WatchStatus
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.objects import Store
from tests.support import builders, memory_node, virtual_time
from tests.support.summaries import Clock, summary

LIMIT_S = 900.0


class Scene:
    """Two watches, a clock, and the objects that observe the watches. The process starts when the clock shows 1000 s."""

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
        return paths.healthz(self.status).status, paths.livez(self.status).status


def test_a_watch_becomes_stale_when_its_silence_reaches_the_limit_even_without_any_contact() -> None:
    scene = Scene()
    scene.clock.now += LIMIT_S - 1
    assert list(scene.staleness.stale()) == []
    scene.clock.now += 1
    assert list(scene.staleness.stale()) == [ObjectKind.SERVICE, ObjectKind.NODE]
    scene.watches[ObjectKind.NODE].contact_s = scene.clock.now
    assert list(scene.staleness.stale()) == [ObjectKind.SERVICE]


def test_no_watch_becomes_stale_if_the_limit_is_zero() -> None:
    scene = Scene(limit_s=0)
    scene.clock.now += 1e6
    assert list(scene.staleness.stale()) == []


def test_a_stale_watch_is_logged_once_and_its_recovery_is_logged_once() -> None:
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
def test_a_stale_watch_fails_healthz_if_a_setting_says_so_but_never_fails_livez(
    *, turns_away: bool, codes: tuple[int, int]
) -> None:
    scene = Scene(turns_away=turns_away)
    assert scene.codes() == (200, 200)
    scene.clock.now += LIMIT_S
    assert scene.codes() == codes
    assert scene.status.is_turned_away is turns_away
    assert paths.healthz(scene.status).body.endswith(b',"staleWatches":["Node","Service"]}')
    for watch in scene.watches.values():
        watch.contact_s = scene.clock.now
    assert scene.codes() == (200, 200)
    assert b"stale" not in paths.healthz(scene.status).body


class Lists(DirectorySource):
    """A source whose first lists arrive in pages; the arguments give the times of the pages for each kind.

    ``troubles`` are the reasons why the attempts so far have ended.
    """

    def __init__(self, troubles: Sequence[Trouble] = (), **pages_s: Sequence[float]) -> None:
        super().__init__("somewhere")
        self._restarts = Counter(troubles)
        self._pages_s = {ObjectKind[name]: times_s for name, times_s in pages_s.items()}

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        now_s = virtual_time.loop().time() - virtual_time.BEGIN_S
        contacts_s = {
            kind: max((one for one in times_s if one <= now_s), default=None) for kind, times_s in self._pages_s.items()
        }
        return {
            kind: WatchStatus(contact_s=None if last_s is None else virtual_time.BEGIN_S + last_s, restarts=self._restarts)
            for kind, last_s in contacts_s.items()
        }


def without_services() -> Store:
    store = Store(started_s=0)
    store.deliver([memory_node.listed(kind, ()) for kind in (ObjectKind.ENDPOINT_SLICE, ObjectKind.NODE)], 0)
    return store


async def give_up_after_s(source: Lists) -> float:
    """The seconds that a command waits for a missing list of Services before the command gives up."""
    with pytest.raises(CannotStartError, match="no complete list of Services within 20 s from directory somewhere"):
        await sources.wait_for_lists(without_services(), source, silent=sources.give_up, waiting=complain)
    return virtual_time.loop().time() - virtual_time.BEGIN_S


@virtual_time.in_virtual_time
async def test_the_wait_for_a_long_list_continues_while_its_pages_arrive() -> None:
    assert await give_up_after_s(Lists(SERVICE=(5, 19, 33, 50))) == 70


@virtual_time.in_virtual_time
async def test_pages_of_other_lists_do_not_extend_the_wait_for_a_missing_list() -> None:
    assert await give_up_after_s(Lists(SERVICE=(), NODE=range(1000))) == 20


@virtual_time.in_virtual_time
async def test_a_command_that_waits_for_a_list_names_the_list_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    await give_up_after_s(Lists(SERVICE=(5, 19)))
    written = capsys.readouterr()
    assert written.out == ""
    assert (
        written.err.splitlines()[0] == "ipvsproxy: waiting for the list of Services from directory somewhere; 0 Services so far"
    )
    assert len(written.err.splitlines()) == 7


@virtual_time.in_virtual_time
async def test_the_daemon_waits_for_the_first_lists_without_a_time_limit_and_logs_the_wait_repeatedly() -> None:
    store = without_services()
    healed = 0

    async def heal() -> None:
        nonlocal healed
        healed += 1
        await asyncio.sleep(10)  # the next progress line is logged before these ten seconds end

    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(sources.wait_for_lists(store, Lists(), silent=sources.log_silence, heal=heal))
        await asyncio.sleep(3600)
        assert not task.done()
        store.deliver([memory_node.listed(ObjectKind.SERVICE, ())], 0)
        await task
    assert {line["event"] for line in logs} == {"first_lists_missing"}
    assert 10 <= len(logs) <= 13
    assert healed == len(logs)


@pytest.mark.parametrize(
    ("trouble", "is_reached"),
    [
        *((trouble, True) for trouble in (Trouble.UNAUTHORIZED, Trouble.FORBIDDEN, Trouble.THROTTLED, Trouble.SERVER_ERROR)),
        *((trouble, False) for trouble in (Trouble.UNREACHABLE, Trouble.SILENT, Trouble.GARBLED, Trouble.REFUSED)),
    ],
)
@virtual_time.in_virtual_time
async def test_kernel_objects_that_hide_the_server_are_removed_only_if_no_request_reaches_the_server(
    trouble: Trouble, *, is_reached: bool
) -> None:
    healed = asyncio.Event()

    async def heal() -> None:
        healed.set()

    source = Lists((trouble,), SERVICE=())
    task = asyncio.create_task(sources.wait_for_lists(without_services(), source, silent=sources.log_silence, heal=heal))
    await asyncio.sleep(3600)
    task.cancel()
    assert healed.is_set() is not is_reached
