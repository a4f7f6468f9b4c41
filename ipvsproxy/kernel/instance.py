"""Ensures that one ipvsproxy runs per network namespace.

Two processes would program the same kernel tables. The lock is an abstract socket: exactly the processes of one network namespace
share its name, it needs no file, and it vanishes with its process, however the process ends.
"""

import contextlib
import os
import pathlib
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base.errors import KernelError

NAME = "\0ipvsproxy"
"""The name of the abstract socket; ``ss -xl`` and ``lsof`` show it as ``@ipvsproxy``."""
ANSWER_WITHIN_S = 1.0
"""The longest wait for a connection to the process that has the name. The kernel accepts connections for an ipvsproxy at once."""
_BETWEEN_TRIES_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Instance:
    """The right to program this network namespace, from the creation of this object until ``close`` or the end of the process.

    ``squatter`` describes a process that has taken the name but is no ipvsproxy; empty if there is none. Any process can take a
    name, so a squatter must not stop ipvsproxy.

    Raises:
        KernelError: another ipvsproxy has the right to program this network namespace.
    """

    def __init__(self, name: str = NAME) -> None:
        self.squatter = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(name)
            self._socket.listen()
        except OSError:
            self._socket.close()
            self.squatter = _describe_squatter(name)

    def fileno(self) -> int:
        """The listening socket, readable when another process connects to ask for our identity; -1 if there is a squatter."""
        return self._socket.fileno()

    def dismiss(self) -> None:
        """Close the connections of processes that asked for our identity.

        The kernel has told them our identity already. Open connections would fill the queue and keep later processes from asking.
        """
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Give up the right to program the namespace."""
        self._socket.close()


class Running(NamedTuple):
    """The ipvsproxy of this network namespace.

    ``process`` is 0 if this process cannot see it, as from another container. ``arguments`` follow the program's name on its
    command line; None if the files that they name may be other files for this process, because its mount namespace is another.
    """

    process: int
    arguments: Sequence[str] | None


def running(name: str = NAME) -> Running | None:
    """The process that has the name, if it is an ipvsproxy; None also if this process may not know that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, contextlib.suppress(OSError):
        asking.settimeout(ANSWER_WITHIN_S)
        asking.connect(name)
        process, user = _owner(asking)
        if user not in (0, os.geteuid()):
            return None
        if not process or not pathlib.Path(f"/proc/{process}/ns/mnt").samefile("/proc/self/ns/mnt"):
            return Running(process, None)
        words = [os.fsdecode(word) for word in pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[:-1]]
        programs = [place for place, word in enumerate(words) if pathlib.PurePath(word).stem == "ipvsproxy"]
        return Running(process, words[programs[0] + 1 :]) if programs else None
    return None


def _owner(connected: socket.socket) -> tuple[int, int]:
    """The process and the user that listen at the other end; the process is 0 if it cannot be seen."""
    process, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _describe_squatter(name: str) -> str:
    """A description of the process that has the name, if that process cannot be an ipvsproxy.

    Raises:
        KernelError: the process may be an ipvsproxy.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_WITHIN_S)
        deadline_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                asking.connect(name)
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    return "a process that does not answer"
                time.sleep(_BETWEEN_TRIES_S)
        process, user = _owner(asking)
    if user not in (0, os.geteuid()):
        return f"a process of user {user}"
    which = f" (process {process})" if process else " (in another container)"
    raise KernelError(
        action="take the lock of this node",
        detail=f"another ipvsproxy{which} is running in this network namespace; stop it first",
    )
