"""Covers how changes of interfaces and addresses by other programs reach the loop."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Sequence

import pytest

from ipvsproxy.daemon import app
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import notify
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from tests.support.fake_kernel import FakeKernel


class Listener:
    """A listener that receives changes from a test. A change is read when the descriptor of the listener is readable."""

    def __init__(self) -> None:
        self.changes: list[notify.Change] = []
        self.is_broken = False
        self.is_closed = False
        self._reading, self._writing = socket.socketpair()

    def wake(self) -> None:
        self._writing.send(b"x")

    def fileno(self) -> int:
        return self._reading.fileno()

    def read(self) -> Sequence[notify.Change]:
        if self.is_broken:
            raise KernelError(action="listen for changes of interfaces", errno=errno.EBADF)
        self._reading.recv(1)
        changes, self.changes = self.changes, []
        return changes

    def close(self) -> None:
        self.is_closed = True
        self._reading.close()
        self._writing.close()


class Calls:
    """An engine that records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.arrived = asyncio.Event()

    def kernel_changed(self) -> None:
        self.calls.append("kernel")
        self.arrived.set()

    def interfaces_changed(self) -> None:
        self.calls.append("interfaces")
        self.arrived.set()


NODE = FakeKernel()
NODE.ports = set()  # type: ignore[attr-defined]  # the real kernel has this attribute


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    listener = Listener()
    monkeypatch.setattr(notify, "ChangeListener", lambda **_: listener)
    return listener


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (notify.Change.OTHER_ADDRESSES, "interfaces"),
        (notify.Change.OURS, "kernel"),
    ],
)
async def test_a_change_by_another_program_causes_the_loop_to_read_the_kernel(
    listener: Listener, change: notify.Change, expected: str
) -> None:
    engine = Calls()
    following = asyncio.create_task(app.follow_interfaces(engine, NODE, ROUTE_PROTOCOL))  # type: ignore[arg-type]  # fake objects are passed
    listener.changes = [change]
    listener.wake()
    await engine.arrived.wait()
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert engine.calls == [expected]
    assert listener.is_closed


async def test_a_broken_netlink_listener_ends_the_process(listener: Listener) -> None:
    listener.is_broken = True
    listener.wake()
    with pytest.raises(KernelError, match="listen for changes"):
        await app.follow_interfaces(Calls(), NODE, ROUTE_PROTOCOL)  # type: ignore[arg-type]  # fake objects are passed
    assert listener.is_closed
