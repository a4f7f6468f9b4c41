"""Covers a stop while a node is prepared, and a missing requirement. ``tests/test_running.py`` covers the preparation."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

import pytest

from ipvsproxy.daemon.base import log
from ipvsproxy.daemon.base.errors import CannotStartError
from ipvsproxy.daemon.process import init_only, lifecycle, requirements
from tests.config import loading


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "set_up", lambda **_: None)


def test_a_stop_before_the_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def hang(_chosen: object) -> AsyncIterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(requirements, "running_kernel", hang)
    assert init_only.run(loading.from_flags("--init-only")) == lifecycle.FAILED


def test_a_missing_requirement_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_chosen: object) -> contextlib.AbstractAsyncContextManager[None]:
        raise CannotStartError("it is not there: get it")

    monkeypatch.setattr(requirements, "running_kernel", refuse)
    assert init_only.run(loading.from_flags("--init-only")) == lifecycle.CANNOT_START
    assert "ipvsproxy: it is not there: get it\n" in capsys.readouterr().err
