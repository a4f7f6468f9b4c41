"""The real firewalld, running as a daemon in this network namespace, with its own message bus."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from tests.support import patience

RUNS_WITHIN_S = patience.seconds(60.0)
PROGRAMS = ("firewalld", "firewall-cmd", "dbus-daemon")

_BUS = """\
<busconfig>
  <type>system</type>
  <listen>unix:path={bus}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/><allow user="*"/>
  </policy>
</busconfig>
"""
_CONFIGURATION = "DefaultZone=public\nFirewallBackend=nftables\nIPv6_rpfilter=no\n"


def missing() -> str:
    """The missing programs that firewalld needs; empty if no program is missing."""
    return ", ".join(name for name in PROGRAMS if shutil.which(name) is None)


class Firewalld:
    """Run firewalld with the default zone ``public`` while the block runs.

    firewalld keeps its files in ``directory``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._closing = contextlib.ExitStack()
        self._daemon: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        bus = self._directory / "bus"
        configuration = self._directory / "bus.conf"
        configuration.write_text(_BUS.format(bus=bus))
        (self._directory / "firewalld").mkdir()
        (self._directory / "firewalld" / "firewalld.conf").write_text(_CONFIGURATION)
        self._environment: Mapping[str, str] = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={bus}"}
        with contextlib.ExitStack() as closing:
            closing.callback(self._stop)
            closing.callback(_end, self._start("dbus-daemon", f"--config-file={configuration}", "--nofork"))
            self._wait_until(bus.exists)
            self.start()
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._closing.close()

    def start(self) -> None:
        """Start the daemon, and wait until its rules have been written."""
        configuration = self._directory / "firewalld"
        self._daemon = self._start("firewalld", "--nofork", "--nopid", f"--system-config={configuration}")
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        self._wait_until(lambda: self._command("--state").returncode == 0)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RUNS_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, (self._directory / "log").read_text()
            time.sleep(0.2)

    def restart(self) -> None:
        """Restart the daemon; the daemon removes its rules when it stops."""
        self._stop()
        self.start()

    def reload(self) -> None:
        """Make the daemon write its rules again.

        On a slow kernel, writing the rules takes longer than the message bus waits, so ``firewall-cmd`` may get no reply. This
        error is ignored.
        """
        done = self._command("--reload")
        assert done.returncode == 0 or "Did not receive a reply" in done.stderr, done.stderr
        self._wait_until_it_answers()

    def command(self, *words: str) -> str:
        """Run ``firewall-cmd``; return its output."""
        done = self._command(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(("firewall-cmd", *words), env=self._environment, capture_output=True, text=True, check=False)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._directory / "log").open("ab") as log:
            return subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _stop(self) -> None:
        if self._daemon is not None:
            _end(self._daemon)
            self._daemon = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(RUNS_WITHIN_S)
