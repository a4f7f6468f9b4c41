"""Keywords of the parsers under test, which random mutation alone would take long to find."""

from collections.abc import Iterator

import msgspec

from ipvsproxy.config import catalogue
from ipvsproxy.model.sets import SetKind
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.api import schema

_OTHERS = (
    '\\"metadata\\":{',
    '\\"items\\":[',
    '\\"type\\":\\"ADDED\\"',
    '\\"object\\":{',
    "null",
    "true",
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1",
    "kind: KubeProxyConfiguration",
    "mode: ipvs",
    "--proxy-mode=ipvs",
    "TCP",
    "FWM",
    "persistent",
    "-> ",
    "*nat",
    "*filter",
    "COMMIT",
    "-A ",
    " - [0:0]",
    "-m comment --comment ",
)


def _all() -> Iterator[str]:
    yield from _OTHERS
    for shape in vars(schema).values():
        if isinstance(shape, type) and issubclass(shape, msgspec.Struct):
            yield from (field.encode_name for field in msgspec.structs.fields(shape))
    for key, option in catalogue.BY_KEY.items():
        yield key.rpartition(".")[2]
        yield f"--{option.flag}"
    yield from (kind.value for kind in SetKind)
    yield from (key.chain for key in skeleton.CHAINS)


ALL = tuple(dict.fromkeys(_all()))
"""Each word once, quoted as in a libFuzzer dictionary."""
