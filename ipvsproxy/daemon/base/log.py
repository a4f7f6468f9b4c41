"""Writes the log to standard error; each log line consists of one event and the event's keys."""

import contextlib
import io
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO, cast

import structlog

from ipvsproxy.daemon.base.timing import RateLimits

CHANGES_VERBOSITY = 2
"""From this verbosity (``-v``) on, the log reports opened and closed health-check ports, removed addresses, and changed rules."""
DEBUG_VERBOSITY = 4
"""From this verbosity (``-v``) on, the log reports each received event, each translated Service and each operation, as klog
does."""
REPEAT_S = 300.0
"""After a library has logged a text, the same text is not logged again for this time; some libraries log the same text with every
request."""
MOST_TEXTS = 100
"""The largest number of remembered library texts, each with its last log time (see ``REPEAT_S``)."""
MOST_WAITING = 1 << 20
"""The largest number of characters (about 5,000 lines) that wait for a slow reader of the log."""
FULL_PAUSE_S = 0.02
STANDARD_ERROR = 2
LAST_LINES_S = 0.5
"""The longest time in seconds for which an ending process waits for a slow reader of the log."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
"""The logger of the daemon and of the commands."""


class _Writer:
    """A thread that writes log lines, so that no caller waits for the log's reader or for a disk.

    A line is dropped if ``MOST_WAITING`` characters are already waiting, or if writing it fails. As soon as lines can be written
    again, a log line says how many lines were dropped. The file stays in blocking mode, because the mode is shared by all
    processes that have the file open.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: list[str] = []
        self._waiting = 0
        self._dropped = 0
        self._ends = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Queue a line for writing. A line that the writing thread itself logs is never dropped."""
        with self._changed:
            if self._waiting + len(line) > MOST_WAITING and threading.current_thread() is not self._thread:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting += len(line)
            self._changed.notify_all()

    def end(self, within_s: float) -> None:
        """Write all waiting lines, but give up after ``within_s`` seconds."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(within_s)

    def _run(self) -> None:
        before = ""
        while lines := self._take():
            try:
                self._write((before + "".join(lines)).encode(errors="backslashreplace"))
            except OSError:
                before = "\n"  # a part of the line may have been written
                with self._changed:
                    self._dropped += len(lines)
            else:
                before = ""
                with self._changed:
                    dropped, self._dropped = self._dropped, 0
                if dropped:
                    hint = "its reader or its disk did not take them"
                    log.log(logging.WARNING, "log_lines_dropped", lines=dropped, hint=hint)

    def _take(self) -> list[str]:
        """Wait for lines, and return all waiting lines; an empty list means that the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._ends)
            lines, self._lines, self._waiting = self._lines, [], 0
            return lines

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # another process has switched the file to non-blocking mode
                time.sleep(FULL_PAUSE_S)


class _Output(io.TextIOBase):
    """Writes to standard error; if the thread for log lines is running, the thread writes.

    A failed write is ignored: a proxy must keep running even if nothing reads its log.
    """

    def write(self, text: str) -> int:
        if _Process.writer:
            _Process.writer.put(text)
            return len(text)
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return len(text)


class Libraries(logging.Handler):
    """Turns records of Python's ``logging`` into lines of ipvsproxy's log.

    Without this class, Python would write the records of libraries to standard error as bare text.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts = RateLimits[str](1, REPEAT_S, MOST_TEXTS)

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, unless a record with the same text was logged a short while ago."""
        text = record.getMessage()
        if not self._texts.take(text, time.monotonic()):
            return
        level = logging.ERROR if record.levelno >= logging.ERROR else logging.WARNING
        log.log(level, "library_message", library=record.name, message=text, exc_info=record.exc_info)


_libraries = Libraries()


class _Process:
    """The verbosity of the process, and the thread that writes its log."""

    verbosity = 0
    writer: _Writer | None = None


def verbosity() -> int:
    """The current verbosity (``-v``)."""
    return _Process.verbosity


def shows(level: int) -> bool:
    """Whether the log shows lines of a given verbosity.

    Callers check the verbosity before they build an expensive log line.
    """
    return _Process.verbosity >= level


def set_up(*, json: bool, verbosity: int, quiet: bool = False) -> None:
    """Configure structlog for the process; with ``quiet``, only warnings and more severe lines are logged.

    Text lines use the logfmt format: values are quoted and escaped, so a value cannot be mistaken for another line.
    """
    _Process.verbosity = verbosity
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
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Output())),
        # Loggers are not cached, because a cached logger would keep its old configuration after another call of this function.
        cache_logger_on_first_use=False,
    )
    logging.getLogger().addHandler(_libraries)


@contextlib.contextmanager
def written_by_a_thread(descriptor: int = STANDARD_ERROR) -> Iterator[None]:
    """Inside the ``with`` block, callers do not wait for the log's reader.

    At the end of the ``with`` block, the process waits at most ``LAST_LINES_S`` until the remaining lines are written.
    """
    writer = _Process.writer = _Writer(descriptor)
    try:
        yield
    finally:
        _Process.writer = None
        writer.end(LAST_LINES_S)


def _plain_values(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Turn lists into comma-separated text, because a renderer would print the lists in Python's notation."""
    for key, value in event.items():
        if isinstance(value, list | tuple | set | frozenset):
            event[key] = ",".join(map(str, value))
    return event


def _printable_text(_logger: object, _name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters, because terminals and line-based readers interpret carriage returns and escape sequences."""
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[key] = printable(value)
    return event


def printable(text: str) -> str:
    """The given text with all control characters escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
