"""The control directory. `init`, the process that starts the command, finds this directory at /run/test-kernel.

The directory contains the command with its environment, the mounts, and programs that come first in the command's PATH.
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator

from scripts.kernels import processes
from scripts.kernels.errors import NoKernelError

INSIDE = "/run/test-kernel"  # the command finds the control directory here; the script init repeats this path
INIT = pathlib.Path(__file__).resolve().with_name("init")
ROOT = INIT.parents[2]

MODULES = (
    *"""
    ipv6 ip_vs ip_vs_rr ip_vs_wrr ip_vs_lc ip_vs_wlc ip_vs_lblc ip_vs_lblcr ip_vs_sh ip_vs_dh ip_vs_sed ip_vs_nq
    ip_vs_fo ip_vs_ovf ip_vs_mh ip_set ip_set_bitmap_port ip_set_hash_ip ip_set_hash_ipport ip_set_hash_ipportip
    ip_set_hash_ipportnet ip_set_hash_net xt_set nf_conntrack nf_conntrack_netlink xt_comment xt_mark xt_conntrack
    xt_addrtype xt_MASQUERADE xt_ipvs ipt_REJECT ip6t_REJECT dummy veth bridge br_netfilter sctp
""".split(),  # noqa: SIM905 - a list of names is easier to read as a paragraph
)

VARIANTS = {
    "legacy": ("/usr/sbin/xtables-legacy-multi", ("iptable_nat", "iptable_filter", "ip6table_nat", "ip6table_filter")),
    "nft": (
        "/usr/sbin/xtables-nft-multi",
        ("nf_tables", "nft_compat", "nft_chain_nat", "nft_ct", "nft_nat", "nft_masq", "nft_fib_inet", "nft_reject_inet"),
    ),
}
"""For each variant of iptables, its program, and the modules that only this variant needs. Debian's default is nft."""

ON_DEMAND = (
    *"""
    nft_numgen nft_limit nft_log nft_queue nft_hash nft_redir nft_objref xt_multiport xt_statistic xt_limit xt_nat
    xt_REDIRECT xt_LOG xt_NFLOG xt_CT xt_tcpudp xt_connmark xt_physdev iptable_mangle ip6table_mangle iptable_raw ip6table_raw
    xt_TCPMSS ipip ip6_tunnel
""".split(),  # noqa: SIM905 - program names are easier to read as a paragraph
)
"""Modules that are loaded when a test needs them. The kernel loads modules for rules, above all for rules of other programs, and
a test loads the module for tunnels."""

TOOLS = (
    *"ip ipset ipvsadm nft conntrack sysctl mount umount sleep cat true sh bash".split(),  # noqa: SIM905 - program names are easier to read as a paragraph
    *(
        f"{family}-{variant}{ending}"
        for family in ("iptables", "ip6tables")
        for variant in VARIANTS
        for ending in ("", "-save", "-restore")
    ),
)
"""System programs that the tests start often. The first folder of PATH has links to these programs. An attempt to start a program
from a folder that lacks the program takes as long as a successful start. The reason is that user-mode Linux copies the caller's
address space at each attempt."""

PASSED_NAMES = frozenset({"VIRTUAL_ENV", "TERM", "CI", "LANG"})
PASSED_PREFIXES = ("PYTHON", "HYPOTHESIS", "IPVSPROXY_")


@contextlib.contextmanager
def directory(command: list[str], mounts: list[str], iptables: str | None) -> Iterator[pathlib.Path]:
    """Create the control directory, and remove it at the end of the ``with`` block.

    Args:
        command: the command and its arguments.
        mounts: lines of fstab, mounted before /run and /tmp are replaced.
        iptables: the variant of iptables that the command gets; None means the host's variant.

    Raises:
        NoKernelError: a directory that the command needs is /tmp itself or in /run. Empty file systems are mounted on both.
    """
    with tempfile.TemporaryDirectory(prefix="ipvsproxy-kernel-") as name:
        control = pathlib.Path(name)
        (control / "bin").mkdir()
        (control / "init").symlink_to(INIT)
        (control / "fstab").write_text("\n".join([*mounts, *private_directories(control)]) + "\n")
        environment = passed_on(os.environ)
        lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
        lines += [f"cd {shlex.quote(str(pathlib.Path.cwd()))} || exit", f"exec {shlex.join(command)}"]
        (control / "command").write_text("\n".join(lines) + "\n")
        for tool in TOOLS:
            if path := shutil.which(tool, path=processes.SYSTEM_PATH):
                (control / "bin" / tool).symlink_to(path)
        if iptables:
            program, _ = VARIANTS[iptables]
            for tool in ("iptables", "ip6tables"):
                for ending in ("", "-save", "-restore"):
                    (control / f"bin/{tool}{ending}").symlink_to(program)
        yield control


def modules(iptables: str | None) -> tuple[str, ...]:
    """List the modules that the tests need with this variant of iptables."""
    _, needed = VARIANTS[iptables or "legacy"]
    return MODULES + needed


def passed_on(environment: os._Environ[str]) -> dict[str, str]:
    """Choose the environment variables that are passed to the command. The variable HOME is set to an empty directory."""
    chosen = {name: value for name, value in environment.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)}
    directories = [f"{INSIDE}/bin", *environment.get("PATH", "").split(":"), *processes.SYSTEM_PATH.split(":")]
    chosen["PATH"] = ":".join(dict.fromkeys(directory for directory in directories if directory))
    chosen["HOME"] = f"{INSIDE}/home"
    if not sys.stdout.isatty():
        chosen["TERM"] = "dumb"
    return chosen


def private_directories(control: pathlib.Path) -> list[str]:
    """Return the lines of fstab that mount empty file systems on /run and /tmp.

    Only the directories that the command needs stay visible there.
    """
    kept = [pathlib.Path.cwd(), ROOT, *(pathlib.Path(name) for name in (os.environ.get("VIRTUAL_ENV"),) if name)]
    lines = ["tmpfs /run tmpfs mode=755 0 0", f"{fstab(control)} {INSIDE} none bind,X-mount.mkdir 0 0"]
    inside = sorted({path for path in kept if path.is_relative_to("/tmp")})  # noqa: S108 - the path is only compared, not used
    outermost = [path for path in inside if not any(other in path.parents for other in inside)]
    if pathlib.Path("/tmp") in outermost or any(path.is_relative_to("/run") for path in kept):  # noqa: S108 - the path is only compared, not used
        raise NoKernelError("the working directory cannot be /tmp itself or in /run: both are empty where the command runs")
    for number, path in enumerate(outermost):
        lines.append(f"{fstab(path)} /run/kept/{number} none rbind,X-mount.mkdir 0 0")
    lines.append("tmpfs /tmp tmpfs mode=1777 0 0")
    for number, path in enumerate(outermost):
        lines.append(f"/run/kept/{number} {fstab(path)} none rbind,X-mount.mkdir 0 0")
    lines.append(f"tmpfs {INSIDE}/home tmpfs X-mount.mkdir,mode=700 0 0")
    return lines


def fstab(path: pathlib.Path) -> str:
    """Escape a path for fstab."""
    return str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def write_program(path: pathlib.Path, text: str) -> None:
    """Write an executable file."""
    path.write_text(text)
    path.chmod(0o755)
