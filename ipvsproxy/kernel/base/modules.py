"""Determines the state of kernel modules from files of this host. No function of this file loads a module."""

import enum
import os
import pathlib
import threading

from ipvsproxy.model.annotations import SCHEDULERS

_NF_TABLES = "nf_tables"
_REFUSED = threading.Event()
"""This event is set as soon as the kernel has answered that it has no nf_tables."""


class ModuleState(enum.StrEnum):
    """The state of a kernel module. UNKNOWN: the files of the host's modules are not visible to this process."""

    LOADED = "loaded"
    BUILT_IN = "built in"
    LOADABLE = "loadable"
    MISSING = "missing"
    UNKNOWN = "unknown"


def module_state(name: str, root: pathlib.Path = pathlib.Path("/")) -> ModuleState:
    """The state of this kernel module. Reading the state of a module does not load the module."""
    if (root / "sys/module" / name).exists():
        return ModuleState.LOADED
    directory = root / "lib/modules" / os.uname().release
    for file, state in (("modules.builtin", ModuleState.BUILT_IN), ("modules.dep", ModuleState.LOADABLE)):
        try:
            lines = (directory / file).read_text(errors="replace").splitlines()
        except OSError:
            return ModuleState.UNKNOWN
        if any(line.partition(":")[0].rpartition("/")[2].partition(".ko")[0].replace("-", "_") == name for line in lines):
            return state
    return ModuleState.MISSING


def may_have_nf_tables(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether the kernel may have tables of nf_tables.

    If the result is false, do not send a query to nf_tables: the query would load the module, or would start modprobe without
    success. If the files of the host's modules are not visible, the result is true until ``note_no_nf_tables`` is called; from
    then on, the result is false until the module appears.
    """
    state = module_state(_NF_TABLES, root)
    return not _REFUSED.is_set() if state is ModuleState.UNKNOWN else state in (ModuleState.LOADED, ModuleState.BUILT_IN)


def note_no_nf_tables() -> None:
    """Record that the kernel has no nf_tables: the kernel has answered EINVAL, because no module handles nf_tables requests."""
    _REFUSED.set()


def schedulers(root: pathlib.Path = pathlib.Path("/")) -> tuple[str, ...]:
    """The schedulers that an annotation may name and whose module files this host has."""
    missing = (ModuleState.MISSING, ModuleState.UNKNOWN)
    return tuple(name for name in SCHEDULERS if module_state(f"ip_vs_{name}", root) not in missing)
