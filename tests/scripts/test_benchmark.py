"""The benchmark measures the program as it is now, and says what it found. What it finds is nobody's assertion."""

import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types
from xml.etree import ElementTree as ET

import pytest

from scripts.benchmark import cases, figures, report

ROOT = pathlib.Path(__file__).parents[2]
SERVICES, ENDPOINTS = 20, 3


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> types.ModuleType:
    """``scripts/bench``, which keeps its figures in ``tmp_path``."""
    loader = importlib.machinery.SourceFileLoader("bench", str(ROOT / "scripts/bench"))
    found = importlib.util.spec_from_loader("bench", loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    monkeypatch.setattr(module, "STORED", tmp_path / "benchmarks.json")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "benchmarks.svg")
    return module


def test_the_whole_program_is_measured_without_a_kernel() -> None:
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    cold = ["own", {"what": "cold", "arguments": {"pages": [SERVICES, ENDPOINTS]}}]
    steady = {"pages": [SERVICES, ENDPOINTS], "services": SERVICES, "endpoints": ENDPOINTS, "churn_s": 0.2, "changes": 3}
    parts = ["change", "rolling", "scrape", "churn"]
    wanted = [cold, ["own", {"what": "steady", "arguments": {**steady, "parts": parts}}]]
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "scripts.benchmark.guest", json.dumps(wanted)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    started, served = map(json.loads, done.stdout.splitlines())
    assert "error" not in started, started["error"]
    assert "error" not in served, served["error"]
    assert started["failed"] == started["pending"] == 0
    assert started["counts"]["messages"] > SERVICES * (1 + ENDPOINTS), "each virtual and real server has a message"
    assert served["change"]["messages"] >= 3, "one added, one set to weight 0, one removed"
    assert served["rolling"]["events"] == 100
    assert served["rolling"]["operations_p50"] == 3, "of a thousand endpoints only what changed"
    assert served["scrape"]["series"] == 5 * (SERVICES + 1), "each Service has had traffic, that of the rolling update as well"
    assert served["churn"]["backlog"] >= 0
    assert served["churn"]["waiting"] >= 0
    for part in parts:
        assert served[part]["counts"]["system calls"] >= served[part]["counts"]["calls"]


def test_a_figure_beyond_its_target_is_a_miss() -> None:
    rows = [figures.Row("start 10x1", "wall s, best", 2.0, 1.0), figures.Row("idle", "processor %", 0.1, 0.2)]
    heading, miss, good = report.table(rows, {("idle", "processor %"): 0.2})
    assert "relative" in heading
    assert "MISS" in miss
    assert "ok" in good
    assert good.endswith("0.50")


def test_the_picture_has_a_line_for_each_series_that_was_measured() -> None:
    rows = [
        *(figures.Row(f"start {size}x10", "wall s, best", size / 1000) for size in (100, 1000, 10000)),
        *(figures.Row(f"change {size}x10", "p50 ms", 1.0) for size in (100, 10000)),
        figures.Row("start 5000x50", "wall s, best", 1.0),
    ]
    root = ET.fromstring(report.picture(rows))  # noqa: S314 - we wrote it
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 2]
    assert report.picture([figures.Row("idle", "processor %", 0.1)]) == ""


def test_what_several_cases_tell_together_is_relative_to_the_main_one() -> None:
    rows = [figures.Row("start 10000x10", "ratio to replay", 3.0), figures.Row("start 5000x50", "ratio to replay", 3.3)]
    (row,) = cases.related(rows)
    assert (row.case, round(row.value, 3), row.target, row.ok) == ("start 5000x50", 1.1, 1.2, True)


def test_figures_are_written_as_rows_of_five_fields(bench: types.ModuleType) -> None:
    rows = [figures.Row("idle", "processor %", 0.3, 0.2), figures.Row("scrape", "bytes", 48899)]
    assert json.loads(bench.as_json(rows)) == [
        {"case": "idle", "figure": "processor %", "value": 0.3, "target": 0.2, "ok": False},
        {"case": "scrape", "figure": "bytes", "value": 48899, "target": None, "ok": True},
    ]


def test_what_cases_of_several_runs_tell_together_is_of_those_that_are_kept(bench: types.ModuleType) -> None:
    bench.save([figures.Row("start 10000x10", "ratio to replay", 3.2), figures.Row("start 44125x2", "ratio to replay", 1.6)])
    bench.save([figures.Row("start 10000x10", "ratio to replay", 2.0)])
    kept = {(row["case"], row["figure"]): row["value"] for row in bench.stored()}
    assert kept["start 44125x2", "ratio, relative to that of 10000x10"] == 0.8
    bench.save([figures.Row("start 44125x2", "ratio to replay", 2.6)])
    kept = {(row["case"], row["figure"]): row["value"] for row in bench.stored()}
    assert kept["start 44125x2", "ratio, relative to that of 10000x10"] == 1.3
    assert len(kept) == len(bench.stored()), "each figure once"


def test_a_file_that_can_not_be_written_is_told_before_anything_is_measured(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "--json", "/nowhere/figures.json"])
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 2
    assert "/nowhere is no directory" in capsys.readouterr().err
