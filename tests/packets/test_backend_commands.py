"""The commands print the same output with either backend, and cleanup finds leftovers of an unfinished switch of backends."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.kernel import backends
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.rules import Backend
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.test_backends import SERVICES
from tests.support import golden_state, harm, lab
from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.kernel,
    NEEDS_NF_TABLES,
]

BESIDE = ("sysctl", "flow")
"""Findings about settings that a network namespace may not change, and reads of each start."""
MASQUERADING = {Backend.IPTABLES: "KUBE-MARK-MASQ", Backend.NFTABLES: "KUBE-POSTROUTING"}


def told(running: Cluster) -> dict[str, Any]:
    """The output of explain, verify and plan, without the rules and sets that explain lists."""
    explained, verified, planned = (
        json.loads(one.output)
        for one in running.run("explain default/web --output=json", "verify --output=json", "plan --output=json")
    )
    ways = [way for one in _all(explained, "masquerade") for way in one]
    assert ways
    return {
        "ways": [{key: value for key, value in way.items() if key not in ("rules", "sets")} for way in ways],
        "rules": " ".join(str(way["rules"]) for way in ways),
        "differences": sorted(
            (one["kind"], one["object"]) for one in verified["differences"] if not one["kind"].startswith(BESIDE)
        ),
        "operations": sorted((one["verb"], one["kind"]) for one in planned["operations"] if not one["kind"].startswith(BESIDE)),
    }


def _all(document: Any, key: str) -> Iterator[Any]:
    """All values of a key in nested dictionaries and lists."""
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from _all(one, key)
    if isinstance(document, dict) and key in document:
        yield document[key]


def test_the_commands_explain_verify_and_plan_print_the_same_output_with_both_backends(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    before, after = {}, {}
    for backend, masquerading in MASQUERADING.items():
        (tmp_path / backend).mkdir()
        with Cluster(laboratory, tmp_path / backend, f"--rules-backend={backend}") as running:
            running.have(*SERVICES)
            running.program.__exit__(None, None, None)
            before[backend] = told(running)
            assert masquerading in before[backend].pop("rules")
            laboratory.run("node", *harm.flush_chain("filter", "KUBE-FORWARD", backend))
            laboratory.run("node", *harm.remove_entry("KUBE-CLUSTER-IP", "10.96.0.1,tcp:80", backend))
            after[backend] = told(running)
            after[backend].pop("rules")
    pairs = zip(before[Backend.NFTABLES].pop("ways"), before[Backend.IPTABLES].pop("ways"), strict=True)
    assert [(one, other) for one, other in pairs if one != other] == []
    assert before[Backend.NFTABLES] == before[Backend.IPTABLES]
    assert before[Backend.NFTABLES]["differences"] == []
    assert after[Backend.NFTABLES] == after[Backend.IPTABLES]
    assert {kind for kind, _ in after[Backend.NFTABLES]["differences"]} == {"rules", "set_entry"}
    assert after[Backend.NFTABLES]["operations"] == [("add", "set_entry"), ("set", "rules")]


def test_verify_reports_a_rule_of_another_program_but_does_not_report_our_jumps(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables") as running:
        running.have(*SERVICES)
        running.program.__exit__(None, None, None)
        laboratory.run("node", "nft", "insert", "rule", "inet", "ipvsproxy", "IPv6-filter-INPUT", "accept")
        (shown,) = running.run("verify --output=json")
        (found,) = (one for one in json.loads(shown.output)["differences"] if one["kind"] == "rules")
        assert found["object"] == "IPv6 chain filter/INPUT"
        assert found["observed"].startswith("accept (inet ipvsproxy IPv6-filter-INPUT handle ")
        assert found["observed"].endswith("), which run removes")


@pytest.mark.parametrize(("former", "new"), [(Backend.IPTABLES, Backend.NFTABLES), (Backend.NFTABLES, Backend.IPTABLES)], ids=str)
def test_after_a_kill_during_a_switch_of_backends_cleanup_removes_our_objects_from_both_backends(
    laboratory: lab.Lab, tmp_path: Path, former: Backend, new: Backend
) -> None:
    with Cluster(laboratory, tmp_path, f"--rules-backend={former}") as running:
        running.have(*SERVICES)
        running.program.kill()
        running.begin(f"--rules-backend={new}")
        running.program.wait_until(lambda: _holds(new), "moved in part", 60)
        running.program.kill()
        assert _holds(former)
        shown, done = running.run("cleanup --dry-run", "cleanup")
        assert "would remove set KUBE-CLUSTER-IP" in shown.output
        assert done.status == 0, done.output + done.error
        assert not any(_holds(backend) for backend in (former, new))
        assert all(
            not golden_state.read_state(("ipsets", "iptables"), one)[part]
            for one in (former, new)
            for part in ("ipsets", "iptables")
        )
        assert not running.virtual_servers()


def _holds(backend: Backend) -> bool:
    """Whether a backend contains at least one of our sets."""
    if backend is Backend.NFTABLES:
        return nft_tables.has_own_table()
    return "KUBE-CLUSTER-IP" in backends.held_by_other(Backend.NFTABLES, ["KUBE-CLUSTER-IP"])
