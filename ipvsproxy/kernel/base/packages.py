"""Imports single modules of a package without executing the package's ``__init__.py``.

The ``__init__.py`` would import all modules of the package.

A package can be in ``sys.modules`` although its code has not been executed; single modules of such a package can be imported in
the usual manner.
"""

import importlib
import importlib.util
import sys
from types import ModuleType


class _Deferred(ModuleType):
    """A package in ``sys.modules`` whose code has not been executed.

    The first access to a missing attribute executes the code.
    """

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment] # from now on, the package is an ordinary module
        if self.__spec__ and self.__spec__.loader:
            self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(package: str, *modules: str) -> ModuleType:
    """Put a package into ``sys.modules``; the package's code is executed only when necessary.

    A package that is already in ``sys.modules`` is not changed. ``modules`` are imported at once, because other modules of the
    package import them by ``from package import module``.

    Raises:
        ModuleNotFoundError: the package, or one of the modules, does not exist.
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
            setattr(sys.modules[parent], name, module)  # an import statement would set this attribute too
    for name in modules:
        importlib.import_module(f"{package}.{name}")
    return sys.modules[package]
