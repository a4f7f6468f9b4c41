"""Reads a program's log through a pipe, as a container runtime does. The reader copies the log into a file and can pause."""

import contextlib
import os
import threading
from pathlib import Path

_CHUNK_BYTES = 1 << 16


class LogReader:
    """``descriptor`` is the write end of the pipe; the program writes its log to this descriptor.

    Reading ends when the last writing process has ended.
    """

    def __init__(self, log: Path) -> None:
        reading, self.descriptor = os.pipe()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._has_stalled = threading.Event()
        self._thread = threading.Thread(target=self._copy, args=(reading, log), daemon=True, name="log reader")
        self._thread.start()

    def stall(self, process_id: int) -> None:
        """Stop reading, and fill the log pipe of the process ``process_id`` until the pipe accepts no more bytes."""
        self._goes_on.clear()
        # The same pipe is opened again, because the descriptor of the program must not become non-blocking.
        pipe = os.open(f"/proc/{process_id}/fd/1", os.O_WRONLY | os.O_NONBLOCK)
        _fill(pipe)
        self._has_stalled.wait()  # before the thread stalls, it reads the pipe once more
        _fill(pipe)
        os.close(pipe)

    def finish(self) -> None:
        """Read the remaining output of a process that has ended."""
        self._goes_on.set()
        self._thread.join()

    def _copy(self, reading: int, log: Path) -> None:
        with log.open("ab", buffering=0) as file, open(reading, "rb", buffering=0) as pipe:
            while data := pipe.read(_CHUNK_BYTES):
                if not self._goes_on.is_set():
                    self._has_stalled.set()
                    self._goes_on.wait()
                file.write(data)


def _fill(pipe: int) -> None:
    for size in (_CHUNK_BYTES, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"\n" * size)
