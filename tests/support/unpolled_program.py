"""The program without periodic polls: it reads the kernel again only at an audit and after a notification."""

from ipvsproxy import cli
from ipvsproxy.daemon.loop import reader

STARTER = ("-m", "tests.support.unpolled_program")
"""The arguments of Python that run it."""
NEVER_S = 3600.0

if __name__ == "__main__":
    reader.POLL_INTERVAL_S = NEVER_S
    raise SystemExit(cli.main())
