"""When the programs of iptables get a library preloaded. Running without raw sockets is tested in tests/test_running.py."""

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


def test_with_raw_sockets_iptables_starts_in_our_environment(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    has(tmp_path, "0000000000003000")
    assert iptables_process.environment(tmp_path, library) is None


def test_without_raw_sockets_the_library_comes_before_other_preloaded_ones(
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


def test_without_the_library_nothing_is_added(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    has(tmp_path, "0000000000001000")
    library.unlink()
    assert iptables_process.environment(tmp_path, library) is None
