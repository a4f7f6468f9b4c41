"""The one error of this floor."""

import os


class KernelError(Exception):
    """The kernel, or a tool that speaks to it, refused something or could not be read.

    ``action`` says what was tried (``iptables-restore``, ``read net/ipv4/ip_forward``), ``errno`` is the kernel's number or 0
    where there is none, ``detail`` is one line for the operator; empty, it is the text of the number.
    """

    def __init__(self, *, action: str, errno: int = 0, detail: str = "") -> None:
        self.action = action
        self.errno = errno
        self.detail = detail or os.strerror(errno)
        super().__init__(f"{action}: {self.detail}")
