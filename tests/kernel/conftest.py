"""No test of these folders uses an answer of the kernel that an earlier test has cached."""

import threading

import pytest

from ipvsproxy.kernel.base import modules


@pytest.fixture(autouse=True)
def _forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the answers of the kernel that were cached during an earlier test."""
    monkeypatch.setattr(modules, "_REFUSED", threading.Event())
