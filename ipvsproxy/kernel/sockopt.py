"""Questions by ``getsockopt``: one buffer holds the question, and then the kernel's answer."""

import ctypes
import os
import socket

from ipvsproxy.kernel.errors import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer, at most as long as the question. ``action`` is for the error.

    Raises:
        KernelError: the kernel refused the question.
    """
    buffer = ctypes.create_string_buffer(question, len(question))
    length = ctypes.c_uint32(len(question))
    if _libc.getsockopt(asking.fileno(), level, option, buffer, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return buffer.raw[: length.value]
