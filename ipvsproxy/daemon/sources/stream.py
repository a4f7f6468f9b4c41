"""The bytes of a watch, to lines, and its changes, to those that are news."""

from ipvsproxy.model.service import ObjectKey

LONGEST_LINE_BYTES = 64 << 20
MOST_DIGITS = 20
"""Of a resource version: it is an unsigned 64-bit number."""


class LineTooLongError(Exception):
    """A line of a watch exceeds the bound; the message says which."""


class LineBuffer:
    """Bytes as they arrive, to whole lines.

    Pieces are joined once per line: adding each chunk to one buffer is quadratic for a line of many megabytes.
    """

    def __init__(self, longest_bytes: int = LONGEST_LINE_BYTES) -> None:
        self._pieces: list[bytes] = []
        self._longest_bytes = longest_bytes
        self.pending_bytes = 0
        """How much has come of a line that has no end yet."""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, without their ends and without empty ones.

        Raises:
            LineTooLongError: the buffer cannot be used any more.
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
    """Tells changes that are news from those that were told already, or that are older than what was told.

    A server that has just taken over may repeat changes or bring them late. Resource versions of built-in kinds are integers
    that grow (KEP-5504); where one is not an integer, every change counts as news. Only changes since the last bookmark have
    to be remembered, because a bookmark says that all up to it have been sent.
    """

    def __init__(self) -> None:
        self._floor = 0
        self._told: dict[ObjectKey, int] = {}

    def all_told(self, version: str) -> None:
        """All changes up to this version have been told, by a list or before a bookmark."""
        self._floor = number(version)
        self._told.clear()

    def is_news(self, key: ObjectKey, version: str) -> bool:
        """Whether this change is newer than all that was told of the object; if so, it counts as told from now on."""
        found = number(version)
        if not found:
            return True
        if found <= self._floor or found <= self._told.get(key, 0):
            return False
        self._told[key] = found
        return True


def number(version: str) -> int:
    """A resource version to compare with others (KEP-5504); 0 where it is not an integer, and so tells nothing."""
    return int(version) if version.isdecimal() and len(version) <= MOST_DIGITS else 0
