"""The library, compiled from ``datagram.c``, with which the programs of iptables only need CAP_NET_ADMIN.

It exists if there was a C compiler when this package was installed, as in the image. Without it, CAP_NET_RAW is needed.
"""

import os
import pathlib
from collections.abc import Mapping

LIBRARY = pathlib.Path(__file__).with_name("datagram.abi3.so")
NET_ADMIN, NET_RAW = 12, 13
"""The bits of capability sets (include/uapi/linux/capability.h)."""


def capabilities(proc: pathlib.Path = pathlib.Path("/proc")) -> int:
    """The effective capabilities of this process, one bit for each."""
    lines = (proc / "self/status").read_text().splitlines()
    return next((int(line.partition(":")[2], 16) for line in lines if line.startswith("CapEff:")), 0)


def environment(proc: pathlib.Path = pathlib.Path("/proc"), library: pathlib.Path = LIBRARY) -> Mapping[str, str] | None:
    """The environment for a program of iptables; None for our own environment, if nothing has to be added."""
    if capabilities(proc) >> NET_RAW & 1 or not library.exists():
        return None
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {**os.environ, "LD_PRELOAD": ":".join(preloaded)}
