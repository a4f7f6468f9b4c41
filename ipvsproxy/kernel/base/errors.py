"""``KernelError``, the only error class of ``kernel/``."""

import os


class KernelError(Exception):
    """The kernel, or a program that configures it, refused a request, or could not be read.

    ``action`` is what was attempted (``iptables-restore``, ``read net/ipv4/ip_forward``). ``errno`` is the kernel's error number,
    0 without one. ``detail`` is one line for the operator; an empty one becomes the text of the error number.
    """

    def __init__(self, *, action: str, errno: int = 0, detail: str = "") -> None:
        self.action = action
        self.errno = errno
        self.detail = detail or os.strerror(errno)
        super().__init__(f"{action}: {self.detail}")
