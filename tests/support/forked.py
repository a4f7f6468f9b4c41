"""Runs programs under test as forks of a process that has already imported them.

The import takes most of the time of a start on user-mode Linux.
"""

import ctypes
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection

_CLONE_NEWNET = 0x40000000
_IMPORTED = ("tests.chaos.history", "tests.faults.starts", "tests.support.preloaded")
"""The modules that are imported before any fork. They also import whatever the main modules in ``scripts`` import. Each fork runs
the main module again, and would otherwise repeat these imports."""
_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the forking process in the network namespace of this thread, unless it already runs."""
    _context.set_forkserver_preload([*_IMPORTED])
    forkserver.ensure_running()


class Forked:
    """A forked process that runs a function in this thread's network namespace; has the methods of ``subprocess.Popen``.

    ``target`` returns the exit status. Standard output and error go to the descriptor ``output``.
    """

    def __init__(self, target: Callable[..., int], *arguments: object, output: int, environment: Mapping[str, str]) -> None:
        prepare()
        with (
            Connection(os.dup(output), readable=False) as log,
            Connection(os.open("/proc/thread-self/ns/net", os.O_RDONLY), writable=False) as namespace,
        ):
            self._process = _context.Process(target=_run, args=(log, namespace, dict(environment), target, *arguments))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status; None means that the process still runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit status.

        Raises: subprocess.TimeoutExpired: the process still runs.
        """
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return status

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()


def _run(
    log: "Connection[None, None]",
    namespace: "Connection[None, None]",
    environment: Mapping[str, str],
    target: Callable[..., int],
    *arguments: object,
) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no such network namespace")
    namespace.close()
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    log.close()
    # The inherited ``sys.stdout`` and ``sys.stderr`` would still treat the descriptors as the former kind of file, for example as
    # regular files although they are now pipes.
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    status = target(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
