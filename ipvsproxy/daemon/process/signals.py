"""Signals of the process: SIGTERM and SIGINT end it, SIGHUP reloads its configuration."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable

STOP_WITHIN_S = 1.7
"""The longest time from the signal to the end. The end does not wait longer for a kernel or a program that hangs."""


class Signals:
    """Signals of this process from ``install`` until ``close``. ``end`` ends the process at once."""

    def __init__(self, end: Callable[[int], object] = os._exit) -> None:
        self.stopping = asyncio.Event()
        self._end = end
        self._deadline: threading.Timer | None = None

    def install(self, on_hangup: Callable[[], object]) -> None:
        """Handle signals in the running loop. Another call replaces ``on_hangup``, which SIGHUP calls."""
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
        """Cancel the forced end, because the process has stopped in time."""
        if self._deadline is not None:
            self._deadline.cancel()
