"""The parts of kubernetes-asyncio that ``watch`` uses, without the 800 modules of its models and APIs.

The library's package ``client`` imports all of these, and every module of the library imports ``client``: 34 MB and 0.3 to 1 s
for unused classes. The package does nothing else, so it need not be executed (see ``packages``). Other importers of the library
still get all of it.

A version of the library that cannot be imported in parts is imported as usual, which costs only memory and time.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator

from ipvsproxy.kernel.base import packages

LIBRARY = "kubernetes_asyncio"
UNUSED = "urllib3"
"""A package that the library imports for one function that nothing here calls: 30 modules, 10 ms (60 on the test kernel)."""
PARTS = (f"{LIBRARY}.client.rest", f"{LIBRARY}.config.incluster_config", f"{LIBRARY}.config.kube_config")


@contextlib.contextmanager
def _in_parts() -> Iterator[None]:
    """Lets the block import the parts, in either way."""
    if LIBRARY not in sys.modules:
        try:
            _import_parts()
        except Exception:  # noqa: BLE001  # of any kind, from another version: the usual import may still work
            for name in [name for name in sys.modules if name.partition(".")[0] in {LIBRARY, UNUSED}]:
                del sys.modules[name]
    yield


def _import_parts() -> None:
    packages.defer(UNUSED)
    packages.defer(LIBRARY)
    names = vars(packages.defer(f"{LIBRARY}.client"))
    names["Configuration"] = importlib.import_module(f"{LIBRARY}.client.configuration").Configuration
    names["ApiClient"] = type("ApiClient", (), {})  # unused functions of kube_config name it
    for part in PARTS:
        importlib.import_module(part)
    del names["ApiClient"]


with _in_parts():
    from kubernetes_asyncio.client.configuration import Configuration
    from kubernetes_asyncio.client.rest import RESTClientObject
    from kubernetes_asyncio.config.config_exception import ConfigException
    from kubernetes_asyncio.config.incluster_config import InClusterConfigLoader
    from kubernetes_asyncio.config.kube_config import KubeConfigLoader

__all__ = ["ConfigException", "Configuration", "InClusterConfigLoader", "KubeConfigLoader", "RESTClientObject"]
