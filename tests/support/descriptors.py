"""The file descriptors of this process."""

import contextlib
import pathlib


def opened() -> set[tuple[str, str]]:
    """The number of each open descriptor, and the file or socket to which the descriptor leads.

    A thread of an earlier test may close its descriptors at any time, so a test that compares two results must accept that
    descriptors are missing from the second result.
    """
    found = set()
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists this directory is gone by now
            found.add((path.name, str(path.readlink())))
    return found
