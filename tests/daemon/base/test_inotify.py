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


def write(directory: pathlib.Path) -> None:
    (directory / "a").write_text("new")


def remove(directory: pathlib.Path) -> None:
    (directory / "a").unlink()


def move_in(directory: pathlib.Path) -> None:
    (directory.parent / "elsewhere").replace(directory / "b")


def move_out(directory: pathlib.Path) -> None:
    (directory / "a").rename(directory.parent / "gone")


def link(directory: pathlib.Path) -> None:
    (directory / "link").symlink_to("a")


def allow(directory: pathlib.Path) -> None:
    (directory / "a").chmod(0o600)


NAMES = [remove, move_in, move_out, link]


@pytest.mark.parametrize(
    ("change", "is_reported"), [*((change, True) for change in (write, allow, *NAMES)), *((change, False) for change in NAMES)]
)
async def test_inotify_reports_every_change_in_the_directory_and_polling_finds_new_and_deleted_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pathlib.Path], None], *, is_reported: bool
) -> None:
    if not is_reported:
        monkeypatch.setattr(inotify, "CHANGES", 0)  # inotify reports no change that another host makes on a network file system
    directory = tmp_path / "watched"
    directory.mkdir()
    (directory / "a").write_text("old")
    (tmp_path / "elsewhere").write_text("other")
    os.utime(directory, ns=(0, 0))
    with inotify.DirectoryChanges(str(directory), NEVER_S if is_reported else QUICK_S) as changes:
        waiter = asyncio.create_task(changes.wait())
        await asyncio.sleep(0 if is_reported else 10 * QUICK_S)
        assert not waiter.done()
        change(directory)
        async with asyncio.timeout(DEADLINE_S):
            await waiter
        assert changes.is_notified


async def test_without_a_change_the_waiting_task_is_not_woken(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a").write_text("old")
    with inotify.DirectoryChanges(str(tmp_path), NEVER_S) as changes:
        (tmp_path / "a").read_text()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await changes.wait()


async def test_a_change_between_two_waits_ends_the_second_wait_at_once(tmp_path: pathlib.Path) -> None:
    with inotify.DirectoryChanges(str(tmp_path), NEVER_S) as changes:
        write(tmp_path)
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
            write(directory)
            await changes.wait()


async def test_a_symbolic_link_that_is_changed_to_another_directory_is_followed(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("one")
    with inotify.DirectoryChanges(str(tmp_path / "current"), QUICK_S) as changes:
        waiter = asyncio.create_task(changes.wait())
        await asyncio.sleep(0)
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(tmp_path / "current")
        async with asyncio.timeout(DEADLINE_S):
            await waiter
        assert changes.is_notified
        write(tmp_path / "two")
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait()


async def test_a_change_in_the_old_target_of_a_symbolic_link_wakes_no_task(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "current").symlink_to("one")
    with inotify.DirectoryChanges(str(tmp_path / "current"), QUICK_S) as changes:
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").replace(tmp_path / "current")
        await asyncio.wait_for(changes.wait(), DEADLINE_S)
        write(tmp_path / "one")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(changes.wait(), 0.1)


async def test_without_inotify_the_waiting_task_wakes_up_to_poll(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inotify, "_libc", Mock(inotify_init1=lambda _: -1))
    with inotify.DirectoryChanges(str(tmp_path), QUICK_S) as changes:
        assert not changes.is_notified
        async with asyncio.timeout(DEADLINE_S):
            await changes.wait()


async def test_no_inotify_descriptor_remains_open(tmp_path: pathlib.Path) -> None:
    before = descriptors.opened()
    for _ in range(3):
        with inotify.DirectoryChanges(str(tmp_path), QUICK_S):
            pass
        with inotify.DirectoryChanges(str(tmp_path / "absent"), QUICK_S):
            pass
    assert descriptors.opened() <= before
