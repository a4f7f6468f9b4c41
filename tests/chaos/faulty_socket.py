"""Netlink sockets that inject faults: ``Faults`` says which of the program's requests to the kernel fail, and how."""

import dataclasses
import errno
import random
import struct
import time
from collections.abc import Callable

from ipvsproxy.kernel.base import netlink
from tests.chaos.faults import Faults, Kind, Order
from tests.support.fake_netlink import HEADER, error, messages, sequences

_INTERRUPTED = 0x10
_FLAGS_OFFSET = 6
_ALSO_LISTINGS = frozenset({Kind.ENOBUFS, Kind.EBUSY, Kind.ENOMEM})


def install(faults: Faults) -> None:
    """Make every channel that is created after this call fail in the way that a test orders."""
    dice = random.Random()
    usual = netlink.Channel

    class FaultyChannel(usual):  # type: ignore[misc, valid-type]  # the class may itself be a replacement
        """A channel whose sockets fail."""

        def __init__(
            self,
            protocol: int,
            connect: Callable[[int], netlink.Socket] = netlink.open_socket,
            sleep: Callable[[float], object] = time.sleep,
        ) -> None:
            super().__init__(protocol, lambda number: FaultySocket(connect(number), faults, dice), sleep)

    netlink.Channel = FaultyChannel  # type: ignore[misc]  # replaced on purpose


@dataclasses.dataclass(eq=False)
class FaultySocket:
    """One socket."""

    real: netlink.Socket
    faults: Faults
    dice: random.Random
    _before: list[bytes] = dataclasses.field(default_factory=list)
    _behind: list[bytes] = dataclasses.field(default_factory=list)
    _trouble: Order | None = None
    _is_silent: bool = False

    def send(self, data: bytes, /) -> int:
        """Send all messages with one system call, except the messages that must fail because of a requested fault."""
        self._before, self._behind, self._trouble, self._is_silent = [], [], None, False
        order = self.faults.ordered()
        if order is None:
            return self.real.send(data)
        if order.kind is Kind.UNSENT:
            if self._hits(order):
                raise OSError(errno.ENOBUFS, "no buffer space, as ordered")
        elif order.kind in (Kind.LOST, Kind.CUT, Kind.INTERRUPTED):
            if _is_listing(data) or (order.kind is Kind.LOST and _is_change(data)):
                self._trouble = order
        elif _is_change(data) or order.kind in _ALSO_LISTINGS:
            data = self._refuse(data, order)
        return self.real.send(data) if data else 0

    def _refuse(self, data: bytes, order: Order) -> bytes:
        """Answer, in place of the kernel, the messages that must fail; return the other messages."""
        *_, last = sequences(data)
        kept = []
        for sequence, message in zip(sequences(data), messages(data), strict=True):
            if self.faults.ordered() is None or not self._hits(order):
                kept.append(message)
                continue
            # The answer to the last message ends the batch, so this answer must follow the kernel's answers.
            place = self._behind if sequence == last else self._before
            place.append(error(sequence, getattr(errno, order.kind.value)))
        return b"".join(kept)

    def recv_into(self, buffer: bytearray, nbytes: int, flags: int, /) -> int:
        """Receive an injected answer, or an answer of the kernel."""
        if self._before:
            return _fill(buffer, self._before.pop(0))
        try:
            size = self.real.recv_into(buffer, nbytes, flags)
        except BlockingIOError:
            if self._behind:
                return _fill(buffer, self._behind.pop(0))
            raise
        if self._is_silent:
            raise BlockingIOError(errno.EAGAIN, "the rest never comes, as ordered")
        order = self._trouble
        if order is None or not self._hits(order):
            return size
        self._trouble = None
        if order.kind is Kind.INTERRUPTED:
            _mark(buffer, size)
            return size
        if order.kind is Kind.LOST:
            raise OSError(errno.ENOBUFS, "overrun, as ordered")
        match self.dice.randrange(3):
            case 0:
                return nbytes + 1
            case 1:
                begin_of_last = size - len(messages(bytes(buffer[:size]))[-1])
                return self.dice.randrange(begin_of_last + 1, size)
            case _:
                self._is_silent = True
                raise BlockingIOError(errno.EAGAIN, "the rest never comes, as ordered")

    def _hits(self, order: Order) -> bool:
        if not order.once and self.dice.random() >= order.share:
            return False
        self.faults.done(order)
        return True

    def getsockopt(self, level: int, option: int, /) -> int:
        """As it is."""
        return self.real.getsockopt(level, option)

    def close(self) -> None:
        """Close it."""
        self.real.close()


def _is_listing(data: bytes) -> bool:
    return bool(HEADER.unpack_from(data)[2] & netlink.DUMP == netlink.DUMP)


def _is_change(data: bytes) -> bool:
    """Whether the messages are changes rather than queries.

    Only the last message is examined, because the last of several changes asks for an acknowledgement.
    """
    return bool(HEADER.unpack_from(messages(data)[-1])[2] & netlink.ACKNOWLEDGE)


def _fill(buffer: bytearray, data: bytes) -> int:
    buffer[: len(data)] = data
    return len(data)


def _mark(buffer: bytearray, size: int) -> None:
    position = 0
    for message in messages(bytes(buffer[:size])):
        flags = HEADER.unpack_from(message)[2]
        struct.pack_into("=H", buffer, position + _FLAGS_OFFSET, flags | _INTERRUPTED)
        position += len(message)
