"""Second scopes: a switch by a reload, and the commands plan, verify and cleanup."""

import functools
import json
import re
import subprocess
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.packets.switching import configure
from tests.packets.test_scope_changes import ask, backends, has_no_traces, have_web, traces
from tests.packets.test_scopes import API, BOTH, LOCAL
from tests.support import cluster, golden_state, harm, lab
from tests.support.cluster import service
from tests.support.program import Ended, run_in_turn

pytestmark = [pytest.mark.kernel]

FOREIGN = ("ipvsadm", "-A", "-f", "4660", "-s", "wlc")
"""A virtual server of another program, whose mark uses bits of our marks."""
SERVED = service("web", 1, *BOTH, balancer=True, protocols=["TCP"], **LOCAL)
BESIDE = re.compile(r"sysctl|flow")
"""A network namespace may not change the size of the connection table; a host may. Each start reads the tracked flows."""


def test_a_reload_switches_second_scopes_off_and_on_without_a_lost_connection(laboratory: lab.Lab, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    configure(path)
    with cluster.Cluster(laboratory, tmp_path, f"--config={path}") as running:
        have_web(running)
        process = running.program.process_id
        held = [running.lab.open("p2", "TCP", cluster.address("balancer 1", Family.IPV4), 80) for _ in range(2)]
        assert {one.backend for one in held} == set(backends("p1", "r1"))
        with laboratory.load("host", "TCP", cluster.address("balancer 1", Family.IPV4), 80, interval_s=0.1) as loads:
            configure(path, trafficScopes="kube-proxy")
            running.wait_until(lambda: ask(running, "p2", "balancer 1").backends == backends("p1"), "switched off")
            assert [one.ask() for one in held] == [one.backend for one in held]
            held[1].abort()
            configure(path)
            running.wait_until(lambda: ask(running, "p2", "balancer 1").backends == backends("p1", "r1"), "switched on")
            assert held[0].ask() == held[0].backend
        (load,) = loads
        assert (load.failed, load.outcomes["ok"] > 5) == (0, True), load.failures
        held[0].abort()
        # Without this deadline, closed connections remain for two minutes.
        configure(path, trafficScopes="kube-proxy", drainDeadline="1s")
        running.wait_until(lambda: has_no_traces(running), "without a trace")
        assert running.program.process_id == process
        assert running.program.is_alive


def _differences(verified: Ended) -> list[str]:
    found = [" ".join((one["kind"], one["object"])) for one in json.loads(verified.output)["differences"]]
    return [one for one in found if not BESIDE.search(one)]


def test_run_repairs_drift_of_scopes_plan_and_verify_show_it_and_cleanup_removes_only_our_marks(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.have(SERVED)
        mark, whole = str(int(_marks()[0], 16)), _all_scopes()
        for damage in (
            ("ipvsadm", "-D", "-f", mark),
            ("ipvsadm", "-E", "-f", mark, "-s", "wlc"),
            harm.flush_set("KUBE-IPVSPROXY-SCOPE"),
            harm.flush_chain("mangle", "KUBE-IPVSPROXY-MARK"),
        ):
            found = len(running.logged("event=drift_found"))
            subprocess.run(damage, check=True, timeout=300)
            is_repaired = functools.partial(_is_repaired, running, found, whole)
            running.wait_until(is_repaired, f"repaired after {' '.join(damage)}")
        assert ask(running, "p2", "balancer 1").backends == backends("p1", "r1")

        laboratory.run("node", *FOREIGN)
        running.program.__exit__(None, None, None)
        assert _differences(*running.run("verify --output=json")) == []
        entry = golden_state.read_state(("ipsets",), cluster.BACKEND)["ipsets"]["KUBE-IPVSPROXY-SCOPE"]["members"][0]
        laboratory.run("node", "ipvsadm", "-D", "-f", mark)
        laboratory.run("node", *harm.remove_entry("KUBE-IPVSPROXY-SCOPE", entry.split()[0]))
        laboratory.run("node", *harm.flush_chain("mangle", "KUBE-IPVSPROXY-ARRIVAL"))
        verified, planned = running.run("verify --output=json", "plan --output=json")
        found_kinds = {one.split()[0] for one in _differences(verified)}
        operations = [one for one in json.loads(planned.output)["operations"] if not BESIDE.search(one["kind"])]
        assert found_kinds == {"virtual_server", "set_entry", "rules"}
        assert {one["kind"] for one in operations} == {"virtual_server", "real_server", "set_entry", "rules"}
        assert not [one for one in operations if one["verb"] not in ("add", "set")]
        assert len(traces(running)) > 1
        (done,) = run_in_turn(("--cleanup", *API), within_s=300)
        assert done.status == 0, done.error
        assert [line.split()[:2] for line in traces(running)] == [["FWM", f"{int(FOREIGN[3]):08X}"]]


def _marks() -> list[str]:
    return [line.split()[1] for line in Path("/proc/net/ip_vs").read_text().splitlines() if line.startswith("FWM")]


def _is_repaired(running: cluster.Cluster, found: int, state: golden_state.State) -> bool:
    """Whether ipvsproxy has reported drift more than ``found`` times, and the kernel has the ``state`` from before the drift."""
    return len(running.logged("event=drift_found")) > found and _all_scopes() == state


def _all_scopes() -> golden_state.State:
    state = golden_state.read_state(("virtual_servers", "ipsets", "iptables"), cluster.BACKEND)
    servers = {row: value for part in ("virtual_servers", "real_servers") for row, value in state[part].items()}
    sets = {name: content for name, content in state["ipsets"].items() if "IPVSPROXY" in name}
    rules = {chain: lines for chain, lines in state["iptables"].items() if "IPVSPROXY" in chain}
    return {"servers": {row: one for row, one in servers.items() if row.startswith("FWM")}, "sets": sets, "rules": rules}
