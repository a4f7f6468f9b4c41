"""The exceptions that are raised if a command on a test kernel ends without an exit status."""

import signal
from typing import NoReturn

TIMED_OUT = 124
NO_KERNEL = 125

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request this program to stop."""


class NoKernelError(Exception):
    """No kernel with ip_vs could be started, or the kernel crashed; the message is one sentence for a person."""


class InterruptedRun(Exception):  # noqa: N818 - this is a request to stop, not an error
    """A signal has requested this program to stop; this exception carries the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status that shells report for a program ended by this signal."""
        return 128 + self.number


def raise_on_signals() -> None:
    """Make the first stop signal raise InterruptedRun; later signals do not interrupt the clean-up."""
    for number in STOPS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise InterruptedRun(number)
