"""Runs ``ipvsproxy verify`` repeatedly without importing it each time, which takes seconds on user-mode Linux."""

import contextlib
import io
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

from tests.support import patience

PRELOADED = (
    "ipvsproxy.cli",
    "ipvsproxy.commands.verify",
    "ipvsproxy.daemon.sources.source",
    "ipvsproxy.daemon.sources.watch",
    "tests.chaos.history",
)
"""Imports of a suite's main module, because each process runs that module again."""
WITHIN_S = patience.seconds(60.0)


def verify(flags: Sequence[str]) -> tuple[int, str]:
    """Run it; returns the exit status and the output of both streams.

    Raises:
        TimeoutError: it did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(list(flags), sending))
    process.start()
    sending.close()
    try:
        if not receiving.poll(WITHIN_S):
            raise TimeoutError(f"verify did not end within {WITHIN_S:.0f} s")
        status, output = receiving.recv()
        return status, output
    finally:
        process.kill()
        process.join()
        receiving.close()


def _run(flags: Sequence[str], sending: "Connection[tuple[int, str], None]") -> None:
    from ipvsproxy import cli  # noqa: PLC0415 - only in the process that runs it

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = cli.main(["verify", *flags])
    sending.send((status, output.getvalue()))
