"""Log lines: one event with its keys per line, on standard error."""

import contextlib
import io
import logging
import sys
import time
from typing import TextIO, cast

import structlog

CHANGES_VERBOSITY = 2
"""From this ``-v`` on, the log has health-check ports that open or close, addresses that go, and rules that change."""
DEBUG_VERBOSITY = 4
"""From this ``-v`` on, the log has each received event, each translated Service and each operation, as klog does."""
REPEAT_S = 300.0
"""How long the same text of a library is not logged again: some libraries log one with every request."""
MOST_TEXTS = 100
"""How many texts are remembered."""


class _Lossy(io.TextIOBase):
    """A stream that drops text after a failed write: the proxy must go on without a reader of its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class Libraries(logging.Handler):
    """Makes lines of ours from records of Python's ``logging``, which libraries would write to standard error as bare text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logged_s: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, unless its text was logged a short while ago."""
        text, now_s = record.getMessage(), time.monotonic()
        if now_s - self._logged_s.get(text, -REPEAT_S) < REPEAT_S:
            return
        if len(self._logged_s) >= MOST_TEXTS:
            self._logged_s.clear()
        self._logged_s[text] = now_s
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
        structlog.get_logger().log(level, "library_message", library=record.name, message=text, exc_info=record.exc_info)


_libraries = Libraries()


class _Level:
    """The verbosity of the process."""

    verbosity = 0


def verbosity() -> int:
    """The ``-v`` in force."""
    return _Level.verbosity


def shows(level: int) -> bool:
    """Whether the log has lines of this ``-v``. A caller asks before it makes a line that is expensive."""
    return _Level.verbosity >= level


def set_up(*, json: bool, verbosity: int, quiet: bool = False) -> None:
    """Configure structlog for the process; ``quiet``: warnings and worse only.

    Text lines are logfmt: values are quoted and escaped, so none can forge a line.
    """
    _Level.verbosity = verbosity
    level = logging.DEBUG if verbosity >= DEBUG_VERBOSITY else logging.WARNING if quiet else logging.INFO
    logfmt = structlog.processors.LogfmtRenderer(key_order=("timestamp", "level", "event"), bool_as_flag=False)
    renderers: list[structlog.typing.Processor] = [structlog.processors.JSONRenderer()] if json else [_printable_text, logfmt]
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _plain_values,
        *renderers,
    ]
    structlog.configure(
        processors=shared,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=cast("TextIO", _Lossy(sys.stderr))),
        # A cached logger would keep the old configuration after another call.
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(_libraries)


def _plain_values(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Turn lists into comma-separated text: a renderer would print them in Python's notation."""
    for key, value in event.items():
        if isinstance(value, list | tuple | set | frozenset):
            event[key] = ",".join(map(str, value))
    return event


def _printable_text(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters: terminals and line readers act on carriage returns and escape sequences."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(
                character if character.isprintable() else character.encode("unicode_escape").decode() for character in value
            )
    return event
