"""Take-overs from kube-proxy, one after the other in one laboratory, while clients ask without a pause.

The kernel holds kube-proxy's recorded state. Each take-over starts the program on it, waits until all is in force, and ends the
program; what it leaves is what kube-proxy left, so that the next one begins alike.
"""

import itertools
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import golden_fixtures, golden_state, lab

PRELOADED = ("ipvsproxy.cli", "ipvsproxy.daemon.app", "ipvsproxy.daemon.sources.directory")
"""Modules that each program has at its beginning: on user-mode Linux importing them takes seconds."""
WITHIN_S = 60.0
POLL_S = 0.02
SYNCED = b"event=synced"
SIZE_OF_TABLE = Path("/proc/sys/net/netfilter/nf_conntrack_max")
"""The one setting that a take-over writes."""


class Client(NamedTuple):
    """Who asks whom; ``src`` is the address to send from, None lets the kernel choose."""

    from_: str
    protocol: str
    to: str
    port: int
    src: str | None = None


SECOND_ADDRESS = "172.18.0.51"
"""Of the clients outside: where two of them have one address, they may come to have one port as well.

IPVS tells answers apart by the client's address and port and the endpoint. Of two connections from one port of a client to one
endpoint, through two virtual servers, one gets no answers any more: with or without a take-over.
"""
CLIENTS = (
    Client("p1", "TCP", "10.96.16.1", 80),
    Client("client", "TCP", "172.18.0.2", 31030, SECOND_ADDRESS),
    Client("client", "TCP", "198.51.100.6", 80),
    Client("p2", "UDP", "10.96.2.1", 53),
    Client("host", "TCP", "fd00:10:96::b01", 80),
)


def add_second_address(node: lab.Lab) -> None:
    """Give it to the clients outside."""
    node.ip("client", f"address add {SECOND_ADDRESS}/16 dev lan")


class TakeOver(NamedTuple):
    """One take-over: when it began and was over, as ``time.monotonic`` has it, and what the program logged."""

    began_s: float
    ended_s: float
    log: str


class Unanswered(NamedTuple):
    """A request that was not answered; ``take_over`` is the number of the one that was under way, counted from 1, or 0."""

    client: Client
    outcome: str
    asked_s: float
    take_over: int
    after_s: float
    """Seconds from the beginning of that take-over to the question."""
    log: Sequence[str]
    """What the program logged in that take-over."""


class TakeOvers:
    """Take-overs on one node. ``answered`` counts requests, ``unanswered`` holds those that failed."""

    def __init__(self, node: lab.Lab, directory: Path, *, interval_s: float, clients: Sequence[Client] = CLIENTS) -> None:
        self.answered = 0
        self.slowest_s = 0.0
        self.unanswered: list[Unanswered] = []
        self.durations_s: list[float] = []
        self._node = node
        self._interval_s = interval_s
        self._clients = clients
        self._log = directory / "log"
        manifests = directory / "manifests"
        manifests.mkdir()
        golden_fixtures.World(manifests).apply("P0")
        profile = golden_fixtures.profiles()["default"]["flags"].split()
        self._flags = ["--proxy-mode=ipvs", f"--manifests={manifests}", "--hostname-override=node-a", "-v=4", *profile]
        self._recorded: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        add_second_address(node)
        golden_state.restore_state(self._recorded)
        self._size = SIZE_OF_TABLE.read_text()

    def run(self, count: int) -> None:
        """Take over so many times while all clients ask; what they met with is known at the end.

        Raises:
            TimeoutError: a program was not in force, or did not end, in time.
        """
        done: list[TakeOver] = []
        loads = [self._node.load(*client[:4], src=client.src, interval_s=self._interval_s) for client in self._clients]
        results = [load.__enter__() for load in loads]
        try:
            done.extend(self._take_over() for _ in range(count))
        finally:
            for load in loads:
                load.__exit__(None, None, None)
        numbers = itertools.count(len(self.durations_s) + 1)
        numbered = list(zip(numbers, done, strict=False))
        self.durations_s += [one.ended_s - one.began_s for one in done]
        for client, (met,) in zip(self._clients, results, strict=True):
            self.answered += met.outcomes.get("ok", 0)
            self.slowest_s = max(self.slowest_s, met.slowest_s)
            self.unanswered += [_told(client, outcome, asked_s, numbered) for asked_s, outcome in met.failures]

    def differences(self) -> Mapping[str, Any]:
        """What the kernel holds now and kube-proxy did not leave, but for rows that differ on purpose."""
        found = golden_state.differences(self._recorded, golden_state.read_state(), golden_state.KERNEL_SECTIONS)
        report = {
            part: [row for row in rows if not golden_fixtures.is_accepted("P0", part, row[0])] for part, rows in found.items()
        }
        return {part: rows for part, rows in report.items() if rows}

    def _take_over(self) -> TakeOver:
        if os.access(SIZE_OF_TABLE, os.W_OK):
            SIZE_OF_TABLE.write_text(self._size)
        self._log.write_bytes(b"")
        began_s = time.monotonic()
        process = self._context.Process(target=_run, args=(self._flags, str(self._log)))
        process.start()
        try:
            while SYNCED not in self._log.read_bytes():
                if not process.is_alive() or time.monotonic() > began_s + WITHIN_S:
                    raise TimeoutError(f"not in force within {WITHIN_S:.0f} s:\n{self._log.read_text()[-4000:]}")
                time.sleep(POLL_S)
            ended_s = time.monotonic()
        finally:
            process.kill()
            process.join()
        return TakeOver(began_s, ended_s, self._log.read_text())


def _run(flags: Sequence[str], log: str) -> None:
    from ipvsproxy import cli  # noqa: PLC0415 - in the process that is to run it alone

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    raise SystemExit(cli.main(list(flags)))


def _told(client: Client, outcome: str, asked_s: float, done: Sequence[tuple[int, TakeOver]]) -> Unanswered:
    """A failure, with the take-over that had begun last."""
    before = [(number, one) for number, one in done if one.began_s <= asked_s]
    if not before:
        return Unanswered(client, outcome, asked_s, 0, 0.0, ())
    number, during = before[-1]
    return Unanswered(client, outcome, asked_s, number, asked_s - during.began_s, during.log.splitlines())
