"""Ensures that one ipvsproxy runs per network namespace.

Two processes would program the same kernel tables. The lock is an abstract socket: exactly the processes of one network namespace
share its name, it needs no file, and it vanishes with its process, however the process ends.
"""

import contextlib
import os
import socket
import struct
import time

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
        credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    if user not in (0, os.geteuid()):
        return f"a process of user {user}"
    which = f" (process {process})" if process else " (in another container)"
    raise KernelError(
        action="take the lock of this node",
        detail=f"another ipvsproxy{which} is running in this network namespace; stop it first",
    )
