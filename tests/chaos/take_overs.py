"""Takes over from kube-proxy again and again in one lab, while clients send requests without a pause.

The kernel has kube-proxy's recorded state. Each take-over starts the program on the recorded state, waits until everything has
been programmed, and ends the program. At its end, the program leaves the kernel's state as kube-proxy had left it, so that the
next take-over starts from the same state.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import golden_fixtures, golden_state, lab, patience, program

WITHIN_S = patience.seconds(60.0)
POLL_S = 0.02
SYNCED = b"event=synced"
SIZE_OF_TABLE = Path("/proc/sys/net/netfilter/nf_conntrack_max")
"""The path of the kernel setting for the largest size of the connection-tracking table. A take-over writes no other kernel
setting."""


class Client(NamedTuple):
    """A client, and the target of its requests. ``src`` is the source address; None lets the kernel choose it."""

    from_: str
    protocol: str
    to: str
    port: int
    src: str | None = None


SECOND_ADDRESS = "172.18.0.51"
"""A second address for the clients outside, because two clients with the same address may get the same port.

IPVS assigns an answer to a connection by the client's address and port and by the endpoint. If two connections from one client
port go through two virtual servers to one endpoint, one of them gets no more answers, with or without a take-over.
"""
CLIENTS = (
    Client("p1", "TCP", "10.96.16.1", 80),
    Client("client", "TCP", "172.18.0.2", 31030, SECOND_ADDRESS),
    Client("client", "TCP", "198.51.100.6", 80),
    Client("p2", "UDP", "10.96.2.1", 53),
    Client("host", "TCP", "fd00:10:96::b01", 80),
)


def add_second_address(node: lab.Lab) -> None:
    """Add ``SECOND_ADDRESS`` to the machine on which the outside clients run."""
    node.ip("client", f"address add {SECOND_ADDRESS}/16 dev lan")


ANSWER_WITHIN_S = 60.0
"""The longest wait for an answer on a busy machine. The long wait hides no failure, because a refused request fails at once, and
the client does not send a lost UDP request again."""


@contextlib.contextmanager
def undisturbed(node: lab.Lab, held: Sequence[lab.Connection], *, interval_s: float) -> Iterator[Callable[[], None]]:
    """Let ``CLIENTS`` send requests while the ``with`` block runs; after the block, fail if a request has failed.

    Yields a function that fails if a connection of ``held`` is lost.
    """

    def check_held() -> None:
        assert [one.ask(ANSWER_WITHIN_S) for one in held] == [one.backend for one in held]

    with contextlib.ExitStack() as loads:
        results = [
            loads.enter_context(
                node.load(*one[:4], src=one.src, interval_s=interval_s, timeout_s=patience.seconds(ANSWER_WITHIN_S))
            )
            for one in CLIENTS
        ]
        yield check_held
    assert {client: load.failures for client, (load,) in zip(CLIENTS, results, strict=True) if load.failed} == {}
    assert all(load.outcomes["ok"] > 3 for (load,) in results), "clients have sent requests throughout"
    for one in held:
        one.abort()


class TakeOver(NamedTuple):
    """One take-over: its start and end in ``time.monotonic``, and the program's log."""

    began_s: float
    ended_s: float
    log: str


class Unanswered(NamedTuple):
    """An unanswered request. ``log`` is the program's log of the last take-over that began before the request."""

    client: Client
    outcome: str
    after_s: float
    """The seconds from the beginning of the take-over until the request."""
    log: Sequence[str]


class TakeOvers:
    """Takes over the kernel state of kube-proxy on one node, any number of times.

    ``answered`` counts answered requests, ``unanswered`` has the failed requests.
    """

    def __init__(self, node: lab.Lab, directory: Path, *, interval_s: float) -> None:
        self.answered = 0
        self.slowest_s = 0.0
        self.unanswered: list[Unanswered] = []
        self.durations_s: list[float] = []
        self._node = node
        self._interval_s = interval_s
        self._log = directory / "log"
        manifests = directory / "manifests"
        manifests.mkdir()
        golden_fixtures.World(manifests).apply("P0")
        profile = golden_fixtures.profiles()["default"]["flags"].split()
        self._program = program.Program(manifests, self._log, "--hostname-override=node-a", "-v=4", *profile)
        self._recorded: Mapping[str, Any] = golden_fixtures.recording("default", "P0")
        add_second_address(node)
        golden_state.restore_state(self._recorded)
        self._size = SIZE_OF_TABLE.read_text()

    def run(self, count: int) -> None:
        """Run ``count`` take-overs while all clients send requests, and then record the results of all clients.

        Raises:
            TimeoutError: not everything was programmed in time, or the program did not end in time.
        """
        with contextlib.ExitStack() as loads:
            results = [
                loads.enter_context(self._node.load(*client[:4], src=client.src, interval_s=self._interval_s))
                for client in CLIENTS
            ]
            done = [self._take_over() for _ in range(count)]
        self.durations_s += [one.ended_s - one.began_s for one in done]
        for client, (met,) in zip(CLIENTS, results, strict=True):
            self.answered += met.outcomes.get("ok", 0)
            self.slowest_s = max(self.slowest_s, met.slowest_s)
            for asked_s, outcome in met.failures:
                during = next((one for one in reversed(done) if one.began_s <= asked_s), done[0])
                self.unanswered.append(Unanswered(client, outcome, asked_s - during.began_s, during.log.splitlines()))

    def differences(self) -> list[tuple[Any, ...]]:
        """The rows that differ from the state that kube-proxy left, except intended differences."""
        differing = golden_state.differences(self._recorded, golden_state.read_state(), golden_state.KERNEL_SECTIONS)
        return golden_fixtures.unaccepted(differing)

    def _take_over(self) -> TakeOver:
        if os.access(SIZE_OF_TABLE, os.W_OK):
            SIZE_OF_TABLE.write_text(self._size)
        self._log.write_bytes(b"")
        began_s = time.monotonic()
        running = self._program.__enter__()
        try:
            while SYNCED not in self._log.read_bytes():
                if not running.is_alive or time.monotonic() > began_s + WITHIN_S:
                    raise TimeoutError(f"not in force within {WITHIN_S:.0f} s:\n{self._log.read_text()[-4000:]}")
                time.sleep(POLL_S)
            ended_s = time.monotonic()
        finally:
            running.kill()
        return TakeOver(began_s, ended_s, self._log.read_text())
