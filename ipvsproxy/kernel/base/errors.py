"""``KernelError``, the only error class of ``kernel/``, and context managers that ignore errors with certain error numbers."""

import contextlib
import os


class KernelError(Exception):
    """The kernel, or a program that configures the kernel, refused a request, or the state of the kernel could not be read.

    ``action`` names what was attempted, such as ``iptables-restore`` or ``read net/ipv4/ip_forward``. ``errno`` is the kernel's
    error number, or 0 if the kernel gave no number. ``detail`` is one line for the operator; if no detail is given, the text of
    the error number is used instead.
    """

    def __init__(self, *, action: str, errno: int = 0, detail: str = "") -> None:
        self.action = action
        self.errno = errno
        self.detail = detail or os.strerror(errno)
        super().__init__(f"{action}: {self.detail}")


class Tolerated(contextlib.AbstractContextManager[None]):
    """A context manager that ends its ``with`` block silently at a ``KernelError`` with one of the given error numbers.

    The context manager is meant for work on kernel objects that may be absent.
    """

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        return isinstance(error, KernelError) and error.errno in self._numbers
