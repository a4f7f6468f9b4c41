"""Lets several pytest processes share the same tests: the first process that claims a module runs it.

Each process gets ``-p tests.support.sharing --share DIRECTORY``, with a directory that all processes can access and that is empty
at first. Modules claimed by other processes are skipped silently: together, the reports of all processes contain every test once.
"""

import itertools
import pathlib

import pytest

LONGEST = (
    "test_moments",
    "test_golden",
    "test_program",
    "test_start_faults",
    "test_chaos",
    "test_limits",
    "test_scope_changes",
    "test_backends",
    "test_neighbours",
    "test_reported",
    "test_running",
    "test_contract",
    "test_commands",
    "test_runbook",
    "test_changes",
    "test_node_addresses",
    "test_bindings",
    "test_scope_operations",
    "test_take_over",
    "test_over_and_back",
    "test_annotations",
    "test_services",
    "test_scopes",
    "test_one_way_flows",
    "test_demo",
    "test_large_datagrams",
    "test_drain",
    "test_cleanup",
    "test_masquerade",
    "test_golden_state",
)
"""These modules come first, so that no process starts one of them when all others have ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=pathlib.Path, required=True, metavar="DIRECTORY", help="where modules are claimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Like pytest's own loop, but module by module: each is torn down completely, because the next is not known yet."""
    directory = session.config.getoption("--share")
    if session.testsfailed:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    modules = {module: list(group) for module, group in itertools.groupby(session.items, key=lambda item: item.path)}
    for module in sorted(modules, key=_place):
        if not _claim(directory, module):
            continue
        items: list[pytest.Item] = modules[module]
        for item, following in zip(items, [*items[1:], None], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def _place(module: pathlib.Path) -> int:
    return LONGEST.index(module.stem) if module.stem in LONGEST else len(LONGEST)


def _claim(directory: pathlib.Path, module: pathlib.Path) -> bool:
    """Claim a module by creating a directory, which is atomic even in a file system that several kernels share."""
    try:
        (directory / "-".join(module.parts[1:])).mkdir()
    except FileExistsError:
        return False
    return True
