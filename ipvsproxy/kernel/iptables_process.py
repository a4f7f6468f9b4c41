"""Starting the programs of iptables, and what they say when they fail. All calls block."""

import errno
import re
import shutil
import subprocess

from ipvsproxy.kernel import preload
from ipvsproxy.kernel.errors import KernelError

TIMEOUT_S = 60
"""Longest run of one iptables program; the wait for its lock is shorter, so only a hanging one gets here."""


def run(command: str, *arguments: str, stdin: str = "") -> str:
    """What a program of iptables prints.

    Raises:
        KernelError: it is not in PATH or exits with another status than 0; with a number, it could not be started or hangs.
    """
    path = shutil.which(command)
    if path is None:
        raise KernelError(action=command, errno=0, detail=f"{command} is not in PATH; install the package iptables")
    try:
        done = subprocess.run(
            (path, *arguments),
            input=stdin,
            env=preload.environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        detail = f"it was ended after {TIMEOUT_S} s without an answer"
        raise KernelError(action=command, errno=errno.ETIMEDOUT, detail=detail) from error
    except OSError as error:
        raise KernelError(action=command, errno=error.errno or errno.EIO, detail=f"{path}: {error.strerror}") from error
    if done.returncode:
        detail = describe_failure(done.stderr, stdin) or f"exit status {done.returncode}"
        raise KernelError(action=command, errno=0, detail=detail)
    return done.stdout


def describe_failure(stderr: str, stdin: str) -> str:
    """One line out of what an iptables program says on stderr, with the line of its input that it names, if any."""
    said = [line.strip() for line in stderr.splitlines() if line.strip() and not line.startswith("Try `")]
    text = "; ".join(said)
    found = re.search(r"\bline:? (\d+)", text)
    lines = stdin.splitlines()
    if found and 0 < int(found.group(1)) <= len(lines):
        text += f" ({lines[int(found.group(1)) - 1]})"
    return text
