"""Covers how long the first lists are waited for, and what is said meanwhile; in virtual time."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest
import structlog

from ipvsproxy.daemon.sources import first_lists
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.daemon.sources.source import CannotStartError
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.store.objects import Store
from tests.support import memory_node, virtual_time


class Lists:
    """A source whose first lists come page by page: by kind, the times at which something of it came."""

    def __init__(self, **pages_s: Sequence[float]) -> None:
        self._pages_s = {ObjectKind[name]: times_s for name, times_s in pages_s.items()}

    def describe(self) -> str:
        return "somewhere"

    @property
    def statuses(self) -> Mapping[ObjectKind, WatchStatus]:
        now_s = virtual_time.loop().time() - virtual_time.BEGIN_S
        came_s = {kind: max((one for one in times_s if one <= now_s), default=None) for kind, times_s in self._pages_s.items()}
        return {
            kind: WatchStatus(contact_s=None if last_s is None else virtual_time.BEGIN_S + last_s)
            for kind, last_s in came_s.items()
        }


def without_services() -> Store:
    store = Store(started_s=0)
    store.deliver([memory_node.listed(kind, ()) for kind in (ObjectKind.ENDPOINT_SLICE, ObjectKind.NODE)], 0)
    return store


async def give_up_after_s(source: Lists) -> float:
    """When a command gives up while only Services are missing."""
    with pytest.raises(CannotStartError, match="no complete list of Services within 20 s from somewhere"):
        await first_lists.wait(without_services(), source, silent=first_lists.give_up, waiting=first_lists.say)
    return virtual_time.loop().time() - virtual_time.BEGIN_S


@virtual_time.in_virtual_time
async def test_a_long_list_is_waited_for_as_long_as_its_pages_come() -> None:
    assert await give_up_after_s(Lists(SERVICE=(5, 19, 33, 50))) == 70


@virtual_time.in_virtual_time
async def test_watches_that_are_fine_do_not_keep_the_program_waiting_for_a_list_that_does_not_come() -> None:
    assert await give_up_after_s(Lists(SERVICE=(), NODE=range(1000))) == 20


@virtual_time.in_virtual_time
async def test_a_command_says_on_standard_error_what_it_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    await give_up_after_s(Lists(SERVICE=(5, 19)))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[0] == "ipvsproxy: waiting for the list of Services from somewhere; 0 Services have come"
    assert len(said.err.splitlines()) == 7


@virtual_time.in_virtual_time
async def test_a_process_that_serves_waits_without_end_says_so_now_and_then_and_goes_on() -> None:
    store = without_services()
    with structlog.testing.capture_logs() as logs:
        task = asyncio.create_task(first_lists.serve_later(store, Lists()))
        await asyncio.sleep(3600)
        assert not task.done()
        store.deliver([memory_node.listed(ObjectKind.SERVICE, ())], 0)
        await task
    assert {line["event"] for line in logs} == {"first_lists_missing"}
    assert 10 <= len(logs) <= 13
