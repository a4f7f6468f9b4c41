"""Packages of others that import everything they have, although a few of their modules are all that is wanted here.

Such a package can be in ``sys.modules`` without having been executed: then what is in it can be imported as usual, and alone.
"""

import importlib
import importlib.util
import sys
from types import ModuleType


class _Deferred(ModuleType):
    """A package that is executed, once and in its place, when somebody asks for anything in it that is not there yet."""

    def __getattr__(self, name: str) -> object:
        self.__class__ = ModuleType  # type: ignore[assignment]  # from now on it is like any other
        if self.__spec__ and self.__spec__.loader:
            self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def defer(package: str, *modules: str) -> ModuleType:
    """Have the package in ``sys.modules``, to be executed only when it is needed; as it is, if it is there already.

    ``modules`` of it are imported at once: those that others in it import by ``from package import module``.

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
