"""Covers what scripts/test runs on each chosen kernel, and how many times. Small programs replace the kernel and pytest."""

import json
import pathlib
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from scripts.kernels import control

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts/test"
FOUND = (
    "tests/chaos/test_chaos.py::test_a_short_history_passes",
    "tests/kernel/test_contract.py::test_a[nftables]",
    "tests/kernel/test_ipvs.py::test_b",
    "tests/packets/test_services.py::test_c",
)
SETUP = """#!/bin/sh
echo "$@" >>setups
"""
# This stand-in collects tests and adds up results; it never runs as a worker.
PYTHON = f"""#!/bin/sh
case "$*" in
    *--collect-only*) printf '%s\\n' {" ".join(f"'{name}'" for name in FOUND)} ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
# The first worker of each variant claims all tests of the variant; all later workers claim none.
KERNEL = f"""#!{sys.executable}
import json, os, pathlib, sys
report = pathlib.Path(sys.argv[sys.argv.index("--junit-xml") + 1])
tests = pathlib.Path(sys.argv[-1][1:]).read_text().split()
names = ("IPVSPROXY_TEST_RULES_BACKEND", "IPVSPROXY_TEST_PATIENCE", "IPVSPROXY_KERNEL_REQUIRED")
words = sys.argv[1:sys.argv.index("--iptables") + 2]
call = {{"words": words, "tests": tests, "environment": [os.environ.get(name) for name in names]}}
with open("calls", "a") as calls:
    calls.write(json.dumps(call) + "\\n")
try:
    pathlib.Path(sys.argv[sys.argv.index("--share") + 1], "all").mkdir()
except FileExistsError:
    tests = []
failures = int(os.path.exists("broken") and bool(tests))
report.write_text(f'<testsuite tests="{{len(tests)}}" failures="{{failures}}" errors="0" skipped="0"/>')
sys.exit(failures if tests else 5)
"""

# A script that replaces python, coverage, scripts/kernel and scripts/check while scripts/test runs all tests. It reports one
# test, which fails if the file "broken" exists.
ANYTHING = f"""#!/bin/sh
case "$*" in
    -\\ *) exec {sys.executable} "$@" ;;
    *--collect-only*) echo "tests/test_a.py: 1" ;;
esac
while [ $# -gt 0 ]; do
    report="<testsuite tests='1' failures='$(ls broken 2>/dev/null | wc -l)' errors='0' skipped='0'/>"
    [ "$1" = --junit-xml ] && echo "$report" >"$2"
    shift
done
exit 0
"""


class Place:
    """A directory with a copy of scripts/test, and with stand-ins for the programs that scripts/test starts."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        for name, text in (("scripts/setup", SETUP), (".venv/bin/python", PYTHON), ("scripts/kernel", KERNEL)):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            control.write_program(path, text)
        shutil.copy(SCRIPT, root / "scripts/test")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.root / "scripts/test"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    def calls(self) -> list[dict[str, Any]]:
        """The recorded calls of the stand-in for ``scripts/kernel``: the words, tests and environment of each call."""
        return [json.loads(line) for line in (self.root / "calls").read_text().splitlines()]


@pytest.fixture
def place(tmp_path: pathlib.Path) -> Place:
    return Place(tmp_path)


def test_four_nf_tables_kernels_share_the_tests_that_concern_the_nftables_backend(place: Place) -> None:
    ended = place.run("--kernel=nf-tables")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "3 passed, 0 failed")
    assert (place.root / "setups").read_text() == "--with-nf-tables-kernel\n"
    first, *others = place.calls()
    # Later kernels might not be started, because earlier kernels may already have claimed all tests.
    assert all(call == first for call in others)
    assert len(others) <= 3
    assert first["words"] == ["--kernel", "nf-tables", "--timeout", "7200", "--iptables", "nft"]
    assert first["tests"] == [name for name in FOUND if "test_ipvs" not in name]
    assert first["environment"] == ["nftables", "1", "1"]


def test_each_rules_variant_runs_its_tests_with_its_iptables_programs_and_its_backend(place: Place) -> None:
    ended = place.run("--kernel=nf-tables", "--rules=legacy,nft,nftables")
    assert ended.stdout.splitlines()[-1] == "11 passed, 0 failed"
    kinds = {(call["words"][-1], call["environment"][0], len(call["tests"])) for call in place.calls()}
    assert kinds == {("legacy", None, 4), ("nft", None, 4), ("nft", "nftables", 3)}


def test_two_debian_kernels_run_the_tests_of_all_variants_with_time_limits_five_times_as_long(place: Place) -> None:
    ended = place.run("--kernel=debian", "--processors=1")
    assert ended.stdout.splitlines()[-1] == "11 passed, 0 failed"
    assert (place.root / "setups").read_text() == "--with-debian-kernel\n"
    assert {tuple(call["words"][:4]) for call in place.calls()} == {("--kernel", "debian", "--processors", "1")}
    assert {call["environment"][1] for call in place.calls()} == {"5"}
    assert max(Counter(json.dumps(call) for call in place.calls()).values()) <= 2


def test_the_run_fails_and_reports_one_failure_if_one_test_fails_on_a_kernel(place: Place) -> None:
    (place.root / "broken").touch()
    ended = place.run("--kernel=nf-tables")
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "2 passed, 1 failed")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--kernel=other"], "--kernel=other: debian or nf-tables can be chosen"),
        (["--kernel=nf-tables", "--rules=nft,iptables"], "--rules: 'iptables' is not one of nft, legacy, nftables"),
    ],
)
def test_an_unknown_value_of_the_option_kernel_or_rules_is_refused(place: Place, words: list[str], reason: str) -> None:
    ended = place.run(*words)
    assert (ended.returncode, ended.stderr) == (1, f"scripts/test: {reason}\n")
    assert not (place.root / "setups").exists()


def test_a_commit_is_recorded_as_tested_only_if_all_tests_pass_and_every_file_is_committed(place: Place) -> None:
    for name in (".venv/bin/python", ".venv/bin/coverage", "scripts/kernel", "scripts/check"):
        control.write_program(place.root / name, ANYTHING)
    noted = place.root / "build/tested"

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(("git", *identity, *words), cwd=place.root, capture_output=True, text=True, check=True).stdout

    assert place.run().returncode == 0
    assert not noted.exists(), "there is no commit"
    git("init", "--quiet")
    (place.root / ".gitignore").write_text("build/\nsetups\nbroken\n")
    git("add", "--all")
    git("commit", "--quiet", "--message=first")
    assert place.run().returncode == 0
    assert noted.read_text() == git("rev-parse", "HEAD")
    (place.root / "changed").touch()
    assert place.run().returncode == 0
    assert not noted.exists(), "a file is not committed"
    (place.root / "changed").unlink()
    (place.root / "broken").touch()
    assert place.run().returncode == 1
    assert not noted.exists(), "a test failed"
