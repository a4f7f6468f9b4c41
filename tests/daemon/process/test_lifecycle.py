"""Covers the end of a process, which stops its servers last, and the memory that the process returns to the kernel."""

import asyncio
import ctypes
import platform
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from ipvsproxy.daemon.process import lifecycle
from tests.config import loading

HANGS_S = 60.0
"""The number of seconds for which the hanging thread of a test hangs, unless the test ends earlier."""


async def test_the_health_status_changes_first_and_the_servers_stop_last_if_a_task_fails() -> None:
    order: list[str] = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append(name)

    async def fail() -> None:
        raise ZeroDivisionError

    status = Mock(stop=lambda: order.append("status"))
    with pytest.raises(ZeroDivisionError):
        await lifecycle.until_stopped(asyncio.Event(), status, [work("work"), fail()], [work("server")])
    assert order == ["status", "work", "server"]


async def test_a_task_that_returns_does_not_end_the_process() -> None:
    stopping = asyncio.Event()

    async def end() -> None:
        asyncio.get_running_loop().call_later(0.01, stopping.set)

    await lifecycle.until_stopped(stopping, Mock(), [end()], [])
    assert stopping.is_set()


def test_a_hanging_thread_does_not_delay_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the thread that examines leftover rules hangs while its iptables program hangs."""
    monkeypatch.setattr(lifecycle, "set_up_log", lambda _: None)
    may_end = threading.Event()

    async def main(_signals: lifecycle.Signals) -> int:
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()

        def hang() -> None:
            loop.call_soon_threadsafe(has_begun.set)
            may_end.wait(HANGS_S)

        hanging = asyncio.create_task(asyncio.to_thread(hang))
        await has_begun.wait()
        hanging.cancel()
        return 7

    try:
        began_s = time.monotonic()
        assert lifecycle.run(loading.from_flags(), main) == 7
        assert time.monotonic() - began_s < HANGS_S
    finally:
        may_end.set()


def printed_by(program: str) -> int:
    """Run a program in a separate process; returns the number that the program prints."""
    return int(subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, timeout=300).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others keep no large blocks")
@pytest.mark.parametrize("is_given_back", [True, False])
def test_every_large_memory_block_that_is_freed_is_returned_to_the_kernel(*, is_given_back: bool) -> None:
    program = f"""
from ipvsproxy.daemon.process import lifecycle
if {is_given_back}:
    lifecycle.use_little_memory()
resident_kb = lambda: int(open("/proc/self/status").read().partition("VmRSS:")[2].split()[0])
large = bytearray(b"x" * (20 << 20))
del large
before = resident_kb()
blocks = [bytearray(b"x" * (2 << 20)) for _ in range(20)]
last = blocks[-1]
blocks.clear()
print(resident_kb() - before)
"""
    assert (printed_by(program) < 10 << 10) == is_given_back


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="others have heaps of other kinds")
@pytest.mark.parametrize("is_shared", [True, False])
def test_all_threads_use_the_same_heap(*, is_shared: bool) -> None:
    program = f"""
import ctypes, threading
from ipvsproxy.daemon.process import lifecycle
if {is_shared}:
    lifecycle.use_little_memory()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = [ctypes.c_size_t]
places = [library.malloc(1000)]
thread = threading.Thread(target=lambda: places.append(library.malloc(1000)))
thread.start()
thread.join()
print(abs(places[0] - places[1]))
"""
    assert (printed_by(program) < 1 << 30) == is_shared, "heaps of other threads are far from the first one"


def test_the_program_starts_with_a_c_library_that_has_no_mallopt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    lifecycle.use_little_memory()


def test_the_caller_gets_an_oserror_if_a_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(_signals: lifecycle.Signals) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
            with pytest.raises(OSError, match="can't start new thread"):
                await asyncio.to_thread(lambda: 1)
        return 0

    monkeypatch.setattr(lifecycle, "set_up_log", lambda _: None)
    assert lifecycle.run(loading.from_flags(), main) == 0


_DESCRIPTORS = """
import asyncio, os, resource, structlog.testing
from ipvsproxy.daemon.process import lifecycle
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
lifecycle.take_all_descriptors()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)
assert lifecycle.lowest_free_descriptor() < 64
lifecycle.DESCRIPTORS_INTERVAL_S = 0

async def look(logs, count):
    async with asyncio.timeout(30):
        watching = asyncio.create_task(lifecycle.watch_descriptors())
        for event in ("descriptors_near_limit", "descriptors_no_longer_near_limit"):
            held = []
            while event == "descriptors_near_limit" and len(held) < count:
                try:
                    held.append(os.open("/dev/null", os.O_RDONLY))
                except OSError:
                    break
            while event not in [line["event"] for line in logs]:
                await asyncio.sleep(0)
            for descriptor in held:
                os.close(descriptor)
        watching.cancel()

for count in (100, 1000):  # three quarters, and all
    with structlog.testing.capture_logs() as logs:
        asyncio.run(look(logs, count))
    assert [line["event"] for line in logs] == ["descriptors_near_limit", "descriptors_no_longer_near_limit"], logs
"""


def test_a_warning_is_logged_when_the_process_has_nearly_reached_its_raised_descriptor_limit() -> None:
    subprocess.run([sys.executable, "-c", _DESCRIPTORS], check=True, timeout=300)
