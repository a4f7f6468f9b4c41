"""How a run on a test kernel ends without the status of its command."""

import signal
from typing import NoReturn

TIMED_OUT = 124
NO_KERNEL = 125

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that request to stop."""


class NoKernelError(Exception):
    """No kernel with ip_vs could be started, or it died; the message is one sentence for a person."""


class InterruptedRun(Exception):  # noqa: N818 - not an error: a request to stop
    """A signal requests to stop; carries its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a program that this signal ends, as shells report it."""
        return 128 + self.number


def raise_on_signals() -> None:
    """Turn the first request to stop into InterruptedRun; later ones do not interrupt the clean-up."""
    for number in STOPS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: object) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise InterruptedRun(number)
