"""Netlink sockets that receive notifications of the kernel, and never wait."""

import contextlib
import socket
from collections.abc import Collection
from typing import Protocol

READS_AT_ONCE = 64
"""The most datagrams that a reader takes at once, so that a storm of events leaves its thread some time for other work."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33


class EventSocket(Protocol):
    """The methods of such a socket that all of its readers use."""

    def fileno(self) -> int:
        """As of a socket."""

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        """As of a socket."""

    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None:
        """As of a socket."""

    def close(self) -> None:
        """As of a socket."""


def open_event_socket(protocol: int, groups: Collection[int], receive_buffer: int) -> socket.socket:
    """A socket that receives the notifications of some groups, in the network namespace of the calling thread.

    ``protocol`` is a family of netlink, ``groups`` the numbers of its multicast groups, ``receive_buffer`` the bytes of
    notifications that may wait.

    Raises:
        OSError: the kernel refused it.
    """
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        made.setblocking(False)
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN the default size must do
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        made.bind((0, 0))
        for group in groups:
            made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    except OSError:
        made.close()
        raise
    return made
