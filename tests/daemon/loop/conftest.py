"""Lets each asynchronous test of this directory run in virtual time, and captures the log.

In virtual time, no test really waits: the clock of the event loop jumps to the next timer (``tests/support/virtual_time.py``).
"""

import inspect
from collections.abc import Iterator

import pytest
import structlog.testing
from structlog.typing import EventDict

from tests.support.virtual_time import in_virtual_time


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> None:
    if name.startswith("test_") and inspect.iscoroutinefunction(obj) and isinstance(collector, pytest.Module):
        setattr(collector.obj, name, in_virtual_time(obj))


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """The lines that the program logs during the test."""
    with structlog.testing.capture_logs() as lines:
        yield lines
