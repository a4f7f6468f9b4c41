"""Imports single modules of a package without executing the package, which would import all of its modules.

The package can be in ``sys.modules`` without having been executed. Each module of such a package can then be imported on its own,
in the usual manner.
"""

import importlib
import importlib.util
import sys
from types import ModuleType


class _Deferred(ModuleType):
    """A package in ``sys.modules`` that is executed only when an attribute is accessed that the package does not have yet."""

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]  # the package is an ordinary module from now on
        if self.__spec__ and self.__spec__.loader:
            self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(package: str, *modules: str) -> ModuleType:
    """Put a package into ``sys.modules`` without executing it; it is executed only when that becomes necessary.

    If the package is already in ``sys.modules``, it is not changed.

    ``modules`` are imported at once, because other modules of the package import them by ``from package import module``.

    Raises:
        ModuleNotFoundError: the package does not exist, or the package does not have one of the modules.
    """
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if not spec:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[package] = module
        parent, _, name = package.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)  # an import does the same
    for name in modules:
        importlib.import_module(f"{package}.{name}")
    return sys.modules[package]
