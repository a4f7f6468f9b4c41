"""Sockets besides those of netlink requests: for notifications, and for questions by ``getsockopt``.

Sockets of notifications never wait. Filters make the kernel drop messages before a socket's queue: classic BPF
(include/uapi/linux/filter.h).
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
"""The most port ids that a filter compares; its instructions cannot jump over many more."""
PASS = 0xFFFFFFFF
"""The result of a filter that passes a message; 0 drops it."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33
_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")  # sock_filter: code, instructions to skip if true, if false, operand
_LOAD_HALF, _LOAD_BYTE, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x30, 0x20, 0x15, 0x06
_libc = ctypes.CDLL(None, use_errno=True)
_PORT_OFFSET = 12  # nlmsg_pid of struct nlmsghdr


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


def attach(filtered: socket.socket, program: Sequence[bytes]) -> None:
    """Give a socket these instructions as its filter, in the place of another one.

    Raises:
        OSError: the kernel refused them.
    """
    code = b"".join(program)
    instructions = ctypes.create_string_buffer(code, len(code))
    filtered.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(instructions)))


def load_half(offset: int) -> bytes:
    """Load two bytes of the message."""
    return _INSTRUCTION.pack(_LOAD_HALF, 0, 0, offset)


def load_byte(offset: int) -> bytes:
    """Load one byte of the message."""
    return _INSTRUCTION.pack(_LOAD_BYTE, 0, 0, offset)


def jump(value: int, if_equal: int, otherwise: int = 0) -> bytes:
    """Skip this many instructions if the loaded value, in network order, equals ``value``, or otherwise."""
    return _INSTRUCTION.pack(_JUMP_IF_EQUAL, if_equal, otherwise, value)


def end(result: int) -> bytes:
    """End with ``PASS``, or with 0."""
    return _INSTRUCTION.pack(_RETURN, 0, 0, result)


def dropping(ports: Collection[int]) -> list[bytes]:
    """The instructions that drop messages with one of these port ids, and pass all others. Those beyond ``MOST_PORTS`` pass."""
    checked = tuple(ports)[:MOST_PORTS]
    checks = [jump(in_network_order("=I", port), len(checked) - at) for at, port in enumerate(checked)]
    return [_INSTRUCTION.pack(_LOAD_WORD, 0, 0, _PORT_OFFSET), *checks, end(PASS), end(0)]


def in_network_order(code: str, value: int) -> int:
    """A number in the host's order as a filter loads it: as if it were in network order."""
    return int.from_bytes(struct.pack(code, value), "big")


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer to a question by ``getsockopt``: one buffer holds the question, and then the kernel's answer.

    It is at most as long as the question. ``action`` is for the error.

    Raises:
        KernelError: the kernel refused the question.
    """
    buffer = bytearray(question)
    return bytes(buffer[: ask_in(asking, level, option, buffer, action)])


def ask_in(asking: socket.socket, level: int, option: int, buffer: bytearray, action: str) -> int:
    """As ``ask``, with the answer in place of the question; returns the length of the answer. No byte is copied here.

    Raises:
        KernelError: the kernel refused the question.
    """
    length = ctypes.c_uint32(len(buffer))
    begin = ctypes.byref(ctypes.c_char.from_buffer(buffer))
    if _libc.getsockopt(asking.fileno(), level, option, begin, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return length.value
