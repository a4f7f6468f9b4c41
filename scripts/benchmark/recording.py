"""Records the netlink messages of a run in a file, which ``replay`` reads.

At most 1 MiB of messages is kept in memory, because more would increase the measured memory, page faults and time of the program.
"""

import pathlib
import pickle
import struct
from collections.abc import Sequence
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink

_HEADER = struct.Struct("=IHHII")
_TRANSACTION_BEGINS = 16  # NFNL_MSG_BATCH_BEGIN
_PLAIN_BEGIN_SIZE = 20  # bytes of this message without attributes: the netlink header and struct nfgenmsg
_BUFFER_BYTES = 1 << 20
"""The size of the file's buffer, in bytes. Without a buffer, each write would be a system call, and would take a twentieth of the
time of a single change on the test kernel."""


class Recorded(NamedTuple):
    """The runs of iptables-restore, and the chunks of netlink messages that were sent to the kernel.

    Each chunk has its netlink protocol and its step.

    A step names a part of the measurement, optionally with a number, such as ``change 7``. Between parts, the step is empty. Each
    element of ``rules`` is one run of iptables-restore: its command line, followed by its standard input.
    """

    chunks: Sequence[tuple[int, bytes, str]]
    rules: Sequence[tuple[str, ...]]


class Recording:
    """Writes chunks to one file, and the positions of the chunks to another file.

    ``add`` records the current value of ``step`` with each chunk (see ``Recorded``).
    """

    def __init__(self, file: pathlib.Path) -> None:
        self._index = file.with_suffix(".index")
        self._file = file.open("wb", buffering=_BUFFER_BYTES)
        self._chunks: list[tuple[int, int, str]] = []
        self.step = ""
        self.rules: list[tuple[str, ...]] = []

    def add(self, protocol: int, messages: Sequence[bytes]) -> None:
        """Add a chunk. The last message of the chunk gets the flag that requests an acknowledgement.

        The generation number is removed from an nf_tables transaction, because the generation is different at the replay.
        """
        first, *others = messages
        if protocol == NETLINK_NETFILTER and _HEADER.unpack_from(first)[1] == _TRANSACTION_BEGINS:
            first = _HEADER.pack(_PLAIN_BEGIN_SIZE, *_HEADER.unpack_from(first)[1:]) + first[_HEADER.size : _PLAIN_BEGIN_SIZE]
        final = bytearray(others.pop() if others else first)
        final[6] |= netlink.ACKNOWLEDGE
        sent: list[bytes | bytearray] = [*([first] if len(messages) > 1 else []), *others, final]
        self._file.writelines(sent)
        self._chunks.append((protocol, sum(map(len, sent)), self.step))

    def close(self) -> None:
        """Finish both files."""
        self._file.close()
        self._index.write_bytes(pickle.dumps((self._chunks, self.rules)))


def read(file: pathlib.Path) -> Recorded:
    """Read a whole recording."""
    lengths, rules = pickle.loads(file.with_suffix(".index").read_bytes())  # noqa: S301 - this program itself wrote the pickle
    data, chunks, position = file.read_bytes(), [], 0
    for protocol, length, step in lengths:
        chunks.append((protocol, data[position : position + length], step))
        position += length
    return Recorded(chunks, rules)
