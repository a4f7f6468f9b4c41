"""Sockets for netlink notifications, and queries to the kernel by ``getsockopt``.

Sockets for notifications are non-blocking. Filters (classic BPF, include/uapi/linux/filter.h) make the kernel drop unwanted
messages before they enter a socket's queue.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection, Sequence

from ipvsproxy.kernel.base.errors import KernelError

READS_AT_ONCE = 64
"""The most datagrams that a reader takes at once, so that a storm of events leaves its thread some time for other work."""
MOST_PORTS = 100
"""The most port ids that a filter compares: its jump instructions do not reach much further."""
PASS = 0xFFFFFFFF
"""The result of a filter that lets a message pass; the result 0 drops the message."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33
_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")  # sock_filter: code, number of instructions to skip if true and if false, operand
_LOAD_HALF, _LOAD_BYTE, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x30, 0x20, 0x15, 0x06
_libc = ctypes.CDLL(None, use_errno=True)
_PORT_OFFSET = 12  # nlmsg_pid of struct nlmsghdr


def open_event_socket(protocol: int, groups: Collection[int], receive_buffer: int) -> socket.socket:
    """A socket that receives the notifications of some groups, in the network namespace of the calling thread.

    ``protocol`` is a netlink family, ``groups`` are the numbers of its multicast groups, and ``receive_buffer`` is the size of
    the notification queue in bytes.

    Raises:
        OSError: the kernel refused to create or configure the socket.
    """
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        made.setblocking(False)
        with contextlib.suppress(PermissionError):  # without CAP_NET_ADMIN, the default size has to suffice
            made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        made.bind((0, 0))
        for group in groups:
            made.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
    except OSError:
        made.close()
        raise
    return made


def attach(filtered: socket.socket, program: Sequence[bytes]) -> None:
    """Attach these instructions to a socket as its filter, and replace the previous filter.

    Raises:
        OSError: the kernel refused the filter.
    """
    code = b"".join(program)
    instructions = ctypes.create_string_buffer(code, len(code))
    filtered.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(instructions)))


def load_half(offset: int) -> bytes:
    """Loads two bytes of the message."""
    return _INSTRUCTION.pack(_LOAD_HALF, 0, 0, offset)


def load_byte(offset: int) -> bytes:
    """Loads one byte of the message."""
    return _INSTRUCTION.pack(_LOAD_BYTE, 0, 0, offset)


def jump(value: int, if_equal: int, otherwise: int = 0) -> bytes:
    """Skips ``if_equal`` instructions if the loaded value, in network byte order, equals ``value``, else skips ``otherwise``."""
    return _INSTRUCTION.pack(_JUMP_IF_EQUAL, if_equal, otherwise, value)


def end(result: int) -> bytes:
    """Ends the filter with ``PASS`` or with 0."""
    return _INSTRUCTION.pack(_RETURN, 0, 0, result)


def dropping(ports: Collection[int]) -> list[bytes]:
    """Instructions that drop messages with one of the first ``MOST_PORTS`` of these port IDs, and pass all other messages."""
    checked = tuple(ports)[:MOST_PORTS]
    checks = [jump(in_network_order("=I", port), len(checked) - at) for at, port in enumerate(checked)]
    return [_INSTRUCTION.pack(_LOAD_WORD, 0, 0, _PORT_OFFSET), *checks, end(PASS), end(0)]


def in_network_order(code: str, value: int) -> int:
    """The value that a filter sees for a number in host byte order: filters read numbers in network byte order."""
    return int.from_bytes(struct.pack(code, value), "big")


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer to a query by ``getsockopt``: the same buffer holds the query and then the kernel's answer.

    The answer cannot be longer than the query. ``action`` describes the query in error messages.

    Raises:
        KernelError: the kernel refused the query.
    """
    buffer = bytearray(question)
    return bytes(buffer[: ask_in(asking, level, option, buffer, action)])


def ask_in(asking: socket.socket, level: int, option: int, buffer: bytearray, action: str) -> int:
    """Sends a query as ``ask`` does, writes the answer over the query without copying it, and returns the length of the answer.

    Raises:
        KernelError: the kernel refused the query.
    """
    length = ctypes.c_uint32(len(buffer))
    begin = ctypes.byref(ctypes.c_char.from_buffer(buffer))
    if _libc.getsockopt(asking.fileno(), level, option, begin, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return length.value
