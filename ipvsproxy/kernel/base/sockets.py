"""Sockets for netlink notifications, and queries to the kernel by ``getsockopt``.

Sockets for notifications are non-blocking.
"""

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection

from ipvsproxy.kernel.base.errors import KernelError

READS_AT_ONCE = 64
"""The largest number of datagrams that a reader takes at once. The number is limited, so that the thread of the reader can do
other work during a storm of events."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33
_libc = ctypes.CDLL(None, use_errno=True)


def open_event_socket(protocol: int, groups: Collection[int], receive_buffer: int) -> socket.socket:
    """A socket that receives the notifications of some groups, in the network namespace of the calling thread.

    ``protocol`` is a netlink family, ``groups`` are numbers of multicast groups of that family, and ``receive_buffer`` is the
    size of the notification queue in bytes.

    Raises:
        OSError: the kernel refused to create or configure the socket.
    """
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        made.setblocking(False)
        with contextlib.suppress(PermissionError):  # a process without CAP_NET_ADMIN has to use the default size
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        made.bind((0, 0))
        for group in groups:
            made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    except OSError:
        made.close()
        raise
    return made


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer to a query by ``getsockopt``.

    The answer cannot be longer than the query, because the kernel writes the answer into the buffer of the query. ``action``
    describes the query in error messages.

    Raises:
        KernelError: the kernel refused the query.
    """
    buffer = bytearray(question)
    return bytes(buffer[: ask_in(asking, level, option, buffer, action)])


def ask_in(asking: socket.socket, level: int, option: int, buffer: bytearray, action: str) -> int:
    """Sends a query in the same way as ``ask``; writes the answer into the query's buffer, and returns the answer's length.

    Raises:
        KernelError: the kernel refused the query.
    """
    length = ctypes.c_uint32(len(buffer))
    begin = ctypes.byref(ctypes.c_char.from_buffer(buffer))
    if _libc.getsockopt(asking.fileno(), level, option, begin, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return length.value
