"""Before each test in this folder, answers of the kernel from earlier tests are forgotten."""

import threading

import pytest

from ipvsproxy.kernel.base import modules


@pytest.fixture(autouse=True)
def _forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the answers of the kernel that were cached during an earlier test."""
    monkeypatch.setattr(modules, "_REFUSED", threading.Event())
