"""Runs the program without a kernel: every message is encoded, and counts as acknowledged instead of being sent.

Because the kernel does nothing, only the time of the program itself is measured, including the usual costs of memory and system
calls. The state of the machine is neither read nor changed. The function ``traffic`` makes counters grow as traffic would; it
also works with a real kernel.
"""

import contextlib
import errno
import itertools
from collections.abc import Collection, Container, Iterator
from typing import Any
from unittest import mock

from ipvsproxy.kernel import host, node_kernel, sysctls
from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset.ipset_driver import IpsetDriver
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.ipvs import ipvs_driver as ipvs
from ipvsproxy.kernel.ipvs import readings as ipvs_readings
from ipvsproxy.kernel.ipvs import rows as ipvs_rows
from ipvsproxy.kernel.network import addresses
from ipvsproxy.model.plan import Outcome
from ipvsproxy.model.virtual_servers import Counters, VirtualServerKey

FAMILY_NUMBER = 30
SAVED = "".join(f"*{table}\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n" for table in ("nat", "filter", "mangle"))


@contextlib.contextmanager
def kernel() -> Iterator[None]:
    """Inside the block, replace the kernel by a simulated empty kernel."""

    def run(command: str, *arguments: str, stdin: str = "") -> str:
        del stdin
        return "iptables v1.8.9 (legacy)" if "--version" in arguments else SAVED if command.endswith("-save") else ""

    nothing: dict[Any, Any] = {}
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (netlink.Channel, "run", lambda _channel, _messages, _refusal=None: {}),
            (netlink.Channel, "gather", lambda _channel, _request, _action, _read: []),
            (netlink.Channel, "dumping", lambda _channel, _request, _action: iter(())),
            (netlink, "resolve_family", lambda *_: FAMILY_NUMBER),
            (ipvs_readings.SockoptReader, "connections", lambda _reader, _key: nothing),
            (ipvs.IpvsDriver, "refusal_with", lambda _driver, _scheduler: errno.EINVAL),  # the scheduler exists
            (ipvs.IpvsDriver, "observe", lambda _driver, _families=(): nothing),
            (node_kernel.NodeKernel, "poll", lambda *_, **__: iter(())),  # nothing has changed
            (addresses.AddressDriver, "_find", lambda _driver: addresses._Link(2, "kube-ipvs0", "dummy")),
            (addresses.AddressDriver, "_apply_device", lambda _driver, operation: Outcome(operation)),
            (IpsetDriver, "_revision", lambda _driver, _set: 6),
            (iptables_process, "run", run),
            (host, "load_modules", lambda *_: ""),
            (host, "missing_features", lambda *_: ()),
            (host, "missing_set_types", lambda *_: ()),
            (sysctls.SysctlDriver, "apply", lambda _driver, operations: list(map(Outcome, operations))),
            (sysctls.SysctlDriver, "observe", lambda _driver, paths: dict.fromkeys(paths, "")),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def traffic(virtual_servers: Collection[VirtualServerKey]) -> Iterator[None]:
    """Inside the block, let the counters of these virtual servers grow with each read; the real kernel is still read."""
    read, numbers, every = ipvs_rows.TrafficReader.services, itertools.count(1), frozenset(virtual_servers)

    def counted(reader: ipvs_rows.TrafficReader, _: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        left, counters = list(virtual_servers), Counters._make([next(numbers)] * len(Counters._fields))
        for part in read(reader, every):
            part_keys, left = left[: len(part)], left[len(part) :]
            yield dict.fromkeys(part_keys, counters)
        yield dict.fromkeys(left, counters)  # without a kernel

    with mock.patch.object(ipvs_rows.TrafficReader, "services", counted):
        yield
