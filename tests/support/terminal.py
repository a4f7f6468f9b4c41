"""A program on a pseudo-terminal, and the contents of its screen."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import pyte

from tests.support import patience

PATIENCE_S = patience.seconds(90.0)
_LOOK_S = 0.2
_KEYBOARD_PROTOCOL = b"\x1b[<u"
"""The sequence that ends the keyboard protocol of some terminals. pyte does not know the sequence, and would show its letter."""


class Terminal:
    """Runs a command on a terminal of this many columns and lines, while the block runs.

    The program is killed at the end of the block if it is still running.
    """

    def __init__(self, command: Sequence[str], columns: int, lines: int, environment: Mapping[str, str] | None = None) -> None:
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, theirs = pty.openpty()
        # The variables COLUMNS and LINES would take precedence over the size of the terminal.
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**inherited, "TERM": "xterm-256color", **(environment or {})},
        )
        self._theirs = theirs  # like a shell, this object keeps the descriptor open after the program has ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(PATIENCE_S)
        os.close(self._theirs)
        os.close(self._ours)

    @property
    def lines(self) -> list[str]:
        """The lines on the screen without trailing spaces."""
        return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """The lines on the screen as one text."""
        return "\n".join(self.lines)

    @property
    def settings(self) -> Sequence[object]:
        """The settings of the terminal, such as whether keys are shown."""
        return termios.tcgetattr(self._theirs)

    def type(self, keys: str) -> None:
        """Type these characters."""
        os.write(self._ours, keys.encode())

    def until(self, *texts: str) -> None:
        """Wait until all of these texts are on the screen.

        Raises:
            AssertionError: the texts are not on the screen after a long time, or the program has ended.
        """
        self._until(lambda: all(text in self.text for text in texts), f"{texts} cannot be seen")

    def until_gone(self, text: str) -> None:
        """Wait until this text has left the screen. Raises AssertionError in the same cases as ``until``."""
        self._until(lambda: text not in self.text, f"{text!r} can still be seen")

    def end(self) -> int:
        """Wait until the program has ended; return its exit status."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it still runs:\n{self.text}"
            self._receive()
        self._receive()
        return self.process.returncode

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{failure}:\n{self.text}"
            assert self._receive() or self.process.poll() is None, f"{failure}, the program has ended:\n{self.text}"

    def _receive(self) -> bool:
        """Process the output that arrives within a moment; False if no output arrives."""
        if not select.select([self._ours], [], [], _LOOK_S)[0]:
            return False
        data = os.read(self._ours, 1 << 16)
        self._stream.feed(data.replace(_KEYBOARD_PROTOCOL, b""))
        return bool(data)
