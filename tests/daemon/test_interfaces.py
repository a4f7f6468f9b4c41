"""Covers how changes of interfaces and addresses by other programs reach the loop."""

import asyncio
import errno
import socket
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from ipvsproxy.daemon import app
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.network import notify
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from tests.support.following import running_task


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


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    listener = Listener()
    monkeypatch.setattr(notify, "ChangeListener", lambda **_: listener)
    return listener


@pytest.mark.parametrize(
    ("change", "expected"),
    [(notify.Change.OTHER_ADDRESSES, "interfaces_changed"), (notify.Change.OURS, "kernel_changed")],
)
async def test_a_change_by_another_program_causes_the_loop_to_read_the_kernel(
    listener: Listener, change: notify.Change, expected: str
) -> None:
    engine, arrived = Mock(), asyncio.Event()
    engine.kernel_changed.side_effect = engine.interfaces_changed.side_effect = arrived.set
    async with running_task(app.follow_interfaces(engine, (), ROUTE_PROTOCOL)):
        listener.changes = [change]
        listener.wake()
        await arrived.wait()
    assert [name for name, *_ in engine.mock_calls] == [expected]
    assert listener.is_closed


async def test_a_broken_netlink_listener_ends_the_process(listener: Listener) -> None:
    listener.is_broken = True
    listener.wake()
    with pytest.raises(KernelError, match="listen for changes"):
        await app.follow_interfaces(Mock(), (), ROUTE_PROTOCOL)
    assert listener.is_closed
