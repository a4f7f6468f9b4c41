"""Lets several pytest processes share the same tests: the first process that claims a module runs the tests of this module.

Each process gets ``-p tests.support.sharing --share DIRECTORY``, with a directory that is empty at first and that all processes
can access. A process imports only the modules that it has claimed, because the import of all modules takes seconds on user-mode
Linux. The reports of all processes together contain every test exactly once.
"""

import itertools
import pathlib

import pytest

LONGEST = (
    "test_direct_return",
    "test_start_faults",
    "test_scope_changes",
    "test_backends",
    "test_neighbours",
    "test_reported",
    "test_chaos",
    "test_program",
    "test_running",
    "test_direct_return_changes",
    "test_over_and_back",
    "test_limits",
    "test_golden",
    "test_node_addresses",
    "test_moments",
    "test_commands",
    "test_bindings",
    "test_runbook",
    "test_drain",
)
"""These long modules are claimed first; otherwise, a process could start one of them when all other processes have ended."""
_FOUND = pytest.StashKey[list[pytest.Item | pytest.Collector]]()
"""The key in the session's stash for the nodes that pytest has collected. The nodes are modules, or the tests that the command
line names."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=pathlib.Path, required=True, metavar="DIRECTORY", help="where modules are claimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> bool:
    """Finds the modules, but does not import them."""
    session.stash[_FOUND] = []
    session.perform_collect(genitems=False)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item | pytest.Collector]) -> None:
    """At the first call, clear ``items``, so that hooks which select tests by marks do not see the modules."""
    if session.stash[_FOUND]:
        return
    session.stash[_FOUND] += items
    items.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Like pytest's loop, but each module is torn down completely, because the next module is not known yet."""
    directory, collected = session.config.getoption("--share"), 0
    nodes = session.stash[_FOUND]
    for module, found in itertools.groupby(sorted(nodes, key=_place), key=lambda one: one.path):
        if not _claim(directory, module):
            continue
        items = [item for node in found for item in session.genitems(node)]
        session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
        session.items = items  # a fixture searches this list for the tests that need the fixture
        session.testscollected = collected = collected + len(items)
        for item, following in zip(items, [*items[1:], None], strict=False):  # if there are no tests, the second list is longer
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    return True


def _place(node: pytest.Item | pytest.Collector) -> tuple[int, pathlib.Path]:
    name = node.path.stem
    return (LONGEST.index(name) if name in LONGEST else len(LONGEST)), node.path


def _claim(directory: pathlib.Path, module: pathlib.Path) -> bool:
    """Claim a module by creating a directory, which is atomic even in a file system that several kernels share."""
    try:
        (directory / "-".join(module.parts[1:])).mkdir()
    except FileExistsError:
        return False
    return True
