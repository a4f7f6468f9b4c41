"""The follower of our table of nftables: what it asks of the loop, and what it logs. The kernel's side is a pipe."""

import asyncio
import os
from collections.abc import Iterator
from typing import Any, cast

import pytest
import structlog.testing

from ipvsproxy.daemon.loop.rules_follower import RulesFollower
from ipvsproxy.kernel.nftables.changes import NftChanges


class Engine:
    """Counts how often it was asked to read rules and sets."""

    def __init__(self) -> None:
        self.asked = 0

    def rules_changed(self) -> None:
        self.asked += 1


class Pipe:
    """Notifications by a pipe: ``c`` is a change of ours, ``o`` one of another table, ``b`` breaks the socket."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.is_broken = False
        self.reason = "Bad file descriptor"

    def fileno(self) -> int | None:
        return None if self.is_broken else self._reading

    def read(self) -> bool:
        told = os.read(self._reading, 100)
        self.is_broken |= b"b" in told
        return self.is_broken or b"c" in told

    def tell(self, what: bytes) -> None:
        os.write(self._writing, what)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def pipes() -> Iterator[list[Pipe]]:
    made = [Pipe(), Pipe()]
    yield made
    for one in made:
        one.close()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def as_changes(pipe: Pipe) -> NftChanges:
    return cast(NftChanges, pipe)


async def test_changes_of_our_table_have_rules_read_and_others_do_not(pipes: list[Pipe]) -> None:
    engine = Engine()
    follower = RulesFollower(cast(Any, engine))
    follower.follow(as_changes(pipes[0]))
    pipes[0].tell(b"o")
    await turns()
    assert engine.asked == 0
    pipes[0].tell(b"c")
    await turns()
    assert engine.asked == 1
    follower.follow(None)


async def test_after_a_move_only_the_new_backend_is_followed(pipes: list[Pipe]) -> None:
    engine = Engine()
    follower = RulesFollower(cast(Any, engine))
    former, new = pipes
    follower.follow(as_changes(former))
    follower.follow(None)
    follower.follow(as_changes(new))
    former.tell(b"c")
    await turns()
    assert engine.asked == 0
    new.tell(b"c")
    await turns()
    assert engine.asked == 1
    follower.follow(None)


async def test_a_broken_socket_is_logged_once_and_everything_is_read(pipes: list[Pipe]) -> None:
    engine = Engine()
    follower = RulesFollower(cast(Any, engine))
    with structlog.testing.capture_logs() as logged:
        follower.follow(as_changes(pipes[0]))
        pipes[0].tell(b"b")
        await turns()
        pipes[0].tell(b"c")
        await turns()
    assert engine.asked == 1
    assert [(line["event"], line["error"]) for line in logged] == [("nftables_notifications_lost", "Bad file descriptor")]
    follower.follow(None)


async def test_a_kernel_without_notifications_is_logged(pipes: list[Pipe]) -> None:
    pipes[0].is_broken = True
    with structlog.testing.capture_logs() as logged:
        RulesFollower(cast(Any, Engine())).follow(as_changes(pipes[0]))
    assert [line["event"] for line in logged] == ["nftables_notifications_lost"]
