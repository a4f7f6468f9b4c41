"""Pytest fixtures and marks for tests that need the kernel.

Tests marked ``kernel`` need ip_vs and root. ``scripts/test`` runs all of these tests on a kernel from ``scripts/kernel``, where a
missing ip_vs is a failure. On a host without ip_vs, a plain ``pytest`` skips these tests and says so.
"""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
from collections.abc import Callable, Iterator

import hypothesis
import pytest

from ipvsproxy.model.kernel import TUNNEL_RECORD, parse_record
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES
from tests.support import forked, lab, old_kernel, patience
from tests.support.program import OLD_KERNEL

# Hypothesis has no deadline here, because the time for choosing and running an example depends more on the machine's load than on
# the code. Except in thorough runs, Hypothesis uses the same examples each time, so that no test fails by chance.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not patience.IS_THOROUGH,
    database=None,
    print_blob=True,
)
hypothesis.settings.load_profile("patient")

CORE = tuple(pathlib.Path(__file__).with_name(name) for name in ("store", "translate", "reconcile"))
"""The folders whose tests get the mark ``core``."""

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1

# The C library is called directly, because os.unshare and os.setns need Python 3.12.
_libc = ctypes.CDLL(None, use_errno=True)


def pytest_configure() -> None:
    if OLD_KERNEL:
        old_kernel.speak_as(OLD_KERNEL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not set(CORE).isdisjoint(item.path.parents):
            item.add_marker("core")
        if patience.FACTOR != 1:
            own = item.get_closest_marker("timeout")
            usual = own.args[0] if own else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(patience.seconds(usual)), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernel") is None:
        return
    if os.geteuid() != 0 or not pathlib.Path("/proc/net/ip_vs").exists():
        _refuse("needs root and a kernel with ip_vs: scripts/kernel .venv/bin/pytest -m kernel")
    forked.prepare()  # must come before a fixture moves this thread to another network namespace


@pytest.fixture(scope="module")
def laboratory() -> Iterator[lab.Lab]:
    """The lab that all packet tests of one module share."""
    with lab.Lab() as laboratory:
        yield laboratory


@pytest.fixture
def new_network_namespace() -> Iterator[Callable[[], None]]:
    """Each call moves the test's thread to a new network namespace. The only interface of the new namespace is lo, which is up.

    Each thread has a current network namespace. Threads and processes that the test starts after the call are in the new
    namespace. Threads that already run, such as threads of a session-wide fixture, stay in the old namespace, and so do their
    sockets. ``/proc/sys/net`` shows the namespace of the reading thread, and ``/proc/net`` shows the namespace of the process's
    main thread; ``/proc/thread-self/net`` always shows the namespace of the reading thread. ``/sys/class/net`` still shows the
    interfaces of the old namespace. A namespace is deleted with all its contents when the last process, thread and socket in the
    namespace are gone.
    """
    if os.geteuid() != 0:
        _refuse("a network namespace needs root")
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def enter() -> None:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            _refuse(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        _bring_loopback_up()

    try:
        yield enter
    finally:
        returned = _libc.setns(before, _CLONE_NEWNET)
        os.close(before)
        if returned != 0:  # if the thread did not return, the next tests would run in the wrong namespace
            pytest.exit(f"cannot return from a network namespace: {os.strerror(ctypes.get_errno())}", returncode=3)


@pytest.fixture
def network_namespace(new_network_namespace: Callable[[], None]) -> None:
    """A fresh network namespace for the thread that runs the test."""
    new_network_namespace()
    _forget_tunnels()


def _forget_tunnels() -> None:
    """Reset the tunnel devices in ``/sys`` if the program of an earlier test has recorded its changes there.

    ``/sys`` shows the devices of the namespace that mounted it, so a program without a separate ``/sys`` would find the record.
    """
    record = pathlib.Path(TUNNEL_RECORD)
    if record.exists() and parse_record(record.read_text(errors="replace")):
        for device in TUNNEL_DEVICES.values():
            flags = pathlib.Path("/sys/class/net", device, "flags")
            if flags.exists():
                flags.write_text("0x80")
        record.write_text("\n")


def _refuse(reason: str) -> None:
    if "IPVSPROXY_KERNEL_REQUIRED" in os.environ:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _bring_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
