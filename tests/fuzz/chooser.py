"""Choices out of bytes: what a fuzzer changes a little changes a little of what is made from it."""

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
"""Texts that break out of something somewhere."""


class Chooser:
    """Takes bytes from the front; when they are used up, every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether all bytes are used up."""
        return self._position >= len(self._data)

    def take(self, count: int) -> bytes:
        """So many bytes, or what is left."""
        taken = self._data[self._position : self._position + count]
        self._position += count
        return taken

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(max(0, len(self._data) - self._position))

    def integer(self, low: int, high: int) -> int:
        """A number between these, both included."""
        size = max(1, ((high - low).bit_length() + 7) // 8)
        return low + int.from_bytes(self.take(size), "big") % (high - low + 1)

    def one(self, choices: Sequence[T]) -> T:
        """One of these."""
        return choices[self.integer(0, len(choices) - 1)]

    def chance(self, one_in: int) -> bool:
        """True once in so many times; false when the bytes are used up."""
        return self.integer(0, one_in - 1) == one_in - 1

    def text(self, usual: Sequence[str] = ()) -> str:
        """One of the usual texts most of the time, else a hostile or any one."""
        if usual and not self.chance(4):
            return self.one(usual)
        if self.chance(2):
            return self.take(self.integer(0, 24)).decode(errors="replace")
        return self.one(HOSTILE)
