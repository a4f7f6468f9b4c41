"""Programs under test that run in the process of the tests."""

import pytest

from ipvsproxy.daemon.process import lifecycle


@pytest.fixture(autouse=True)
def _no_forced_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a program that has got a signal would not end in time, and would then end the process of the tests."""
    monkeypatch.setattr(lifecycle, "STOP_WITHIN_S", 600.0)
