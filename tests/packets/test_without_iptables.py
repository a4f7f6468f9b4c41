"""Tests that ipvsproxy needs no iptables, no ipset and none of their kernel modules if its rules are in nftables."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.test_backends import SERVICES
from tests.packets.test_scopes import API
from tests.support import cluster, lab
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

OF_IPTABLES = re.compile(r"ip_set\w*|xt_\w+|ipt_\w+|ip6t_\w+|x_tables|ip6?_tables|ip6?table_\w+|nft_compat")
LOOKING = ("explain default/web", "verify", "plan", "doctor")


def loaded() -> set[str]:
    """The loaded kernel modules that belong to iptables or ipset."""
    return {name for line in Path("/proc/modules").read_text().splitlines() if OF_IPTABLES.fullmatch(name := line.split()[0])}


@pytest.fixture(name="laboratory")
def _laboratory() -> Iterator[lab.Lab]:
    """The lab on a kernel without modules of iptables and ipset. After the test, the modules are loaded again for other tests."""
    built_in = [name for name in ("ip_set", "x_tables") if Path(f"/sys/module/{name}").exists() and name not in loaded()]
    if built_in:
        pytest.skip(f"built into this kernel: {', '.join(built_in)}")
    with lab.Lab() as laboratory:
        cluster.clear()
        before = loaded()
        remaining = before
        while remaining:  # a module can be removed only after all modules that use it
            for name in remaining:
                subprocess.run(("rmmod", name), capture_output=True, check=False)
            if loaded() == remaining:
                break
            remaining = loaded()
        try:
            if remaining:
                pytest.skip(f"in use in this kernel: {', '.join(sorted(remaining))}")
            yield laboratory
        finally:
            subprocess.run(("modprobe", "--all", *before), capture_output=True, check=False)


@pytest.mark.parametrize(
    ("backend", "has_programs"),
    [("nftables", True), ("nftables", False), ("auto", False)],
    ids=["with the programs in PATH", "without the programs", "chosen because the programs are missing"],
)
def test_services_are_served_and_inspected_without_any_iptables_module(
    laboratory: lab.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, *, has_programs: bool
) -> None:
    if not has_programs:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "modprobe").symlink_to(shutil.which("modprobe") or "/sbin/modprobe")
        monkeypatch.setenv("PATH", str(programs))
        assert [name for name in ("iptables", "ip6tables-nft-save", "ipset", "nft") if shutil.which(name)] == []
    running = Cluster(laboratory, tmp_path, *API, f"--rules-backend={backend}")
    running.start()
    try:
        (chosen,) = running.logged("event=rules_backend_chosen")
        assert "backend=nftables" in chosen
        assert ("iptables is not in PATH" in chosen) == (backend == "auto")
        running.have(*SERVICES)
        for family in Family:
            for to, from_ in (("balancer 1", "client"), ("cluster 1", "host"), ("balancer 2", "p2"), ("balancer 3", "client")):
                source = cluster.address("client", family) if from_ == "client" else None
                assert laboratory.probe(from_, "TCP", cluster.address(to, family), 80, src=source).outcome == "ok", to
            stranger = cluster.address("client2", family)
            assert laboratory.probe("client", "TCP", cluster.address("balancer 3", family), 80, src=stranger).outcome == "timeout"
        assert loaded() == set(), "by run"
        explained, *looked = running.run(*LOOKING)
        assert explained.status == 0, explained.output + explained.error
        assert [one.error for one in looked if "Traceback" in one.error] == []
        assert loaded() == set(), f"by {', '.join(LOOKING)}"
    finally:
        running.program.__exit__(None, None, None)
    shown, done, again = running.run("cleanup --dry-run", "cleanup", "cleanup")
    assert "would remove set KUBE-CLUSTER-IP" in shown.output
    assert (done.status, again.status) == (0, 0), done.output + done.error + again.output + again.error
    assert "nothing of ours" in again.output
    assert loaded() == set(), "by cleanup"
    assert not running.virtual_servers()
    assert running.logged("level=error|operation_failed|Traceback") == []


NOTING = """
import sys
from ipvsproxy import cli

def note(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"):
        print("event=process_started", event, str(arguments[:1]), file=sys.stderr, flush=True)

sys.addaudithook(note)
sys.exit(cli.main(sys.argv[1:]))
"""
"""A script that runs the program, and logs each process that the program starts."""


def test_a_start_runs_no_process_if_the_needed_modules_are_loaded(laboratory: lab.Lab, tmp_path: Path) -> None:
    running = Cluster(laboratory, tmp_path, "--rules-backend=nftables", starter=("-c", NOTING))
    for is_first in (True, False):
        before = len(running.logged("event=process_started")) if not is_first else 0
        running.start()
        try:
            running.have(*(SERVICES if is_first else SERVICES[1:]))
            started = running.logged("event=process_started")[before:]
            assert all("modprobe" in one for one in started), started
            assert is_first or started == []
        finally:
            running.program.__exit__(None, None, None)
