"""Runs the program in the network namespace at PATH. Usage: ``python -m tests.support.in_namespace PATH FLAG...``.

``/sys`` shows the interfaces of the namespace in which ``/sys`` was mounted, so this process mounts its own ``/sys``.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

from ipvsproxy import cli

_CLONE_NEWNS, _CLONE_NEWNET, _MS_REC, _MS_PRIVATE = 0x20000, 0x40000000, 0x4000, 0x40000


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(path: str) -> None:
    """Enter the network namespace at this path."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY)
    _check(libc.setns(descriptor, _CLONE_NEWNET))
    os.close(descriptor)
    _check(libc.unshare(_CLONE_NEWNS))
    _check(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def run(path: str, arguments: Sequence[str]) -> int:
    """Run the program in the network namespace at this path; return its exit status."""
    enter(path)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
