"""Covers the wait for the first lists and its messages, in virtual time."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
import structlog

from ipvsproxy.daemon.base.errors import CannotStartError
from ipvsproxy.daemon.sources import first_lists
from ipvsproxy.daemon.sources.reflector import Trouble, WatchStatus
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.objects import Store
from tests.support import memory_node, virtual_time


class Lists:
    """A source whose first lists arrive in pages, at these times by kind. ``troubles`` have ended all earlier attempts."""

    def __init__(self, troubles: Sequence[Trouble] = (), **pages_s: Sequence[float]) -> None:
        self._restarts = dict.fromkeys(troubles, 1)
        self._pages_s = {ObjectKind[name]: times_s for name, times_s in pages_s.items()}

    def describe(self) -> str:
        return "somewhere"

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
    """The time after which a command gives up while only Services are missing."""
    with pytest.raises(CannotStartError, match="no complete list of Services within 20 s from somewhere"):
        await first_lists.wait(without_services(), source, silent=first_lists.give_up, waiting=first_lists.show_progress)
    return virtual_time.loop().time() - virtual_time.BEGIN_S


@virtual_time.in_virtual_time
async def test_the_wait_for_a_long_list_goes_on_while_its_pages_arrive() -> None:
    assert await give_up_after_s(Lists(SERVICE=(5, 19, 33, 50))) == 70


@virtual_time.in_virtual_time
async def test_contact_of_other_watches_does_not_prolong_the_wait_for_a_missing_list() -> None:
    assert await give_up_after_s(Lists(SERVICE=(), NODE=range(1000))) == 20


@virtual_time.in_virtual_time
async def test_a_command_shows_on_standard_error_the_list_that_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    await give_up_after_s(Lists(SERVICE=(5, 19)))
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.splitlines()[0] == "ipvsproxy: waiting for the list of Services from somewhere; 0 Services have come"
    assert len(written.err.splitlines()) == 7


@virtual_time.in_virtual_time
async def test_a_serving_process_waits_without_end_with_a_log_line_now_and_then() -> None:
    store = without_services()
    healed = 0

    async def heal() -> None:
        nonlocal healed
        healed += 1
        await asyncio.sleep(10)  # longer than the wait until the next line of progress

    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(first_lists.serve_later(store, Lists(), heal))
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
async def test_nothing_is_removed_to_reach_a_server_that_answers_without_a_list(trouble: Trouble, *, is_reached: bool) -> None:
    healed = asyncio.Event()

    async def heal() -> None:
        healed.set()

    task = asyncio.create_task(first_lists.serve_later(without_services(), Lists((trouble,), SERVICE=()), heal))
    await asyncio.sleep(3600)
    task.cancel()
    assert healed.is_set() is not is_reached
