"""A netlink socket for dumps and for large numbers of requests.

Rule 1: the kernel handles every message of a ``send`` before ``send`` returns, and produces the next part of a dump at each
``recv``. Because the kernel works only during ``send`` and ``recv``, each answer either is available at once or is lost.

Rule 2: the kernel answers a failed message with the sequence number of the message, even if the message does not request an
acknowledgement. After a failed message, the kernel continues with the next message. Only the last message of a chunk requests an
acknowledgement, because this acknowledgement proves that the kernel has handled all messages of the chunk.

Rule 3: a socket that has lost an answer is closed, because a late answer could be mistaken for the answer to another request.

This module uses Python's sockets, because each socket of pyroute2 starts an event loop, and fails after an overrun.
"""

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from pyroute2.netlink import ctrlmsg

from ipvsproxy.kernel.base import message
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.plan import Operation, Outcome

BUFFER_SIZE = 4 << 20
"""The requested size in bytes of a socket's send and receive buffers."""
CHUNK_LIMIT = 900
"""The largest number of messages in one ``send``. Larger chunks gain nothing, and hold the kernel's locks longer.

A chunk of this many messages about IPv6 real servers is smaller than 128 KiB. For a larger chunk, malloc maps fresh pages each
time.
"""
RECEIVE_SIZE = 65536
"""The size in bytes of the buffer for one read.

After one read with a buffer of 32 KiB or more, the kernel sends datagrams of up to 32 KiB. A smaller buffer would then truncate
datagrams.
"""
DUMP_PAUSES_S: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""The pauses before the attempts at a dump, in seconds: one pause for each attempt. An attempt is repeated if the kernel's data
changed during the attempt, or if an answer was lost.

The kernel continues to change the data of IPv6 addresses after they were added. With ten thousand addresses, this takes half a
second. If all attempts at a dump have lost an answer, later dumps get only one attempt each, until an attempt loses no answer.
Without this rule, the attempts to dump 34 sets would wait for almost half a minute in total.
"""
UNANSWERED = -1
"""The value in place of an error number if the kernel's answer was lost. It is then unknown whether the change is in force."""

REQUEST = 0x1
ACKNOWLEDGE = 0x4
DUMP = 0x300
CREATE = 0x400
EXCLUSIVE = 0x200

_DUMP_INTERRUPTED = 0x10
_ERROR = 2
_DONE = 3
_SO_SNDBUFFORCE = 32  # from include/uapi/asm-generic/socket.h, because Python's socket module lacks this and the next constant
_SO_RCVBUFFORCE = 33
_SOL_NETLINK = 270
_CAP_ACK = 10
_REPLY_COST = 1024  # bytes of receive buffer for one error reply: 768 bytes and a reserve
_INTEGER = struct.Struct("=i")
_SEQUENCE = struct.Struct("=I")
_SEQUENCE_END = 1 << 32

_GENERIC_CONTROL = 16
_GET_FAMILY = 3
_FAMILY_ID = 1

T = TypeVar("T")


class Socket(Protocol):
    """The part of a socket's interface that this module uses."""

    def send(self, data: bytes, /) -> int:
        """Send messages to the kernel."""

    def recv_into(self, buffer: bytearray, nbytes: int, flags: int, /) -> int:
        """Receive one datagram that contains answers.

        With ``MSG_TRUNC``, the result is the full length of the datagram, even if the received data is truncated.
        """

    def getsockopt(self, level: int, option: int, /) -> int:
        """Read a socket option."""

    def close(self) -> None:
        """Close the socket."""


class Reply(NamedTuple):
    """One message of a dump. The payload, which follows the netlink header, is in ``data`` from ``start`` to ``end``."""

    data: bytes
    start: int
    end: int


def open_socket(protocol: int) -> socket.socket:
    """A netlink socket in the network namespace of the calling thread, with the largest buffers that this process may set."""
    opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    opened.setblocking(False)
    for forced, usual in ((_SO_SNDBUFFORCE, socket.SO_SNDBUF), (_SO_RCVBUFFORCE, socket.SO_RCVBUF)):
        try:
            opened.setsockopt(socket.SOL_SOCKET, forced, BUFFER_SIZE)
        except PermissionError:
            opened.setsockopt(socket.SOL_SOCKET, usual, BUFFER_SIZE)
    opened.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
    opened.bind((0, 0))
    return opened


def noting(ports: set[int], connect: Callable[[int], socket.socket]) -> Callable[[int], socket.socket]:
    """A function that opens sockets like ``connect``, and records their port IDs, which identify ipvsproxy's own changes."""

    def connect_and_note(protocol: int) -> socket.socket:
        opened = connect(protocol)
        ports.add(opened.getsockname()[0])
        return opened

    return connect_and_note


class Channel:
    """Requests and dumps over one netlink protocol. Only the thread that creates this object may use it.

    ``connect`` opens a socket for the protocol; after a socket has been closed because of rule 3, ``connect`` is called again.
    """

    def __init__(
        self,
        protocol: int,
        connect: Callable[[int], Socket] = open_socket,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._protocol = protocol
        self._connect = connect
        self._sleep = sleep
        self._socket: Socket | None = None
        self._buffer = bytearray(RECEIVE_SIZE)
        self._next = 1
        self._limit = CHUNK_LIMIT
        self._loses_answers = False  # whether an answer was lost in every attempt to read the most recent dump

    def close(self) -> None:
        """Close the socket; the next use of the channel opens a new socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def limit(self) -> int:
        """The largest number of messages for one call of ``run``.

        With this number, all answers fit into the receive buffer even if every message fails.
        """
        with contextlib.suppress(KernelError):  # if the socket cannot be opened, the request that follows fails too
            self._open()
        return self._limit

    def run(self, messages: Sequence[bytes], refusal: int | None = None) -> dict[int, int]:
        """Give messages new sequence numbers, and have the kernel handle the messages.

        If the first message fails with the error number ``refusal``, the kernel neither handles nor answers the remaining
        messages.

        Returns the error number of each failed message by the index of the message. The indices may be in any order. The error
        number ``UNANSWERED`` means that the answer was lost. Every message without an entry in the result has been applied.
        """
        failed: dict[int, int] = {}
        numbered, first = self._numbered(*messages)
        size, kind, flags, *rest = message.HEADER.unpack_from(numbered[-1])
        message.HEADER.pack_into(numbered[-1], 0, size, kind, flags | ACKNOWLEDGE, *rest)
        try:
            self._open().send(b"".join(numbered))
            complete = self._acknowledged(first, first + len(messages) - 1, failed, refusal)
        except (OSError, KernelError):
            complete = False
        if not complete:
            self.close()
            for index in range(len(messages)):
                failed.setdefault(index, UNANSWERED)
        return failed

    def run_all(self, messages: Sequence[bytes], at_once: int = CHUNK_LIMIT) -> dict[int, int]:
        """Sends any number of messages in the same way as ``run``, with at most ``at_once`` messages in one ``send``."""
        step = min(at_once, self.limit) if messages else 1
        runs = ((first, self.run(messages[first : first + step])) for first in range(0, len(messages), step))
        return {first + index: number for first, failed in runs for index, number in failed.items()}

    def do(self, request: bytes) -> int:
        """Have the kernel handle one message.

        Returns 0 if the message succeeded; otherwise returns the error number, or ``UNANSWERED`` if the answer was lost.
        """
        return self.run([request]).get(0, 0)

    def ask(self, request: bytes, action: str) -> Reply:
        """Send a request, and return the single message with which the kernel answers.

        ``action`` describes the request in error messages.

        Raises:
            KernelError: the kernel refused the request, or the answer was lost.
        """
        (numbered,), expected = self._numbered(request)
        try:
            self._open().send(bytes(numbered))
            data = self._receive()
            messages = list(message.messages(data))
        except OSError as error:
            self.close()
            raise KernelError(action=action, errno=error.errno or 0) from error
        for kind, _, sequence, _, start, end in messages:
            if sequence == expected:
                if kind == _ERROR:
                    with parsing(action):
                        raise KernelError(action=action, errno=-_INTEGER.unpack_from(data[:end], start)[0])
                return Reply(data, start, end)
        self.close()
        raise KernelError(action=action, detail="the answer is incomplete")

    def dump(self, request: bytes, action: str) -> list[Reply]:
        """All messages of a dump; the dump is read to its end before any message is returned.

        ``action`` describes the request in error messages.

        Raises:
            KernelError: the kernel refused the request, or no attempt returned a complete and consistent dump.
        """
        return self.gather(request, action, lambda replies: replies)

    def gather(self, request: bytes, action: str, read: Callable[[list[Reply]], Iterable[T]]) -> list[T]:
        """Reads a dump in the same way as ``dump``, but calls ``read`` on each part of the dump and returns the results."""
        number, detail = 0, ""
        lost = 0
        pauses_s = DUMP_PAUSES_S[:1] if self._loses_answers else DUMP_PAUSES_S
        for pause_s in pauses_s:
            if pause_s:
                self._sleep(pause_s)
            results: list[T] = []
            is_disturbed = False
            try:
                for part, is_interrupted in self._received(request, action):
                    results += read(part)
                    is_disturbed |= is_interrupted
            except OSError as error:
                self.close()
                number, detail = error.errno or 0, f"the dump broke off: {os.strerror(error.errno or 0)}"
                lost += 1
                continue
            except KernelError:  # the kernel has refused the request, so its answers do arrive
                self._loses_answers = False
                raise
            self._loses_answers = False
            if not is_disturbed:
                return results
            number, detail = errno.EINTR, "the data changed during each attempt"
        self._loses_answers = lost == len(pauses_s)
        raise KernelError(action=action, errno=number, detail=detail)

    def dumping(self, request: bytes, action: str) -> Iterator[list[Reply]]:
        """Requests a dump once, and yields each part of the dump as soon as the part arrives.

        The data that the kernel dumps may change during the dump.

        ``request`` and ``action`` have the same meaning as in ``dump``. This channel must not be used for anything else before
        the end of the dump.

        Raises:
            KernelError: the kernel refused the request, or a part of the dump was lost.
        """
        try:
            for replies, _ in self._received(request, action):
                yield replies
        except OSError as error:
            self.close()
            raise KernelError(action=action, errno=error.errno or 0) from error

    def _open(self) -> Socket:
        if self._socket is None:
            try:
                self._socket = self._connect(self._protocol)
            except OSError as error:
                raise KernelError(action=f"open a netlink socket (protocol {self._protocol})", errno=error.errno or 0) from error
            room = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            self._limit = max(1, min(CHUNK_LIMIT, room // _REPLY_COST))
        return self._socket

    def _numbered(self, *messages: bytes) -> tuple[list[bytearray], int]:
        """The messages with new consecutive sequence numbers, and the first of these numbers."""
        if self._next + len(messages) > _SEQUENCE_END:
            self._next = 1
        first, numbered = self._next, list(map(bytearray, messages))
        self._next += len(messages)
        for number, one in enumerate(numbered, first):
            _SEQUENCE.pack_into(one, message.SEQUENCE_OFFSET, number)
        return numbered, first

    def _receive(self) -> bytes:
        """Receive one datagram.

        Raises:
            OSError: no datagram has arrived, a datagram was lost, or the received datagram is truncated.
        """
        size = self._open().recv_into(self._buffer, RECEIVE_SIZE, socket.MSG_TRUNC)
        if size > RECEIVE_SIZE:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        return bytes(memoryview(self._buffer)[:size])

    def _acknowledged(self, first: int, last: int, failed: dict[int, int], refusal: int | None) -> bool:
        """Receive all answers, and collect the error numbers in ``failed``; the result is true if no answer was lost."""
        complete = True
        while True:
            try:
                data = self._receive()
            except OSError as error:
                # The kernel lost the last answers; the answers that are still in the queue are valid. Until the queue has been
                # emptied, the kernel reports an overrun only once (netlink_overrun in net/netlink/af_netlink.c), so a second
                # report means that the socket is broken.
                if error.errno != errno.ENOBUFS or not complete:
                    return False
                complete = False
                continue
            for kind, _, sequence, _, start, end in message.messages(data):
                if kind != _ERROR or not first <= sequence <= last or end - start < _INTEGER.size:
                    continue
                number = -_INTEGER.unpack_from(data, start)[0]
                if number:
                    failed[sequence - first] = number
                if number and number == refusal and sequence == first:
                    failed.update(dict.fromkeys(range(1, last - first + 1), number))
                    return complete
                if sequence == last:
                    return complete

    def _received(self, request: bytes, action: str) -> Iterator[tuple[list[Reply], bool]]:
        """The messages of each datagram of a dump, and whether the datagram reports that the kernel's data have changed."""
        (numbered,), expected = self._numbered(request)
        self._open().send(bytes(numbered))
        is_over = False
        while not is_over:
            data = self._receive()
            replies: list[Reply] = []
            interrupted = False
            for kind, flags, sequence, _, start, end in message.messages(data):
                if sequence != expected:
                    continue
                interrupted = interrupted or bool(flags & _DUMP_INTERRUPTED)
                if kind in (_ERROR, _DONE):
                    number = -_INTEGER.unpack_from(data, start)[0] if end - start >= _INTEGER.size else 0
                    if number > 0:
                        raise KernelError(action=action, errno=number)
                    is_over = True
                    break
                replies.append(Reply(data, start, end))
            yield replies, interrupted


def digest(replies: Iterable[Reply], skip: int = 0, beside: object = "") -> bytes:
    """A hash of ``beside`` and of the payloads of a dump; the first ``skip`` bytes of each payload are left out."""
    hashed = hashlib.blake2b(repr(beside).encode(), digest_size=16)
    for data, start, end in replies:
        hashed.update(memoryview(data)[start + skip : end])
    return hashed.digest()


@contextlib.contextmanager
def parsing(action: str) -> Iterator[None]:
    """A context manager for parsing an answer that may be too short or may lack an attribute.

    Raises:
        KernelError: the answer is too short, or the answer lacks an attribute.
    """
    try:
        yield
    except (LookupError, ValueError, struct.error) as error:
        raise KernelError(action=action, detail="the kernel's answer cannot be parsed") from error


def explain(number: int) -> str:
    """What the error number of a failed message means."""
    if number == UNANSWERED:
        return "the kernel's answer was lost, so this may or may not be in force"
    return os.strerror(number)


def outcome(operation: Operation, number: int, expected: Collection[int] = (), reason: str = "") -> Outcome:
    """The outcome of an operation; ``number`` is 0 for success, an error number, or ``UNANSWERED``.

    An error number in ``expected`` is no failure: the object already existed, or was already absent. ``reason`` explains any
    other error number.
    """
    if number == 0 or number in expected:
        return Outcome(operation, surprise=number != 0)
    return Outcome(operation, f"{operation}: {reason or explain(number)}", max(number, 0))


def resolve_family(channel: Channel, name: str, module: str) -> int:
    """The ``nlmsg_type`` of a generic netlink family.

    Since Linux 5.16, a request for the family of IPVS makes the kernel load the module of IPVS.

    Raises:
        KernelError: the kernel does not have the generic netlink family.
    """
    request = ctrlmsg()
    request["cmd"] = _GET_FAMILY
    request["version"] = 1
    request["attrs"] = [["CTRL_ATTR_FAMILY_NAME", name]]
    try:
        data, start, end = channel.ask(message.encode(request, _GENERIC_CONTROL, REQUEST), f"find {name}")
    except KernelError as error:
        if error.errno == errno.ENOENT:
            detail = f"this kernel has no {name}: the module {module} is missing or cannot be loaded"
            raise KernelError(action=error.action, errno=error.errno, detail=detail) from error
        raise
    with parsing(f"find {name}"):
        first, last = message.attributes(data, start + 4, end)[_FAMILY_ID]
        return struct.unpack_from("=H", data[:last], first)[0]  # type: ignore[no-any-return] # values from struct are untyped
