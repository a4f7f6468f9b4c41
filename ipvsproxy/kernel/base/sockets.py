"""Sockets for netlink notifications, and questions to the kernel by ``getsockopt``.

Sockets for notifications are non-blocking. Filters make the kernel drop messages before a socket's queue: classic BPF
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
"""The most port ids that a filter compares: its jump instructions do not reach much further."""
PASS = 0xFFFFFFFF
"""The result of a filter that lets a message pass; the result 0 drops the message."""

_SOL_NETLINK, _ADD_MEMBERSHIP, _SO_RCVBUFFORCE = 270, 1, 33
_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")  # sock_filter: code, instructions to skip if true, if false, operand
_LOAD_HALF, _LOAD_BYTE, _LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x30, 0x20, 0x15, 0x06
_libc = ctypes.CDLL(None, use_errno=True)
_PORT_OFFSET = 12  # nlmsg_pid of struct nlmsghdr


def open_event_socket(protocol: int, groups: Collection[int], receive_buffer: int) -> socket.socket:
    """A socket that receives the notifications of some groups, in the network namespace of the calling thread.

    ``protocol`` is a family of netlink, ``groups`` are the numbers of its multicast groups, ``receive_buffer`` is the size of the
    queue of notifications in bytes.

    Raises:
        OSError: the kernel refused the socket.
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
    """Set these instructions as the filter of a socket, in place of its former filter.

    Raises:
        OSError: the kernel refused the filter.
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
    """Skip ``if_equal`` instructions if the loaded value, in network order, equals ``value``, else ``otherwise`` instructions."""
    return _INSTRUCTION.pack(_JUMP_IF_EQUAL, if_equal, otherwise, value)


def end(result: int) -> bytes:
    """End with ``PASS``, or with 0."""
    return _INSTRUCTION.pack(_RETURN, 0, 0, result)


def dropping(ports: Collection[int]) -> list[bytes]:
    """The instructions that drop messages with one of the first ``MOST_PORTS`` of these port ids, and pass all other messages."""
    checked = tuple(ports)[:MOST_PORTS]
    checks = [jump(in_network_order("=I", port), len(checked) - at) for at, port in enumerate(checked)]
    return [_INSTRUCTION.pack(_LOAD_WORD, 0, 0, _PORT_OFFSET), *checks, end(PASS), end(0)]


def in_network_order(code: str, value: int) -> int:
    """The value that a filter loads for a number in host order: filters load numbers as if in network order."""
    return int.from_bytes(struct.pack(code, value), "big")


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer to a question by ``getsockopt``: one buffer holds the question, and then the kernel's answer.

    The answer is at most as long as the question. ``action`` is for the error.

    Raises:
        KernelError: the kernel refused the question.
    """
    buffer = bytearray(question)
    return bytes(buffer[: ask_in(asking, level, option, buffer, action)])


def ask_in(asking: socket.socket, level: int, option: int, buffer: bytearray, action: str) -> int:
    """Asks as ``ask`` does, writes the answer over the question without copying it, and returns the length of the answer.

    Raises:
        KernelError: the kernel refused the question.
    """
    length = ctypes.c_uint32(len(buffer))
    begin = ctypes.byref(ctypes.c_char.from_buffer(buffer))
    if _libc.getsockopt(asking.fileno(), level, option, begin, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return length.value
