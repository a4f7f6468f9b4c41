"""Runs a command on the host's own kernel, in new namespaces."""

import os
import pathlib
import subprocess
import time

from scripts.kernels import control, processes
from scripts.kernels.errors import NoKernelError

IP_VS = pathlib.Path("/proc/net/ip_vs")


def why_not() -> str:
    """Return the reason why the host's kernel cannot be used; empty if it can be used. The function loads ip_vs if possible."""
    if os.geteuid() != 0:
        return "this is not root"
    if not IP_VS.exists():
        processes.quiet(["modprobe", "ip_vs"])
        if not IP_VS.exists():
            return "the host's kernel has no ip_vs, and 'modprobe ip_vs' does not load it"
    return processes.why_no_namespaces()


def run(command: list[str], deadline: float | None, iptables: str | None) -> int:
    """Run a command in new namespaces of the host's kernel, and return the command's exit status.

    Args:
        command: the command and its arguments.
        deadline: a time of time.monotonic; None means no limit.
        iptables: a variant of iptables; None means the host's own variant.

    Raises:
        NoKernelError: the host's kernel cannot be used.
        TimeoutError: the deadline has passed.
    """
    if reason := why_not():
        raise NoKernelError(f"the host's kernel cannot be used: {reason}")
    for module in control.modules(iptables):  # one command per module, so that an unknown name does not stop the others
        processes.quiet(["modprobe", module])
    # sysfs shows the devices of the network namespace in which it is mounted
    mounts = ["sysfs /sys sysfs nosuid,nodev,noexec 0 0"]
    with control.directory(command, mounts, iptables) as directory:
        process = subprocess.Popen(
            [*processes.IN_NAMESPACES, "--net", str(directory / "init"), "host"],
            stdin=subprocess.DEVNULL, env={"PATH": processes.SYSTEM_PATH}, start_new_session=True,
            preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - see die_with_parent
        )  # fmt: skip
        with processes.killed_at_the_end(process):
            try:
                return process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError from None
