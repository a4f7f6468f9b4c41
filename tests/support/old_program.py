"""Runs the program as on an older kernel, with the command ``python -m tests.support.old_program 4.18 FLAGS``."""

import sys

from ipvsproxy import cli
from ipvsproxy.kernel import host
from tests.support import old_kernel

STARTER = ("-m", "tests.support.old_program")


def main() -> int:
    """Run the program; return its exit status."""
    version, *arguments = sys.argv[1:]
    old_kernel.speak_as(version)
    major, minor = map(int, version.split("."))
    host.kernel_version = lambda *_: (major, minor)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
