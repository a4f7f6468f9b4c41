"""The driver for kernel settings: sysctls, and settings below ``/sys``."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.kernel import TUNNEL_RECORD, Sysctl, parse_record, render_record
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
_UP_AND_NOARP = 0x81
"""IFF_UP and IFF_NOARP. All other flags are ignored, because other programs change flags: for example, a program that listens on
a device sets IFF_PROMISC."""
_SET_FLAGS = 0x8914
"""SIOCSIFFLAGS of linux/sockios.h."""
_RECORDING_DEVICE = TUNNEL_RECORD.split("/")[-2]
_SET_LINK, _IFALIAS = 19, 20
"""RTM_SETLINK of linux/rtnetlink.h, and IFLA_IFALIAS of linux/if_link.h."""
_LINK = struct.Struct("=BxHiII")
"""``struct ifinfomsg``: family, type, index, flags, and which flags change."""


class SysctlDriver:
    """Reads and writes kernel settings. The path of a setting is relative to ``/proc/sys``, or absolute (``/sys/module/...``)."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/proc/sys")) -> None:
        self._root = root

    def observe(self, paths: Iterable[str]) -> Mapping[str, str]:
        """The values of the given settings that exist and that this process may read.

        For the flags of a device, the value contains only the bits IFF_UP and IFF_NOARP.

        Raises:
            KernelError: a setting exists and cannot be read.
        """
        values: dict[str, str] = {}
        for path in paths:
            try:
                values[path] = self._read(path)
            except (FileNotFoundError, PermissionError):
                continue
            except OSError as error:
                raise KernelError(action=f"read {path}", errno=error.errno or 0, detail=_explain(error)) from error
        return values

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Write kernel settings.

        The removal of a setting restores the former value if that value is recorded and no other program has changed the setting
        since then.
        """
        return [self._apply_one(operation, operation.item) for operation in operations if isinstance(operation.item, Sysctl)]

    def _apply_one(self, operation: Operation, setting: Sysctl) -> Outcome:
        try:
            if operation.verb is Verb.REMOVE:
                self._restore(setting)
            else:
                if setting.for_tunnels:
                    self._record(setting.path)
                self._write(setting.path, setting.value)
        except OSError as error:
            return Outcome(operation, error=f"{setting.path} = {setting.value}: {_explain(error)}", errno=error.errno or 0)
        except ValueError as error:
            return Outcome(operation, error=f"{setting.path}: the recorded value cannot be read: {error}", errno=errno.EINVAL)
        return Outcome(operation)

    def _read(self, path: str) -> str:
        text = (self._root / path).read_text(errors="replace").strip()  # the alias of a device may contain any bytes
        return hex(int(text, 16) & _UP_AND_NOARP) if _FLAGS_OF_DEVICE.fullmatch(path) else text

    def _write(self, path: str, value: str) -> None:
        if device := _FLAGS_OF_DEVICE.fullmatch(path):
            _set_flags(device[1], int(value, 16))
            return
        # If the setting does not exist and the root is an ordinary directory, as in tests, ``write_text`` would create a file.
        descriptor = os.open(self._root / path, os.O_WRONLY)
        try:
            os.write(descriptor, f"{value}\n".encode())
        finally:
            os.close(descriptor)

    def _record(self, path: str) -> None:
        """Record the value of a setting that is about to be changed."""
        alias = self._read(TUNNEL_RECORD)
        former = parse_record(alias)
        if alias and not former:
            raise OSError(errno.EEXIST, f"the tunnel device has the alias of another program: {alias}")
        _set_alias(render_record(former | {path: self._read(path)}))

    def _restore(self, setting: Sysctl) -> None:
        """Restore the former value of a setting if the value is recorded.

        If the record or the setting cannot be read, the record stays.
        """
        with contextlib.suppress(FileNotFoundError):  # the device may have been removed, together with the record
            former = parse_record(self._read(TUNNEL_RECORD))
            if setting.path in former:
                value = former.pop(setting.path)
                with contextlib.suppress(FileNotFoundError):
                    if self._read(setting.path) == setting.value:
                        self._write(setting.path, value)
                _set_alias(render_record(former))


def _set_flags(device: str, flags: int) -> None:
    """Set the flags of a network device, even where ``/sys`` is mounted read-only."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sH22x", device.encode(), flags))


def _set_alias(alias: str) -> None:
    """Set the alias of the IPv4 tunnel device, even where ``/sys`` is mounted read-only."""
    body = _LINK.pack(0, 0, socket.if_nametoindex(_RECORDING_DEVICE), 0, 0) + message.attribute(_IFALIAS, alias.encode())
    request = message.HEADER.pack(message.HEADER.size + len(body), _SET_LINK, netlink.REQUEST, 0, 0) + body
    with contextlib.closing(netlink.Channel(socket.NETLINK_ROUTE)) as channel:
        if number := channel.do(request):
            raise OSError(max(number, 0), f"set the alias of {_RECORDING_DEVICE}: {netlink.explain(number)}")


def _explain(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror}; {remedy}" if remedy else f"{error.strerror}"
