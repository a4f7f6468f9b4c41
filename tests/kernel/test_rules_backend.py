"""Covers when the kernel is asked for the table of the other backend; ``nftables/test_rules`` asks a real one."""

import errno

import pytest

from ipvsproxy.kernel import rules_backend
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState


class Channel:
    """A kernel without nf_tables, which starts modprobe at each question."""

    asked = 0

    def __init__(self, _bus: int) -> None:
        pass

    def ask(self, _query: bytes, action: str) -> None:
        Channel.asked += 1
        raise KernelError(action=action, errno=errno.EINVAL, detail="no module has registered this subsystem")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("state", "questions"),
    [(ModuleState.LOADABLE, 0), (ModuleState.MISSING, 0), (ModuleState.UNKNOWN, 1), (ModuleState.LOADED, 3)],
)
def test_a_kernel_without_nf_tables_is_asked_for_our_table_once(
    state: ModuleState, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "asked", 0)
    monkeypatch.setattr(netlink, "Channel", Channel)
    monkeypatch.setattr(modules, "module_state", lambda *_: state)
    assert [rules_backend.remove_table() for _audit in range(3)] == [False] * 3
    assert Channel.asked == questions
