"""Bad moments: temporary conditions of a node that a program may mistake for "does not exist" or "nothing to do".

Each function causes a condition and reverts it. The module ``bad_moments`` defines how the program must react to each condition.
"""

import contextlib
import enum
import fcntl
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.support.commands import run

LOCK = Path("/run/xtables.lock")
HELD_S = 12.0
"""The time for which the xtables lock is held. This time is longer than the sum of the times that iptables and ip6tables wait for
the lock."""
ADDRESS = "172.18.0.9"
"""A second address of the node's interface."""
AWAY_S = 1.0
"""The time for which the address is missing. This time suffices for the program to notice the loss, even on a busy machine."""
HIDDEN_TABLE = "filter"
_STRANGER = ("INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
_SAVING = ("iptables-save", "iptables-legacy-save")
_WRAPPER = """\
#!/bin/sh
[ -e {marker} ] || exec {real} "$@"
{real} "$@" | sed "/^\\*{table}\\$/,/^COMMIT\\$/c\\\\
# Table \\`{table}' is incompatible, use 'nft' tool."
"""


class Moment(enum.Enum):
    """The kinds of temporary conditions ("bad moments") that the tests cause on a node."""

    LOCKED_RESTART = "restart while another program holds the xtables lock"
    NATIVE_RULE = "native nft rule in a table of iptables"
    BLINKING_ADDRESS = "address that disappears for a moment"
    SILENT_PROXY = "silent proxy in front of the API server"
    FULL_RELOAD = "reload under ENOBUFS"
    STALLED_LOG = "the reader of the log stalls"
    FULL_DESCRIPTORS = "descriptors at the limit"
    LOCKED_MOVE = "start with nftables while another program holds the xtables lock"


@contextlib.contextmanager
def held_lock() -> Iterator[None]:
    """Hold the xtables lock, as another program would."""
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class NativeRules:
    """A wrapper of ``iptables-save``; the directory of the wrapper, ``path``, must be prepended to PATH.

    Some test kernels have only legacy tables, and legacy tables cannot hold native nft rules. Therefore the wrapper simulates a
    native rule. In the ``with`` block of ``added``, the wrapper prints a sentence in place of the table ``filter``, and returns
    status 0. The real program does the same for a table with native rules.
    """

    def __init__(self, directory: Path) -> None:
        self._marker = directory / "native"
        self.path = directory / "programs"
        self.path.mkdir()
        for name in _SAVING:
            if real := shutil.which(name):
                wrapper = self.path / name
                marker = shlex.quote(str(self._marker))
                wrapper.write_text(_WRAPPER.format(marker=marker, real=shlex.quote(real), table=HIDDEN_TABLE))
                wrapper.chmod(0o755)

    @contextlib.contextmanager
    def added(self) -> Iterator[None]:
        """While the block runs, the table has a rule of another program, and ``iptables-save`` cannot list the table."""
        self._marker.touch()
        run("iptables", "-A", *_STRANGER)  # the kernel sends the same notification for this rule as for a native rule
        try:
            yield
        finally:
            self._marker.unlink()
            run("iptables", "-D", *_STRANGER)


@contextlib.contextmanager
def second_address() -> Iterator[None]:
    """While the block runs, the node's interface has one more address."""
    _change_address("add")
    try:
        yield
    finally:
        _change_address("del")


@contextlib.contextmanager
def without_address() -> Iterator[None]:
    """While the block runs, the second address of the interface is missing."""
    _change_address("del")
    try:
        yield
    finally:
        _change_address("add")


def _change_address(verb: str) -> None:
    run("ip", "address", verb, f"{ADDRESS}/16", "dev", "eth0")
