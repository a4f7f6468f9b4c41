"""Faults at the program's netlink sockets: a test writes an order to a file that the program's sockets read.

``faulty_socket`` is the part that runs in the program.
"""

import contextlib
import enum
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Kind(enum.Enum):
    """Kinds of faults.

    For the first five kinds, the socket itself answers the program's message, and does not send it to the kernel.
    """

    ENOBUFS = "ENOBUFS"
    EBUSY = "EBUSY"
    ENOMEM = "ENOMEM"
    EEXIST = "EEXIST"
    """EEXIST and ENOENT are injected only as answers to changes; as answers to a query, they would report a wrong state."""
    ENOENT = "ENOENT"
    UNSENT = "unsent"
    """The system call that sends the message fails."""
    LOST = "lost"
    """The kernel carries out the request, but the kernel's answer overruns the receive buffer."""
    CUT = "cut"
    """An answer does not fit into the buffer, is cut off, or lacks the message that ends a listing."""
    INTERRUPTED = "interrupted"
    """The kernel reports that the listed objects changed during the listing."""


class Order(NamedTuple):
    """A requested fault.

    With ``once``, the fault affects one suitable message. Otherwise it affects each suitable message with the probability
    ``share``.
    """

    kind: Kind
    share: float
    once: bool


class Faults:
    """Passes orders for faults from a test to the program's sockets, through a file.

    Tests call ``order`` and ``end``; the sockets of the program under test (``faulty_socket``) call ``ordered`` and ``done``.
    """

    def __init__(self, directory: Path) -> None:
        self._wanted = directory / "faults"
        self._done = directory / "injected"

    def order(self, order: Order) -> None:
        """Inject this fault from now on."""
        draft = self._wanted.with_suffix(".draft")
        draft.write_text(f"{order.kind.value} {order.share} {int(order.once)}")
        draft.rename(self._wanted)

    def end(self) -> None:
        """Stop injecting faults."""
        self._wanted.unlink(missing_ok=True)

    def ordered(self) -> Order | None:
        """The present order."""
        with contextlib.suppress(FileNotFoundError):
            kind, share, once = self._wanted.read_text().split()
            return Order(Kind(kind), float(share), once == "1")
        return None

    def done(self, order: Order) -> None:
        """Count one message that fails because of an order. If the order is for a single failure, the order is then over."""
        with self._done.open("a") as file:
            file.write(f"{order.kind.value}\n")
        if order.once:
            self.end()

    def injected(self) -> Counter[str]:
        """How many messages have failed so far, by kind of fault."""
        return Counter(self._done.read_text().split() if self._done.exists() else ())
