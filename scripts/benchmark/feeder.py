"""Sends lines to a watch at a fixed rate.

The sender is a separate process, so that its work does not count as the program's work.

python -m scripts.benchmark.feeder DESCRIPTOR BEGINS_S PER_S < LINES
"""

import itertools
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

TICK_S = 0.004
BUFFER_BYTES = 4 << 20
"""The size of the socket's send buffer in bytes. The buffer holds the lines of one second, so the feeder does not wait for the
reader."""


def start(lines: BinaryIO, *, begins_s: float, per_s: int) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """Start a process that sends these lines to the returned socket, and closes its own end after the last line.

    Sending begins when ``time.perf_counter`` reaches ``begins_s``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setsockopt(socket.SOL_SOCKET, 32, BUFFER_BYTES)  # SO_SNDBUFFORCE
        command = [sys.executable, "-m", "scripts.benchmark.feeder", str(theirs.fileno()), str(begins_s), str(per_s)]
        process = subprocess.Popen(command, stdin=lines, pass_fds=[theirs.fileno()])
    ours.setblocking(False)
    return ours, process


def main(arguments: Sequence[str]) -> None:
    """Run the feeder with the arguments of the command line."""
    begins_s, per_s = float(arguments[1]), int(arguments[2])
    with socket.socket(fileno=int(arguments[0])) as reader:
        fed = 0
        while True:
            due = int((time.perf_counter() - begins_s) * per_s) + 1
            if due > fed:
                chunk = b"".join(itertools.islice(sys.stdin.buffer, due - fed))
                if not chunk:
                    return
                reader.sendall(chunk)
                fed = due
            time.sleep(TICK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
