"""The parts of kubernetes-asyncio that ``watch`` uses, without the 800 modules of its models and APIs.

The library's top package and its ``client`` import all of these, and whatever is imported from the library imports both: 34 MB
and 0.3 to 1 s, for classes that nobody asks for. Neither package does anything else. So while the parts are imported, both
are in ``sys.modules`` without having been executed. Afterwards the parts are taken out of ``sys.modules`` as well: who else
imports the library gets it whole, and anew.

A version of the library that can not be taken apart like this is imported as usual, which costs memory and nothing else.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

LIBRARY = "kubernetes_asyncio"
PARTS = (f"{LIBRARY}.client.rest", f"{LIBRARY}.config.incluster_config", f"{LIBRARY}.config.kube_config")


@contextlib.contextmanager
def _without_models() -> Iterator[None]:
    """In here, the parts can be imported. Where the library is loaded already, there is nothing to spare."""
    is_spared = LIBRARY not in sys.modules and _import_parts()
    try:
        yield
    finally:
        if is_spared:
            _forget()


def _import_parts() -> bool:
    """Whether that went well; nothing of it is left else."""
    try:
        _stand_in(LIBRARY)
        client = _stand_in(f"{LIBRARY}.client")
        configuration = importlib.import_module(f"{LIBRARY}.client.configuration").Configuration
        # An ApiClient is made by functions of kube_config that nobody calls here.
        vars(client).update(Configuration=configuration, ApiClient=type("ApiClient", (), {}))
        for part in PARTS:
            importlib.import_module(part)
    except Exception:  # noqa: BLE001  # whatever another version does, the usual import must be tried
        _forget()
        return False
    return True


def _stand_in(package: str) -> ModuleType:
    """The package, not executed, in ``sys.modules``: what is in it can be imported."""
    spec = importlib.util.find_spec(package)
    if not spec:
        raise ModuleNotFoundError(package)
    module = sys.modules[package] = importlib.util.module_from_spec(spec)
    return module


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == LIBRARY]:
        del sys.modules[name]


with _without_models():
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config.config_exception import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

__all__ = ["ConfigException", "Configuration", "InClusterConfigLoader", "KubeConfigLoader", "RESTClientObject"]
