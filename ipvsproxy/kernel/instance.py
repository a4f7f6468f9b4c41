"""One ipvsproxy per network namespace.

What two of them program is the same kernel table; an abstract socket is known to exactly the processes of one network namespace,
needs no file, and goes with its process however that ends.
"""

import contextlib
import os
import socket
import struct
import time

from ipvsproxy.kernel.errors import KernelError

NAME = "\0ipvsproxy"
"""The abstract socket's name; ``ss -xl`` and ``lsof`` show it as ``@ipvsproxy``."""
ANSWER_WITHIN_S = 1.0
"""How long whoever holds the name may take to be connected to; an ipvsproxy is at once, its kernel sees to that."""
_BETWEEN_TRIES_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group


class Instance:
    """The right to program this network namespace, from being made until ``close`` or the end of the process.

    ``squatter`` says who holds the name without being an ipvsproxy, if somebody does: any process can take a name, and must
    not keep us from working.

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
            self.squatter = _require_stranger(name)

    def fileno(self) -> int:
        """The socket to wait on for those who ask who we are; -1 where there is a squatter."""
        return self._socket.fileno()

    def dismiss(self) -> None:
        """Let go of those who have asked. The kernel told them; left alone, they would keep later ones from asking."""
        with contextlib.suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def close(self) -> None:
        """Give the right back."""
        self._socket.close()


def _require_stranger(name: str) -> str:
    """Say who holds the name, who could not be an ipvsproxy.

    Raises:
        KernelError: it is one who could.
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
    who = f" (process {process})" if process else " (in another container)"
    raise KernelError(
        action="take the lock of this node",
        detail=f"another ipvsproxy{who} is running in this network namespace; stop that one first",
    )
