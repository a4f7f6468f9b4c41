"""Starts processes that end with their parent; the children of these processes end with them."""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IN_NAMESPACES = ("/usr/bin/unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""In front of a command, these words give the command separate mount and process namespaces."""


def why_no_namespaces() -> str:
    """Return the reason why this process cannot create namespaces; empty if it can."""
    return "" if quiet([*IN_NAMESPACES, "--net", "true"]) == 0 else "the host does not allow new namespaces (unshare failed)"


def quiet(command: list[str]) -> int:
    """Run a command and discard its output; return 127 if the command is not installed."""
    try:
        return subprocess.run(
            command, env={"PATH": SYSTEM_PATH}, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        ).returncode  # fmt: skip
    except FileNotFoundError:
        return 127


def die_with_parent() -> None:
    """Let the kernel end this process when the parent process ends for any reason.

    This function runs between fork and exec, which is safe because this program has a single thread.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of processes that a killed child leaves behind, so that this process can wait for their end."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """At the end of the ``with`` block, kill all processes in the session of ``process``.

    A user-mode Linux consists of many processes.
    """
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)  # these are orphans of the killed session
