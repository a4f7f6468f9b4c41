"""``ipvsproxy verify``, again and again, without importing it anew each time: that takes seconds on user-mode Linux."""

import contextlib
import io
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection

PRELOADED = (
    "ipvsproxy.cli",
    "ipvsproxy.commands.verify",
    "ipvsproxy.daemon.sources.source",
    "ipvsproxy.daemon.sources.watch",
    "tests.chaos.history",
)
"""With what the main module of a suite imports: each process runs that module again."""
WITHIN_S = 60.0


def verify(flags: Sequence[str]) -> tuple[int, str]:
    """The exit status and what was said, on both streams.

    Raises:
        TimeoutError: it did not end.
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
        status, said = receiving.recv()
        return status, said
    finally:
        process.kill()
        process.join()
        receiving.close()


def _run(flags: Sequence[str], sending: "Connection[tuple[int, str], None]") -> None:
    from ipvsproxy import cli  # noqa: PLC0415 - in the process that is to run it alone

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.main(["verify", *flags])
    sending.send((status, said.getvalue()))
