"""The conditions under which the iptables programs are run with a preloaded library.

tests/test_running.py runs the whole program without raw sockets.
"""

import pathlib

import pytest

from ipvsproxy.kernel.iptables import process as iptables_process


@pytest.fixture
def library(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "self").mkdir()
    path = tmp_path / "datagram.so"
    path.touch()
    return path


def has(proc: pathlib.Path, capabilities: str) -> None:
    (proc / "self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nCapBnd:\t0000000000000000\n")


def test_iptables_runs_with_an_unchanged_environment_if_raw_sockets_can_be_opened(
    tmp_path: pathlib.Path, library: pathlib.Path
) -> None:
    has(tmp_path, "0000000000003000")
    assert iptables_process.environment(tmp_path, library) is None


def test_our_library_is_preloaded_before_other_libraries_if_raw_sockets_cannot_be_opened(
    tmp_path: pathlib.Path, library: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(tmp_path, "0000000000001000")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    environment = iptables_process.environment(tmp_path, library)
    assert environment is not None
    assert environment["LD_PRELOAD"] == str(library)
    assert environment["PATH"] == "/bin"
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert (iptables_process.environment(tmp_path, library) or {})["LD_PRELOAD"] == f"{library}:libother.so"


def test_nothing_is_preloaded_if_the_library_is_missing(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    has(tmp_path, "0000000000001000")
    library.unlink()
    assert iptables_process.environment(tmp_path, library) is None
