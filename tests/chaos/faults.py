"""Faults at the program's netlink sockets: what is to fail is written into a file that the program's sockets read.

The program's side is ``faulty_socket``.
"""

import contextlib
import enum
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Kind(enum.Enum):
    """What fails. The first five are answered in place of the kernel, which never sees the message."""

    ENOBUFS = "ENOBUFS"
    EBUSY = "EBUSY"
    ENOMEM = "ENOMEM"
    EEXIST = "EEXIST"
    """Only changes are answered so, and by the next: as an answer to a question they would be lies."""
    ENOENT = "ENOENT"
    UNSENT = "unsent"
    """The system call that sends fails."""
    LOST = "lost"
    """The kernel does what it is asked to; its answer overruns the buffer."""
    CUT = "cut"
    """An answer does not fit the buffer, ends in the middle, or its end never comes."""
    INTERRUPTED = "interrupted"
    """A listing says that it changed while it was listed."""


class Order(NamedTuple):
    """What is to fail: the next message of those that it can happen to, or each one with this probability."""

    kind: Kind
    share: float
    once: bool


class Faults:
    """Both sides of the file. ``order`` and ``end`` are for who wants faults, ``wanted`` and ``done`` for the sockets."""

    def __init__(self, directory: Path) -> None:
        self._wanted = directory / "faults"
        self._done = directory / "injected"

    def order(self, order: Order) -> None:
        """From now on."""
        draft = self._wanted.with_suffix(".draft")
        draft.write_text(f"{order.kind.value} {order.share} {int(order.once)}")
        draft.rename(self._wanted)

    def end(self) -> None:
        """No more faults."""
        self._wanted.unlink(missing_ok=True)

    def wanted(self) -> Order | None:
        """What is to fail now."""
        with contextlib.suppress(FileNotFoundError):
            kind, share, once = self._wanted.read_text().split()
            return Order(Kind(kind), float(share), once == "1")
        return None

    def done(self, order: Order) -> None:
        """One message has failed."""
        with self._done.open("a") as file:
            file.write(f"{order.kind.value}\n")
        if order.once:
            self.end()

    def injected(self) -> Counter[str]:
        """How many messages have failed so far, by kind."""
        return Counter(self._done.read_text().split() if self._done.exists() else ())
