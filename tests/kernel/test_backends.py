"""Covers when the kernel is queried for the table of the unused backend, with a fake kernel.

``nftables/test_nft_rules_driver`` queries a real kernel.
"""

import errno
import pathlib
import subprocess
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from ipvsproxy.kernel import backends
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.model.plan import Operation, Outcome


class Channel:
    """A netlink channel to a kernel without nf_tables, where each request makes the kernel run modprobe."""

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


class Refusing:
    """A fake program ipset that may not destroy a set."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        return [Outcome(one, error=f"{one}: no", errno=errno.EPERM) for one in operations]

    def close(self) -> None:
        pass


def test_a_set_that_cannot_be_removed_is_reported_as_in_use_only_if_that_is_the_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module/ip_set").mkdir(parents=True)
    monkeypatch.setattr(backends, "IpsetDriver", Refusing)
    with pytest.raises(KernelError, match="KUBE-"):
        backends.remove_ipsets(tmp_path)


@pytest.mark.parametrize("present", [(), ("KUBE-IPVS-IPS", "KUBE-CLUSTER-IP")])
def test_removed_ipsets_are_logged_and_sets_that_apply_unless_another_set_matches_are_removed_first(
    present: Sequence[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def apply(_driver: object, operations: Sequence[Operation]) -> list[Outcome]:
        removed.extend(str(one.item) for one in operations)
        return [Outcome(one, surprise=str(one.item) not in present) for one in operations]

    (tmp_path / "module/ip_set").mkdir(parents=True)
    monkeypatch.setattr(IpsetDriver, "apply", apply)
    with capture_logs() as logged:
        assert backends.remove_ipsets(tmp_path) == ()
    assert [one["event"] for one in logged] == ["other_backend_removed"] * bool(present)
    assert removed.index("KUBE-IPVS-IPS") < removed.index("KUBE-CLUSTER-IP")


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
