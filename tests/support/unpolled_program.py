"""The program without periodic polls: the kernel is read again only by an audit or after a notification."""

from ipvsproxy import cli
from ipvsproxy.daemon.loop import reader

STARTER = ("-m", "tests.support.unpolled_program")
"""The arguments with which Python runs this program."""
NEVER_S = 3600.0

if __name__ == "__main__":
    reader.POLL_INTERVAL_S = NEVER_S
    raise SystemExit(cli.main())
