"""The kernel settings that serving needs, from the operator's choices and the kernel's version."""

import dataclasses
from collections.abc import Iterator

from ipvsproxy.model.kernel import PROMPT_REUSE, Sysctl

CONNTRACK_CEILING = 1024 * 1024
"""The most flows that conntrack is asked to hold, with any number of processors (cmd/kube-proxy/app/conntrack.go)."""
CONNTRACK_BUCKETS = "/sys/module/nf_conntrack/parameters/hashsize"
"""The size of conntrack's hash table. The whole host has one, and only its first network namespace can set it."""
FLOWS_PER_BUCKET = 4
"""Flows per bucket of that table, as in kube-proxy."""
_REUSE_MODE = (4, 1)
"""The Linux that brought ``conn_reuse_mode``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConntrackChoices:
    """The operator's settings of connection tracking; 0 leaves a setting unchanged. Times are in seconds."""

    max_per_core: int = 0
    minimum: int = 0
    tcp_established_timeout_s: float = 0
    tcp_close_wait_timeout_s: float = 0
    tcp_be_liberal: bool = False
    udp_timeout_s: float = 0
    udp_stream_timeout_s: float = 0


def ipvs_sysctls(kernel_version: tuple[int, int], *, strict_arp: bool) -> Iterator[Sysctl]:
    """The settings that IPVS with masquerading needs (pkg/proxy/ipvs/proxier.go). IPv4 forwarding counts for both families."""
    yield Sysctl("net/ipv4/vs/conntrack", "1")
    if _REUSE_MODE <= kernel_version < PROMPT_REUSE:
        # With 1, each reused source port would cost a second (kubernetes/kubernetes #81775).
        yield Sysctl("net/ipv4/vs/conn_reuse_mode", "0")
    yield Sysctl("net/ipv4/vs/expire_nodest_conn", "1")
    yield Sysctl("net/ipv4/vs/expire_quiescent_template", "1")
    yield Sysctl("net/ipv4/ip_forward", "1")
    if strict_arp:
        yield Sysctl("net/ipv4/conf/all/arp_ignore", "1")
        yield Sysctl("net/ipv4/conf/all/arp_announce", "2")


def conntrack_maximum(choices: ConntrackChoices, processors: int) -> int:
    """The number of flows that conntrack should hold; 0 leaves the setting unchanged."""
    if not choices.max_per_core:
        return 0
    scaled = choices.max_per_core * processors
    return CONNTRACK_CEILING if scaled > CONNTRACK_CEILING else max(scaled, choices.minimum)


def conntrack_sysctls(choices: ConntrackChoices, processors: int) -> Iterator[Sysctl]:
    """The settings of connection tracking. A larger maximum than ours stays: an administrator has chosen it."""
    maximum = conntrack_maximum(choices, processors)
    if maximum:
        yield Sysctl("net/netfilter/nf_conntrack_max", str(maximum), at_least=True)
        yield Sysctl(CONNTRACK_BUCKETS, str(maximum // FLOWS_PER_BUCKET), at_least=True)
    settings = (
        ("nf_conntrack_tcp_timeout_established", choices.tcp_established_timeout_s),
        ("nf_conntrack_tcp_timeout_close_wait", choices.tcp_close_wait_timeout_s),
        ("nf_conntrack_tcp_be_liberal", choices.tcp_be_liberal),
        ("nf_conntrack_udp_timeout", choices.udp_timeout_s),
        ("nf_conntrack_udp_timeout_stream", choices.udp_stream_timeout_s),
    )
    for name, value in settings:
        if int(value):
            yield Sysctl(f"net/netfilter/{name}", str(int(value)))
