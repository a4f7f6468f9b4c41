"""Fixtures for tests that run the whole program inside the process of the tests, and for tests that read the program's log."""

from collections.abc import Callable, Iterator

import pytest
import structlog

from ipvsproxy.daemon.process import lifecycle


@pytest.fixture(autouse=True)
def _no_forced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each program ten minutes to end after a signal.

    The usual time limit is much shorter. On a busy machine, a program would exceed the usual limit, and would then kill the
    process of the tests.
    """
    monkeypatch.setattr(lifecycle, "STOP_WITHIN_S", 600.0)


@pytest.fixture
def read(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """A function that returns the lines that were written to standard error since the last call of the function.

    When the test ends, the logging configuration of the process is restored.
    """
    before = structlog.get_config()

    def lines() -> list[str]:
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.splitlines(keepends=True)

    yield lines
    structlog.configure(**before)
