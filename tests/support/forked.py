"""Programs under test as forks of a process that has imported them: the import is most of a start on user-mode Linux."""

import ctypes
import importlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection

_CLONE_NEWNET = 0x40000000
PRELOADED = ("tests.support.preloaded",)
_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Start the process that forks, in the network namespace of this thread, unless it runs already."""
    _context.set_forkserver_preload(list(PRELOADED))
    forkserver.ensure_running()


class Forked:
    """``main`` of a module in a fork, in the network namespace of this thread, with the methods of ``subprocess.Popen``.

    ``main`` finds its arguments in ``sys.argv``, and returns the exit status. Both streams of output go to a descriptor.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, output: int, environment: Mapping[str, str]) -> None:
        prepare()
        with (
            Connection(os.dup(output), readable=False) as log,
            Connection(os.open("/proc/thread-self/ns/net", os.O_RDONLY), writable=False) as namespace,
        ):
            self._process = _context.Process(target=_run, args=(module, arguments, dict(environment), log, namespace))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
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
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: "Connection[None, None]",
    namespace: "Connection[None, None]",
) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no such network namespace")
    namespace.close()
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    log.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    status = importlib.import_module(module).main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
