"""The real program as a subprocess, with a directory of manifests as its source."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from ipvsproxy import cli
from tests.support import forked, in_turn, patience

SYNCED_WITHIN_S = patience.seconds(120.0)
STOPPED_WITHIN_S = patience.seconds(30.0)
_BETWEEN_LOOKS_S = 0.05
OLD_KERNEL = os.environ.get("IPVSPROXY_TEST_OLD_KERNEL", "")
"""The version of Linux whose answers the kernel must imitate; empty if the kernel imitates no other version."""
STARTER = ("-m", "tests.support.old_program", OLD_KERNEL) if OLD_KERNEL else ("-m", "ipvsproxy")
"""The arguments with which Python runs the program."""
OTHER_VERSION = os.environ.get("IPVSPROXY_TEST_PROGRAM", "")
"""The folder of another version of ipvsproxy that is tested in place of the version in this repository. The text is empty if the
version in this repository is tested."""
FORKS = not OLD_KERNEL and not OTHER_VERSION
"""Whether the program under test runs as a fork (``forked.py``). A fork can run only the version that the forking process has
imported."""
PYTHON = (sys.executable, "-P") if OTHER_VERSION else (sys.executable,)
"""The command that starts Python; with the variables of ``python_environment``, Python imports the version under test."""


AnyProcess = forked.Forked | subprocess.Popen[bytes]


class Ended(NamedTuple):
    """The result of a command line."""

    status: int
    output: str
    error: str


def python_environment() -> dict[str, str]:
    """The environment variables for ``PYTHON``."""
    return os.environ | ({"PYTHONPATH": f"{OTHER_VERSION}:{Path.cwd()}"} if OTHER_VERSION else {})


def run_in_turn(*commands: Sequence[str], within_s: float) -> list[Ended]:
    """Run several command lines that end by themselves, in one process, because each start takes seconds on user-mode Linux.

    Raises: subprocess.SubprocessError: a command line ended the process, or the command lines took too long.
    """
    with tempfile.TemporaryFile() as output:
        if FORKS:
            process: AnyProcess = forked.Forked(in_turn.run, commands, output=output.fileno(), environment=os.environ)
        else:
            command = [*PYTHON, "-m", "tests.support.in_turn", json.dumps(commands)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, env=python_environment())
        try:
            status = process.wait(patience.seconds(within_s))
        finally:
            process.kill()
        output.seek(0)
        text = output.read().decode()
    if status != 0:
        raise subprocess.CalledProcessError(status, str(commands), text)
    return [Ended(*json.loads(line)) for line in text.splitlines()]


class ProgramError(Exception):
    """Raised if the program did not behave as expected; the message ends with the last log lines."""


class Program:
    """Runs ``ipvsproxy --proxy-mode=ipvs --manifests=…`` in the current namespace while the block runs.

    If ``manifests`` is None, the flags name the source. Output is appended to the file ``log``, or goes to the descriptor
    ``output``, which this process closes after the start. ``path`` is prepended to PATH, and ``environment`` is added to the
    environment of this process. ``starter`` has the arguments with which Python starts the program, such as ``-m ipvsproxy``; the
    flags follow these arguments. If ``starter`` is empty or ``main`` is given, the program normally runs as a fork
    (``forked.py``), which calls ``main`` with the flags.
    """

    def __init__(
        self,
        manifests: Path | None,
        log: Path,
        *flags: str,
        path: str | None = None,
        environment: Mapping[str, str] | None = None,
        starter: Sequence[str] = (),
        main: Callable[[Sequence[str]], int] | None = None,
        output: int | None = None,
    ) -> None:
        source = [f"--manifests={manifests}"] if manifests else []
        self._main = main or cli.main
        self._is_fork = FORKS and (main is not None or not starter)
        self._flags = ["--proxy-mode=ipvs", *source, *flags]
        self._command = [*PYTHON, *(starter or STARTER), *self._flags]
        self._log = log
        self._output = output
        self._environment = python_environment() | (dict(environment or {}))
        if path:
            self._environment |= {"PATH": f"{path}:{os.environ['PATH']}"}

    def __enter__(self) -> Self:
        with self._log.open("ab") if self._output is None else open(self._output, "wb") as log:  # noqa: PTH123 - a descriptor, not a path
            self._process: AnyProcess = (
                forked.Forked(self._main, self._flags, output=log.fileno(), environment=self._environment)
                if self._is_fork
                else subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive:
            self._process.terminate()
            try:
                self._process.wait(STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise ProgramError(f"still running {STOPPED_WITHIN_S} s after SIGTERM\n{self.log_tail()}") from None

    def kill(self) -> None:
        """Kill the program, as a crash would."""
        self._process.kill()
        self._process.wait()

    def wait_for_end(self, within_s: float) -> None:
        """Wait until the program has ended by itself."""
        self._process.wait(within_s)

    @property
    def process_id(self) -> int:
        """The process ID of the program."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of the program; None means that the program still runs."""
        return self._process.poll()

    @property
    def is_alive(self) -> bool:
        """Whether the program is running."""
        return self.status is None

    @property
    def command(self) -> str:
        """The command line."""
        return " ".join(self._command)

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until_synced(self) -> None:
        """Wait until the log says that all manifests were programmed once.

        Raises:
            ProgramError: the program ended, or took too long.
        """
        self.wait_until(lambda: b"event=synced" in self._log.read_bytes(), "synced", SYNCED_WITHIN_S)

    def wait_until(self, reached: Callable[[], bool], what: str, within_s: float) -> None:
        """Poll until a condition holds.

        Some conditions are checked by starting a process. Therefore each pause is at least as long as the check before it, and at
        least the smaller of one second and three times this duration. So checks take at most half of the time.

        Raises:
            ProgramError: the program ended, or the condition did not hold within ``within_s`` seconds.
        """
        began_s = time.monotonic()
        deadline_s = began_s + within_s
        while not reached():
            if not self.is_alive:
                raise ProgramError(f"ended with status {self.status}, not {what}\n{self.log_tail()}")
            looked_s = time.monotonic()
            if looked_s > deadline_s:
                raise ProgramError(f"not {what} within {within_s} s\n{self.log_tail()}")
            took_s = looked_s - began_s
            time.sleep(max(_BETWEEN_LOOKS_S, took_s, min(3 * took_s, 1.0)))
            began_s = time.monotonic()
