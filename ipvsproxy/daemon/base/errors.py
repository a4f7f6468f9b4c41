"""The error of a start that cannot succeed."""


class CannotStartError(Exception):
    """Requirements of the start are missing. ``reasons`` has a sentence for each."""

    def __init__(self, *reasons: object) -> None:
        self.reasons = tuple(map(str, reasons))
        super().__init__("; ".join(self.reasons))
