"""Several pytest processes that share the same tests: each module is run by the one that claims it first.

``-p tests.support.sharing --share DIRECTORY`` in each of them; the directory lies where all of them see it, and is empty at
first. What another process has claimed is passed over without a word: the reports of all of them together tell of every test
once.
"""

import itertools
import pathlib

import pytest

LONGEST = (
    "test_program",
    "test_golden",
    "test_running",
    "test_chaos",
    "test_commands",
    "test_golden_state",
    "test_runbook",
    "test_cleanup",
    "test_packets_node_addresses",
    "test_packets_services",
    "test_take_over",
    "test_packets_changes",
)
"""These modules come first, so that nobody begins with one of them when all others have ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=pathlib.Path, required=True, metavar="DIRECTORY", help="where modules are claimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """As pytest's own, but module by module: after each, all is torn down, since nobody knows which one will be next."""
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
    """Making a directory is one step, also in a file system that several kernels see."""
    try:
        (directory / "-".join(module.parts[1:])).mkdir()
    except FileExistsError:
        return False
    return True
