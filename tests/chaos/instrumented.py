"""Runs ``ipvsproxy`` with its usual arguments, counts its tasks, and lets its netlink sockets fail on request.

The program uses two files in the directory ``IPVSPROXY_CHAOS``. It writes the number of its tasks to ``tasks`` every second, and
reads from ``faults`` which faults a test orders. If ``IPVSPROXY_CHAOS_WITHOUT`` names a bad moment (see ``moments.py``), the
program runs without the fix for this bad moment. ``IPVSPROXY_CHAOS_DESCRIPTORS`` is the maximum number of the program's file
descriptors.
"""

import asyncio
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos import broken, faults, faulty_socket
from tests.chaos.moments import Moment
from tests.support.program import Program

DIRECTORY = "IPVSPROXY_CHAOS"
WITHOUT = "IPVSPROXY_CHAOS_WITHOUT"
DESCRIPTORS = "IPVSPROXY_CHAOS_DESCRIPTORS"
STARTER = ("-m", "tests.chaos.instrumented")
TASKS = "tasks"
INTERVAL_S = 1.0
LONGEST_SILENCE_S = 10.0
"""In these tests, a watch with bookmarks may be silent for this time; in normal operation, it may be silent for 150 seconds."""


def program(
    directory: Path,
    log: Path,
    *flags: str,
    path: str | None = None,
    without: Moment | None = None,
    descriptors: int = 0,
    output: int | None = None,
    forks: bool = False,
) -> Program:
    """The instrumented program, started like ``Program``.

    ``without`` names the bad moment whose fix is removed, and ``descriptors`` limits the number of file descriptors.

    By default, the program does not run as a fork of this process. If ``forks`` is true, the program may run as a fork. A fork
    shares memory with its parent, so the memory usage of a fork would not be the memory usage of the program alone.
    """
    environment = {DIRECTORY: str(directory)} | ({WITHOUT: without.name} if without else {})
    environment |= {DESCRIPTORS: str(descriptors)} if descriptors else {}
    return Program(
        None, log, *flags, path=path, environment=environment, starter=STARTER, main=main if forks else None, output=output
    )


class _Policy(asyncio.DefaultEventLoopPolicy):
    """Remembers all loops."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[asyncio.AbstractEventLoop] = []

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        self.loops.append(loop)
        return loop


def count_tasks(path: Path) -> None:
    """Start a thread that writes the number of tasks to a file."""
    policy = _Policy()
    asyncio.set_event_loop_policy(policy)

    def count() -> None:
        draft = path.with_suffix(".draft")
        with contextlib.suppress(FileNotFoundError):  # the directory may be removed before the thread ends
            while True:
                draft.write_text(str(sum(len(asyncio.all_tasks(loop)) for loop in policy.loops)))
                draft.rename(path)
                time.sleep(INTERVAL_S)

    threading.Thread(target=count, daemon=True, name="count tasks").start()


def main(flags: Sequence[str] | None = None) -> int:
    """Run the program with these flags, or, if no flags are given, with the flags of the command line."""
    directory = Path(os.environ[DIRECTORY])
    if limit := int(os.environ.get(DESCRIPTORS, "0")):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    count_tasks(directory / TASKS)
    faulty_socket.install(faults.Faults(directory))
    from ipvsproxy import cli  # noqa: PLC0415 - imported only in the process that needs it
    from ipvsproxy.daemon.sources import reflector  # noqa: PLC0415 - imported only in the process that needs it

    reflector.LONGEST_SILENCE_S = LONGEST_SILENCE_S
    if without := os.environ.get(WITHOUT):
        broken.WITHOUT_MEND[Moment[without]]()
    return cli.main(flags)


if __name__ == "__main__":
    sys.exit(main())
