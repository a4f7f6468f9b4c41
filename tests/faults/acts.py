"""An act is one interaction of a start with the system: a netlink message, ``getsockopt``, a process, or a file of the kernel.

``install`` intercepts all acts of the calling process, and records the acts in a file in their order. If a test has chosen an
act, ``install`` makes this act fail.
"""

import builtins
import contextlib
import ctypes
import errno
import io
import json
import os
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ipvsproxy.kernel.base import netlink, sockets
from tests.support import fake_netlink
from tests.support.fake_netlink import HEADER

KERNEL_FILES = ("/proc/", "/sys/")
OWN_FILES = (
    "/proc/self/status",
    "/proc/self/stat",
    "/proc/self/limits",
    "/proc/self/oom_score_adj",
    "/proc/stat",
    "/proc/meminfo",
)
"""Files about this process and the machine. Opening them does not count as an act. Most of them are used only by the metrics."""
LOCKED = "Another app is currently holding the xtables lock; still 5s 0us time ahead to have a chance to grab the lock...\n"
FAILURES: dict[str, tuple[str, ...]] = {
    "send": ("ENOBUFS", "refused"),
    "receive": ("ENOBUFS",),
    "getsockopt": ("ENOMEM",),
    "process": ("locked", "hangs", "EAGAIN"),
    "file": ("ENFILE",),
}
"""The ways in which each kind of act can fail."""
LOCKLESS = ("--version", "-save")
"""A process of iptables whose command line has one of these words never takes the xtables lock."""

_MODULE = re.compile("^/sys/module/[^/]+/")
"""The folder of a kernel module. Two acts have the same name if their files differ only in this folder."""
_PROTOCOLS = {0: "route", 12: "netfilter", 16: "generic"}
_GENERIC = 16
_REMOVING = frozenset({3, 7, 17})  # IPVS_CMD_DEL_SERVICE, IPVS_CMD_DEL_DEST, IPVS_CMD_FLUSH (include/uapi/linux/ip_vs.h).
_FIRST_FAMILY = 17  # The numbers of generic netlink families begin after 16, the number of their controller


class Order(NamedTuple):
    """A requested failure: the name of an act, how the act fails, and which act of this name fails.

    Acts are counted from 1, and 0 means every act.
    """

    name: str
    failure: str
    time: int


class Act(NamedTuple):
    """An act; ``time`` says how many acts of the same name have happened, including this act.

    ``removes`` says whether the act is a message that removes something from IPVS.
    """

    name: str
    time: int
    failed: bool
    removes: bool


class Acts:
    """Records acts, and decides which acts fail. Records are appended to the file ``path``."""

    def __init__(self, path: Path, orders: Sequence[Order]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._orders = {order.name: order for order in orders}
        self._times: Counter[str] = Counter()

    def begin(self, name: str, *, removes: bool = False) -> str:
        """Record an act; return how the act must fail, or an empty string."""
        self._times[name] += 1
        order = self._orders.get(name)
        fails = order is not None and order.time in (0, self._times[name])
        line = json.dumps(Act(name, self._times[name], fails, removes))
        os.write(self._descriptor, f"{line}\n".encode())
        return order.failure if order is not None and fails else ""


def failures(name: str) -> Sequence[str]:
    """The ways in which an act with this name can fail."""
    return [
        failure
        for failure in FAILURES[name.partition(" ")[0]]
        if failure != "locked" or not any(word in name for word in LOCKLESS)
    ]


def read(path: Path) -> list[Act]:
    """Read the recorded acts."""
    return [Act(*json.loads(line)) for line in path.read_text().splitlines()]


def install(acts: Acts) -> None:
    """Intercept the acts of this process from now on."""
    _watch_sockets(acts)
    _watch_questions(acts)
    _watch_processes(acts)
    _watch_files(acts)


def _watch_sockets(acts: Acts) -> None:
    class WatchedSocket(socket.socket):
        """A netlink socket whose acts are intercepted."""

        pending: bytes = b""
        about = ""

        def send(self, data: Any, flags: int = 0, /) -> int:
            protocol = _PROTOCOLS.get(self.proto, str(self.proto))
            messages = fake_netlink.messages(bytes(data))
            self.about = f"{protocol} {_described(self.proto, messages[0])}"
            removes = self.proto == _GENERIC and any(_removes(message) for message in messages)
            failure = acts.begin(f"send {self.about}", removes=removes)
            self.pending = b""
            if failure == "refused":
                self.pending = b"".join(fake_netlink.error(one, errno.ENOMEM) for one in fake_netlink.sequences(bytes(data)))
                return len(data)
            if failure:
                raise OSError(getattr(errno, failure), f"{failure}, as ordered")
            return super().send(data, flags)

        def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0, /) -> int:
            if self.pending:
                answer, self.pending = self.pending, b""
                buffer[: len(answer)] = answer
                return len(answer)
            failure = acts.begin(f"receive {self.about}")
            if failure:
                with contextlib.suppress(OSError):
                    super().recv_into(buffer, nbytes, flags)
                raise OSError(getattr(errno, failure), f"{failure}, as ordered")
            return super().recv_into(buffer, nbytes, flags)

    class Sockets:
        """Stands in for the module ``socket``: creates a ``WatchedSocket`` instead of a socket, and is otherwise the same."""

        def __getattr__(self, name: str) -> Any:
            return WatchedSocket if name == "socket" else getattr(socket, name)

    setattr(netlink, "socket", Sockets())  # noqa: B010 - mypy does not know this attribute


def _described(protocol: int, message: bytes) -> str:
    _, kind, flags, _, _ = HEADER.unpack_from(message)
    what = f"command {message[HEADER.size]}" if protocol == _GENERIC else f"type {kind}"
    return f"{what}{' dump' if flags & netlink.DUMP == netlink.DUMP else ''}"


def _removes(message: bytes) -> bool:
    return HEADER.unpack_from(message)[1] >= _FIRST_FAMILY and message[HEADER.size] in _REMOVING


def _watch_questions(acts: Acts) -> None:
    library = sockets._libc

    class Library:
        """A stand-in for the C library. It intercepts ``getsockopt``, the only function of the library that ``sockets`` calls."""

        def getsockopt(self, descriptor: int, level: int, option: int, *rest: Any) -> int:
            if failure := acts.begin(f"getsockopt level {level} option {option}"):
                ctypes.set_errno(getattr(errno, failure))
                return -1
            return int(library.getsockopt(descriptor, level, option, *rest))

    sockets._libc = Library()  # type: ignore[assignment]  # replaced on purpose


def _watch_processes(acts: Acts) -> None:
    start: Callable[..., Any] = subprocess.run

    def run(command: Sequence[str], **options: Any) -> Any:
        words = [Path(command[0]).name, *(word for word in command[1:] if not word.isdigit())]
        failure = acts.begin(f"process {' '.join(words)}")
        if failure == "locked":
            return subprocess.CompletedProcess(command, 4, "", LOCKED)
        if failure == "hangs":
            raise subprocess.TimeoutExpired(command, options.get("timeout") or 0)
        if failure:
            raise OSError(getattr(errno, failure), f"{failure}, as ordered")
        return start(command, **options)

    subprocess.run = run  # type: ignore[assignment]  # replaced on purpose


def _watch_files(acts: Acts) -> None:
    def watched(usual: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *arguments: Any, **options: Any) -> Any:
            name = file if isinstance(file, str) else os.fspath(file) if isinstance(file, os.PathLike) else ""
            is_watched = isinstance(name, str) and name.startswith(KERNEL_FILES) and not name.startswith(OWN_FILES)
            if is_watched and (failure := acts.begin(f"file {_MODULE.sub('/sys/module/*/', name)}")):
                raise OSError(getattr(errno, failure), f"{failure}, as ordered", name)
            return usual(file, *arguments, **options)

        return opened

    io.open = watched(io.open)
    builtins.open = watched(builtins.open)
    os.open = watched(os.open)
