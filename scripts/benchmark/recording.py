"""The netlink messages of a run, in a file: what ``replay`` sends again.

They are written as they go. Kept in memory, they would be the program's in each figure of memory, page faults and time.
"""

import os
import pathlib
import pickle
from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.kernel import netlink


class Recorded(NamedTuple):
    """Chunks as they went to the kernel, each with its netlink protocol; and the rules, as command line and standard input."""

    chunks: Sequence[tuple[int, bytes]]
    rules: Sequence[tuple[str, ...]]


class Recording:
    """Writes what it is told to one file, and where the chunks are to another one."""

    def __init__(self, file: pathlib.Path) -> None:
        self._index = file.with_suffix(".index")
        self._file = file.open("wb", buffering=0)
        self._chunks: list[tuple[int, int]] = []
        self.rules: list[tuple[str, ...]] = []

    def add(self, protocol: int, messages: Sequence[bytes]) -> None:
        """One chunk, with the flag that has its last message acknowledged."""
        final = bytearray(messages[-1])
        final[6] |= netlink.ACKNOWLEDGE
        length = sum(map(len, messages))
        if os.writev(self._file.fileno(), [*messages[:-1], final]) != length:
            raise OSError(f"{self._file.name} could not be written as a whole")
        self._chunks.append((protocol, length))

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()
        self._index.write_bytes(pickle.dumps((self._chunks, self.rules)))


def read(file: pathlib.Path) -> Recorded:
    """All of a recording."""
    lengths, rules = pickle.loads(file.with_suffix(".index").read_bytes())  # noqa: S301 - we wrote it ourselves a moment ago
    data, chunks, position = file.read_bytes(), [], 0
    for protocol, length in lengths:
        chunks.append((protocol, data[position : position + length]))
        position += length
    return Recorded(chunks, rules)
