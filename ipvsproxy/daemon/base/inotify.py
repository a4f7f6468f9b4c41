"""Waits for changes in a directory: with inotify, or by polling where inotify is not available."""

import asyncio
import contextlib
import ctypes
import os
import pathlib
from typing import Self

from ipvsproxy.daemon.base.timing import comes_within, until_readable

# linux/inotify.h
IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_DELETE_SELF, IN_MOVE_SELF, IN_ONLYDIR = 0x400, 0x800, 0x1000000
# IN_ATTRIB is included, because a change of permissions may make an unreadable file readable.
CHANGES = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryChanges:
    """Watches one directory, without its subdirectories, from the beginning of the ``with`` block.

    ``wait`` returns every ``poll_s`` seconds while the directory is absent, or while the kernel has no free inotify instance
    (fs.inotify.max_user_instances). Every ``poll_s`` seconds, the watcher also polls two properties of the directory. The first
    property is the directory to which the path leads, because inotify does not report that a symbolic link now points to another
    directory. The second property is the modification time: on NFS, FUSE and similar file systems, inotify may not report changes
    made by other hosts. On NFS and similar file systems, the watcher does not notice a change of a file's content if the file
    keeps its name.
    """

    def __init__(self, path: str, poll_s: float) -> None:
        self._path = path
        self._poll_s = poll_s
        self._descriptor = -1
        self._polled = (0, 0, 0)

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def is_notified(self) -> bool:
        """Whether inotify reports changes; if inotify reports changes, waiting takes no processor time."""
        return self._descriptor >= 0

    async def wait(self) -> None:
        """Wait until the directory may have changed since this method last returned."""
        if self.is_notified:
            while self._poll() == self._polled and not await comes_within(self._poll_s, until_readable(self._descriptor)):
                pass
            with contextlib.suppress(BlockingIOError):
                while os.read(self._descriptor, READ_BYTES):
                    pass
        else:
            await asyncio.sleep(self._poll_s)
        # The path may now lead to another directory. The caller misses no change, because the caller reads the directory after
        # ``wait`` has returned.
        self._open()

    def _open(self) -> None:
        """Watch the directory to which the path leads now; a second call for the same directory has no effect."""
        before, self._polled = self._polled, self._poll()
        if self._polled[:2] != before[:2]:  # without ``_close``, the old directory would still be watched
            self._close()
        if not self.is_notified:
            self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        mask = CHANGES | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR
        if self.is_notified and _libc.inotify_add_watch(self._descriptor, os.fsencode(self._path), mask) < 0:
            self._close()

    def _poll(self) -> tuple[int, int, int]:
        """Device, inode and modification time of the directory at the path, or zeros if there is no directory."""
        try:
            status = pathlib.Path(self._path).stat()
        except OSError:
            return 0, 0, 0
        return status.st_dev, status.st_ino, status.st_mtime_ns

    def _close(self) -> None:
        if self.is_notified:
            os.close(self._descriptor)
            self._descriptor = -1
