"""The commands of docs/runbook.md, migration.md and running.md run as printed, and none of them fails.

The commands of the runbook run on a real kernel. The commands of the other pages change a cluster, so they run with a stand-in
for kubectl; ``tests/packets/test_over_and_back.py`` runs the commands of the migration on a node.

Lines that inspect iptables and ipset run only with the iptables backend. Lines that inspect nftables run only with the nftables
backend. The stand-in for kubectl runs the command of "exec" on this machine. The stand-in fails if a file to apply is missing, or
if the folder after -k has no kustomization.yaml. The tests do not cover what a real cluster would answer.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
import yaml

from ipvsproxy.model.rules import Backend
from scripts.kernels import control
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.support.program import STARTER, Ended, Program, run_in_turn

ROOT = pathlib.Path(__file__).parents[1]
DEMO = ROOT / "manifests/demo"
KUBECTL = """\
#!/bin/bash
echo "kubectl $*" >>"${0%/*}/calls"
configuration=${0%/*}/config.conf
case " $* " in
    *" exec "*)
        while [[ $1 != -- ]]; do shift; done
        shift 2
        [[ $1 == -c ]] && exec env NODE_NAME=demo-node sh -c "${2//\\/var\\/lib\\/kube-proxy\\/config.conf/$configuration}"
        exit 9 ;;
    *" get configmap "*) cat "$configuration" ;;
    *" get pods "*" -o name "*) echo pod/ipvsproxy-1 ;;
    *" get nodes "*) echo worker-1 worker-2 ;;
    *" kustomize "*) exec @KUBECTL@ "$@" ;;
    *" apply -f - "*) { echo ---; cat; } >>"${0%/*}/applied" ;;
    *" -k "*) [[ -e ${!#}/kustomization.yaml ]] ;;
    *" --patch-file "*) [[ -e ${!#} ]] ;;
    *" logs "*) echo "synced differences=0 failed=0" ;;
    *) exit 0 ;;
esac
"""
SLEEP = "#!/bin/sh\n"
IPVSPROXY = '#!/bin/sh\nexec python3 -m ipvsproxy "$@"\n'
ASKING = """\
#!/bin/bash
cd "${0%/*}"
printf '%s\\n' "$@" >asked
read -r status <answered
cat output
cat error >&2
exit "$status"
"""
"""The stand-in for ipvsproxy that passes its arguments to ``answering``."""
CONFIGURATION = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: ipvs
clusterCIDR: 10.244.0.0/16,fd00:10:244::/56
enableProfiling: true
healthzBindAddress: 0.0.0.0:10256
metricsBindAddress: 127.0.0.1:10249
conntrack: {maxPerCore: 0}
ipvs: {scheduler: rr}
"""
CONFIG = "--config=/var/lib/kube-proxy/config.conf"
ELSEWHERE = ("podman ", "(cd manifests/", "ipvsproxy() { podman ", "kubectl debug ")
"""The beginnings of commands that need a registry or change the repository; the tests leave out these commands."""
OF_OTHER_BACKEND = {Backend.IPTABLES: ("nft ",), Backend.NFTABLES: ("ipset ", "iptables-save ")}
"""For each backend, the beginnings of commands that find nothing, because they inspect the other backend."""
NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl, which brings kustomize, is not installed")
BACKENDS = [Backend.IPTABLES, pytest.param(Backend.NFTABLES, marks=NEEDS_NF_TABLES)]
IN_THE_REPORT = {
    Backend.IPTABLES: ("create KUBE-CLUSTER-IP", ":KUBE-SERVICES"),
    Backend.NFTABLES: ("set KUBE-CLUSTER-IP {", "chain IPv4-nat-KUBE-SERVICES {"),
}


def blocks(document: str, backend: Backend = Backend.IPTABLES) -> list[str]:
    """A document's shell commands for one backend, as one string for each heading."""
    lines = ["".join(commands).splitlines(keepends=True) for _, commands in _sections(document) if commands]
    left_out = (*ELSEWHERE, *OF_OTHER_BACKEND[backend])
    return ["".join(line for line in part if not line.startswith(left_out)) for part in lines]


def blocks_of(document: str, heading: str) -> list[str]:
    """The blocks of shell commands below the heading that begins with the text ``heading``."""
    (found,) = (commands for title, commands in _sections(document) if title.startswith(heading))
    return [re.sub(rf"^({'|'.join(map(re.escape, ELSEWHERE))}).*\n", "", block, flags=re.MULTILINE) for block in found]


def _sections(document: str) -> list[tuple[str, list[str]]]:
    """The headings of a document, each with its blocks of shell commands."""
    parts = re.split(r"^##+ ", (ROOT / "docs" / document).read_text(), flags=re.MULTILINE)
    return [(part, re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL)) for part in parts]


@pytest.fixture
def backend() -> Backend:
    """The rules backend of the program, unless a test chooses another backend."""
    return Backend.IPTABLES


@pytest.fixture
def tools(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, backend: Backend) -> pathlib.Path:
    """A folder in PATH with the stand-ins and with a configuration by which ipvsproxy serves the demo's Services."""
    tools = tmp_path / "tools"
    tools.mkdir()
    kubectl = KUBECTL.replace("@KUBECTL@", shutil.which("kubectl") or "false")
    for name, text in (("kubectl", kubectl), ("ipvsproxy", IPVSPROXY), ("sleep", SLEEP)):
        control.write_program(tools / name, text)
    (tools / "config.conf").write_text(CONFIGURATION + f"ipvsproxy: {{manifests: {DEMO}, rulesBackend: {backend}}}\n")
    monkeypatch.setenv("PATH", f"{tools}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    return tools


@pytest.fixture
def running(tools: pathlib.Path, tmp_path: pathlib.Path, network_namespace: None) -> Iterator[None]:
    """A node on which the daemon ipvsproxy runs.

    There, a stand-in replaces the program ``ipvsproxy`` and executes its command lines.
    """
    for command in ("link add eth0 type dummy", "address add 172.18.0.2/16 dev eth0", "link set eth0 up"):
        subprocess.run(("ip", *command.split()), check=True)
    pathlib.Path("/proc/sys/net/ipv6/conf/all/forwarding").write_text("1")
    (tmp_path / "log").touch()
    with Program(
        DEMO, tmp_path / "log", f"--config={tools / 'config.conf'}", "--hostname-override=demo-node", starter=STARTER
    ) as program:
        program.wait_until_synced()
        with answering(tools):
            yield


@contextlib.contextmanager
def answering(tools: pathlib.Path) -> Iterator[None]:
    """Run each command line of the stand-in for ipvsproxy in a forked process, which starts faster than a new program."""
    asked, answered = tools / "asked", tools / "answered"
    os.mkfifo(asked)
    os.mkfifo(answered)
    control.write_program(tools / "ipvsproxy", ASKING)

    def answer() -> None:
        while words := asked.read_text().splitlines():
            try:
                (ended,) = run_in_turn(words, within_s=300)
            except subprocess.SubprocessError as error:
                ended = Ended(9, "", str(error))
            (tools / "output").write_text(ended.output)
            (tools / "error").write_text(ended.error)
            answered.write_text(f"{ended.status}\n")

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        asked.write_text("")
        thread.join()


def type_in(commands: str, folder: pathlib.Path) -> str:
    """Run command lines in one shell in ``folder``, and return the output.

    The folder first gets a symbolic link named ``manifests``, which leads to the project's ``manifests``.
    """
    (folder / "manifests").symlink_to(ROOT / "manifests")
    done = subprocess.run(
        ("bash", "-eEu", "-o", "pipefail", "-c", f"trap 'echo failed: $BASH_COMMAND' ERR\n{commands}"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, textwrap.shorten(done.stdout[-1500:] + done.stderr[-1500:], 3000)
    return done.stdout


@pytest.mark.kernel
@pytest.mark.usefixtures("running")
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_command_of_the_runbook_works_as_printed(tmp_path: pathlib.Path, backend: Backend) -> None:
    said = type_in("".join(blocks("runbook.md", backend)), tmp_path)
    assert "\n200\n" in said.replace("}200", "}\n200")
    assert "Service demo/web (ClusterIP)" in said
    assert "TCP 10.96.0.80:80 (cluster IP), rr" in said
    assert "0 differences" in said or "equal" in said
    assert re.search(r"^demo-node: 0 failures, \d+ warnings?, \d+ notes?", said, re.MULTILINE)
    report = (tmp_path / "report.txt").read_text()
    for part in ('"command": "explain"', "demo/web:http", *IN_THE_REPORT[backend], "kube-ipvs0"):
        assert part in report


@NEEDS_KUBECTL
def test_every_command_of_the_pages_about_migration_and_updates_works_as_printed(
    tmp_path: pathlib.Path, tools: pathlib.Path
) -> None:
    for name in ("curl", "ipvsadm"):
        control.write_program(tools / name, f'#!/bin/sh\necho {name} "$*" >>{tools}/calls\n')
    assert "mode: ipvs" in type_in("".join(blocks("migration.md") + blocks("running.md")), tmp_path)
    calls = (tools / "calls").read_text()
    for folder in ("beside-kube-proxy", "replace-kube-proxy", "cleanup-on-all-nodes", "own-configuration"):
        assert f"apply -k manifests/overlays/{folder}" in calls
    assert "localhost:10256/healthz\nipvsadm -Ln\n" in calls
    assert "get nodes -l kubernetes.io/os=linux,!service-proxy " in calls, "no pod would ever come to any other node"
    over, back = "app.kubernetes.io/component=proxy", "k8s-app=kube-proxy"
    for node in ("worker-1", "worker-2"):
        for given, label, times in (("service-proxy=ipvsproxy", over, 1), ("service-proxy-", back, 2)):
            one_node = (
                f"kubectl label node {node} {given}\n"
                f"kubectl -n kube-system get pods -l {label} --field-selector spec.nodeName={node} -o name\n"
                f"kubectl -n kube-system wait pod -l {label} --field-selector spec.nodeName={node} --for=condition=Ready"
            )
            assert calls.count(one_node) >= times, "each node is waited for before the next one is touched"


def test_the_printed_shell_function_gives_up_waiting_for_a_pod_after_sixty_attempts(tmp_path: pathlib.Path) -> None:
    (ready,) = (part for part in blocks("migration.md") if "ready() {" in part)
    stands_in = 'kubectl() { [[ $* != *" wait "* ]]; }; sleep() { echo slept; }\n'
    script = f"{stands_in}{ready.partition('NODE=')[0]}ready worker-1 k8s-app=kube-proxy || echo gave up\n"
    done = subprocess.run(("bash", "-c", script), cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [*["slept"] * 60, "gave up"]


@NEEDS_KUBECTL
def test_the_cleanup_job_on_the_named_node_runs_first_as_a_dry_run_and_then_removes_objects(
    tmp_path: pathlib.Path, tools: pathlib.Path
) -> None:
    (clean,) = (part for part in blocks("migration.md") if "kubectl drain $NODE" in part and "manifests/cleanup" in part)
    type_in(clean, tmp_path)
    jobs = list(yaml.safe_load_all((tools / "applied").read_text()))
    pods = [job["spec"]["template"]["spec"] for job in jobs]
    assert {(job["kind"], job["metadata"]["name"]) for job in jobs} == {("Job", "ipvsproxy-cleanup")}
    assert [pod["nodeName"] for pod in pods] == ["worker-1"] * 2
    assert [pod["containers"][0]["args"] for pod in pods] == [[CONFIG, "--dry-run=true"], [CONFIG, "--dry-run=false"]]


@NEEDS_KUBECTL
def test_the_cleanup_jobs_for_returning_to_kube_proxy_remove_only_what_kube_proxy_does_not_know(
    tmp_path: pathlib.Path, tools: pathlib.Path
) -> None:
    parts = blocks("migration.md")
    (ready,) = (part for part in parts if "ready() {" in part)
    (back,) = (part for part in parts if "--only=own" in part)
    type_in(ready.partition("NODE=")[0] + back, tmp_path)
    applied = list(yaml.safe_load_all((tools / "applied").read_text()))
    pods = [one["spec"]["template"]["spec"] for one in filter(None, applied)]
    assert [pod.get("nodeName") for pod in pods] == ["worker-1", "worker-2", None]
    cleaning = [
        container for pod in pods for container in (*pod.get("initContainers", ()), *pod["containers"]) if "args" in container
    ]
    assert [(*one["command"], *one["args"]) for one in cleaning] == [("ipvsproxy", "cleanup", CONFIG, "--only=own")] * 3
