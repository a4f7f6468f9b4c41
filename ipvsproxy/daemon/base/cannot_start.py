"""The error for a start that cannot succeed, and messages for the operator on standard error."""

import sys


class CannotStartError(Exception):
    """Requirements for starting are not met. ``reasons`` has one sentence for each unmet requirement."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))


def complain(*sentences: object) -> None:
    """Writes each sentence to standard error, prefixed with the name of the program."""
    for sentence in sentences:
        sys.stderr.write(f"ipvsproxy: {sentence}\n")
