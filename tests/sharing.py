"""Several pytest processes that share the same tests: each module is run by the one that claims it first.

``-p tests.sharing --share DIRECTORY`` in each of them; the directory lies where all of them see it, and is empty at first. What
another process has claimed is passed over without a word: the reports of all of them together tell of every test once.
"""

import pathlib

import pytest

_mine: dict[pathlib.Path, bool] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=pathlib.Path, required=True, metavar="DIRECTORY", help="where modules are claimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if item.path not in _mine:
        _mine[item.path] = _claim(item.config.getoption("--share"), item.path)
    return None if _mine[item.path] else True


def _claim(directory: pathlib.Path, module: pathlib.Path) -> bool:
    """Making a directory is one step, also in a file system that several kernels see."""
    try:
        (directory / "-".join(module.parts[1:])).mkdir()
    except FileExistsError:
        return False
    return True
