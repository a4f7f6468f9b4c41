"""The faults that docs/track-record.md lists.

For each fault, today's tests must fail if they test the last version that has the fault.

Each row of the page's tables describes one fault. ``scripts/track-record`` unpacks the package ``ipvsproxy`` of the row's commit
into build/track-record, and then runs the row's command. If the command runs a script of ``scripts/``, the old package becomes
the program under test. Otherwise, pytest imports the old package. The command must fail with the symptom of the row.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/track-record.md"
PROGRAMS = ROOT / "build/track-record"
SHELL = ("/bin/bash", "-o", "pipefail", "-c")
LIMIT_S = 1200.0
_CODE = re.compile(r"`([^`]+)`")


class Row(NamedTuple):
    """One fault.

    If ``symptom`` is empty, no old program shows the fault, and ``command`` is the test that would find the fault today.
    """

    fault: str
    found_by: str
    command: str
    commit: str
    symptom: str


def rows(page: str) -> list[Row]:
    """Read the rows of all tables of the page.

    If a row has no symptom, its command is the test that would find the fault today.
    """
    cells = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    return [Row(fault, found_by, *map(_code, (*rest, "")[:3])) for fault, found_by, *rest in cells if _code("".join(rest))]


def _code(cell: str) -> str:
    found = _CODE.search(cell)
    return found[1].replace("\\|", "|") if found else ""


def unpack(commit: str) -> pathlib.Path:
    """Return a folder with the package ``ipvsproxy`` as it was at this commit."""
    folder = PROGRAMS / commit
    if not (folder / "ipvsproxy").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([*SHELL, 'git archive "$0" ipvsproxy | tar x -C "$1"', commit, folder], cwd=ROOT, check=True)
    return folder


def run(row: Row, *, mended: bool) -> str:
    """Run the command of a row; returns a description of the problem, or an empty text if there is no problem."""
    environment = os.environ | {"IPVSPROXY_TEST_THOROUGH": "1"}  # run thorough tests, too, because a skipped test finds no fault
    if not mended:
        folder = str(unpack(row.commit))
        if re.search(r"(^| )scripts/", row.command):
            environment["IPVSPROXY_TEST_PROGRAM"] = folder
        else:  # makes pytest import the old package before a test imports ipvsproxy
            environment |= {"PYTHONPATH": folder, "PYTEST_ADDOPTS": "-p ipvsproxy"}
    try:
        done = subprocess.run(
            [*SHELL, row.command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {LIMIT_S:.0f} s"
    (PROGRAMS / "last.txt").write_text(done.stdout)
    if mended:
        return "" if done.returncode == 0 else f"status {done.returncode} of today's program:\n{done.stdout[-3000:]}"
    if done.returncode == 0:
        return "the fault is no longer found"
    return "" if re.search(row.symptom, done.stdout) else f"without the symptom {row.symptom!r}:\n{done.stdout[-3000:]}"


def main() -> int:
    """Run the chosen rows of the track record."""
    parser = argparse.ArgumentParser(prog="scripts/track-record", description="Prove that old faults are still found.")
    parser.add_argument("--mended", action="store_true", help="run today's program, which must have none of the faults")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only rows with one of these words")
    arguments = parser.parse_args()
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    chosen = [
        row
        for row in rows(PAGE.read_text())
        if row.symptom and (not arguments.words or any(word in " ".join(row) for word in arguments.words))
    ]
    failed = 0
    for row in chosen:
        trouble = run(row, mended=arguments.mended)
        failed += bool(trouble)
        sys.stdout.write(f"{row.commit} {row.command}: {trouble or ('passes' if arguments.mended else 'found')}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - failed} of {len(chosen)}\n")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
