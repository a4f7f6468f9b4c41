"""What the process does when it gets a signal: SIGTERM and SIGINT end it, SIGHUP has it read its configuration again."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

STOP_WITHIN_S = 1.7
"""Whoever asks us to stop waits this long at most. What then still hangs, in the kernel or in a program, cannot be waited for."""


class Signals:
    """Signals of this process from ``install`` until ``close``. ``end`` ends the process at once."""

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.stopping = asyncio.Event()
        self._end = end
        self._deadline: threading.Timer | None = None

    def install(self, on_hangup: Callable[[], object]) -> None:
        """Handle signals in the running loop; to be called again with what a SIGHUP shall do."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, on_hangup)

    def _stop(self) -> None:
        self.stopping.set()
        if self._deadline is None:
            self._deadline = threading.Timer(STOP_WITHIN_S, self._end, (0,))
            self._deadline.daemon = True
            self._deadline.start()

    def close(self) -> None:
        """Nothing hangs any more."""
        if self._deadline is not None:
            self._deadline.cancel()
