"""The benchmark measures the current program and reports the results. No test asserts a measured figure."""

import dataclasses
import functools
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree as ET

import pytest

from scripts.benchmark import cases, connections, figures, report
from scripts.benchmark import recording as recordings

ROOT = pathlib.Path(__file__).parents[2]
SERVICES, ENDPOINTS = 20, 3


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> types.ModuleType:
    """``scripts/bench``, which saves its figures in ``tmp_path``."""
    loader = importlib.machinery.SourceFileLoader("bench", str(ROOT / "scripts/bench"))
    found = importlib.util.spec_from_loader("bench", loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    monkeypatch.setattr(module, "STORED", tmp_path / "benchmarks.json")
    monkeypatch.setattr(module, "PICTURE", tmp_path / "benchmarks.svg")
    return module


@pytest.mark.parametrize("quick", [False, True])
def test_each_recording_of_a_case_has_a_name(*, quick: bool) -> None:
    """If a name were empty, the benchmark would open the folder of all recordings as a file."""
    given = [arguments for case in cases.all_cases(quick=quick) for _, arguments in case.measurements]
    names = [arguments["recording"] for arguments in given if "recording" in arguments]
    assert names
    assert all(names)


def test_the_benchmark_measures_the_whole_program_without_a_kernel(tmp_path: pathlib.Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a network namespace needs root")
    cold = ["own", {"what": "cold", "arguments": {"pages": [SERVICES, ENDPOINTS]}}]
    steady = {"pages": [SERVICES, ENDPOINTS], "services": SERVICES, "endpoints": ENDPOINTS, "churn_s": 0.2, "changes": 3}
    steady["recording"] = str(tmp_path / "recording")
    parts = ["change", "rolling", "scrape", "churn"]
    measurements = [cold, ["own", {"what": "steady", "arguments": {**steady, "parts": parts}}]]
    command = ["unshare", "--net", "--mount", sys.executable, "-m", "scripts.benchmark.guest", json.dumps(measurements)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    started, served = map(json.loads, done.stdout.splitlines())
    assert "error" not in started, started["error"]
    assert "error" not in served, served["error"]
    assert started["failed"] == started["pending"] == 0
    assert started["counts"]["messages"] > SERVICES * (1 + ENDPOINTS), "each virtual and real server has a message"
    assert served["change"]["messages"] >= 3, "one added, one set to weight 0, one removed"
    steps = {step for _, _, step in recordings.read(tmp_path / "recording").chunks}
    assert steps == {"", "change 0", "change 1", "change 2", "churn"}, "the kernel's share is found by these names"
    assert served["rolling"]["events"] == 100
    assert served["rolling"]["operations_p50"] == 3, "only the change, of a thousand endpoints"
    assert served["scrape"]["series"] == 5 * (SERVICES + 1), (
        "each Service has had traffic, including the one of the rolling update"
    )
    assert served["churn"]["backlog"] >= 0
    assert served["churn"]["waiting"] >= 0
    for part in parts:
        assert served[part]["counts"]["system calls"] >= served[part]["counts"]["calls"]


def test_a_figure_worse_than_its_target_is_reported_as_a_miss() -> None:
    rows = [figures.Row("start 10x1", "wall s, best", 2.0, 1.0), figures.Row("idle", "processor %", 0.1, 0.2)]
    heading, miss, good = report.table(rows, {("idle", "processor %"): 0.2})
    assert "relative" in heading
    assert "MISS" in miss
    assert "ok" in good
    assert good.endswith("0.50")
    _, missing = report.table([figures.unmeasured("churn")], {})
    assert "MISS" in missing


def test_the_chart_has_a_line_for_each_measured_series() -> None:
    rows = [
        *(figures.Row(f"start {size}x10", "wall s, best", size / 1000) for size in (100, 1000, 10000)),
        *(figures.Row(f"change {size}x10", "p50 ms", 1.0) for size in (100, 10000)),
        figures.Row("start 5000x50", "wall s, best", 1.0),
    ]
    root = ET.fromstring(report.picture(rows))  # noqa: S314 - the benchmark itself made this picture
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 2]
    assert report.picture([figures.Row("idle", "processor %", 0.1)]) == ""


def test_the_p50_of_another_case_is_shown_relative_to_the_p50_of_the_main_case() -> None:
    rows = [figures.Row("change 10000x10", "p50 ms", 3.0), figures.Row("change 100x10", "p50 ms", 3.3)]
    (row,) = cases.related(rows)
    assert row.value is not None
    assert (row.case, round(row.value, 3), row.target, row.ok) == ("change 100x10", 1.1, 1.3, True)


def test_rows_that_combine_several_cases_are_recomputed_from_the_saved_rows(bench: types.ModuleType) -> None:
    bench.save([figures.Row("change 10000x10", "p50 ms", 3.2), figures.Row("change 100000x1", "p50 ms", 1.6)])
    bench.save([figures.Row("change 10000x10", "p50 ms", 2.0)])
    kept = {(row["case"], row["figure"]): row["value"] for row in bench.stored()}
    assert kept["change 100000x1", "p50, relative to that of 10000x10"] == 0.8
    bench.save([figures.Row("change 100000x1", "p50 ms", 2.6)])
    kept = {(row["case"], row["figure"]): row["value"] for row in bench.stored()}
    assert kept["change 100000x1", "p50, relative to that of 10000x10"] == 1.3
    assert len(kept) == len(bench.stored()), "each figure once"


def test_a_result_file_that_cannot_be_written_is_reported_before_anything_is_measured(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "--json", "/nowhere/figures.json"])
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as left:
        bench.main()
    assert left.value.code == 2
    assert "/nowhere is not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("failure", [RuntimeError("the kernel died"), KeyError("wall_s")])
def test_every_case_has_a_saved_row_even_if_one_case_cannot_be_measured(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, failure: Exception
) -> None:
    assert _run(bench, monkeypatch, tmp_path, failure) == 2
    assert json.loads((tmp_path / "figures.json").read_text()) == [
        {"case": "own", "figure": "page faults", "value": 7, "target": None, "ok": True},
        {"case": "own change", "figure": "could not be measured", "value": None, "target": None, "ok": False},
        {"case": "own churn of 10 s", "figure": "page faults", "value": 7, "target": None, "ok": True},
    ]


def test_an_interrupted_benchmark_saves_the_cases_that_were_measured(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.save([figures.Row("own change", "p50 ms", 1.25)])
    assert _run(bench, monkeypatch, tmp_path, KeyboardInterrupt()) == 130
    found = [(row["case"], row["value"], row["ok"]) for row in json.loads((tmp_path / "figures.json").read_text())]
    assert found == [("own", 7, True), ("own change", None, False), ("own churn of 10 s", None, False)]
    kept = [(row["case"], row["figure"], row["value"]) for row in bench.stored()]
    assert kept == [("own", "page faults", 7), ("own change", "p50 ms", 1.25)], "cases without new figures keep the saved ones"
    assert "interrupted; not measured: own change, own churn of 10 s" in capsys.readouterr().err


def test_a_missing_kernel_is_reported_before_anything_is_measured(
    bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("it would say so first")
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(bench, "on_kernel", lambda *_: ["sh", "-c", "echo scripts/kernel: no kernel with ip_vs >&2; exit 125"])
    monkeypatch.setattr(sys, "argv", ["scripts/bench"])
    assert bench.main() == 2
    assert "no kernel with ip_vs" in capsys.readouterr().err
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.main() == 2
    assert "run scripts/setup" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bench.main() == 2
    assert "sudo" in capsys.readouterr().err


def test_the_benchmark_script_needs_only_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "scripts/bench"), "--list"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_figure_of_a_change_is_printed_beside_the_figure_of_its_replay() -> None:
    change = {"p50_ms": 2.0, "p99_ms": 4.0, "cpu_ms": 1.5, "messages": 3, "system_calls": 7}
    connection = {"p50_ms": 6.0, "p99_ms": 9.0, "connect_ms": 0.5}
    churn = {"p50_ms": 30.0, "p99_ms": 80.0, "cpu_percent": 40.0, "wall_s": 21.0, "fed_s": 20.0}
    replay = {
        "change": {"p50_ms": 0.2, "p99_ms": 0.3, "sum_s": 0.06, "steps": 300},
        "connection": {"p50_ms": 0.4, "p99_ms": 0.7},
        "churn": {"sum_s": 3.0},
    }
    found: list[figures.Found] = [{"change": change, "connection": connection, "churn": churn}, {"parts": replay}]
    rows = {row.figure: row.value for row in figures.beside_kernel("figures 10x1", found)}
    assert (rows["change, p99 ms"], rows["change, p99 ms: replay"]) == (4.0, 0.3)
    assert rows["first connection, p50 ms: replay"] == pytest.approx(0.9), "messages and connecting"
    assert rows["processor s for 1,000 changes"] == 1.5
    assert rows["processor s for 1,000 changes: replay"] == pytest.approx(0.2)
    assert rows["processor s for 1,000 of churn"] == pytest.approx(0.42)
    assert rows["processor s for 1,000 of churn: replay"] == pytest.approx(0.15)


def test_the_report_of_a_start_also_has_the_number_of_services_per_second() -> None:
    (case,) = (case for case in cases.all_cases(quick=False) if case.name == "figures start 50000x1")
    cold = {"wall_s": 10.0, "cpu_s": 8.0, "resident_mb": 150, "failed": 0, "pending": 0, "counts": {}}
    replay = {"wall_s": 2.5, "addresses": 2.0}
    starts = [replay if what == "replay" else cold for what, _ in case.measurements]
    rows = {row.figure: row.value for row in case.rows(starts)}
    assert rows["Services per second: wall s, median, routes"] == 5_000
    assert rows["Services per second: replay s, median, routes"] == 20_000


def test_a_client_tries_to_connect_until_the_servers_address_accepts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # the address refuses connections until the server listens
        clock = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: server.listen())
        monkeypatch.setattr(connections, "time", clock)
        connected = connections.connect(*server.getsockname())
    assert 0 < connected.took_s < connected.at_s


def _page_faults(name: str, _found: Sequence[figures.Found]) -> Iterator[figures.Row]:
    yield figures.Row(name, "page faults", 7)


def _run(bench: types.ModuleType, monkeypatch: pytest.MonkeyPatch, place: pathlib.Path, failure: BaseException) -> int:
    """Run three cases, and return the exit status. The second case fails with this error."""

    def measure(case: cases.Case, _kernel: str) -> list[object]:
        if case.name == "own change":
            raise failure
        return []

    chosen = [
        dataclasses.replace(case, rows=functools.partial(_page_faults, case.name))
        for case in cases.all_cases(quick=True)
        if case.name.startswith("own")
    ]
    monkeypatch.setattr(bench.cases, "all_cases", lambda **_: chosen)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "why_not", lambda *_: "")
    monkeypatch.setattr(sys, "argv", ["scripts/bench", "--quick", "--save", "--json", str(place / "figures.json")])
    status: int = bench.main()
    return status
