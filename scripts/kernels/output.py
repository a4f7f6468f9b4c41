"""Passes on the output of a command while the command runs on another kernel."""

import contextlib
import os
import selectors
import subprocess
import time

AT_ONCE = 65536
PAUSE_S = 0.05


def pass_on(routes: dict[int, int], deadline: float | None) -> None:
    """Copy from each pipe to its target until every pipe has ended, then close the pipes.

    The keys of ``routes`` are the pipes, and the values are the targets.

    Raises:
        TimeoutError: the deadline (a time of time.monotonic) has passed.
    """
    with selectors.DefaultSelector() as selector:
        for source in routes:
            selector.register(source, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_remaining(deadline)):
                data = os.read(key.fd, AT_ONCE)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                _write(routes[key.fd], data)


def follow(routes: dict[int, int], process: subprocess.Popen[bytes], deadline: float | None) -> None:
    """Copy from each file to its target while a process appends to the files. Close the files after the process has ended.

    ``routes`` maps the descriptor of each file to the descriptor that receives the copied data.

    Raises:
        TimeoutError: the deadline (a time of time.monotonic) has passed.
    """
    while True:
        ended = process.poll() is not None  # the process is checked before the files are read, so that no output is missed
        for source, target in routes.items():
            while data := os.read(source, AT_ONCE):
                _write(target, data)
                _remaining(deadline)
        if ended:
            break
        _remaining(deadline)
        time.sleep(PAUSE_S)  # there is no way to wait for new data in a file
    for source in routes:
        os.close(source)


def _remaining(deadline: float | None) -> float | None:
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError
    return remaining


def _write(target: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe; the exit status of the command still counts
        while data:
            data = data[os.write(target, data) :]
