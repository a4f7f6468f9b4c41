"""Tells that a directory has changed: through inotify, and by looking again and again where that is not to be had."""

import asyncio
import contextlib
import ctypes
import os
import pathlib
import struct
from typing import Self

# linux/inotify.h
IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_UNMOUNT, IN_IGNORED = 0x400, 0x800, 0x2000, 0x8000
IN_ONLYDIR = 0x1000000
# IN_ATTRIB, because a file that could not be read may have become readable.
CHANGES = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
END = IN_DELETE_SELF | IN_MOVE_SELF | IN_UNMOUNT | IN_IGNORED
HEADER = struct.Struct("iIII")
READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryChanges:
    """Watches one directory, not those below it, from ``with`` on.

    While the directory is absent, or the kernel has no inotify instance left (fs.inotify.max_user_instances), ``wait`` returns
    every ``poll_s`` seconds. As often it looks whether a link on the path leads to another directory now, which inotify does not
    tell, and when the directory was modified: on NFS, FUSE and the like inotify may tell nothing of what others do. What is
    written into a file without a new name stays unseen there.
    """

    def __init__(self, path: str, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s
        self._descriptor = -1
        self._seen = (0, 0, 0)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def is_notified(self) -> bool:
        """Whether the kernel tells us, so that waiting costs nothing."""
        return self._descriptor >= 0

    async def wait(self) -> None:
        """Returns when something may have changed since the last return."""
        if not self.is_notified:
            self._open()  # Before the caller looks: what changes after that look is then told.
            await asyncio.sleep(self._poll_s)
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._descriptor, readable.set)
        try:
            while not readable.is_set() and self._look() == self._seen:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)
        watched, self._seen = self._seen, self._look()
        if self._drain() & END or self._seen[:2] != watched[:2]:  # This directory is no longer the one at the path.
            self._close()
            self._open()

    def _open(self) -> None:
        self._seen = self._look()
        descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            return
        if _libc.inotify_add_watch(descriptor, os.fsencode(self._path), CHANGES | END & ~IN_IGNORED | IN_ONLYDIR) < 0:
            os.close(descriptor)
            return
        self._descriptor = descriptor

    def _look(self) -> tuple[int, int, int]:
        """Device, inode and time of modification of the directory at the path; zeros where there is none."""
        try:
            found = pathlib.Path(self._path).stat()
        except OSError:
            return 0, 0, 0
        return found.st_dev, found.st_ino, found.st_mtime_ns

    def _close(self) -> None:
        if self.is_notified:
            os.close(self._descriptor)
            self._descriptor = -1

    def _drain(self) -> int:
        """All events that wait, as one mask."""
        seen = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                data = os.read(self._descriptor, READ_BYTES)
                offset = 0
                while offset < len(data):
                    _, mask, _, name_bytes = HEADER.unpack_from(data, offset)
                    seen |= mask
                    offset += HEADER.size + name_bytes
        return seen
