"""Covers how the files of a fake host show which kernel modules exist or are loaded."""

import os
import pathlib

import pytest

from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.modules import ModuleState


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A host with kernel modules in different states."""
    (tmp_path / "sys/module/ip_vs").mkdir(parents=True)
    directory = tmp_path / "lib/modules" / os.uname().release
    directory.mkdir(parents=True)
    (directory / "modules.builtin").write_text("kernel/drivers/net/dummy.ko\n")
    (directory / "modules.dep").write_text(
        "kernel/net/netfilter/ipvs/ip_vs_rr.ko.xz: kernel/net/netfilter/ipvs/ip_vs.ko.xz\nkernel/net/nf-conntrack.ko:\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("ip_vs", ModuleState.LOADED),
        ("dummy", ModuleState.BUILT_IN),
        ("ip_vs_rr", ModuleState.LOADABLE),
        ("nf_conntrack", ModuleState.LOADABLE),
        ("ip_vs_mh", ModuleState.MISSING),
    ],
)
def test_the_state_of_a_module_is_found_without_loading_the_module(root: pathlib.Path, name: str, state: ModuleState) -> None:
    assert modules.module_state(name, root) is state


def test_the_state_of_a_module_is_unknown_if_the_module_files_are_missing(tmp_path: pathlib.Path) -> None:
    assert modules.module_state("ip_vs", tmp_path) is ModuleState.UNKNOWN


def test_a_kernel_has_the_schedulers_whose_modules_exist(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert modules.schedulers(root) == ("rr",)
    assert modules.schedulers(tmp_path / "nothing") == ()


@pytest.mark.parametrize(
    ("state", "before", "after"),
    [
        (ModuleState.LOADED, True, True),
        (ModuleState.BUILT_IN, True, True),
        (ModuleState.LOADABLE, False, False),
        (ModuleState.MISSING, False, False),
        (ModuleState.UNKNOWN, True, False),
    ],
)
def test_a_refusal_ends_the_queries_to_nf_tables_only_if_the_module_state_is_unknown(
    monkeypatch: pytest.MonkeyPatch, state: ModuleState, *, before: bool, after: bool
) -> None:
    monkeypatch.setattr(modules, "module_state", lambda *_: state)
    assert modules.may_have_nf_tables() is before
    modules.note_no_nf_tables()
    assert modules.may_have_nf_tables() is after
