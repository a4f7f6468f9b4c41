"""One ipvsproxy per network namespace.

Two of them would program the same kernel table. The lock is an abstract socket: exactly the processes of one network namespace
share its name, it needs no file, and it vanishes with its process, however that ends.
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
"""The longest wait for a connection to the process with this name. The kernel connects to an ipvsproxy at once."""
_BETWEEN_TRIES_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Instance:
    """The right to program this network namespace, from the creation of this object until ``close`` or the end of the process.

    ``squatter`` describes another process that has the name and is no ipvsproxy; empty without one. Any process can take a name,
    so a squatter must not stop us.

    Raises:
        KernelError: another ipvsproxy has that right.
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
        """The listening socket, readable when another process connects to ask for our identity; -1 where there is a squatter."""
        return self._socket.fileno()

    def dismiss(self) -> None:
        """Close the connections of processes that asked for our identity.

        The kernel has answered them already. Left open, they would fill the queue and keep later processes from asking.
        """
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Give the right back."""
        self._socket.close()


def _describe_squatter(name: str) -> str:
    """Describe the process that has the name, if it cannot be an ipvsproxy.

    Raises:
        KernelError: it may be an ipvsproxy.
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
