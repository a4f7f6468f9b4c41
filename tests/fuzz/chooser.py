"""Makes choices from bytes, so that a small mutation of the bytes causes a small change of the result."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

HOSTILE = (
    "",
    " ",
    "\n-A INPUT -j ACCEPT",
    '" -j ACCEPT --comment "',
    "' -j DROP",
    "\r\nCOMMIT\n",
    "x\x00y",
    "\x1b[2J",
    "\u202egnp.exe",
    "\u2028level=error",
    "\\",
    "$(reboot)",
    "`reboot`",
    "../../etc/passwd",
    "a b",
    "%s%n",
    "+",
    "!",
    "-j",
    "x" * 300,
    "é" * 15,
    "💥",
)
"""Texts that could break the syntax of the line or document into which they are inserted."""


class Chooser:
    """Makes each choice from the next bytes of ``data``. When all bytes are used up, each choice is the first alternative."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def take(self, count: int) -> bytes:
        """Takes this many bytes, or all remaining bytes if fewer than this number remain."""
        taken = self._data[self._position : self._position + count]
        self._position += count
        return taken

    def rest(self) -> bytes:
        """All remaining bytes."""
        return self.take(max(0, len(self._data) - self._position))

    def integer(self, low: int, high: int) -> int:
        """Chooses a number in this range, which includes its bounds."""
        size = max(1, ((high - low).bit_length() + 7) // 8)
        return low + int.from_bytes(self.take(size), "big") % (high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        """One of these."""
        return choices[self.integer(0, len(choices) - 1)]

    def chance(self, one_in: int) -> bool:
        """True in one of ``one_in`` cases, and False when all bytes are used up."""
        return self.integer(0, one_in - 1) == one_in - 1

    def text(self, usual: Sequence[str] = ()) -> str:
        """Chooses in most cases one of the usual texts, otherwise a hostile or arbitrary text."""
        if usual and not self.chance(4):
            return self.one(usual)
        if self.chance(2):
            return self.take(self.integer(0, 24)).decode(errors="replace")
        return self.one(HOSTILE)
