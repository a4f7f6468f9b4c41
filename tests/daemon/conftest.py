"""Fixtures for tests that run the whole program inside the process of the tests."""

import pytest

from ipvsproxy.daemon.process import lifecycle


@pytest.fixture(autouse=True)
def _no_forced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow a program ten minutes to end after a signal.

    If this time were short, a program on a busy machine would end the process of the tests by force.
    """
    monkeypatch.setattr(lifecycle, "STOP_WITHIN_S", 600.0)
