"""Covers the signals that this process handles.

``tests/test_program.py`` and ``test_running.py`` cover how the whole program ends.
"""

import asyncio
import os
import signal
import threading

import pytest

from ipvsproxy.daemon.process import lifecycle

WITHIN_S = 60.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_that_hangs_after_a_stop_signal_is_ended_in_time(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(lifecycle, "STOP_WITHIN_S", 0.05)
    statuses: list[int] = []
    is_over = threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        is_over.set()

    installed = lifecycle.Signals(end)
    installed.install(lambda: None)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(installed.stopping.wait(), WITHIN_S)
    os.kill(os.getpid(), number)  # a second signal from an impatient user
    assert await asyncio.to_thread(is_over.wait, WITHIN_S)
    assert statuses == [0]


async def test_a_process_that_stops_in_time_is_not_ended_by_force() -> None:
    statuses: list[int] = []
    installed = lifecycle.Signals(statuses.append)
    installed.install(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(installed.stopping.wait(), WITHIN_S)
    installed.close()
    assert installed._deadline is not None
    installed._deadline.join(WITHIN_S)
    assert not installed._deadline.is_alive()
    assert statuses == []


async def test_a_hangup_signal_calls_the_latest_callback_instead_of_stopping_the_process() -> None:
    called = asyncio.Event()
    installed = lifecycle.Signals()
    installed.install(lambda: None)
    installed.install(called.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(called.wait(), WITHIN_S)
    assert not installed.stopping.is_set()
