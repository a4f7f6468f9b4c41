"""Imports single modules of a package without executing the package, which would import all of its modules.

Such a package can be in ``sys.modules`` without having been executed. Then each of its modules can be imported as usual, alone.
"""

import importlib
import importlib.util
import sys
from types import ModuleType


class _Deferred(ModuleType):
    """A package in ``sys.modules`` that is executed at the first access to an attribute that it does not have yet."""

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]  # from now on it is an ordinary module
        if self.__spec__ and self.__spec__.loader:
            self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(package: str, *modules: str) -> ModuleType:
    """Put a package into ``sys.modules``, to be executed only when it is needed.

    A package that is already in ``sys.modules`` stays as it is.

    ``modules``, which other modules of the package import by ``from package import module``, are imported at once.

    Raises:
        ModuleNotFoundError: there is no such package, or it has no such module.
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
            setattr(sys.modules[parent], name, module)  # as an import does
    for name in modules:
        importlib.import_module(f"{package}.{name}")
    return sys.modules[package]
