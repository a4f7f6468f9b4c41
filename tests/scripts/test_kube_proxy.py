"""Covers how a benchmark finds kube-proxy.

If kube-proxy cannot be measured, the benchmark says so in one sentence before it measures anything.
"""

import pathlib
import sys
import types

import pytest

from scripts.benchmark import kube_proxy
from scripts.kernels import control
from tests.scripts.test_benchmark import bench  # noqa: F401 - a fixture that pytest finds by its name

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    """A program file that can be started."""
    path = tmp_path / "kube-proxy"
    control.write_program(path, "#!/bin/sh\n")
    return path


def test_kube_proxy_is_found_by_path_and_by_name(program: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    for named in (str(program), "./kube-proxy", "kube-proxy"):
        assert kube_proxy.find(f"{named} -v=4", directory=program.parent, empty=()) == f"{program} -v=4"
    assert kube_proxy.find("", directory=program.parent) == ""


def test_a_path_to_kube_proxy_is_refused_if_the_test_kernel_does_not_see_the_file(
    program: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path_factory.mktemp("elsewhere") / "kube-proxy"
    link.symlink_to(program)
    for command in (str(program), f"env {program}", str(link)):
        with pytest.raises(kube_proxy.UnusableError, match=r"where .* is empty: put it elsewhere, /usr/local/bin"):
            kube_proxy.find(command, directory=program.parent, empty=(program.parent,))
    monkeypatch.setattr(kube_proxy, "ROOT", program.parent)
    assert kube_proxy.find(str(program), directory=program.parent, empty=(program.parent,)), "the kept directory is visible"


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("/nowhere/kube-proxy", "/nowhere/kube-proxy is no file"),
        ("nowhere/kube-proxy", f"{pathlib.Path.cwd()}/nowhere/kube-proxy is no file"),
        ("kube-proxy-of-nobody", "there is no kube-proxy-of-nobody in PATH"),
        (str(ROOT / "pyproject.toml"), "pyproject.toml is not executable"),
        (str(ROOT / "tests"), "tests is no file"),
        ("'kube-proxy", "no command: no closing quotation"),
    ],
)
def test_a_kube_proxy_that_cannot_be_started_is_reported_before_anything_is_measured(
    command: str,
    complaint: str,
    bench: types.ModuleType,  # noqa: F811 - the argument is the fixture
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBE_PROXY", command)
    monkeypatch.setattr(sys, "argv", ["scripts/bench"])
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("it measures"))
    assert bench.main() == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.err.count("\n") == 1, "one sentence"
    assert printed.out == ""
