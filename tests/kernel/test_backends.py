"""When the kernel is queried for the table of the other backend, with a fake kernel.

``nftables/test_nft_rules_driver`` queries a real kernel.
"""

import errno
import pathlib
import subprocess
from collections.abc import Sequence
from typing import ClassVar

import pytest

from ipvsproxy.kernel import backends
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.model.plan import Operation, Outcome


class Channel:
    """A kernel without nf_tables, which runs modprobe at each request."""

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
def test_a_kernel_without_nf_tables_is_queried_for_our_table_only_once(
    state: ModuleState, questions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "asked", 0)
    monkeypatch.setattr(netlink, "Channel", Channel)
    monkeypatch.setattr(modules, "module_state", lambda *_: state)
    assert [backends.remove_table() for _audit in range(3)] == [False] * 3
    assert Channel.asked == questions


class FewSets:
    """A fake program ipset: it fails to destroy three of our sets; for the last of the three, it returns the error ``number``."""

    number = ipset.IN_USE
    emptied: ClassVar[list[str]] = []

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        numbers = (0, ipset.IN_USE, self.number)
        return [
            Outcome(one, error=f"{one}: no" if number else "", errno=number)
            for one, number in zip(operations, numbers, strict=False)
        ]

    def empty(self, name: str) -> None:
        self.emptied.append(name)

    def close(self) -> None:
        pass


@pytest.fixture
def sys_folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory like ``/sys`` on a host where ipset is loaded."""
    (tmp_path / "module/ip_set").mkdir(parents=True)
    return tmp_path


def test_sets_that_cannot_be_removed_because_a_rule_uses_them_are_reported(
    sys_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "IpsetDriver", FewSets)
    monkeypatch.setattr(FewSets, "emptied", [])
    second, third = backends.remove_ipsets(sys_folder)
    assert FewSets.emptied == [second, third]


def test_a_set_that_cannot_be_removed_for_another_reason_is_not_reported_as_in_use(
    sys_folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "IpsetDriver", FewSets)
    monkeypatch.setattr(FewSets, "number", errno.EPERM)
    with pytest.raises(KernelError) as raised:
        backends.remove_ipsets(sys_folder)
    assert "KUBE-" in str(raised.value)


def test_if_ipset_is_not_loaded_no_set_is_removed(tmp_path: pathlib.Path) -> None:
    assert backends.remove_ipsets(tmp_path) == ()


@pytest.mark.kernel
@pytest.mark.usefixtures("fresh_namespace")
def test_the_kernel_error_shows_that_a_set_is_in_use() -> None:
    for words in (
        ("ipset", "create", "KUBE-NODE-IP", "hash:ip"),
        ("ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port"),
        ("iptables", "-A", "INPUT", "-m", "set", "--match-set", "KUBE-CLUSTER-IP", "dst,dst", "-j", "ACCEPT"),
    ):
        subprocess.run(words, check=True)
    subprocess.run(("ipset", "add", "KUBE-CLUSTER-IP", "10.96.0.1,tcp:443"), check=True)
    assert backends.remove_ipsets() == ("KUBE-CLUSTER-IP",)
    listed = subprocess.run(("ipset", "save", "KUBE-CLUSTER-IP"), check=True, capture_output=True, text=True).stdout
    assert "\nadd" not in listed, "what a rule still uses decides about no packet"
    subprocess.run(("iptables", "-F", "INPUT"), check=True)
    assert backends.remove_ipsets() == ()
