"""Runs command lines that end by themselves, one after the other; prints status, output and error of each as a line of JSON."""

import contextlib
import io
import json
import os
import sys

from ipvsproxy import cli


def main() -> int:
    """Run the command lines in the last argument, a list in JSON."""
    end = os._exit
    os._exit = lambda _status: None  # type: ignore[assignment, return-value]  # a command with a thread that has not ended does not end this process
    for arguments in json.loads(sys.argv[-1]):
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
            status = cli.main(arguments)
        sys.stdout.write(json.dumps([status, output.getvalue(), error.getvalue()]) + "\n")
        sys.stdout.flush()
    end(0)


if __name__ == "__main__":
    sys.exit(main())
