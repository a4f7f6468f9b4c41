"""The demo: its help text, its success on a kernel with ip_vs, and its failure when an answer is wrong.

The installation of packages is not tested, because it needs a fresh machine.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from scripts import demo_mailbox, demo_node
from tests.support import lab

ROOT = Path(__file__).parents[1]
SAMPLED_WITHIN_S = 300.0
"""The longest wait until the page shows rates; the page computes a rate from two readings of the counters."""
UNTIL_CLIENTS_CONNECT = (
    'before=$(ipvsadm -Ln --stats); while [[ $(ipvsadm -Ln --stats) == "$before" ]]; do sleep 0.1; done; echo; echo clients go on'
)


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / "scripts/demo", *arguments], capture_output=True, text=True, check=False, timeout=300)


def test_the_help_of_the_demo_states_its_requirements_and_its_exit_status() -> None:
    shown = _demo("--help")
    assert shown.returncode == 0
    assert "needs root on Debian 12" in shown.stdout
    assert "Exit status" in shown.stdout


def test_an_unknown_argument_of_the_demo_is_refused_in_one_line_on_stderr() -> None:
    refused = _demo("--fast")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "scripts/demo: unknown argument '--fast'; see scripts/demo --help\n"


@contextlib.contextmanager
def _mailbox(directory: Path) -> Iterator[str]:
    """While the ``with`` block runs, relay requests to the node, as ``--stay`` does on the host; yields the URL for the user."""
    # any free port, because the node uses the default port
    command = [sys.executable, "-m", "scripts.demo_mailbox", str(directory), "0"]
    with subprocess.Popen(command, cwd=ROOT) as relay:
        try:
            while not (directory / "address").exists():
                assert relay.poll() is None
                time.sleep(0.05)
            yield (directory / "address").read_text()
        finally:
            relay.terminate()


@pytest.mark.kernel
def test_with_the_flag_stay_the_demo_succeeds_and_keeps_its_node_for_inspection(tmp_path: Path) -> None:
    with _mailbox(tmp_path) as address:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/ui/", address)
        command = [sys.executable, "-m", "scripts.demo_node", "--stay", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
            while not (tmp_path / "ready").exists():
                assert running.poll() is None
                time.sleep(0.1)
            page = urllib.request.urlopen(address, timeout=60)  # noqa: S310 - the test has checked the address
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]
            assert b"<title>ipvsproxy</title>" in page.read()
            busiest: Mapping[str, Any] = {}
            node: Mapping[str, Any] = {}
            deadline_s = time.monotonic() + SAMPLED_WITHIN_S
            while not (busiest.get("connectionsPerSecond") and node["connectionsPerSecond"]) and time.monotonic() < deadline_s:
                time.sleep(0.5)
                told = json.load(urllib.request.urlopen(f"{address}api/services.json?sort=connections", timeout=60))  # noqa: S310 - the test has checked the address
                node = json.load(urllib.request.urlopen(f"{address}api/node.json", timeout=60))  # noqa: S310 - the test has checked the address
                busiest = next(row for row in told["services"] if row["name"] == told["names"][0])
            top = [sys.executable, "-m", "ipvsproxy", "top", "--once", f"--server={address.removesuffix('/ui/')}"]
            shown = subprocess.run(top, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout
            (tmp_path / "1.draft").write_text(f"ipvsadm -Ln; nonsense; {UNTIL_CLIENTS_CONNECT}")
            (tmp_path / "1.draft").rename(tmp_path / "1.command")
            while not (tmp_path / "1.output").exists():
                assert running.poll() is None
                time.sleep(0.1)
            said = (tmp_path / "1.output").read_text()
            (tmp_path / "stop").touch()
            output, _ = running.communicate(timeout=300)
    assert running.returncode == 0, output
    assert busiest["connectionsPerSecond"] > 0
    assert node["connectionsPerSecond"] > 0
    assert node["inForce"] or node["reasons"]
    assert busiest["activeConnections"] is not None
    assert "demo/web" in shown
    assert "TCP  10.96.0.80:80 rr" in said
    assert "nonsense: command not found" in said
    assert said.endswith("\nclients go on\n")
    assert f"Open {address} in a browser" in output
    assert re.search(r"ssh -L (\d+):127\.0\.0\.1:\1 \S", output)
    assert f"ipvsproxy top --server={address.removesuffix('/ui/')}\n" in output
    assert "TCP  10.96.0.80:80 rr" in output
    assert "\033[" not in output
    assert "checks, all as expected" in output


_STUBS = {
    "scripts/setup": 'echo "setup $*" >>log',
    # Like scripts.demo_node with --stay, this stub answers each command in the mailbox until the file "stop" appears.
    "scripts/kernel": """
        directory=${*: -1} number=1
        touch "$directory/ready"
        while [[ ! -e $directory/stop ]]; do
            sleep 0.05
            [[ -e $directory/$number.command ]] || continue
            { echo "node ran: $(cat "$directory/$number.command")"; } >"$directory/draft"
            mv "$directory/draft" "$directory/$number.output"
            number=$((number + 1))
        done
        echo "the demo ends"
        exit 1
    """,
    ".venv/bin/python": "exec sleep 600",
}


@pytest.mark.skipif(os.geteuid() != 0, reason="scripts/demo needs root")
@pytest.mark.parametrize("last", ["exit\nnever\n", ""], ids=["exit", "end of input"])
def test_the_shell_of_the_demo_runs_each_line_in_the_node_until_exit_or_the_end_of_the_input(tmp_path: Path, last: str) -> None:
    for name, lines in _STUBS.items():
        stub = tmp_path / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{lines}\n")
        stub.chmod(0o755)
    shutil.copy(ROOT / "scripts/demo", tmp_path / "scripts/demo")
    ended = subprocess.run(
        [tmp_path / "scripts/demo", "--shell"],
        input=f"ipvsadm -Ln\n\nip address | head -1\n{last}",
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ended.returncode == 1, "the status of the demo"
    said = [line for line in ended.stdout.splitlines() if line.startswith(("node ran", "the demo"))]
    assert said == ["node ran: ipvsadm -Ln", "node ran: ip address | head -1", "the demo ends"]
    assert "Each line is a command in the node" in ended.stdout
    assert (tmp_path / "log").read_text() == "setup --for-demo\n"
    assert list((tmp_path / "build").iterdir()) == []


def test_the_demo_answers_a_request_even_if_no_metrics_server_listens(tmp_path: Path) -> None:
    (tmp_path / "1.request").write_text(json.dumps(["/ui/", {"Host": "localhost"}]))
    answer = tmp_path / "1.answer"
    demo_mailbox.answer_all(tmp_path, answer.exists)
    head, _, body = answer.read_bytes().partition(b"\n")
    assert json.loads(head)[0] in (200, 502)
    assert body


def test_the_demo_fails_and_names_the_failed_check_if_an_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test provides the answers instead of a node: the first answer is correct, and the second answer lacks a pod."""
    good, bad = demo_node.QUESTIONS[0], demo_node.QUESTIONS[4]
    results = {good.probe: good.expected, bad.probe: bad.expected._replace(backends=bad.expected.backends[1:])}
    node = types.SimpleNamespace(probe_all=lambda probes: [results[probe] for probe in probes])
    monkeypatch.setattr(lab, "Lab", lambda: contextlib.nullcontext(node))
    monkeypatch.setattr(
        demo_node, "_demonstrate", lambda screen, node, *_: [demo_node._put(screen, node, one) for one in (good, bad)]
    )
    assert demo_node.main() == 1
    shown = capsys.readouterr().out
    assert f"ok  {good.title} " in shown
    assert f"NO  {bad.title} " in shown
    assert "2 checks, 1 NOT as expected" in shown
