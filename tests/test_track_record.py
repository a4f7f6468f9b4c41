"""The track record names only existing tests and commits.

The command ``scripts/track-record`` reports each former fault that today's tests no longer find.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests import track_record
from tests.chaos import plan
from tests.track_record import ROOT, Row

ROWS = track_record.rows(track_record.PAGE.read_text())


def test_every_column_of_the_track_record_is_read() -> None:
    page = "| fault | found by |\n| --- | --- |\n| one | chaos | `scripts/x --y` | `abc1234` | `a\\|b` |\n"
    page += "| two | review | `t.py::a` | `abc` |\n"
    assert track_record.rows(page) == [
        Row("one", "chaos", "scripts/x --y", "abc1234", "a|b"),
        Row("two", "review", "t.py::a", "abc", ""),
    ]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault[:60])
def test_each_row_names_an_existing_test_or_an_existing_kind_of_chaos(row: Row) -> None:
    tests = re.findall(r"(tests/\S+\.py)(?:::(\w+))?", row.command)
    for file, name in tests:
        assert re.search(rf"def {name}\b", (ROOT / file).read_text()), row.command
    kinds = re.findall(r"--only=(\S+)", row.command)
    assert all(kind in plan.KINDS for kind in kinds), row.command
    assert tests or kinds


@pytest.mark.parametrize("commit", sorted({row.commit for row in ROWS}))
def test_each_commit_in_the_track_record_is_an_ancestor_of_the_current_commit(commit: str) -> None:
    if not (ROOT / ".git").exists() or (ROOT / ".git/shallow").exists():
        pytest.skip("the history is not here")
    subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("command", "trouble"),
    [
        ("echo lost && false", ""),
        ("echo other && false", "without the symptom 'lost':\nother\n"),
        ("echo lost", "the fault is no longer found"),
    ],
)
def test_a_fault_counts_as_found_only_if_the_command_fails_and_prints_the_symptom(
    command: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track_record, "PROGRAMS", tmp_path)
    (tmp_path / "abc/ipvsproxy").mkdir(parents=True)
    assert track_record.run(Row("fault", "chaos", command, "abc", "lost"), mended=False) == trouble


@pytest.mark.parametrize(("command", "names"), [("scripts/x", "IPVSPROXY_TEST_PROGRAM"), ("pytest", "PYTHONPATH")])
def test_scripts_and_pytest_use_the_program_of_the_commit_in_the_row(
    command: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(track_record, "PROGRAMS", tmp_path)
    monkeypatch.setattr(track_record, "SHELL", ("/bin/sh", "-c", f"echo ${names}; exit 1"))
    (tmp_path / "abc/ipvsproxy").mkdir(parents=True)
    assert not track_record.run(Row("fault", "chaos", command, "abc", f"^{tmp_path}/abc$"), mended=False)
