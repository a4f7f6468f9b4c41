"""A netlink socket without a kernel; its answers and losses are scripted."""

import errno
import struct
from collections.abc import Callable, Iterable

HEADER = struct.Struct("=IHHII")
ERROR, DONE = 2, 3
OVERRUN = OSError(errno.ENOBUFS, "overrun")

Answer = bytes | OSError


class FakeSocket:
    """A fake netlink socket.

    ``answer`` gets the bytes of each ``send``, and returns the datagrams and errors that the next receive calls yield.
    """

    def __init__(self, answer: Callable[[bytes], Iterable[Answer]], receive_buffer: int = 8 << 20) -> None:
        self._answer = answer
        self._receive_buffer = receive_buffer
        self.options: dict[tuple[int, int], int] = {}
        self._queue: list[Answer] = []
        self.sent: list[bytes] = []
        self.closed = False

    def send(self, data: bytes, /) -> int:
        assert not self.closed
        self.sent.append(bytes(data))
        self._queue += self._answer(bytes(data))
        return len(data)

    def recv_into(self, buffer: bytearray, nbytes: int, _flags: int, /) -> int:
        if not self._queue:
            raise BlockingIOError(errno.EAGAIN, "nothing there")
        item = self._queue.pop(0)
        if isinstance(item, OSError):
            raise item
        buffer[: min(len(item), nbytes)] = item[:nbytes]
        return len(item)

    def getsockopt(self, _level: int, _option: int, /) -> int:
        return self._receive_buffer

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        self.options[level, option] = value

    def close(self) -> None:
        self.closed = True


def refusing(number: int) -> Callable[[int], FakeSocket]:
    """Opens sockets of a kernel that refuses each message with this error number."""
    return lambda _protocol: FakeSocket(lambda data: [error(sequence, number) for sequence in sequences(data)])


def message(sequence: int, payload: bytes = b"", *, kind: int = 100, flags: int = 0) -> bytes:
    """A whole message."""
    return HEADER.pack(HEADER.size + len(payload), kind, flags, sequence, 0) + payload


def messages(data: bytes) -> list[bytes]:
    """The messages of a datagram, each with its padding."""
    found = []
    while len(data) >= HEADER.size:
        length = max(HEADER.size, (HEADER.unpack_from(data)[0] + 3) & ~3)
        found.append(data[:length])
        data = data[length:]
    return found


def split(data: bytes) -> list[tuple[int, int, int, int, bytes]]:
    """Length, type, flags, sequence number and payload of each message in a datagram."""
    headers = [(HEADER.unpack_from(whole), whole) for whole in messages(data)]
    return [(length, kind, flags, sequence, whole[HEADER.size : length]) for (length, kind, flags, sequence, _), whole in headers]


def error(sequence: int, number: int = 0) -> bytes:
    """The answer to a message: a failure with this error number, or an acknowledgement if the number is 0."""
    return message(sequence, struct.pack("=i", -number) + bytes(16), kind=ERROR)


def done(sequence: int, number: int = 0, flags: int = 0) -> bytes:
    """The message that ends a dump."""
    return message(sequence, struct.pack("=i", -number), kind=DONE, flags=flags)


def sequences(data: bytes) -> list[int]:
    """The sequence numbers of sent messages."""
    return [sequence for _, _, _, sequence, _ in split(data)]


def attribute(kind: int, payload: bytes) -> bytes:
    """An attribute with its padding."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)
