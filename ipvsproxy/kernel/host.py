"""The host: kernel settings, kernel version, processors, and what must be there before anything can be programmed."""

import errno
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pyroute2.ipset import IPSet
from pyroute2.netlink.exceptions import NetlinkError

from ipvsproxy.kernel import preload
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.ipset_message import IPSET_PROTOCOL
from ipvsproxy.model.kernel import INDISPENSABLE_SETTINGS, SetType, Sysctl
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb

MODPROBE_TIMEOUT_S = 30
"""Longest run of modprobe; it only helps, so a hanging one is given up."""

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
"""What the kernel needs and does not always load by itself."""

_PRIVILEGED = "have a privileged container run ipvsproxy --init-only before this one, or set the value on the host"
_REMEDIES: Mapping[int, str] = {
    errno.EROFS: f"it is mounted read-only; {_PRIVILEGED}",
    errno.EACCES: _PRIVILEGED,
    errno.EPERM: _PRIVILEGED,
    errno.ENOENT: "this kernel has no such setting: load the module that brings it, or use a kernel that has it",
    errno.EINVAL: "the kernel does not take this value",
}


class Missing(NamedTuple):
    """Something that must be there and is not, and what to do about it; together they are one sentence."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


class SysctlDriver:
    """Reads and writes kernel settings. A path is relative to ``/proc/sys``, or absolute (``/sys/module/...``)."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/proc/sys")) -> None:
        self._root = root

    def observe(self, paths: Iterable[str]) -> Mapping[str, str]:
        """The values of those settings that exist and that this process may see.

        Raises:
            KernelError: one exists and cannot be read.
        """
        found: dict[str, str] = {}
        for path in paths:
            try:
                found[path] = (self._root / path).read_text().strip()
            except (FileNotFoundError, PermissionError):
                continue
            except OSError as error:
                raise KernelError(action=f"read {path}", errno=error.errno or 0, detail=_explain(error)) from error
        return found

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Write settings. Removing one is not possible, and leaves it as it is: what it was before is not known."""
        return [_write(self._root, operation, operation.item) for operation in operations if isinstance(operation.item, Sysctl)]


def _write(root: pathlib.Path, operation: Operation, setting: Sysctl) -> Outcome:
    if operation.verb is Verb.REMOVE:
        return Outcome(operation)
    try:
        # Not write_text: it would create a file where the kernel has no such setting and the directory is an ordinary one.
        descriptor = os.open(root / setting.path, os.O_WRONLY)
        try:
            os.write(descriptor, f"{setting.value}\n".encode())
        finally:
            os.close(descriptor)
    except OSError as error:
        return Outcome(operation, error=f"{setting.path} = {setting.value}: {_explain(error)}", errno=error.errno or 0)
    return Outcome(operation)


def _explain(error: OSError) -> str:
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{error.strerror}; {remedy}" if remedy else f"{error.strerror}"


def kernel_version(proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[int, int]:
    """Major and minor number of the running kernel.

    Raises:
        KernelError: the kernel does not tell.
    """
    path = proc / "sys/kernel/osrelease"
    try:
        text = path.read_text()
    except OSError as error:
        raise KernelError(action=f"read {path}", errno=error.errno or 0) from error
    found = re.match(r"(\d+)\.(\d+)", text)
    if found is None:
        raise KernelError(action=f"read {path}", detail=f"{text.strip()!r} is not a kernel version")
    return int(found.group(1)), int(found.group(2))


def processor_count() -> int:
    """How many processors the host has, whatever share of them this process may use; at least 1."""
    return os.cpu_count() or 1


def load_modules(modules: Sequence[str] = MODULES, sys: pathlib.Path = pathlib.Path("/sys")) -> str:
    """Ask modprobe for those modules that are not there, all in one go. Returns what it complained of, for the log.

    A complaint is no proof that something is missing: the module may be built in, or the kernel may load it by itself.
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
        return f"modprobe was ended after {MODPROBE_TIMEOUT_S} s without an answer"
    except OSError as error:
        return f"{path}: {error.strerror}"
    return "; ".join(line.strip() for line in done.stderr.splitlines() if line.strip())


def missing_privileges(
    proc: pathlib.Path = pathlib.Path("/proc"), library: pathlib.Path = preload.LIBRARY
) -> tuple[Missing, ...]:
    """The privileges that this process needs and does not have. ``library`` is what makes it do without CAP_NET_RAW."""
    has = preload.capabilities(proc)
    if not has >> preload.NET_ADMIN & 1:
        return (
            Missing(
                "this process may not change the network (it has no CAP_NET_ADMIN)",
                "run it as root, in a container with privileged: true, or with CAP_NET_ADMIN after --init-only",
            ),
        )
    if not has >> preload.NET_RAW & 1 and not library.exists():
        return (
            Missing(
                "this process cannot run iptables (it has no CAP_NET_RAW)",
                "grant it; or install ipvsproxy where there is a C compiler: its image does without",
            ),
        )
    return ()


def missing_features(proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[Missing, ...]:
    """What the kernel itself lacks; to be asked once ``load_modules`` has been called."""
    if not (proc / "thread-self/net/ip_vs").exists():
        return (
            Missing(
                "this kernel has no IPVS (/proc/net/ip_vs does not exist)",
                "run modprobe ip_vs on the host, or mount its /lib/modules into the container, or use a kernel with CONFIG_IP_VS",
            ),
        )
    if not (proc / "sys/net/ipv4/vs/conntrack").exists():
        return (
            Missing(
                "IPVS cannot track connections in this kernel (net.ipv4.vs.conntrack does not exist)",
                "use a kernel with CONFIG_IP_VS_NFCT, without which masquerading does not work",
            ),
        )
    return ()


def missing_settings(proc: pathlib.Path = pathlib.Path("/proc")) -> tuple[Missing, ...]:
    """The indispensable settings that are off and cannot be switched on by this process. Nothing is written."""
    return tuple(
        Missing(
            f"{path.replace('/', '.')} is off, and this process cannot switch it on (/proc/sys/{path} is not writable)",
            "run ipvsproxy --init-only in a privileged container before this one, or set it on the host",
        )
        for path in INDISPENSABLE_SETTINGS
        if _is_off(proc / "sys" / path) and not os.access(proc / "sys" / path, os.W_OK)
    )


def _is_off(setting: pathlib.Path) -> bool:
    """Whether a setting is there and is known not to be 1; one that is not there is told by ``missing_features``."""
    try:
        return setting.exists() and setting.read_text().strip() != "1"
    except OSError:  # it is read again with all others, and tried again then
        return False


_ASK_SETS = "ask for the types of sets"
_NO_IPSET = frozenset({errno.EINVAL, errno.ENOENT, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT})
"""How nfnetlink refuses a subsystem that the kernel has not got, and cannot load (nfnetlink_rcv_msg)."""
_IPSET_ERRORS = 4096
"""From here on numbers are ipset's own (include/uapi/linux/netfilter/ipset/ip_set.h): ``IPSET_ERR_FIND_TYPE`` is one of them."""


def missing_set_types() -> tuple[Missing, ...]:
    """What the kernel's ipset lacks: the protocol, or types that it neither has nor can load.

    Must not be called in a thread that runs an event loop.

    Raises:
        KernelError: the kernel could not be asked just now.
    """
    try:
        return _missing_set_types()
    except NetlinkError as error:
        raise KernelError(action=_ASK_SETS, errno=error.code) from error
    except OSError as error:
        raise KernelError(action=_ASK_SETS, errno=error.errno or 0) from error


def _missing_set_types() -> tuple[Missing, ...]:
    with IPSet() as ipset:
        missing = _missing_protocol(ipset)
        return missing or tuple(
            Missing(
                f"this kernel has no ipset type {set_type} for {family.label}",
                f"run modprobe ip_set_{set_type.replace(':', '_').replace(',', '')} on the host, "
                "or use a kernel with CONFIG_IP_SET",
            )
            for set_type in SetType
            for family in Family
            if not _has_set_type(ipset, set_type, family)
        )


def _missing_protocol(ipset: IPSet) -> tuple[Missing, ...]:
    try:
        (answer,) = ipset.get_proto_version()
    except NetlinkError as error:
        if error.code not in _NO_IPSET:
            raise
        what = f"this kernel's ipset does not tell which protocol it speaks ({os.strerror(error.code)})"
        return (Missing(what, "run modprobe ip_set on the host, or use a kernel with CONFIG_IP_SET"),)
    newest = int(answer.get_attr("IPSET_ATTR_PROTOCOL") or 0)
    oldest = int(answer.get_attr("IPSET_ATTR_PROTOCOL_MIN") or newest)
    if oldest <= IPSET_PROTOCOL <= newest:
        return ()
    what = f"this kernel's ipset speaks protocol {oldest} to {newest}, not {IPSET_PROTOCOL}"
    return (Missing(what, "use a kernel of version 2.6.39 or later, whose ipset is at least version 6"),)


def _has_set_type(ipset: IPSet, set_type: SetType, family: Family) -> bool:
    try:
        ipset.get_supported_revisions(set_type.value, family=family)
    except NetlinkError as error:
        if error.code < _IPSET_ERRORS:
            raise
        return False
    return True
