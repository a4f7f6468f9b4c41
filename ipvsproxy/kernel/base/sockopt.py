"""Questions by ``getsockopt``: one buffer holds the question, and then the kernel's answer."""

import ctypes
import os
import socket

from ipvsproxy.kernel.base.errors import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer, at most as long as the question. ``action`` is for the error.

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
