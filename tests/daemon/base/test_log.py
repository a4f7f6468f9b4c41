"""Covers the format of log lines on standard error, the verbosity of each line, and that logged values cannot forge lines."""

import errno
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from ipvsproxy.daemon.base import log

Read = Callable[[], list[str]]


def logger(**choices: Any) -> structlog.typing.FilteringBoundLogger:
    """Returns a new logger, because the loggers of modules keep the configuration of their first use."""
    log.set_up(**({"json": False, "verbosity": 0} | choices))
    made: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return made


def test_a_line_of_the_text_log_has_first_the_time_then_the_level_then_the_event_then_the_keys(read: Read) -> None:
    logger().info("synced", services=3, duration_s=0.25, done=True, families=["IPv4", "IPv6"], value='a "b" c=d')
    (line,) = read()
    assert re.fullmatch(
        r"timestamp=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z level=info event=synced "
        r"services=3 duration_s=0\.25 done=true families=IPv4,IPv6 value=\"a \\\"b\\\" c=d\"\n",
        line,
    )


def test_a_log_line_in_json_format_is_one_json_object(read: Read) -> None:
    logger(json=True).warning("not used", name="default/web", fields=("a", "b"), odd=frozenset({"x"}), text="a\nb")
    (line,) = read()
    document = json.loads(line)
    assert document.pop("timestamp")
    assert document == {
        "event": "not used",
        "level": "warning",
        "name": "default/web",
        "fields": "a,b",
        "odd": "x",
        "text": "a\nb",
    }


@pytest.mark.parametrize("text", ["\n", "\r", "\r\n", "\x1b[2K", "\x00", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"], ids=ascii)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_logged_value_cannot_forge_a_line(read: Read, text: str, as_json: bool) -> None:  # noqa: FBT001 - pytest passes the boolean by name
    forged = f"x{text}timestamp=1 level=info event=synced"
    logger(json=as_json).info(forged, value=forged, values=[forged], quoted=f'" {forged}')
    lines = read()
    assert len(lines) == 1
    assert lines[0].strip("\n").isprintable()


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "of a library"])
def test_an_exception_is_logged_in_the_line_of_its_event(read: Read, *, is_ours: bool) -> None:
    ours = logger()
    try:
        int("wrong")
    except ValueError:
        (ours if is_ours else logging.getLogger("some.library")).exception("failed")
    (line,) = read()
    assert "ValueError: invalid literal" in line


def test_a_library_message_is_logged_on_one_line_at_most_once_per_repeat_interval(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("ipvsproxy.daemon.base.log.time.monotonic", lambda: now_s)
    logger(json=True)
    library = logging.getLogger("some.library")
    for _ in range(3):
        library.error("exec: process returned %d.\nnot logged in", 3)
    library.warning("something else")
    library.info("too much")
    lines = [json.loads(line) for line in read()]
    for line in lines:
        assert line.pop("timestamp")
    expected = {"event": "library_message", "library": "some.library"}
    assert lines == [
        expected | {"level": "error", "message": "exec: process returned 3.\nnot logged in"},
        expected | {"level": "warning", "message": "something else"},
    ]
    now_s = log.REPEAT_S
    library.error("exec: process returned %d.\nnot logged in", 3)
    assert len(read()) == 1


# Tests of the thread that writes log lines.


@pytest.fixture(name="pipe")
def _pipe() -> Iterator[tuple[int, int]]:
    """The read end and the write end of a pipe.

    At the end of the test, the fixture restores the logging configuration of the process, and waits for the end of the writing
    thread.

    If the writing thread continued, it would write into the pipe of a later test that gets the same descriptor number.
    """
    before, (read_end, write_end) = structlog.get_config(), os.pipe()
    yield read_end, write_end
    structlog.configure(**before)
    os.close(read_end)
    for thread in threading.enumerate():
        if thread.name == "log":
            thread.join(300)
    os.close(write_end)


def test_a_stalled_log_reader_delays_no_task_because_lines_are_dropped_and_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe has room for 64 KiB, and the writing thread keeps ten more lines; without this thread, the test would hang."""
    read_end, write_end = pipe
    monkeypatch.setattr(log, "MOST_WAITING", 10_000)
    with log.written_by_a_thread(write_end):
        ours = logger()
        for number in range(1000):
            ours.info("line", number=number, text="x" * 1000)
        assert os.get_blocking(write_end), "the mode is that of all processes that share the file"
        read, numbers, dropped = b"", list[int](), 0
        while len(numbers) + dropped < 1000:
            read += os.read(read_end, 1 << 16)
            numbers = [int(number) for number in re.findall(rb" number=(\d+) .*\n", read)]
            dropped = sum(map(int, re.findall(rb"event=log_lines_dropped .*?lines=(\d+)", read)))
    assert len(numbers) + dropped == 1000
    assert numbers == sorted(set(numbers)), "in their order"
    assert numbers
    assert dropped


def test_a_process_ends_without_waiting_for_a_stalled_log_reader(pipe: tuple[int, int]) -> None:
    with log.written_by_a_thread(pipe[1]):
        ours = logger()
        for _ in range(100):
            ours.info("line", text="x" * 1000)
    assert len(os.read(pipe[0], 1 << 20)) > 1000


def test_no_log_line_is_lost_at_the_end_of_a_process_if_the_pipe_has_room(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "LAST_LINES_S", 30)
    with log.written_by_a_thread(pipe[1]):
        ours = logger()
        for number in range(10):
            ours.info("line", number=number)
    assert os.read(pipe[0], 1 << 20).count(b"event=line") == 10


def test_log_lines_that_cannot_be_written_to_a_full_disk_are_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails in the middle of a line truncates this line; the next log line must then begin on a new line."""
    real, is_full = os.write, True

    def write(descriptor: int, data: bytes) -> int:
        if is_full and descriptor == pipe[1] and len(data) > 10:
            return real(descriptor, data[:10])
        if is_full and descriptor == pipe[1]:
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    failed = threading.Event()
    monkeypatch.setattr(os, "write", write)
    with log.written_by_a_thread(pipe[1]):
        ours = logger()
        ours.info("lost")
        assert failed.wait(30)
        is_full = False
        ours.info("kept")
        read = b""
        while b"event=log_lines_dropped" not in read:
            read += os.read(pipe[0], 1 << 16)
    assert re.search(rb"\ntimestamp=\S+ level=info event=kept\n", read)
    assert re.search(rb"event=log_lines_dropped .*lines=1", read)


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_pipe_receives_whole_log_lines_in_blocking_and_in_non_blocking_mode(
    pipe: tuple[int, int], *, is_blocking: bool
) -> None:
    os.set_blocking(pipe[1], is_blocking)
    with log.written_by_a_thread(pipe[1]):
        ours = logger()
        for number in range(200):
            ours.info("line", number=number, text="x" * 1000)
        read = b""
        while read.count(b"\n") < 200:
            read += os.read(pipe[0], 1 << 16)
    assert [int(number) for number in re.findall(rb" number=(\d+) ", read)] == list(range(200))
