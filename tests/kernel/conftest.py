"""A separate network namespace for tests that need root, but not the kernel module ip_vs."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.base import modules

_CLONE_NEWNET = 0x40000000


@pytest.fixture(autouse=True)
def _forget_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the answers of the kernel that were cached during an earlier test."""
    monkeypatch.setattr(modules, "_REFUSED", threading.Event())


@pytest.fixture
def fresh_namespace() -> Iterator[None]:
    """Move this thread and its child processes into a new network namespace, where only the loopback interface is up."""
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    libc = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET) != 0:
            pytest.skip(f"no network namespace here: {os.strerror(ctypes.get_errno())}")
        subprocess.run((shutil.which("ip") or "ip", "link", "set", "lo", "up"), check=True)
        yield
    finally:
        libc.setns(before, _CLONE_NEWNET)
        os.close(before)
