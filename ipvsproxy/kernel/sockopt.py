"""Questions that the kernel answers by ``getsockopt``, whose buffer holds the question first and then the answer."""

import ctypes
import os
import socket

from ipvsproxy.kernel.errors import KernelError

_libc = ctypes.CDLL(None, use_errno=True)


def ask(asking: socket.socket, level: int, option: int, question: bytes, action: str) -> bytes:
    """The answer, which is as long as the question or shorter; ``action`` is for the error.

    Raises:
        KernelError: the kernel refused it.
    """
    buffer = ctypes.create_string_buffer(question, len(question))
    length = ctypes.c_uint32(len(question))
    if _libc.getsockopt(asking.fileno(), level, option, buffer, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise KernelError(action=action, errno=number, detail=os.strerror(number))
    return buffer.raw[: length.value]
