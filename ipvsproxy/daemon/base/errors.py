"""The error of a start that cannot succeed, and sentences for the operator on standard error."""

import sys


class CannotStartError(Exception):
    """Requirements of the start are missing. ``reasons`` has a sentence for each."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))


def complain(*sentences: object) -> None:
    """Writes each sentence to standard error, under the name of the program."""
    for sentence in sentences:
        sys.stderr.write(f"ipvsproxy: {sentence}\n")
