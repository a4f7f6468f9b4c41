"""Three nodes with one program each, for tests of direct return.

``node`` has the pods p1 and p2, ``remote`` has the pods r1 and r2, and ``third`` has no pods. Clients choose the entry node by a
route.
"""

import contextlib
import dataclasses
import functools
import re
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.settings import TUNNEL_MODULES
from tests.support import cluster, in_namespace, lab, patience, program
from tests.support.cluster import service

NODES = {"node-a": "node", "node-b": "remote", "node-c": "third"}
ENTRIES = {
    "node": ("172.18.0.2", "fc00:f853:ccd::2"),
    "remote": ("172.18.0.3", "fc00:f853:ccd::3"),
    "third": ("172.18.0.4", "fc00:f853:ccd::4"),
}
CLIENTS = 48
"""The kernel chooses by the client's port, which is random: with 24 clients, all would reach one node once in 500,000 runs."""
WITHIN_S = patience.seconds(600.0)
DIRECT = ("--ipvs-direct-return=on", "--ipvs-traffic-scopes=kube-proxy")


def nodes(*taking_part: str) -> list[dict[str, Any]]:
    """The three Nodes, of which these take part in direct return."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "annotations": {"ipvsproxy.io/direct-return": "true"} if name in taking_part else {}},
            "status": {"addresses": [{"type": "InternalIP", "address": one} for one in ENTRIES[place]]},
        }
        for name, place in NODES.items()
    ]


@dataclasses.dataclass
class Three:
    """Three nodes with a program each; the first node is that of ``cluster``, the others run while the block runs."""

    cluster: cluster.Cluster
    directory: Path
    flags: Sequence[str]

    def __post_init__(self) -> None:
        self._programs: dict[str, program.Program] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for place in tuple(self._programs):
            self.stop(place)

    @property
    def lab(self) -> lab.Lab:
        """The lab."""
        return self.cluster.lab

    def start(self, place: str, *flags: str) -> None:
        """Start the program of a node with these additional flags, unless it runs, and wait until nothing is left to do."""
        if place not in self._programs:
            (name,) = (name for name, one in NODES.items() if one == place)
            path, before = self.lab.path(place), len(self._syncs(place))
            self._programs[place] = program.Program(
                self.directory / "manifests",
                self.directory / f"log-{place}",
                *(flag for flag in cluster.FLAGS if not flag.startswith("--hostname")),
                f"--hostname-override={name}",
                f"--rules-backend={cluster.BACKEND}",
                *self.flags,
                *flags,
                starter=("-m", "tests.support.in_namespace", path),
                main=functools.partial(in_namespace.run, path),
            ).__enter__()
            self.wait_until(place, lambda: len(self._syncs(place)) > before and self._is_settled(place), "synced")

    def stop(self, place: str) -> None:
        """Stop the program of a node, which leaves the node's kernel as it is."""
        if place in self._programs:
            self._programs.pop(place).__exit__(None, None, None)

    def kill(self, place: str) -> None:
        """Kill the program of a node, as a failure of the node does."""
        self._programs.pop(place).kill()

    def wait_until(self, place: str, reached: Callable[[], bool], what: str) -> None:
        """Poll until a condition holds while the program of this node runs."""
        running = self.cluster.program if place == "node" else self._programs[place]
        running.wait_until(reached, what, WITHIN_S)

    def enter_by(self, place: str, to: str = "balancer 1") -> None:
        """Let the client's packets to a service address go to this node."""
        for family in Family:
            address = cluster.address(to, family)
            self.lab.ip("client", f"route replace {address}/{family.bits} via {ENTRIES[place][family is Family.IPV6]}")

    def have(self, *manifests: list[dict[str, Any]], concerns: Collection[str] = ("remote", "third")) -> None:
        """Set the API's objects, and wait until each affected node, whose program is started if need be, has programmed them."""
        before = {place: len(self._syncs(place, r"services=[1-9]")) for place in concerns if place in self._programs}
        shown = self.cluster.objects
        self.cluster.have(*manifests)
        for place, count in before.items() if self.cluster.objects != shown else ():
            self.wait_until(place, functools.partial(self._has_synced, place, count), "synced")
        for place in concerns:
            self.start(place)
        for place in ("node", *self._programs):
            self.wait_until(place, functools.partial(self._is_settled, place), "settled")

    def _syncs(self, place: str, of: str = "") -> list[str]:
        """The log lines about syncs of a program, with this pattern."""
        log = self.directory / ("log" if place == "node" else f"log-{place}")
        return re.findall(rf".*event=synced {of}.*", log.read_text()) if log.exists() else []

    def _has_synced(self, place: str, before: int) -> bool:
        return len(self._syncs(place, r"services=[1-9]")) > before

    def _is_settled(self, place: str) -> bool:
        """Whether the last sync has left nothing to do. On a busy machine, rules may be written only by a later sync."""
        return " failed=0 pending=0 " in self._syncs(place)[-1]


@contextlib.contextmanager
def three_nodes(laboratory: lab.Lab, directory: Path, *flags: str) -> Iterator[Three]:
    """The lab with a third node, and a program on each of the three nodes."""
    laboratory.add_node("third", "4")
    with cluster.Cluster(laboratory, directory, *flags) as running, Three(running, directory, flags) as three:
        for place in ("remote", "third"):
            three.start(place)
        yield three


@contextlib.contextmanager
def running(directory: Path, *flags: str) -> Iterator[Three]:
    """Three nodes in a lab of their own; the test is skipped if the kernel has no tunnels."""
    if subprocess.run(["modprobe", "--all", *TUNNEL_MODULES.values()], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no tunnels: the modules ipip and ip6_tunnel")
    with lab.Lab() as laboratory, three_nodes(laboratory, directory, *DIRECT, *flags) as three:
        yield three


def web(*pods: cluster.Endpoint | str, **more: Any) -> list[dict[str, Any]]:
    """A Service with direct return; ``pods`` and ``more`` are those of ``cluster.service``."""
    return service("web", 1, *pods, balancer=True, annotations={"direct-return": "true"}, **more)
