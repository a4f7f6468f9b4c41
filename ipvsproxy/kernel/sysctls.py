"""The driver for kernel settings: sysctls, and settings below ``/sys``."""

import errno
import fcntl
import os
import pathlib
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.model.plan import Operation, Outcome, Verb

_PRIVILEGED = "run ipvsproxy --init-only in a privileged container before this one, or set the value on the host"
_REMEDIES: Mapping[int, str] = {
    errno.EROFS: f"it is mounted read-only; {_PRIVILEGED}",
    errno.EACCES: _PRIVILEGED,
    errno.EPERM: _PRIVILEGED,
    errno.ENOENT: "this kernel has no such setting: load the module that provides it, or use a kernel that has it",
    errno.EINVAL: "the kernel refuses this value",
}
_FLAGS_OF_DEVICE = re.compile(r"/sys/class/net/([^/]+)/flags")
_SET_FLAGS = 0x8914
"""SIOCSIFFLAGS of linux/sockios.h."""


class SysctlDriver:
    """Reads and writes kernel settings. A path is relative to ``/proc/sys``, or absolute (``/sys/module/...``)."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/proc/sys")) -> None:
        self._root = root

    def observe(self, paths: Iterable[str]) -> Mapping[str, str]:
        """The values of these settings, except settings that do not exist or that this process may not read.

        Raises:
            KernelError: a setting exists and cannot be read.
        """
        values: dict[str, str] = {}
        for path in paths:
            try:
                values[path] = (self._root / path).read_text().strip()
            except (FileNotFoundError, PermissionError):
                continue
            except OSError as error:
                raise KernelError(action=f"read {path}", errno=error.errno or 0, detail=_explain(error)) from error
        return values

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Write kernel settings. Removing a setting does nothing, because its former value is not known."""
        return [_write(self._root, operation, operation.item) for operation in operations if isinstance(operation.item, Sysctl)]


def _write(root: pathlib.Path, operation: Operation, setting: Sysctl) -> Outcome:
    if operation.verb is Verb.REMOVE:
        return Outcome(operation)
    try:
        if device := _FLAGS_OF_DEVICE.fullmatch(setting.path):
            _set_flags(device[1], int(setting.value, 16))
            return Outcome(operation)
        # ``write_text`` is not used, because it would create a file if the kernel has no such setting and the directory is an
        # ordinary directory.
        descriptor = os.open(root / setting.path, os.O_WRONLY)
        try:
            os.write(descriptor, f"{setting.value}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        return Outcome(operation, error=f"{setting.path} = {setting.value}: {_explain(error)}", errno=error.errno or 0)
    return Outcome(operation)


def _set_flags(device: str, flags: int) -> None:
    """Set the flags of a network device; this also works where ``/sys`` is mounted read-only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sH22x", device.encode(), flags))


def _explain(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror}; {remedy}" if remedy else f"{error.strerror}"
