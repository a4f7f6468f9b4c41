"""Three nodes with one program each, for tests of direct return.

``node`` has the pods p1 and p2, ``remote`` has the pods r1 and r2, and ``third`` has no pods. The client's route to a service
address determines which node gets the client's packets first.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import TUNNEL_MODULES
from tests.support import cluster, in_namespace, lab, patience, program
from tests.support.cluster import service
from tests.support.lab import Connection

NODES = {"node-a": "node", "node-b": "remote", "node-c": "third"}
ENTRIES = {
    "node": ("172.18.0.2", "fc00:f853:ccd::2"),
    "remote": ("172.18.0.3", "fc00:f853:ccd::3"),
    "third": ("172.18.0.4", "fc00:f853:ccd::4"),
}
CLIENTS = 48
"""The number of clients in a test. The kernel chooses an endpoint by the client's port, which is random. Even with 24 clients,
all clients would reach the same node in only one of 500,000 runs."""
WITHIN_S = patience.seconds(240.0)
_MANGLE = ("-w", "-t", "mangle")
DIRECT = ("--ipvs-direct-return=on", "--ipvs-traffic-scopes=kube-proxy")


def node(name: str, *addresses: str, takes_part: bool = True) -> dict[str, Any]:
    """The manifest of a Node. If ``takes_part`` is true, the Node takes part in direct return."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "annotations": {"ipvsproxy.io/direct-return": "true"} if takes_part else {}},
        "status": {"addresses": [{"type": "InternalIP", "address": one} for one in addresses]},
    }


def nodes(*taking_part: str) -> list[dict[str, Any]]:
    """The three Nodes, of which only the given Nodes take part in direct return."""
    return [node(name, *ENTRIES[place], takes_part=name in taking_part) for name, place in NODES.items()]


def program_at(laboratory: lab.Lab, place: str, manifests: Path, log: Path, *flags: str) -> program.Program:
    """An ipvsproxy process that can be started on the node ``remote`` or ``third``."""
    path = laboratory.path(place)
    starter, main = ("-m", "tests.support.in_namespace", path), functools.partial(in_namespace.run, path)
    return program.Program(manifests, log, *flags, starter=starter, main=main)


@dataclasses.dataclass
class Three:
    """Three nodes, each with its own process of ipvsproxy.

    ``cluster`` runs the program of the first node, and this class runs the other programs.
    """

    cluster: cluster.Cluster
    directory: Path
    flags: Sequence[str]

    def __post_init__(self) -> None:
        self._programs: dict[str, program.Program] = {}
        self._verified: dict[str, str] = {}
        """The last output of ``verify`` on each node."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for place in tuple(self._programs):
            self.stop(place)

    @property
    def lab(self) -> lab.Lab:
        """The lab."""
        return self.cluster.lab

    def start(self, place: str) -> None:
        """Start the program of a node, and wait until the program has nothing left to do.

        If the program already runs, do nothing.
        """
        if place not in self._programs:
            before, log = len(self._syncs(place)), self.directory / f"log-{place}"
            started = program_at(self.lab, place, self.directory / "manifests", log, *self._flags(place))
            self._programs[place] = started.__enter__()
            self.wait_until(place, lambda: len(self._syncs(place)) > before and self._is_settled(place), "synced")

    def _flags(self, place: str) -> list[str]:
        (name,) = (name for name, one in NODES.items() if one == place)
        usual = [flag for flag in cluster.FLAGS if not flag.startswith("--hostname")]
        return [*usual, f"--hostname-override={name}", f"--rules-backend={cluster.BACKEND}", *self.flags]

    def stop(self, place: str) -> None:
        """Stop the program of a node. The program leaves the objects in the node's kernel."""
        if place in self._programs:
            self._programs.pop(place).__exit__(None, None, None)

    def kill(self, place: str) -> None:
        """Kill the program of a node, to simulate a failure of the node."""
        self._programs.pop(place).kill()

    @contextlib.contextmanager
    def pausing(self, place: str) -> Iterator[None]:
        """While the block runs, the program of this node is paused, so it does not see changes that the block makes."""
        before, process = len(self._syncs(place, r"services=[1-9]")), self._programs[place].process_id
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(process, signal.SIGCONT)
        self.wait_until(place, lambda: self._has_synced(place, before) and self._is_settled(place), "synced")

    def wait_until(self, place: str, reached: Callable[[], bool], what: str) -> None:
        """Poll until a condition holds while the program of this node runs.

        Raises:
            ProgramError: the program ended, or the condition did not hold in time. The message has the last output of ``verify``.
        """
        running = self.cluster.program if place == "node" else self._programs[place]
        try:
            running.wait_until(reached, what, WITHIN_S)
        except program.ProgramError as error:
            raise program.ProgramError(f"{place}: {error}\nverify: {self._verified.get(place, 'not asked')}") from error

    def open(self, protocol: str, family: Family, count: int, ports: Iterable[int] = ()) -> list[Connection]:
        """Open connections from the client to the Service, and check that the endpoints see the client's address.

        ``ports`` are the source ports; if empty, the kernel chooses them.
        """
        client, to = cluster.address("client", family), cluster.address("balancer 1", family)
        sources = [f"{client}#{port}" for port in ports] or [client] * count
        opened = [
            self.lab.open("client", protocol, to, cluster.PORTS[protocol][0], src=source, timeout_s=20.0) for source in sources
        ]
        assert {one.source for one in opened} == {client}, (protocol, family)
        return opened

    def enter_by(self, place: str, to: str = "balancer 1") -> None:
        """Make the client send its packets for the service address ``to`` to the node ``place``."""
        for family in Family:
            address = cluster.address(to, family)
            self.lab.ip("client", f"route replace {address}/{family.bits} via {ENTRIES[place][family is Family.IPV6]}")

    def have(self, *manifests: list[dict[str, Any]], concerns: Collection[str] = ("remote", "third")) -> None:
        """Set the API's objects, and wait until each affected node has programmed them; start the node's program if necessary."""
        before = {place: len(self._syncs(place, r"services=[1-9]")) for place in concerns if place in self._programs}
        shown = self.cluster.objects
        self.cluster.have(*manifests)
        for place, count in before.items() if self.cluster.objects != shown else ():
            self.wait_until(place, functools.partial(self._has_synced, place, count), "synced")
        for place in concerns:
            self.start(place)
        for place in ("node", *self._programs):
            self.wait_until(place, functools.partial(self._is_settled, place), "settled")

    @contextlib.contextmanager
    def counting_answers(self, place: str) -> Iterator[Callable[[], int]]:
        """While the ``with`` block runs, count the packets that a node receives from other nodes and forwards to the client.

        The ``with`` block gets a function that returns the number of IPv4 and IPv6 packets so far.
        """
        rules = {
            name: f"FORWARD -i eth0 -d {cluster.address('client', family)}"
            for name, family in zip(("iptables", "ip6tables"), Family, strict=True)
        }

        def count() -> int:
            listings = [self.lab.run(place, name, *_MANGLE, "-L", "FORWARD", "1", "-vxn").split() for name in rules]
            return sum(int(words[0]) for words in listings)

        for name, rule in rules.items():
            self.lab.run(place, name, *_MANGLE, "-I", *rule.split())
        try:
            yield count
        finally:
            for name, rule in rules.items():
                self.lab.run(place, name, *_MANGLE, "-D", *rule.split())

    def _syncs(self, place: str, of: str = "") -> list[str]:
        """The log lines of the node ``place`` that contain ``event=synced`` and, after that, a match of the pattern ``of``."""
        log = self.directory / ("log" if place == "node" else f"log-{place}")
        return re.findall(rf".*event=synced {of}.*", log.read_text()) if log.exists() else []

    def _has_synced(self, place: str, before: int) -> bool:
        return len(self._syncs(place, r"services=[1-9]")) > before

    def _is_settled(self, place: str) -> bool:
        """Whether the program has nothing left to do. On a busy machine, rules may be written after the first sync.

        If an operation succeeds only after a sync, the next read of the kernel shows the success, and no further sync follows.
        Therefore ``verify`` is run if the last sync left failed or pending operations.
        """
        return " failed=0 pending=0 " in self._syncs(place)[-1] or self._is_verified(place)

    def _is_verified(self, place: str) -> bool:
        if place == "node":
            (ended,) = self.cluster.run("verify")
            self._verified[place] = ended.output + ended.error
            return ended.status == 0
        asking = ("-m", "tests.support.in_namespace", self.lab.path(place), "verify")
        flags = (f"--manifests={self.directory / 'manifests'}", *self._flags(place))
        command = [sys.executable, *asking, *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WITHIN_S)
        self._verified[place] = done.stdout + done.stderr
        return done.returncode == 0


def load_tunnels() -> None:
    """Load the kernel modules for tunnels; the test is skipped if the kernel does not have them."""
    if subprocess.run(["modprobe", "--all", *TUNNEL_MODULES.values()], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no tunnels: the modules ipip and ip6_tunnel")


@contextlib.contextmanager
def running(directory: Path, *flags: str) -> Iterator[Three]:
    """Three nodes in a separate lab, each with a running ipvsproxy; the test is skipped if the kernel has no tunnels."""
    load_tunnels()
    flags = (*DIRECT, *flags)
    with lab.Lab() as laboratory:
        laboratory.add_node("third", "4")
        with cluster.Cluster(laboratory, directory, *flags) as first, Three(first, directory, flags) as three:
            for place in ("remote", "third"):
                three.start(place)
            yield three


def web(*pods: cluster.Endpoint | str, weights: str = "", **more: Any) -> list[dict[str, Any]]:
    """A Service with direct return, and perhaps with weights; ``pods`` and ``more`` are passed to ``cluster.service``."""
    annotations = {"direct-return": "true"} | ({"weights": weights} if weights else {})
    return service("web", 1, *pods, balancer=True, annotations=annotations, **more)


def check_served(three: Three, protocol: str, family: Family, *pods: str, count: int = CLIENTS) -> None:
    """Check that new connections reach exactly these pods, and that the pods see the client's address."""
    to, client = (cluster.address(name, family) for name in ("balancer 1", "client"))
    seen = three.lab.probe("client", protocol, to, cluster.PORTS[protocol][0], src=client, count=count, timeout_s=20.0)
    backends = tuple(sorted(cluster.address(name, family) for name in pods))
    assert seen == lab.Result("ok", backends, (client,)), (protocol, family)


def check_each_protocol(three: Three, entry: str) -> None:
    """Check for each protocol that outside clients reach endpoints on two nodes if their packets arrive at the node ``entry``.

    Answers from other nodes bypass the node of entry.
    """
    three.have(nodes(*NODES), web("p1", "r1"))
    three.enter_by(entry)
    with three.counting_answers(entry) as answers:
        for protocol, family in itertools.product(cluster.PORTS, Family):
            check_served(three, protocol, family, "p1", "r1")
            assert answers() == 0, (protocol, family)
