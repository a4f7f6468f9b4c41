"""Covers when the follower of changes in our nftables table asks the loop to read rules and sets, and what the follower logs.

A pipe replaces the kernel's netlink socket.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from typing import cast
from unittest.mock import Mock

import pytest
import structlog.testing

from ipvsproxy.daemon import app
from ipvsproxy.kernel.nftables.changes import NftChanges


class Pipe:
    """Notifications that arrive through a pipe.

    The byte ``c`` means a change of our table, ``o`` means a change of another table, and ``b`` breaks the socket.
    """

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

    async def tell(self, what: bytes) -> None:
        """Write a notification, and let the follower run."""
        os.write(self._writing, what)
        await turns()

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@contextlib.asynccontextmanager
async def following(engine: Mock, changes: Pipe | None) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(app.follow_rules(engine, cast(NftChanges, changes)))
    await turns()
    yield task
    task.cancel()
    await asyncio.wait([task])


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_only_changes_of_our_own_table_cause_rules_to_be_read(pipe: Pipe) -> None:
    engine = Mock()
    async with following(engine, pipe):
        await pipe.tell(b"o")
        assert engine.rules_changed.call_count == 0
        await pipe.tell(b"c")
        assert engine.rules_changed.call_count == 1
        await pipe.tell(b"c")
        assert engine.rules_changed.call_count == 2


async def test_a_stopped_follower_does_not_ask_the_loop_to_read_rules(pipe: Pipe) -> None:
    engine = Mock()
    async with following(engine, pipe):
        pass
    await pipe.tell(b"c")
    assert engine.rules_changed.call_count == 0


async def test_the_rules_are_read_and_one_error_is_logged_if_the_notification_socket_breaks(pipe: Pipe) -> None:
    engine = Mock()
    with structlog.testing.capture_logs() as logged:
        async with following(engine, pipe) as task:
            await pipe.tell(b"b")
            assert task.done()
    assert engine.rules_changed.call_count == 1
    assert [(line["event"], line["error"]) for line in logged] == [("nftables_notifications_lost", "Bad file descriptor")]


async def test_a_warning_is_logged_if_the_kernel_offers_no_change_notifications(pipe: Pipe) -> None:
    pipe.is_broken = True
    with structlog.testing.capture_logs() as logged:
        async with following(Mock(), pipe):
            pass
    assert [line["event"] for line in logged] == ["nftables_notifications_lost"]


async def test_no_follower_runs_for_a_rules_backend_without_change_notifications() -> None:
    with structlog.testing.capture_logs() as logged:
        async with following(Mock(), None) as task:
            assert task.done()
    assert not logged
