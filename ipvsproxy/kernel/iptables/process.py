"""Runs the programs of iptables, and parses their error messages. All calls block."""

import errno
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Mapping

from ipvsproxy.kernel.base.errors import KernelError

LIBRARY = pathlib.Path(__file__).with_name("datagram.abi3.so")
"""The library that is compiled from ``datagram.c``. With the library, the programs of iptables need only the capability
CAP_NET_ADMIN.

The library exists if a C compiler was present when this package was installed, as in the image. Without the library, CAP_NET_RAW
is needed.
"""
NET_ADMIN, NET_RAW = 12, 13
"""The numbers of the bits of CAP_NET_ADMIN and CAP_NET_RAW in a set of capabilities (include/uapi/linux/capability.h)."""
TIMEOUT_S = 60
"""The longest time for which an iptables program may run. iptables waits a shorter time for its lock, so only a program that
hangs reaches this limit."""


def capabilities(proc: pathlib.Path = pathlib.Path("/proc")) -> int:
    """The effective capabilities of this process, as a bit mask."""
    lines = (proc / "self/status").read_text().splitlines()
    return next((int(line.partition(":")[2], 16) for line in lines if line.startswith("CapEff:")), 0)


def environment(proc: pathlib.Path = pathlib.Path("/proc"), library: pathlib.Path = LIBRARY) -> Mapping[str, str] | None:
    """The environment for a program of iptables; None means the unchanged environment of this process."""
    if capabilities(proc) >> NET_RAW & 1 or not library.exists():
        return None
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {**os.environ, "LD_PRELOAD": ":".join(preloaded)}


def run(command: str, *arguments: str, stdin: str = "") -> str:
    """Run a program of iptables, and return the program's output.

    Raises:
        KernelError: the program is not in PATH, or its exit status is not 0. An error number in the KernelError means that the
        program could not be started, or that it was killed because it hung.
    """
    path = shutil.which(command)
    if path is None:
        raise KernelError(action=command, errno=0, detail=f"{command} is not in PATH; install the package iptables")
    try:
        done = subprocess.run(
            (path, *arguments),
            input=stdin,
            env=environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        detail = f"it was killed because it did not end within {TIMEOUT_S} s"
        raise KernelError(action=command, errno=errno.ETIMEDOUT, detail=detail) from error
    except OSError as error:
        raise KernelError(action=command, errno=error.errno or errno.EIO, detail=f"{path}: {error.strerror}") from error
    if done.returncode:
        detail = describe_failure(done.stderr, stdin) or f"exit status {done.returncode}"
        raise KernelError(action=command, errno=0, detail=detail)
    return done.stdout


def describe_failure(stderr: str, stdin: str) -> str:
    """The error messages of an iptables program, and the input line to which they refer (if any), in one line."""
    messages = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("Try `")]
    text = "; ".join(messages)
    match = re.search(r"\bline:? (\d+)", text)
    lines = stdin.splitlines()
    if match and 0 < int(match.group(1)) <= len(lines):
        text += f" ({lines[int(match.group(1)) - 1]})"
    return text
