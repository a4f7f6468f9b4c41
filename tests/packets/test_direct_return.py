"""Direct return on three nodes with one program each: who answers, which client address is seen, and what a dead node affects.

``node`` has the pods p1 and p2, ``remote`` has the pods r1 and r2, and ``third`` has no pods. Clients choose the entry node by a
route.
"""

import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.settings import TUNNEL_DEVICES, TUNNEL_MODULES
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
        return self.cluster.lab

    def start(self, place: str, *flags: str) -> None:
        """Start the program of a node with these additional flags, unless it runs, and wait until it has synced."""
        if place not in self._programs:
            (name,) = (name for name, one in NODES.items() if one == place)
            before = self._synced(place, "")
            self._programs[place] = program.Program(
                self.directory / "manifests",
                self._log(place),
                *(flag for flag in cluster.FLAGS if not flag.startswith("--hostname")),
                f"--hostname-override={name}",
                f"--rules-backend={cluster.BACKEND}",
                *self.flags,
                *flags,
                starter=("-m", "tests.support.in_namespace", self.lab.path(place)),
            ).__enter__()
            self.wait_until(place, lambda: self._synced(place, "") > before, "synced")

    def stop(self, place: str) -> None:
        """Stop the program of a node, which leaves the node's kernel as it is."""
        if place in self._programs:
            self._programs.pop(place).__exit__(None, None, None)

    def kill(self, place: str) -> None:
        """Kill the program of a node, as a failure of the node does."""
        self._programs.pop(place).kill()

    def wait_until(self, place: str, reached: Callable[[], bool], what: str) -> None:
        self._programs[place].wait_until(reached, what, program.SYNCED_WITHIN_S)

    def enter_by(self, place: str, to: str = "balancer 1") -> None:
        for family in Family:
            address = cluster.address(to, family)
            self.lab.ip("client", f"route replace {address}/{family.bits} via {ENTRIES[place][family is Family.IPV6]}")

    def have(self, *manifests: list[dict[str, Any]], concerns: Collection[str] = ("remote", "third")) -> None:
        """Set the API's objects, and wait until each affected node, whose program is started if need be, has programmed them."""
        before = {place: self._synced(place) for place in concerns if place in self._programs}
        shown = self.cluster.objects
        self.cluster.have(*manifests)
        for place in concerns if self.cluster.objects != shown else ():
            if place in before:
                self.wait_until(place, functools.partial(self._has_synced, place, before[place]), "synced")
        for place in concerns:
            self.start(place)

    def _log(self, place: str) -> Path:
        return self.directory / f"log-{place}"

    def _synced(self, place: str, services: str = "services=") -> int:
        """How many syncs a program has logged; by default, only syncs with changed Services."""
        text = self._log(place).read_text() if self._log(place).exists() else ""
        return text.count(f"event=synced {services}") - (text.count("event=synced services=0") if services else 0)

    def _has_synced(self, place: str, before: int) -> bool:
        return self._synced(place) > before


@contextlib.contextmanager
def three_nodes(laboratory: lab.Lab, directory: Path, *flags: str) -> Iterator[Three]:
    """The lab with a third node, and a program on each of the three nodes."""
    laboratory.add_node("third", "4")
    with cluster.Cluster(laboratory, directory, *flags) as running, Three(running, directory, flags) as three:
        for place in ("remote", "third"):
            three.start(place)
        yield three


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
    three.kill("third")
    three.lab.ip("third", "link set eth0 down")
    three.enter_by("node")
    answers = [one.ask(10.0) for one in connections]
    assert answers == [one.backend for one in connections]
    assert set(answers) == {"10.244.1.11", "10.244.1.12"}
    for one in connections:
        one.abort()


def test_a_packet_for_an_endpoint_that_was_just_removed_is_refused_and_not_forwarded(three: Three) -> None:
    """The program of the third node is dead, so that kernel still has endpoints that no longer exist.

    The second node has no endpoints left and would send outside clients on to the first node.
    """
    three.lab.ip("third", "link set eth0 up")
    three.have(nodes(*NODES), web("r1", "r2"))
    three.kill("third")
    three.have(nodes(*NODES), web("p1"), concerns=["remote"])
    three.enter_by("third")
    address = cluster.address("balancer 1", Family.IPV4)
    assert three.lab.probe("client", "TCP", address, 80, count=4, timeout_s=4.0).outcome == "refused"


FORMER = {"net/ipv4/conf/all/rp_filter": "2", "net/ipv4/conf/tunl0/rp_filter": "1", "net/ipv4/vs/sloppy_tcp": "0"}
CHANGED = {"net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/tunl0/rp_filter": "0", "net/ipv4/vs/sloppy_tcp": "1"}


def tunnels_and_settings(laboratory: lab.Lab, place: str) -> tuple[set[str], dict[str, str]]:
    """The tunnel devices that are up or have an alias, and the settings that direct return changes."""
    links = json.loads(laboratory.run(place, "ip", "-json", "link", "show"))
    used = {one["ifname"] for one in links if "UP" in one["flags"] or one.get("ifalias")}
    values = laboratory.run(place, "cat", *(f"/proc/sys/{path}" for path in FORMER)).split()
    return used & set(TUNNEL_DEVICES.values()), dict(zip(FORMER, values, strict=True))


@pytest.mark.parametrize("way", ["off", "cleanup"])
def test_without_direct_return_its_devices_and_settings_are_as_before(three: Three, way: str) -> None:
    """Either a start with the flag off or a cleanup restores them, and removes all objects that kube-proxy does not know."""
    three.have(nodes(*NODES), web("p1", "r1"))
    three.stop("third")
    cleanup = [sys.executable, "-m", "tests.support.in_namespace", three.lab.path("third"), "--cleanup"]
    subprocess.run(cleanup, capture_output=True, check=True)
    three.lab.call("sysctl", namespace="third", values=FORMER)
    assert tunnels_and_settings(three.lab, "third") == (set(), FORMER)
    three.start("third")
    up = (set(TUNNEL_DEVICES.values()), CHANGED)
    three.wait_until("third", lambda: tunnels_and_settings(three.lab, "third") == up, "up")
    three.stop("third")
    if way == "off":
        three.start("third", "--ipvs-direct-return=off")
        is_gone = functools.partial(_has_nothing_of_direct_return, three.lab, "third")
        three.wait_until("third", is_gone, "without objects of direct return")
        three.stop("third")
    else:
        subprocess.run(cleanup, capture_output=True, check=True)
        assert _has_nothing_of_direct_return(three.lab, "third")
    assert tunnels_and_settings(three.lab, "third") == (set(), FORMER)


def _has_nothing_of_direct_return(laboratory: lab.Lab, place: str) -> bool:
    listings = (("nft", "list", "ruleset"),) if cluster.BACKEND is Backend.NFTABLES else (("iptables-save",), ("ipset", "save"))
    text = "".join(laboratory.run(place, *one) for one in (*listings, ("ipvsadm", "--list", "--numeric")))
    return "IPVSPROXY" not in text and "FWM" not in text
