"""Importing a module of a deferred package does not execute the code of the package itself."""

import importlib
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from ipvsproxy.kernel.base import packages

NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package that has two modules. The package counts how often its code is executed."""
    name = f"laden{next(NUMBERS)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"from {name} import light, heavy\nEXECUTED = globals().get('EXECUTED', 0) + 1")
    (tmp_path / name / "light.py").write_text("WEIGHT = 1")
    (tmp_path / name / "heavy.py").write_text("WEIGHT = 1000")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for loaded in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[loaded]


def test_a_module_of_a_deferred_package_is_imported_without_executing_the_package(package: str) -> None:
    deferred = packages.defer(package, "light")
    scope: dict[str, Any] = {}
    exec(f"from {package} import light\nfrom {package}.light import WEIGHT", scope)  # noqa: S102  # other programs import in this way
    assert (scope["light"].WEIGHT, scope["WEIGHT"]) == (1, 1)
    assert "EXECUTED" not in vars(deferred)
    assert f"{package}.heavy" not in sys.modules


def test_a_deferred_package_is_executed_once_at_the_first_access_to_one_of_its_attributes(package: str) -> None:
    deferred = packages.defer(package)
    light = importlib.import_module(f"{package}.light")
    assert [deferred.EXECUTED, deferred.EXECUTED] == [1, 1]
    assert deferred.light is light
    assert deferred.heavy.WEIGHT == 1000
    assert importlib.import_module(package) is deferred
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'absent'"):
        _ = deferred.absent


def test_a_package_that_is_imported_already_is_not_replaced(package: str) -> None:
    whole = importlib.import_module(package)
    assert packages.defer(package) is whole
    assert whole.EXECUTED == 1


def test_defer_fails_at_once_if_the_package_is_not_installed() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed_anywhere'"):
        packages.defer("not_installed_anywhere")


def test_only_the_modules_of_pyroute2_that_drivers_use_are_imported() -> None:
    program = "import sys, ipvsproxy.kernel.node_kernel; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=300)
    loaded = [name for name in done.stdout.split() if name.partition(".")[0] == "pyroute2"]
    assert "pyroute2.netlink.generic.ipvs" in loaded
    assert {"pyroute2.ndb", "pyroute2.iproute"}.isdisjoint(loaded)
    assert len(loaded) < 60
