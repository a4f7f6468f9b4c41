"""The commands that only inspect a node, on a real kernel, while ipvsproxy runs and after it has stopped.

The tests show that the output of the commands agrees with the kernel, and that no command changes the kernel. The output of each
command is tested in more detail in the test module of that command.
"""

import subprocess
from pathlib import Path

import pytest

from tests.support.program import Ended, Program, run_in_turn

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests/demo"
FLAGS = ("--hostname-override=demo-node", "--cluster-cidr=10.244.0.0/16,fd00:10:244::/48")
SYSCTL = Path("/proc/sys/net/ipv4/vs/expire_nodest_conn")

pytestmark = pytest.mark.kernel


def _run(*commands: str, manifests: Path = MANIFESTS) -> list[Ended]:
    return run_in_turn(*([*command.split(), f"--manifests={manifests}", *FLAGS] for command in commands), within_s=300)


def _shown(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.fixture
def _node(network_namespace: None) -> None:
    for words in (("link", "add", "eth0", "type", "dummy"), ("addr", "add", "172.18.0.2/16", "dev", "eth0")):
        subprocess.run(("ip", *words), check=True, timeout=300)


def _state() -> list[str]:
    """All kernel objects that an inspecting command might have changed."""
    shown = [_shown(*command.split()) for command in ("ipvsadm -Sn", "ipset save", "ip -o addr", "ip -o link")]
    rules = [line for line in _shown("iptables-save").splitlines() if line.startswith(("-A", ":KUBE"))]
    return [*shown, *rules, SYSCTL.read_text()]


@pytest.mark.usefixtures("_node")
def test_no_inspecting_command_and_no_dry_run_changes_an_empty_node(tmp_path: Path) -> None:
    before, log = _state(), tmp_path / "log"
    *looked, doctor = _run("plan", "verify", "explain demo/web", "explain demo/none", "doctor")
    assert [answer.status for answer in looked] == [0, 1, 0, 1], looked
    assert doctor.status in (0, 1)
    with Program(MANIFESTS, log, *FLAGS, "--dry-run") as program:
        program.wait_until(lambda: b"differences=" in log.read_bytes(), "looked", 60)
    assert _state() == before
    assert "event=differs" in log.read_text()
    assert "address=127.0.0.1:10349" in log.read_text()


@pytest.mark.usefixtures("_node")
def test_list_prints_the_names_of_services_beside_the_rows_of_ipvsadm(tmp_path: Path) -> None:
    for command in ("-A -f 7 -s wlc", "-a -f 7 -r 10.9.9.9 -m", "-A -t 192.0.2.1:80 -s rr -p 60"):
        subprocess.run(("ipvsadm", *command.split()), check=True, timeout=300)
    with Program(MANIFESTS, tmp_path / "log", *FLAGS, starter=("-m", "ipvsproxy")) as program:
        program.wait_until_synced()
        shown, before = _shown("ipvsadm", "-Ln").splitlines(), _state()
        bare = run_in_turn(["list"], ["explain", "pod-1-12"], within_s=300)
    listed, *_ = _run("list", "plan", "verify", "explain 10.96.0.80:80")
    assert listed.status == 0, listed.error
    names = {}
    for row in map(str.rstrip, shown):
        (line,) = {line for line in listed.output.splitlines() if line.startswith(row)}
        names[" ".join(row.split()[:2])] = line.removeprefix(row).strip()
    assert names["TCP 10.96.0.80:80"] == names["TCP [fd00:10:96::80]:80"] == "demo/web:http"
    assert names["TCP 172.18.0.2:30080"] == "demo/shop:http"
    assert names["-> 10.244.1.12:8080"] == "demo/pod-1-12 on other-node"
    assert names["FWM 7"] == names["TCP 192.0.2.1:80"] == "(not ours)"
    assert names["-> 10.9.9.9:0"] == ""
    assert [line for line in bare[0].output.splitlines() if "demo/pod-1-12 on other-node" in line], bare[0].error
    assert "with the flags of the ipvsproxy that runs here" in bare[0].error
    assert "  demo/web port 'http' TCP 80, IPv4: in" in bare[1].output.splitlines()
    (unnamed,) = _run("list", manifests=tmp_path / "absent")
    assert (unnamed.status, sorted(unnamed.output.splitlines())) == (2, sorted(shown))
    assert "absent is not a directory" in unnamed.error
    assert "names are missing above" in unnamed.error
    assert _state() == before
