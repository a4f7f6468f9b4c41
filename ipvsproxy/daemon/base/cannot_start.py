"""The error that ends the start of a process, and messages for the operator on standard error."""

import sys


class CannotStartError(Exception):
    """The process cannot start, because its requirements are not met. ``reasons`` has one sentence for each unmet requirement."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))


def complain(*sentences: object) -> None:
    """Writes each sentence to standard error, prefixed with the name of the program."""
    for sentence in sentences:
        sys.stderr.write(f"ipvsproxy: {sentence}\n")
