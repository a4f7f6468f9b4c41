"""The migration from kube-proxy to ipvsproxy and back, step by step on one kernel, while clients send requests all the time.

kube-proxy is represented by its recorded state: the state of the kernel when ipvsproxy started, and the rules and sets that
kube-proxy writes after its return. ipvsproxy uses kube-proxy's configuration file, without any field of its own, and gets its own
features from additional flags: second scopes, and local routes or nftables. After each step the objects of both proxies are
compared with the recording. The way back is the block of commands in docs/migration.md as printed. The program kubectl is
replaced by a script that runs the Jobs on this node.

Not tested are kube-proxy itself and the update of a DaemonSet by a cluster.
"""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.settings import Binding
from tests import test_runbook
from tests.chaos.take_overs import CLIENTS, add_second_address
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.support import cluster, golden_fixtures, golden_state, lab, patience, program

pytestmark = [pytest.mark.kernel]

RECORDED: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
LONG_LIVED = (("p1", "TCP", "10.96.16.1", 80), ("host", "TCP", "fd00:10:96::b01", 80))
SECTIONS = ("virtual_servers", "real_servers", "ipsets", "iptables", "addresses")
WAYS = [
    (Backend.IPTABLES, Binding.ROUTES),
    pytest.param(Backend.IPTABLES, Binding.ADDRESSES, marks=patience.THOROUGH),
    pytest.param(Backend.NFTABLES, Binding.ROUTES, marks=NEEDS_NF_TABLES),
]
KUBECTL = f"""\
#!/bin/bash
case " $* " in
    *" get nodes "*) echo node-a ;;
    *" get pods "*) echo pod/kube-proxy-1 ;;
    *" kustomize "*) cat "$2/job.yaml" ;;
    *" apply -f - "*) exec {sys.executable} -m tests.support.job "$CONFIGURATION" ;;
    *) exit 0 ;;
esac
"""


@pytest.fixture(name="node", scope="module")
def _node() -> Iterator[lab.Lab]:
    with lab.Lab() as node:
        add_second_address(node)
        yield node
        cluster.clear()


def differing(state: Mapping[str, Any], sections: tuple[str, ...] = SECTIONS) -> list[tuple[str, str, str]]:
    """The rows that differ from those that kube-proxy left, except intended differences."""
    found = golden_state.differences(RECORDED, state, sections)
    return [
        (part, row, kind)
        for part, rows in found.items()
        for row, kind, *_ in rows
        if not golden_fixtures.is_accepted("P0", part, row)
    ]


def own_objects() -> dict[str, bool]:
    """The objects of ipvsproxy in the kernel that kube-proxy does not have."""
    marked = [row for row in golden_state.read_state(("virtual_servers",))["virtual_servers"] if row.startswith("FWM")]
    sets = subprocess.run(("ipset", "list", "-name"), check=True, capture_output=True, text=True).stdout
    chains = subprocess.run(("iptables-save",), check=True, capture_output=True, text=True).stdout
    return {
        "marks": bool(marked),
        "sets": "-IPVSPROXY-" in sets,
        "chains": "-IPVSPROXY-" in chains,
        "routes": bool(golden_state.read_routes()),
        "table": nft_tables.has_own_table(),
    }


NOTHING = dict.fromkeys(("marks", "sets", "chains", "routes", "table"), False)


@pytest.mark.parametrize(("backend", "binding"), WAYS)
def test_each_proxy_takes_over_the_objects_of_the_other_proxy(
    node: lab.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, binding: Binding
) -> None:
    manifests, log, file = tmp_path / "manifests", tmp_path / "log", tmp_path / "config.conf"
    manifests.mkdir()
    golden_fixtures.World(manifests).apply("P0")
    kube_proxys = golden_fixtures.profiles()["default"]["flags"].split()
    (written,) = program.run_in_turn(("--proxy-mode=ipvs", *kube_proxys, f"--write-config-to={file}"), within_s=300)
    assert written.status == 0, written.error
    assert "ipvsproxy:" not in file.read_text()
    own_flags = (f"--rules-backend={backend}", f"--ipvs-vip-binding={binding}", "--ipvs-traffic-scopes=api")
    by_nftables = backend is Backend.NFTABLES
    own = {
        "marks": True,
        "sets": not by_nftables,
        "chains": not by_nftables,
        "routes": binding is Binding.ROUTES,
        "table": by_nftables,
    }

    golden_state.restore_state(RECORDED)
    assert differing(golden_state.read_state(SECTIONS)) == []
    assert own_objects() == NOTHING
    with _undisturbed(node) as check_held:
        with program.Program(manifests, log, f"--config={file}", "--hostname-override=node-a", *own_flags) as running:
            running.wait_until_synced()
            running.wait_until(lambda: own_objects() == own, f"own objects: {own}", program.SYNCED_WITHIN_S)
            for one in program.run_in_turn(("cleanup", "--only=own"), ("cleanup", "--dry-run", "--only=own"), within_s=300):
                assert (one.status, one.output.splitlines()[0][:26]) == (1, "problem: another ipvsproxy")
            check_held()
        assert own_objects() == own, "a proxy that ends changes nothing"
        check_held()
        if by_nftables:  # kube-proxy starts, and writes its rules and sets
            golden_state.restore_rules(RECORDED)
        monkeypatch.setenv("CONFIGURATION", str(tmp_path))
        _type_in_the_way_back(tmp_path / "page", monkeypatch)
        check_held()
        assert own_objects() == NOTHING
        # With the routes binding, two rules in iptables differ until kube-proxy rewrites them.
        sections = (
            SECTIONS if by_nftables or binding is Binding.ADDRESSES else tuple(one for one in SECTIONS if one != "iptables")
        )
        assert differing(golden_state.read_state(SECTIONS), sections) == []


def _type_in_the_way_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loop from the migration page that returns to kube-proxy node by node."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for name, text in (("kubectl", KUBECTL), ("sleep", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(test_runbook.ROOT))
    (ready,) = (part for part in test_runbook.blocks("migration.md") if "ready() {" in part)
    (back,) = (part for part in test_runbook.blocks("migration.md") if "--only=own" in part)
    loop = back.partition("kubectl delete -k")[0]
    said = test_runbook.type_in(f"{ready.partition('NODE=')[0]}{loop}", str(folder))
    assert re.search(r"^removed: (?!nothing)", said, re.MULTILINE), said


@contextlib.contextmanager
def _undisturbed(node: lab.Lab) -> Iterator[Callable[[], None]]:
    """Fail at the end of the block if a request has failed.

    The block gets a function that fails if an open connection is lost.
    """
    held = [node.open(*one) for one in LONG_LIVED]

    def check_held() -> None:
        assert [one.ask() for one in held] == [one.backend for one in held]

    with contextlib.ExitStack() as loads:
        results = [loads.enter_context(node.load(*one[:4], src=one.src, interval_s=patience.seconds(0.1))) for one in CLIENTS]
        yield check_held
    assert {client: load.failures for client, (load,) in zip(CLIENTS, results, strict=True) if load.failed} == {}
    assert all(load.outcomes["ok"] > 10 for (load,) in results), "clients have sent requests throughout"
    for one in held:
        one.abort()
