"""Direct return on three nodes with one program each: who answers, which client address is seen, and what a dead node affects.

``node`` has the pods p1 and p2, ``remote`` has the pods r1 and r2, and ``third`` has no pods. Clients choose the entry node by a
route.
"""

import contextlib
import functools
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.settings import TUNNEL_MODULES
from tests.support import cluster, lab, program
from tests.support.cluster import service

pytestmark = [pytest.mark.kernel]

NODES = {"node-a": "node", "node-b": "remote", "node-c": "third"}
ENTRIES = {
    "node": ("172.18.0.2", "fc00:f853:ccd::2"),
    "remote": ("172.18.0.3", "fc00:f853:ccd::3"),
    "third": ("172.18.0.4", "fc00:f853:ccd::4"),
}
CLIENTS = 48
"""The kernel chooses by the client's port, which is random: with 24 clients, all would reach one node once in 500,000 runs."""
DIRECT = ("--ipvs-direct-return=on", "--ipvs-traffic-scopes=kube-proxy")


def nodes(*taking_part: str) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "annotations": {"ipvsproxy.io/direct-return": "true"} if name in taking_part else {}},
            "status": {"addresses": [{"type": "InternalIP", "address": one} for one in ENTRIES[place]]},
        }
        for name, place in NODES.items()
    ]


class Three(NamedTuple):
    """Three nodes; the first node is that of ``cluster``."""

    cluster: cluster.Cluster
    others: dict[str, program.Program]
    logs: dict[str, Path]

    @property
    def lab(self) -> lab.Lab:
        return self.cluster.lab

    def enter_by(self, place: str, to: str = "balancer 1") -> None:
        for family in Family:
            address = cluster.address(to, family)
            self.lab.ip("client", f"route replace {address}/{family.bits} via {ENTRIES[place][family is Family.IPV6]}")

    def have(self, *manifests: list[dict[str, Any]], concerns: Collection[str] = ("remote", "third")) -> None:
        """Set the API's objects, and wait until each affected node has programmed them."""
        shown, before = self.cluster.objects, {name: self._synced(name) for name in self.logs}
        self.cluster.have(*manifests)
        if self.cluster.objects == shown:
            return
        for name in concerns:
            self.others[name].wait_until(
                functools.partial(self._has_synced, name, before[name]), "synced", program.SYNCED_WITHIN_S
            )

    def _synced(self, name: str) -> int:
        """How many syncs with changed Services a program has logged."""
        text = self.logs[name].read_text() if self.logs[name].exists() else ""
        return text.count("event=synced services=") - text.count("event=synced services=0")

    def _has_synced(self, name: str, before: int) -> bool:
        return self._synced(name) > before


@contextlib.contextmanager
def three_nodes(laboratory: lab.Lab, directory: Path, *flags: str) -> Iterator[Three]:
    """The lab with a third node, and a program on each of the three nodes."""
    paths = {"remote": laboratory.path("remote"), "third": laboratory.add_node("third", "4")}
    logs = {place: directory / f"log-{place}" for place in paths}
    with cluster.Cluster(laboratory, directory, *flags) as running, contextlib.ExitStack() as stack:
        others = {}
        for name, place in NODES.items():
            if place in paths:
                others[place] = program.Program(
                    directory / "manifests",
                    logs[place],
                    *(flag for flag in cluster.FLAGS if not flag.startswith("--hostname")),
                    f"--hostname-override={name}",
                    f"--rules-backend={cluster.BACKEND}",
                    *flags,
                    starter=("-m", "tests.support.in_namespace", paths[place]),
                )
                stack.enter_context(others[place])
        yield Three(running, others, logs)


@pytest.fixture(scope="module", name="three")
def _three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Three]:
    if subprocess.run(["modprobe", "--all", *TUNNEL_MODULES.values()], capture_output=True, check=False).returncode:
        pytest.skip("this kernel has no tunnels: the modules ipip and ip6_tunnel")
    with lab.Lab() as laboratory, three_nodes(laboratory, tmp_path_factory.mktemp("direct"), *DIRECT) as running:
        yield running


def web(*pods: str, **more: Any) -> list[dict[str, Any]]:
    return service("web", 1, *pods, balancer=True, annotations={"direct-return": "true"}, **more)


@pytest.mark.parametrize("entry", ENTRIES)
def test_endpoints_on_each_node_see_the_client_address_whichever_node_the_client_uses(three: Three, entry: str) -> None:
    three.have(nodes(*NODES), web("p1", "r1"))
    three.enter_by(entry)
    for protocol, (port, _) in cluster.PORTS.items():
        for family in Family:
            seen = three.lab.probe(
                "client",
                protocol,
                cluster.address("balancer 1", family),
                port,
                src=cluster.address("client", family),
                count=CLIENTS,
                timeout_s=4.0,
            )
            backends = tuple(sorted(cluster.address(name, family) for name in ("p1", "r1")))
            assert seen == lab.Result("ok", backends, (cluster.address("client", family),)), (protocol, family)


def test_in_a_mixed_cluster_connections_to_nodes_without_direct_return_are_masqueraded(three: Three) -> None:
    three.have(nodes("node-a", "node-c"), web("p1", "r1"), concerns=["third"])
    three.enter_by("third")
    seen = three.lab.probe(
        "client", "TCP", cluster.address("balancer 1", Family.IPV4), 80, src="172.18.0.50", count=CLIENTS, timeout_s=4.0
    )
    assert (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11"))
    assert set(seen.sources) == {"172.18.0.50", "172.18.0.4"}, "the client's address, and the node's towards the other node"


def test_clients_on_a_node_and_in_its_pods_are_served_as_without_direct_return(three: Three) -> None:
    three.have(nodes(*NODES), web("p1", "r1"), concerns=["third"])
    for client in ("host", "p2"):
        seen = three.lab.probe(client, "TCP", cluster.address("balancer 1", Family.IPV4), 80, count=8, timeout_s=4.0)
        assert (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11")), client


_TRANSFER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family) as client:
    client.settimeout(60)
    client.connect((sys.argv[1], 80))
    client.sendall((b"x" * 2000 + b"\\n") * 100 + b"\\n" * 4900)
    reader = client.makefile("rb")
    answers = [reader.readline() for _ in range(5000)]
    print(sum(map(len, answers)), client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG))
"""


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_large_transfers_fit_into_the_tunnel_in_both_directions_with_path_mtu_discovery(three: Three, family: Family) -> None:
    """200 kB to the endpoint of another node, and 300 kB back, with path MTU discovery as usual."""
    three.have(nodes(*NODES), web("r1"))
    three.enter_by("third")
    address = cluster.address("balancer 1", family)
    command = ["nsenter", f"--net={three.lab.path('client')}", sys.executable, "-I", "-S", "-c", _TRANSFER, address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # not by the lab, whose pods would wait for it
    received, segment = map(int, done.stdout.split())
    assert received > 5000 * 40
    assert segment <= {Family.IPV4: 1440, Family.IPV6: 1400}[family]


def test_tunnelled_packets_from_an_unknown_sender_are_refused(three: Three) -> None:
    three.have(nodes(*NODES), web("r1"))
    address = cluster.address("balancer 1", Family.IPV4)
    three.lab.ip(
        "client",
        "link add forged type ipip local 172.18.0.50 remote 172.18.0.3",
        "link set forged up",
        f"route replace {address}/32 dev forged src 172.18.0.50",
    )
    try:
        assert three.lab.probe("client", "TCP", address, 80, count=2, timeout_s=2.0).outcome == "timeout"
    finally:
        three.lab.ip("client", "link del forged")
    three.enter_by("third")
    assert three.lab.probe("client", "TCP", address, 80, count=2, timeout_s=4.0).outcome == "ok", "from a node it is not"


def test_open_connections_survive_the_failure_of_the_entry_node(three: Three) -> None:
    """The client's route moves from a dead node to another node. Neither node has a pod of the Service."""
    three.have(nodes(*NODES), web("r1", "r2"))
    three.enter_by("third")
    address = cluster.address("balancer 1", Family.IPV4)
    connections = [three.lab.open("client", "TCP", address, 80, src="172.18.0.50") for _ in range(200)]
    assert {one.source for one in connections} == {"172.18.0.50"}
    three.others["third"].kill()
    three.lab.ip("third", "link set eth0 down")
    three.enter_by("node")
    answers = [one.ask(10.0) for one in connections]
    assert answers == [one.backend for one in connections]
    assert set(answers) == {"10.244.1.11", "10.244.1.12"}
    for one in connections:
        one.abort()


def test_a_packet_for_an_endpoint_that_was_just_removed_is_refused_and_not_forwarded(three: Three) -> None:
    """The program of the third node is dead since the previous test, so that kernel still has endpoints that no longer exist.

    The second node has no endpoints left and would send outside clients on to the first node.
    """
    three.lab.ip("third", "link set eth0 up")
    three.have(nodes(*NODES), web("p1"), concerns=["remote"])
    three.enter_by("third")
    address = cluster.address("balancer 1", Family.IPV4)
    assert three.lab.probe("client", "TCP", address, 80, count=4, timeout_s=4.0).outcome == "refused"
