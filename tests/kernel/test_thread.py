"""The thread that owns the kernel's sockets. The thread owns one object and runs one call after the other."""

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable

import pytest

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.thread import KernelThread

WITHIN_S = 60.0


class Target:
    """An object that records the threads that call its methods."""

    def __init__(self) -> None:
        self.threads = [threading.current_thread()]
        self.calls: list[int] = []
        self.is_waiting = threading.Event()
        self.may_go_on = threading.Event()

    def note(self, number: int, *, wait: bool = False) -> int:
        if wait:
            self.is_waiting.set()
            assert self.may_go_on.wait(WITHIN_S)
        self.threads.append(threading.current_thread())
        self.calls.append(number)
        return number * 2

    def fail(self) -> None:
        raise KernelError(action="try", errno=1)


@pytest.fixture
async def thread() -> AsyncIterator[KernelThread[Target]]:
    started = await KernelThread.start(Target)
    yield started
    started.stop()


async def test_one_separate_thread_creates_the_object_and_calls_its_methods(thread: KernelThread[Target]) -> None:
    assert [await thread.call(note(number)) for number in range(3)] == [0, 2, 4]
    assert len(set(thread._target.threads)) == 1
    assert thread._target.threads[0] is not threading.current_thread()
    assert thread._target.threads[0].name.startswith("kernel")


async def test_calls_run_in_their_order_while_the_event_loop_continues(thread: KernelThread[Target]) -> None:
    calls = [asyncio.create_task(thread.call(note(number, wait=True))) for number in range(5)]
    await asyncio.sleep(0)
    assert not any(call.done() for call in calls)
    thread._target.may_go_on.set()
    assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8]
    assert thread._target.calls == [0, 1, 2, 3, 4]


async def test_the_thread_still_runs_calls_after_a_call_has_raised_an_exception_to_its_caller(
    thread: KernelThread[Target],
) -> None:
    with pytest.raises(KernelError):
        await thread.call(lambda target: target.fail())
    assert await thread.call(note(4)) == 8


async def test_the_caller_gets_the_exception_and_the_thread_ends_if_creating_the_object_fails() -> None:
    makers: list[threading.Thread] = []

    def make() -> Target:
        makers.append(threading.current_thread())
        raise KernelError(action="open", errno=1)

    with pytest.raises(KernelError):
        await KernelThread.start(make)
    await asyncio.to_thread(makers[0].join, WITHIN_S)
    assert not makers[0].is_alive()


async def test_a_stopped_thread_finishes_its_running_call_and_drops_waiting_calls(thread: KernelThread[Target]) -> None:
    target = thread._target
    running = asyncio.create_task(thread.call(note(1, wait=True)))
    waiting = asyncio.create_task(thread.call(note(2)))
    await asyncio.to_thread(target.is_waiting.wait, WITHIN_S)
    thread.stop()
    target.may_go_on.set()
    assert await running == 2
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert target.calls == [1]
    await asyncio.to_thread(target.threads[0].join, WITHIN_S)
    assert not target.threads[0].is_alive()
    with pytest.raises(RuntimeError):
        await thread.call(note(3))


async def test_a_call_never_runs_if_it_is_cancelled_before_it_begins(thread: KernelThread[Target]) -> None:
    target = thread._target
    running = asyncio.create_task(thread.call(note(1, wait=True)))
    given_up = asyncio.create_task(thread.call(note(2)))
    await asyncio.to_thread(target.is_waiting.wait, WITHIN_S)
    for call in (running, given_up):
        call.cancel()
    await asyncio.gather(running, given_up, return_exceptions=True)
    target.may_go_on.set()
    assert await thread.call(note(3)) == 6
    assert target.calls == [1, 3]


def test_the_thread_continues_if_a_caller_closes_its_event_loop_before_the_result_arrives() -> None:
    kept: list[KernelThread[Target]] = []
    left: list[asyncio.Task[int]] = []

    async def leave_one_running() -> None:
        thread = await KernelThread.start(Target)
        kept.append(thread)
        left.append(asyncio.create_task(thread.call(note(1, wait=True))))
        await asyncio.to_thread(thread._target.is_waiting.wait, WITHIN_S)

    async def ask_again() -> int:
        kept[0]._target.may_go_on.set()
        return await kept[0].call(note(2))

    asyncio.run(leave_one_running())
    assert asyncio.run(ask_again()) == 4
    assert kept[0]._target.calls == [1, 2]
    kept[0].stop()


def test_the_process_ends_only_after_the_running_call_has_finished() -> None:
    script = """
import asyncio, threading, time
from ipvsproxy.kernel.thread import KernelThread

begun = threading.Event()

async def main():
    thread = await KernelThread.start(object)
    asyncio.ensure_future(thread.call(lambda _: (begun.set(), time.sleep(0.5), print("done", flush=True))))
    await asyncio.to_thread(begun.wait)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


def note(number: int, *, wait: bool = False) -> Callable[[Target], int]:
    return lambda target: target.note(number, wait=wait)


async def test_a_slow_call_is_logged_once_while_it_is_still_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 0.01)
    slow = asyncio.Semaphore(0)
    thread = await KernelThread.start(Target, slow.release)
    running = asyncio.create_task(thread.call(note(1, wait=True)))
    await asyncio.wait_for(slow.acquire(), WITHIN_S)
    assert not running.done()
    thread._target.may_go_on.set()
    assert await running == 2
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 60)
    await thread.call(note(2))
    assert slow.locked(), "neither a second time, nor for a call that is over"
    thread._watch(thread._ended)  # the test calls this method in place of the timer
    assert thread._timer is None, "nothing is awaited"
    thread.stop()


async def test_a_call_that_has_to_wait_long_before_it_runs_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 0.01)
    slow = asyncio.Event()
    other = await KernelThread.start(Target)
    thread = other.standing_in(Target())
    thread._on_slow = slow.set
    before = asyncio.create_task(other.call(note(1, wait=True)))
    await asyncio.to_thread(other._target.is_waiting.wait, WITHIN_S)
    running = asyncio.create_task(thread.call(note(2, wait=True)))
    await asyncio.sleep(0.1)
    assert not slow.is_set(), "a call of another object is not this one's"
    other._target.may_go_on.set()
    await before
    await asyncio.wait_for(slow.wait(), WITHIN_S)
    thread._target.may_go_on.set()
    await running
    other.stop()


async def test_a_slow_call_is_logged_even_if_its_caller_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 0.2)
    slow = asyncio.Event()
    thread = await KernelThread.start(Target, slow.set)
    calls = [asyncio.create_task(thread.call(note(number, wait=True))) for number in range(2)]
    await asyncio.to_thread(thread._target.is_waiting.wait, WITHIN_S)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.wait_for(slow.wait(), WITHIN_S)
    thread._target.may_go_on.set()
    slow.clear()
    monkeypatch.setattr("ipvsproxy.kernel.thread.SLOW_S", 60)
    await thread.call(note(2))
    thread._watch(thread._ended)  # the test calls this method in place of the timer
    assert not slow.is_set(), "a call that was given up before it began is none that runs"
    thread.stop()


class Heavy:
    """An object whose method ``fail`` the test passes to ``KernelThread.call``.

    The test checks that the call does not keep the object alive.
    """

    def fail(self, _: Target) -> None:
        raise KernelError(action="try", errno=1)


async def test_the_arguments_of_a_failed_call_are_freed_without_garbage_collection(thread: KernelThread[Target]) -> None:
    heavy = Heavy()
    kept = weakref.ref(heavy)
    gc.disable()
    try:
        with contextlib.suppress(KernelError):
            await thread.call(heavy.fail)
        del heavy
        await thread.call(note(1))  # makes the thread drop its references to the previous call
        assert kept() is None
    finally:
        gc.enable()
