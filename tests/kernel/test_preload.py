"""When the programs of iptables get a library preloaded. That they then do without raw sockets: tests/test_running.py."""

import pathlib

import pytest

from ipvsproxy.kernel import preload


@pytest.fixture
def library(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "self").mkdir()
    path = tmp_path / "datagram.so"
    path.touch()
    return path


def has(proc: pathlib.Path, capabilities: str) -> None:
    (proc / "self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nCapBnd:\t0000000000000000\n")


def test_who_has_raw_sockets_starts_iptables_as_it_is(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    has(tmp_path, "0000000000003000")
    assert preload.environment(tmp_path, library) is None


def test_who_has_none_preloads_the_library_before_what_is_preloaded_anyway(
    tmp_path: pathlib.Path, library: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(tmp_path, "0000000000001000")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    environment = preload.environment(tmp_path, library)
    assert environment is not None
    assert environment["LD_PRELOAD"] == str(library)
    assert environment["PATH"] == "/bin"
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert (preload.environment(tmp_path, library) or {})["LD_PRELOAD"] == f"{library}:libother.so"


def test_without_the_library_nothing_is_added(tmp_path: pathlib.Path, library: pathlib.Path) -> None:
    has(tmp_path, "0000000000001000")
    library.unlink()
    assert preload.environment(tmp_path, library) is None
