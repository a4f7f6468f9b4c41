"""Counts the program's system calls.

The module itself counts each call on a netlink socket. The kernel's counters give the numbers of file reads and writes.

Other system calls, such as waiting for input, are not included in any figure.
"""

import functools
import itertools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ipvsproxy.kernel.base import netlink, sockets
from ipvsproxy.kernel.network import notify

SENDS, RECEIVES, QUESTIONS, HEARD = NETLINK = ("sends", "receives", "questions", "heard")
"""The names of the counters of system calls on netlink sockets. ``questions`` counts ``getsockopt`` on any socket; ``heard``
counts calls on the sockets that receive the kernel's notifications about interfaces, addresses and routes."""
_IO = pathlib.Path("/proc/self/io")
_reads_before = itertools.count()


class Make(Protocol):
    """Makes a system call, and counts it by name."""

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Make the call, count the call, and return its result."""


class CountedSocket:
    """A socket that makes its system calls through ``make``, and has the methods that ``netlink.Channel`` uses."""

    def __init__(self, opened: netlink.Socket, make: Make) -> None:
        self._opened = opened
        self._make = make

    def send(self, data: bytes, /) -> int:
        """Calls the socket's method of the same name, and counts the call."""
        sent: int = self._make(SENDS, self._opened.send, data)
        return sent

    def recv_into(self, buffer: bytearray, nbytes: int, flags: int, /) -> int:
        """Calls the socket's method of the same name, and counts the call."""
        size: int = self._make(RECEIVES, self._opened.recv_into, buffer, nbytes, flags)
        return size

    def getsockopt(self, level: int, option: int, /) -> int:
        """Calls the socket's method of the same name, and counts the call."""
        value: int = self._make(QUESTIONS, self._opened.getsockopt, level, option)
        return value

    def close(self) -> None:
        """Calls the socket's method of the same name, and counts the call."""
        self._opened.close()


class _ListeningSocket:
    """A listening socket that counts its calls.

    The calls have a separate counter, because the event loop's thread owns this socket, and another thread owns the netlink
    channels.
    """

    def __init__(self, opened: Any, counts: Counter[str]) -> None:
        self._opened = opened
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def recv(self, size: int) -> Any:
        self._counts[HEARD] += 1
        return self._opened.recv(size)

    def send(self, data: bytes) -> Any:
        self._counts[HEARD] += 1
        return self._opened.send(data)


def cover(make: Make, counts: Counter[str]) -> None:
    """Route all calls of new netlink channels, and all queries by ``getsockopt``, through ``make``.

    The calls of listening sockets are only counted.
    """
    netlink.Channel.__init__ = _connecting(netlink.Channel.__init__, make)  # type: ignore[method-assign]  # to observe its calls
    notify.ChangeListener.__init__ = _listening(notify.ChangeListener.__init__, counts)  # type: ignore[method-assign]  # to count
    sockets._libc.getsockopt = functools.partial(make, QUESTIONS, sockets._libc.getsockopt)


def file_calls() -> Mapping[str, int]:
    """The numbers of reads and writes of this process and its finished children; empty if the kernel does not count them.

    The result leaves out the calls that this function itself makes.
    """
    try:
        with _IO.open("rb", buffering=0) as file:
            lines = file.read(4096).decode().splitlines()
    except OSError:
        return {}
    found = dict(line.split(": ") for line in lines)
    return {"reads": int(found["syscr"]) - next(_reads_before), "writes": int(found["syscw"])}


def _connecting(make_channel: Callable[..., None], make: Make) -> Callable[..., None]:
    @functools.wraps(make_channel)
    def made(
        channel: netlink.Channel, protocol: int, connect: Callable[[int], netlink.Socket] = netlink.open_socket, *others: Any
    ) -> None:
        make_channel(channel, protocol, lambda number: CountedSocket(connect(number), make), *others)

    return made


def _listening(make_listener: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    @functools.wraps(make_listener)
    def made(listener: notify.ChangeListener, **named: Any) -> None:
        make_listener(listener, **named)
        counts[HEARD] += 1  # a new socket requests the names of interfaces from the kernel
        listener._socket = _ListeningSocket(listener._socket, counts)  # type: ignore[assignment]  # it has the methods that are used

    return made
