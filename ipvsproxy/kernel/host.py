"""Facts about the host: the kernel version, the number of processors, and the requirements for programming the kernel."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER, NETLINK_ROUTE

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState, module_state
from ipvsproxy.kernel.ipset import ipset_message
from ipvsproxy.kernel.iptables import process as iptables_process
from ipvsproxy.kernel.network import conntrack, routes
from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS, PROMPT_REUSE
from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import SetType

MODPROBE_TIMEOUT_S = 30
"""The longest time for which modprobe may run. A modprobe that hangs is killed, because loading modules early is optional."""
_NOT_FOUND = re.compile(r"Module (\S+) not found")

MODULES = (
    "ip_vs",
    "nf_conntrack",
    "ip_set",
    "ip_set_hash_ip",
    "ip_set_hash_ipport",
    "ip_set_hash_ipportip",
    "ip_set_hash_ipportnet",
    "ip_set_bitmap_port",
    "xt_set",
    "xt_ipvs",
    "xt_physdev",
    "dummy",
)
"""The modules that IPVS, ipsets and rules of iptables need. The kernel does not always load them by itself."""
NFTABLES_MODULES = (
    "ip_vs",
    "nf_conntrack",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_fib_inet",
    "nft_masq",
    "nft_nat",
    "nft_reject_inet",
    "dummy",
)
"""The modules that IPVS and the rules and sets of nftables need."""

MODULES_BY_FAMILY = ("nf_conntrack_ipv4", "nf_conntrack_ipv6")
"""The additional modules that connection tracking needs before Linux 4.19.

Without these modules, the sysctls of connection tracking exist only after the first rule was added to ``nat``.
"""
_ONE_CONNECTION_MODULE = (4, 19)
"""The first Linux version in which ``nf_conntrack`` tracks both families (net/netfilter/nf_conntrack_proto.c, a0ae2562c6c4)."""
_ARRIVAL_BEHIND_IPVS = (5, 5)
"""The first Linux version whose postrouting hook knows the interface of arrival (net/ipv4/ip_output.c, 28f8bfd1ac94)."""


class Missing(NamedTuple):
    """A missing requirement and its remedy; the two texts together form one sentence."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def kernel_version() -> tuple[int, int]:
    """The major and minor version number of the running kernel."""
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    return int(major), int(minor)


class Lack(NamedTuple):
    """A feature that this kernel lacks: the feature's name in docs/compatibility.md, and what happens without the feature."""

    name: str
    without: str


def lacking(
    version: tuple[int, int], *, needs_arrival: bool, connect: Callable[[int], socket.socket] = netlink.open_socket
) -> Iterator[Lack]:
    """The optional features that the kernel certainly does not have.

    The function sends one socket option and one message to the kernel to find out about features. The kernel's answer takes
    precedence over ``version``, because distributions port features back to older kernels. ``version`` is used only for features
    about which the kernel gives no answer. ``needs_arrival`` means that rules in nftables recognise this node's pods by their
    interface.
    """
    if _filters_routes(connect) is False:
        yield Lack("filtered-routes", "the kernel dumps all routes of the host at each poll, and ipvsproxy picks its own")
    if needs_arrival and version < _ARRIVAL_BEHIND_IPVS:
        yield Lack("arrival-behind-ipvs", "connections of this node's pods to cluster IPs are masqueraded as well")
    if conntrack.filters_listings(connect) is False:
        yield Lack("filtered-connections", "the kernel lists all connections of a family, and ipvsproxy picks those to delete")
    if version < PROMPT_REUSE:
        yield Lack("prompt-reuse", "a new connection from a source port in recent use goes to the endpoint of the former one")


def _filters_routes(connect: Callable[[int], socket.socket]) -> bool | None:
    """Whether the kernel filters dumps of routes; None means that no query could be sent to the kernel."""
    try:
        with contextlib.closing(connect(NETLINK_ROUTE)) as opened:
            return routes.ask_to_filter(opened)
    except OSError:
        return None


def processor_count() -> int:
    """The number of processors of the host, at least 1, even if this process may use fewer processors."""
    return os.cpu_count() or 1


def modules_of_older_kernels(version: tuple[int, int], state: Callable[[str], ModuleState] = module_state) -> tuple[str, ...]:
    """The additional kernel modules that a kernel of the given ``version`` needs if this version is old.

    A module that this kernel does not have is left out, because the kernel may contain a backport of the module's successor.
    """
    if version >= _ONE_CONNECTION_MODULE:
        return ()
    return tuple(name for name in MODULES_BY_FAMILY if state(name) is ModuleState.LOADABLE)


def load_modules(modules: Sequence[str] = MODULES, sys: pathlib.Path = pathlib.Path("/sys")) -> str:
    """Load all absent modules with one call of modprobe, and return the error messages of modprobe as one sentence.

    The sentence is empty if there is no error message. An error message does not prove that
    a module is missing: the module may be built in, or the kernel may load it later.
    """
    absent = [module for module in modules if not (sys / "module" / module).exists()]
    if not absent:
        return ""
    path = shutil.which("modprobe")
    if path is None:
        return "modprobe is not in PATH"
    try:
        done = subprocess.run(
            (path, "-a", *absent), capture_output=True, text=True, errors="replace", timeout=MODPROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"modprobe was killed because it did not end within {MODPROBE_TIMEOUT_S} s"
    except OSError as error:
        return f"{path}: {error.strerror}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    names = [match[1] for line in lines if (match := _NOT_FOUND.search(line))]
    others = [line for line in lines if not _NOT_FOUND.search(line)]
    said = [*([f"it finds no module {', '.join(names)}"] if names else []), *others]
    return f"modprobe says: {'; '.join(said)}" if said else ""


def missing_privileges(
    proc: pathlib.Path = pathlib.Path("/proc"), library: pathlib.Path = iptables_process.LIBRARY, *, runs_iptables: bool = True
) -> tuple[Missing, ...]:
    """The privileges that this process needs but does not have.

    If the file ``library`` exists, CAP_NET_RAW is unnecessary.

    CAP_NET_RAW is also unnecessary if the process never runs iptables (``runs_iptables`` is false).
    """
    has = iptables_process.capabilities(proc)
    if not has >> iptables_process.NET_ADMIN & 1:
        what = "this process may not change the network (it has no CAP_NET_ADMIN)"
        return (Missing(what, "run it as root, in a container with privileged: true, or with CAP_NET_ADMIN after --init-only"),)
    if runs_iptables and not has >> iptables_process.NET_RAW & 1 and not library.exists():
        what = "this process cannot run iptables (it has no CAP_NET_RAW)"
        return (Missing(what, "grant it; or use the image of ipvsproxy, or install with a C compiler: then it is not needed"),)
    return ()


def missing_features(proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[Missing, ...]:
    """The required features that the kernel does not have. Call ``load_modules`` first."""
    if not (proc / "thread-self/net/ip_vs").exists():
        remedy = "run modprobe ip_vs on the host, or mount its /lib/modules into the container, or use a kernel with CONFIG_IP_VS"
        return (Missing("this kernel has no IPVS (/proc/net/ip_vs does not exist)", remedy),)
    if not (proc / "sys/net/ipv4/vs/conntrack").exists():
        what = "IPVS cannot track connections in this kernel (net.ipv4.vs.conntrack does not exist)"
        return (Missing(what, "use a kernel with CONFIG_IP_VS_NFCT, without which masquerading does not work"),)
    return ()


def missing_settings(proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[Missing, ...]:
    """The required sysctls that are off and that this process cannot switch on. Writes no setting."""
    return tuple(
        Missing(
            f"{path.replace('/', '.')} is off, and this process cannot switch it on (/proc/sys/{path} is not writable)",
            "run ipvsproxy --init-only in a privileged container before this one, or set it on the host",
        )
        for path in INDISPENSABLE_SETTINGS
        if _is_off(proc / "sys" / path) and not os.access(proc / "sys" / path, os.W_OK)
    )


def _is_off(setting: pathlib.Path) -> bool:
    """Whether a sysctl exists and its value is not 1. ``missing_features`` reports sysctls that do not exist."""
    try:
        return setting.exists() and setting.read_text().strip() != "1"
    except OSError:  # the daemon reads and sets this sysctl later, together with all other sysctls
        return False


_NO_IPSET = frozenset({errno.EINVAL, errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT})
"""The errors by which nfnetlink refuses a subsystem that the kernel neither has nor can load (nfnetlink_rcv_msg)."""


def missing_set_types(connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> tuple[Missing, ...]:
    """The set types that ipset in this kernel lacks and cannot load, or one text which says that the kernel has no ipset.

    Raises:
        KernelError: the kernel did not answer this time; a later attempt may succeed.
    """
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER, connect)) as channel:
        try:
            return tuple(
                Missing(
                    f"this kernel has no ipset type {set_type} for {family.label}",
                    f"run modprobe ip_set_{set_type.replace(':', '_').replace(',', '')} on the host, "
                    "or use a kernel with CONFIG_IP_SET",
                )
                for set_type in SetType
                for family in Family
                if ipset_message.revisions(channel, set_type, family) is None
            )
        except KernelError as error:
            if error.errno not in _NO_IPSET:
                raise
            what = f"this kernel has no ipset ({os.strerror(error.errno)})"
            return (Missing(what, "run modprobe ip_set on the host, or use a kernel with CONFIG_IP_SET"),)
