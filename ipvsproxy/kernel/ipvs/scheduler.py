"""Whether the kernel has a scheduler. The kernel loads the module when a virtual server asks for it, so only an attempt shows it.

The attempt is a virtual server that the kernel refuses, but only after it has looked up the scheduler (``ip_vs_add_service`` in
net/netfilter/ipvs/ip_vs_ctl.c). So a process that is killed in between leaves nothing behind. This virtual server is of IPv6. If
IPVS in this kernel has no IPv6, the attempt is kube-proxy's (pkg/proxy/ipvs in kubernetes/kubernetes): a virtual server that
exists for a moment, without real servers. Its address is reserved for documentation (RFC 5737), so that no client ever uses it.
"""

import errno
import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol as Interface

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.message import SCHEDULER_NAME_LIMIT
from ipvsproxy.model.net import Protocol, parse_address
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServer, VirtualServerKey, VirtualServerSettings

PROBE_ADDRESS = parse_address("198.51.100.0")
FIRST_PROBE_PORT = 20000
"""The probe has the first free port from here on, so that a virtual server of another program is left alone."""

_ACTION = "find the schedulers of this kernel"


class Ipvs(Interface):
    """The part of the IPVS driver that knows about schedulers. Each method raises ``KernelError`` as that driver does."""

    def refusal_with(self, scheduler: str) -> int:
        """The error number with which the kernel refuses an impossible virtual server that has this scheduler."""

    def observe(self) -> Mapping[VirtualServerKey, ObservedVirtualServer]:
        """All virtual servers."""

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in their order."""


def why_unusable(ipvs: Ipvs, scheduler: str) -> str:
    """The reason why no virtual server can have this scheduler, one line for the operator; empty if it can.

    Raises:
        KernelError: virtual servers cannot be listed, added or removed, whatever their scheduler.
    """
    missing = describe_missing(scheduler)
    if len(scheduler) > SCHEDULER_NAME_LIMIT:
        return missing
    refusal = ipvs.refusal_with(scheduler)
    if refusal in {errno.EINVAL, errno.ENOENT}:
        return missing if refusal == errno.ENOENT else ""
    return missing if _is_missing_for_ipv4(ipvs, scheduler) else ""


def describe_missing(scheduler: str) -> str:
    """The reason why a scheduler that the kernel lacks is unusable."""
    return f"the kernel has no scheduler {scheduler!r}: the module ip_vs_{scheduler} is missing or cannot be loaded"


def _is_missing_for_ipv4(ipvs: Ipvs, scheduler: str) -> bool:
    """Ask by adding a virtual server, unless an existing one has the scheduler."""
    observed = ipvs.observe()
    if any(server.settings.scheduler == scheduler for server in observed.values()):
        return False
    keys = (VirtualServerKey(Protocol.TCP, PROBE_ADDRESS, port) for port in itertools.count(FIRST_PROBE_PORT))
    probe = VirtualServer(next(key for key in keys if key not in observed), VirtualServerSettings(scheduler))
    added = _apply(ipvs, Operation(Verb.ADD, probe))
    if added.errno == errno.ENOENT:
        return True
    if added.error:
        raise KernelError(action=_ACTION, errno=added.errno, detail=added.error)
    if not added.surprise:  # otherwise another program has just made it
        removed = _apply(ipvs, Operation(Verb.REMOVE, probe))
        if removed.error:
            raise KernelError(action=_ACTION, errno=removed.errno, detail=removed.error)
    return False


def _apply(ipvs: Ipvs, operation: Operation) -> Outcome:
    (outcome,) = ipvs.apply([operation])
    return outcome
