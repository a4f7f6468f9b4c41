"""Tests ``scripts/conformance`` with stand-ins for ``e2e.test`` and ``ginkgo``. The stand-ins write reports as Ginkgo 2 does."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/conformance"
STAND_IN = """#!{python}
import os, pathlib, re, sys
own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
options = dict(item.lstrip("-").removeprefix("ginkgo.").split("=", 1) for item in own if "=" in item)
report = pathlib.Path(options.get("output-dir", ""), options["junit-report"])
(pathlib.Path(sys.argv[0]).parent / (report.stem + ".command")).write_text(" ".join(sys.argv))
if os.environ.get("BROKEN"):
    sys.exit("no such flag")
cases = ['<testcase name="[SynchronizedBeforeSuite]" status="passed"/>']
for line in pathlib.Path(sys.argv[0]).with_name("tests").read_text().splitlines():
    status, message, name = line.split("|")
    if not re.search(options["focus"], name) or re.search(options["skip"], name):
        status, message = "skipped", "skipped"
    elif "--ginkgo.dry-run" in sys.argv:
        status, message = "passed", ""
    skipped = '<skipped message="%s"/>' % message if status in ("skipped", "pending") else ""
    cases.append('<testcase name="[It] %s" status="%s">%s</testcase>' % (name, status, skipped))
report.write_text("<testsuites><testsuite>%s</testsuite></testsuites>" % "".join(cases))
sys.exit(1 if "failed" in report.read_text() else 0)
"""
AFFINITY = "[sig-network] Services should have session affinity [Conformance]"
TESTS = f"""passed||{AFFINITY}
timedout||[sig-network] Services should fallback to local terminating endpoints
skipped|skipped - needs 3 zones|[sig-network] Traffic Distribution should route traffic to the same zone
passed||[sig-network] KubeProxy should set TCP CLOSE_WAIT timeout [Serial]
passed||[sig-network] Services should survive the end of the API server [Disruptive]
passed||[sig-network] NetworkPolicy should deny ingress
passed||[sig-apps] Services of another group
"""


@pytest.fixture
def programs(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with the stand-ins for e2e.test and ginkgo.

    Its file ``tests`` lists the tests whose results the stand-ins report.
    """
    for name in ("e2e.test", "ginkgo"):
        path = tmp_path / name
        path.write_text(STAND_IN.replace("{python}", sys.executable))
        path.chmod(0o755)
    (tmp_path / "tests").write_text(TESTS)
    (tmp_path / "kubeconfig").touch()
    return tmp_path


def copied_script(programs: pathlib.Path) -> pathlib.Path:
    """A copy of the script, so that the results of other runs are not changed."""
    script = programs / "project/scripts/conformance"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.read_text().replace("#!/usr/bin/env python3", f"#!{sys.executable}"))
    script.chmod(0o755)
    return script


def run(programs: pathlib.Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = copied_script(programs)
    command = [str(script), "--kubeconfig", str(programs / "kubeconfig"), "--binaries", str(programs), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": "", **environment})


def test_the_results_of_the_parallel_and_the_serial_tests_are_counted_by_status(programs: pathlib.Path) -> None:
    done = run(programs, "--name", "kube-proxy", "--processes", "7")
    assert re.search(r"passed +2\n +failed +1\n +skipped +1\n", done.stdout), done.stdout
    assert "failed: [sig-network] Services should fallback to local terminating endpoints" in done.stdout
    assert done.returncode == 1
    assert "--procs=7" in (programs / "parallel.command").read_text()
    serial = (programs / "serial.command").read_text()
    assert serial.startswith(str(programs / "e2e.test")), "tests that must be alone are not run by ginkgo's processes"
    saved = json.loads((programs / "project/build/conformance/kube-proxy.json").read_text())
    assert saved[AFFINITY] == "passed"
    assert len(saved) == 4


def test_the_script_uses_the_programs_in_path_and_asks_kind_for_the_kubeconfig_of_a_cluster(programs: pathlib.Path) -> None:
    kind = programs / "kind"
    kind.write_text(
        '#!/bin/sh\n[ "$*" = "get kubeconfig --name blue" ] || { echo "no nodes" >&2; exit 1; }\necho "server: blue"\n'
    )
    kind.chmod(0o755)
    script = copied_script(programs)
    environment = {"PATH": str(programs)}
    done = subprocess.run([script, "--kind", "blue"], capture_output=True, text=True, check=False, env=environment)
    assert re.search(r"passed +2\n", done.stdout), done.stdout + done.stderr
    kubeconfig = programs / "project/build/conformance/ipvsproxy/kubeconfig"
    assert kubeconfig.read_text() == "server: blue\n"
    assert kubeconfig.stat().st_mode & 0o077 == 0, "the file has the key of an administrator"
    for command in ("parallel.command", "serial.command"):
        assert f"--kubeconfig={kubeconfig}" in (programs / command).read_text()

    done = subprocess.run([script, "--kind", "red"], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (2, "scripts/conformance: --kind: no nodes\n")


def test_a_failure_that_the_other_proxy_also_has_does_not_count_as_a_new_failure(programs: pathlib.Path) -> None:
    run(programs, "--name", "kube-proxy")
    done = run(programs, "--beside", "kube-proxy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed / failed: " in done.stdout
    (programs / "tests").write_text(TESTS.replace("passed||" + AFFINITY, "panicked||" + AFFINITY))
    done = run(programs, "--beside", "kube-proxy")
    assert done.returncode == 1
    assert f"failed / passed: {AFFINITY}" in done.stdout


def test_the_list_option_prints_the_tests_and_runs_none(programs: pathlib.Path) -> None:
    done = run(programs, "--list")
    names = [line for line in done.stdout.splitlines() if line.startswith("[sig")]
    assert len(names) == 4
    assert AFFINITY in names
    assert not list((programs / "project/build/conformance").glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        ([], {"BROKEN": "yes"}, "the parallel part left no report"),
        (["--beside", "nobody"], {}, "no result of an earlier run"),
        (["--binaries", "/nonexistent"], {}, "kubernetes-test-linux-ARCH.tar.gz"),
        (["--kubeconfig", "/nonexistent"], {}, "cannot be read"),
    ],
)
def test_a_conformance_run_that_is_impossible_is_refused_with_the_reason(
    programs: pathlib.Path, arguments: list[str], environment: dict[str, str], reason: str
) -> None:
    done = run(programs, *arguments, **environment)
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_run_that_skips_every_test_does_not_count_as_success(programs: pathlib.Path) -> None:
    (programs / "tests").write_text("passed||[sig-apps] Deployment should roll\n")
    done = run(programs)
    assert done.returncode == 2
    assert "no test ran" in done.stderr
