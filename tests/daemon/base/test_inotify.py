"""Covers which changes of a directory wake a waiting task, with and without inotify."""

import asyncio
import os
import pathlib
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from ipvsproxy.daemon.base import inotify
from tests.support import descriptors

DEADLINE_S = 60
NEVER_S = 3600.0
QUICK_S = 0.001


CHANGES: dict[str, Callable[[pathlib.Path], object]] = {
    "write": lambda directory: (directory / "a").write_text("new"),
    "allow": lambda directory: (directory / "a").chmod(0o600),
    "remove": lambda directory: (directory / "a").unlink(),
    "move in": lambda directory: (directory.parent / "elsewhere").replace(directory / "b"),
    "move out": lambda directory: (directory / "a").rename(directory.parent / "gone"),
    "link": lambda directory: (directory / "link").symlink_to("a"),
}


@pytest.mark.parametrize(
    ("change", "is_reported"), [*((change, True) for change in CHANGES), *((change, False) for change in [*CHANGES][2:])]
)
async def test_inotify_reports_every_change_in_the_directory_and_polling_finds_new_and_deleted_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: str, *, is_reported: bool
) -> None:
    if not is_reported:
        monkeypatch.setattr(inotify, "CHANGES", 0)  # on a network file system, inotify reports no change by another host
    directory = tmp_path / "watched"
    directory.mkdir()
    (directory / "a").write_text("old")
    (tmp_path / "elsewhere").write_text("other")
    os.utime(directory, ns=(0, 0))
    with inotify.DirectoryChanges(str(directory), NEVER_S if is_reported else QUICK_S) as changes:
        waiter = asyncio.create_task(changes.wait())
        await asyncio.sleep(0 if is_reported else 10 * QUICK_S)
        assert not waiter.done()
        CHANGES[change](directory)
        async with asyncio.timeout(DEADLINE_S):
            await waiter
        assert changes.is_notified


async def test_a_waiting_task_is_not_woken_if_nothing_changes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_text("old")
    with inotify.DirectoryChanges(str(tmp_path), NEVER_S) as changes:
        (tmp_path / "a").read_text()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await changes.wait()


async def test_a_change_between_two_waits_ends_the_second_wait_at_once(tmp_path: pathlib.Path) -> None:
    with inotify.DirectoryChanges(str(tmp_path), NEVER_S) as changes:
        (tmp_path / "a").write_text("new")
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait()


async def test_a_replaced_directory_is_watched_again(tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "watched"
    directory.mkdir()
    with inotify.DirectoryChanges(str(directory), QUICK_S) as changes:
        directory.rename(tmp_path / "old")
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait()
            notified_without_a_directory = changes.is_notified
            directory.mkdir()
            await changes.wait()
            assert (notified_without_a_directory, changes.is_notified) == (False, True)
            (directory / "a").write_text("new")
            await changes.wait()


async def test_only_the_new_directory_is_watched_after_a_symbolic_link_gets_another_target(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("one")
    with inotify.DirectoryChanges(str(tmp_path / "current"), QUICK_S) as changes:
        waiter = asyncio.create_task(changes.wait())
        await asyncio.sleep(0)
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(tmp_path / "current")
        await asyncio.wait_for(waiter, DEADLINE_S)
        assert changes.is_notified
        (tmp_path / "one/a").write_text("new")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes.wait(), 0.1)
        (tmp_path / "two/a").write_text("new")
        await asyncio.wait_for(changes.wait(), DEADLINE_S)


async def test_without_inotify_the_waiting_task_is_woken_so_that_it_can_poll(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "_libc", Mock(inotify_init1=lambda _: -1))
    with inotify.DirectoryChanges(str(tmp_path), QUICK_S) as changes:
        assert not changes.is_notified
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait()


async def test_no_inotify_descriptor_remains_open(tmp_path: pathlib.Path) -> None:
    before = descriptors.opened()
    for _ in range(3):
        for path in (tmp_path, tmp_path / "absent"):
            with inotify.DirectoryChanges(str(path), QUICK_S):
                pass
    assert descriptors.opened() <= before
