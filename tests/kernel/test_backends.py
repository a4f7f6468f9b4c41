"""Covers queries for ipvsproxy's table in nftables, and the removal of sets from ipset, mostly with a fake kernel.

``nftables/test_nft_rules_driver`` queries a real kernel.
"""

import errno
import pathlib
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from ipvsproxy.kernel import backends
from ipvsproxy.kernel.base import modules, nft_message
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.model.plan import Operation, Outcome
from tests.kernel.drivers import run


def test_a_kernel_without_nf_tables_is_queried_for_our_table_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without nf_tables runs modprobe at each query."""
    generation = Mock(side_effect=KernelError(action="read the generation", errno=errno.EINVAL))
    monkeypatch.setattr(nft_message, "generation", generation)
    monkeypatch.setattr(modules, "module_state", lambda *_: ModuleState.UNKNOWN)
    assert [backends.remove_table() for _audit in range(3)] == [False] * 3
    assert generation.call_count == 1


def test_a_refused_removal_of_a_set_is_an_error_unless_the_kernel_says_that_the_set_is_in_use(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_driver: object, operations: Sequence[Operation]) -> list[Outcome]:
        return [Outcome(one, error=f"{one}: no", errno=errno.EPERM) for one in operations]

    (tmp_path / "module/ip_set").mkdir(parents=True)
    monkeypatch.setattr(IpsetDriver, "apply", refuse)
    with pytest.raises(KernelError, match="KUBE-"):
        backends.remove_ipsets(tmp_path)


@pytest.mark.parametrize("present", [(), ("KUBE-IPVS-IPS", "KUBE-CLUSTER-IP")])
def test_removed_ipsets_are_logged_and_kube_ipvs_ips_is_removed_before_kube_cluster_ip(
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


def test_no_set_is_removed_if_ipset_is_not_loaded(tmp_path: pathlib.Path) -> None:
    assert backends.remove_ipsets(tmp_path) == ()


@pytest.mark.kernel
@pytest.mark.usefixtures("network_namespace")
def test_remove_ipsets_only_empties_a_set_that_a_rule_uses_and_returns_the_name_of_the_set() -> None:
    for words in (
        ("ipset", "create", "KUBE-NODE-IP", "hash:ip"),
        ("ipset", "create", "KUBE-CLUSTER-IP", "hash:ip,port"),
        ("ipset", "add", "KUBE-CLUSTER-IP", "10.96.0.1,tcp:443"),
        ("iptables", "-A", "INPUT", "-m", "set", "--match-set", "KUBE-CLUSTER-IP", "dst,dst", "-j", "ACCEPT"),
    ):
        run(*words)
    assert backends.remove_ipsets() == ("KUBE-CLUSTER-IP",)
    assert "\nadd" not in run("ipset", "save", "KUBE-CLUSTER-IP"), "what a rule still uses decides about no packet"
    run("iptables", "-F", "INPUT")
    assert backends.remove_ipsets() == ()
