"""Splits the bytes of a watch into lines, and drops its repeated or outdated changes."""

from ipvsproxy.model.service import ObjectKey

LONGEST_LINE_BYTES = 64 << 20
MOST_DIGITS = 20
"""The longest resource version, which is an unsigned 64-bit number."""


class LineTooLongError(Exception):
    """A line of a watch exceeds the bound, which the message names."""


class LineBuffer:
    """Makes whole lines of chunks.

    The pieces of a line are joined once: adding each chunk to one buffer takes quadratic time for a line of many megabytes.
    """

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self._pieces: list[bytes] = []
        self._longest_bytes = longest_bytes
        self.pending_bytes = 0
        """The number of received bytes of an incomplete line."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that a chunk completes, without their ends and without empty lines.

        Raises:
            LineTooLongError: a line is too long. The buffer cannot be used any more.
        """
        head, *tail = chunk.split(b"\n")
        self._pieces.append(head)
        self.pending_bytes += len(head)
        if self.pending_bytes > self._longest_bytes:
            raise LineTooLongError(f"a line of the watch is longer than {self._longest_bytes} bytes")
        if not tail:
            return []
        lines = [b"".join(self._pieces), *tail]
        rest = lines.pop()
        self._pieces, self.pending_bytes = [rest], len(rest)
        return [line for line in lines if line]


class Freshness:
    """Distinguishes new changes of objects from repeated and outdated ones.

    A server that has just taken over may send changes again or late. Resource versions of built-in kinds are growing integers
    (KEP-5504); a change with another version always counts as new. Only changes since the last bookmark are remembered,
    because the server has sent all changes up to a bookmark before it.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._newest: dict[ObjectKey, int] = {}

    def has_all_up_to(self, version: str) -> None:
        """Take note that all changes up to this version have arrived, with a list or before a bookmark."""
        self._floor = number(version)
        self._newest.clear()

    def is_new(self, key: ObjectKey, version: str) -> bool:
        """Whether a change is newer than all earlier ones of its object. A new change is remembered."""
        new = number(version)
        if not new:
            return True
        if new <= self._floor or new <= self._newest.get(key, 0):
            return False
        self._newest[key] = new
        return True


def number(version: str) -> int:
    """A resource version for comparisons (KEP-5504); 0 if it is no integer, and so cannot be compared."""
    return int(version) if version.isdecimal() and len(version) <= MOST_DIGITS else 0
