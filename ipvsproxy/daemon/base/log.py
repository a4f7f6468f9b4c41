"""Log lines: one event with its keys per line, on standard error."""

import contextlib
import io
import logging
import sys
import time
from typing import TextIO, cast

import structlog

CHANGES_VERBOSITY = 2
"""From this ``-v`` on, what opens, closes and goes is told: health-check ports, addresses, rules."""
DEBUG_VERBOSITY = 4
"""From this ``-v`` on, every step is told, as operators know it from klog: what was received, what it wants, what was done."""
REPEAT_S = 300.0
"""How long the same text of a library is not told again: some say it with every request."""
MOST_TEXTS = 100
"""Different ones that are remembered as told."""


class _Lossy(io.TextIOBase):
    """A stream; what cannot be written is lost: that nobody reads the log any more is no reason to serve no longer."""

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
    """What libraries log through Python's ``logging``, as lines of ours; left alone, it would be bare text on standard error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Tell a record."""
        text, now_s = record.getMessage(), time.monotonic()
        if now_s - self._told.get(text, -REPEAT_S) < REPEAT_S:
            return
        if len(self._told) >= MOST_TEXTS:
            self._told.clear()
        self._told[text] = now_s
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
        structlog.get_logger().log(level, "library_message", library=record.name, message=text, exc_info=record.exc_info)


_libraries = Libraries()


class _Level:
    """How much is told; one for the process."""

    verbosity = 0


def verbosity() -> int:
    """The ``-v`` in force."""
    return _Level.verbosity


def tells(level: int) -> bool:
    """Whether lines of this ``-v`` are told: worth asking where making the line costs more than asking."""
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
        # A cached logger would not notice that it is set up again.
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(_libraries)


def _plain_values(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Lists as comma-separated text: a renderer would print them as Python does."""
    for key, value in event.items():
        if isinstance(value, list | tuple | set | frozenset):
            event[key] = ",".join(map(str, value))
    return event


def _printable_text(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Carriage returns, escape sequences and the like as Python writes them: terminals and line readers act on them."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in value)
    return event
