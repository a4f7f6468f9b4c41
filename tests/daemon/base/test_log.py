"""Covers lines on standard error: their form, the verbosity of each, and that a value cannot forge one."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

from ipvsproxy.daemon.base import log

Read = Callable[[], list[str]]


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Iterator[Read]:
    """The lines on standard error since the last call. The test's end restores the configuration of the process."""
    before = structlog.get_config()

    def lines() -> list[str]:
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines(keepends=True)

    yield lines
    structlog.configure(**before)


def logger(**choices: Any) -> structlog.typing.FilteringBoundLogger:
    """A new logger: those of modules keep the configuration of their first use."""
    log.set_up(**({"json": False, "verbosity": 0} | choices))
    made: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return made


def test_a_text_line_has_time_level_and_event_first_and_then_its_keys(read: Read) -> None:
    logger().info("synced", services=3, duration_s=0.25, done=True, families=["IPv4", "IPv6"])
    (line,) = read()
    assert re.fullmatch(
        r"timestamp=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z level=info event=synced "
        r"services=3 duration_s=0\.25 done=true families=IPv4,IPv6\n",
        line,
    )


def test_a_json_line_is_one_object(read: Read) -> None:
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


@pytest.mark.parametrize("verbosity", [0, log.DEBUG_VERBOSITY - 1, log.DEBUG_VERBOSITY, 10])
def test_debug_lines_appear_from_a_verbosity_on(read: Read, verbosity: int) -> None:
    logger(verbosity=verbosity).debug("operation")
    assert len(read()) == (verbosity >= log.DEBUG_VERBOSITY)


@pytest.mark.parametrize("text", ["\n", "\r", "\r\n", "\x1b[2K", "\x00", "\x0b", "\x0c", "\x85", "\u2028", "\u2029"], ids=ascii)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_value_cannot_forge_a_line(read: Read, text: str, as_json: bool) -> None:  # noqa: FBT001 - a parameter
    forged = f"x{text}timestamp=1 level=info event=synced"
    logger(json=as_json).info(forged, value=forged, values=[forged], quoted=f'" {forged}')
    lines = read()
    assert len(lines) == 1
    assert lines[0].strip("\n").isprintable()


def test_values_with_blanks_are_quoted(read: Read) -> None:
    logger().info("two words", value='a "b" c=d')
    (line,) = read()
    assert line.endswith(' event="two words" value="a \\"b\\" c=d"\n')


def test_an_exception_is_part_of_its_line(read: Read) -> None:
    try:
        int("wrong")
    except ValueError:
        logger().exception("failed")
    (line,) = read()
    assert "ValueError: invalid literal" in line


def test_a_message_of_a_library_becomes_a_line_and_repeats_once_in_a_while(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_exception_that_a_library_logs_is_part_of_its_line(read: Read) -> None:
    logger()
    try:
        int("x")
    except ValueError:
        logging.getLogger("some.library").exception("a task has failed")
    (line,) = read()
    assert "ValueError: invalid literal" in line
