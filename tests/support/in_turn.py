"""Runs ipvsproxy's commands one after the other in one process.

Each command must end by itself. For each command, this module prints one line of JSON with the exit status, the standard output
and the standard error.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence

from ipvsproxy import cli


def run(commands: Sequence[Sequence[str]]) -> int:
    """Run each command line, print its result, and then end this process with status 0."""
    end = os._exit
    # If a thread has not ended yet, a command calls ``os._exit``, which must not end this process.
    os._exit = lambda _status: None  # type: ignore[assignment, return-value]  # replaced on purpose
    for arguments in commands:
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
            status = cli.main(arguments)
        sys.stdout.write(json.dumps([status, output.getvalue(), error.getvalue()]) + "\n")
        sys.stdout.flush()
    end(0)


if __name__ == "__main__":
    run(json.loads(sys.argv[-1]))
