"""Ensures that only one ipvsproxy runs in each network namespace.

Two ipvsproxy processes in one namespace would program the same kernel tables. The lock is an abstract socket. The socket's name
is visible to each process in the same network namespace, and to no other process. The socket needs no file, and the kernel
removes the socket when its process ends for any reason.
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
"""The longest wait for a connection to the process that has bound the socket's name. If this process is an ipvsproxy, the kernel
accepts the connection at once, because the process listens."""
_BETWEEN_TRIES_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # the fields of struct ucred: process ID, user ID, group ID


class Instance:
    """The right to program this network namespace, from the creation of this object until ``close`` or the end of the process.

    ``squatter`` describes a process that has bound the socket's name but is not ipvsproxy; empty if there is no such process.
    ipvsproxy runs in spite of a squatter, because any process can bind the socket's name.

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
        """The file descriptor of the listening socket.

        The socket is readable when another process connects to find out which process listens. The value is -1 if another program
        has bound the socket's name.
        """
        return self._socket.fileno()

    def dismiss(self) -> None:
        """Close the connections of processes that wanted to find out who listens on the socket.

        The kernel has already told the connecting processes which process listens. Connections that stay open would fill the
        socket's queue, and prevent later processes from connecting.
        """
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Give up the right to program this network namespace."""
        self._socket.close()


class Running(NamedTuple):
    """The ipvsproxy that runs in this network namespace.

    ``process`` is the process ID, or 0 if the process is not visible, for example because it runs in another container.
    ``arguments`` are the command-line arguments after the program's name. ``arguments`` is None if the running process has
    another mount namespace than this process, because file names in the arguments may then mean different files for the two
    processes.
    """

    process: int
    arguments: Sequence[str] | None


def running(name: str = NAME) -> Running | None:
    """The ipvsproxy that has bound the socket's name; None if no ipvsproxy runs, or if this process has no permission to ask."""
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
    """The process ID and user ID of the process that listens at the other end of a connection; 0 if an ID is not visible."""
    process, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _describe_squatter(name: str) -> str:
    """A description of the process that has bound the socket's name, if the process cannot be an ipvsproxy.

    Raises:
        KernelError: the process that has bound the socket's name may be an ipvsproxy.
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
