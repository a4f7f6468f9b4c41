"""Direct return on three nodes: which pod answers, which client address the pod sees, and what survives the failure of a node.

Service addresses are bound to ``kube-ipvs0``. ``three_nodes.py`` describes the nodes.
"""

import functools
import ipaddress
import itertools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from tests.packets.three_nodes import CLIENTS, ENTRIES, NODES, Three, check_each_protocol, node, nodes, web
from tests.support import cluster, patience

pytestmark = [pytest.mark.kernel]


FLAGS = ("--mass-deletion-guard=0",)


@pytest.mark.parametrize("entry", [pytest.param(one, marks=patience.THOROUGH if one == "remote" else []) for one in ENTRIES])
def test_endpoints_see_the_client_address_and_answer_directly_whichever_node_gets_the_packets(three: Three, entry: str) -> None:
    check_each_protocol(three, entry)


def test_connections_to_endpoints_on_nodes_without_direct_return_are_masqueraded(three: Three) -> None:
    three.have(nodes("node-a", "node-c"), web("p1", "r1"), concerns=["third"])
    three.enter_by("third")
    with three.counting_answers("third") as answers:
        seen = three.lab.probe(
            "client", "TCP", cluster.address("balancer 1", Family.IPV4), 80, src="172.18.0.50", count=CLIENTS, timeout_s=20.0
        )
        assert answers() > 0, "of the node without direct return"
    assert (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11"))
    assert set(seen.sources) == {"172.18.0.50", "172.18.0.4"}, "the client's address, and the node's towards the other node"


def test_direct_return_does_not_change_how_clients_on_a_node_and_in_its_pods_are_served(three: Three) -> None:
    three.have(nodes(*NODES), web("p1", "r1"), concerns=["third"])
    for client in ("host", "p2"):
        seen = three.lab.probe(client, "TCP", cluster.address("balancer 1", Family.IPV4), 80, count=8, timeout_s=20.0)
        assert (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11")), client


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
    assert three.lab.probe("client", "TCP", address, 80, count=2, timeout_s=20.0).outcome == "ok", "from a node it is not"


def test_tunnelled_packets_from_another_node_reach_only_service_addresses(three: Three) -> None:
    three.have(nodes(*NODES), web("r1"))
    pod = cluster.address("r1", Family.IPV4)
    reach = functools.partial(three.lab.probe, "third", "TCP", pod, 8080)
    assert reach(timeout_s=20.0).outcome == "ok", "without a tunnel the node reaches the pod"
    three.lab.ip(
        "third",
        "link add inner type ipip local 172.18.0.4 remote 172.18.0.3",
        "link set inner up",
        f"route replace {pod}/32 dev inner src 172.18.0.4",
    )
    try:
        assert reach(timeout_s=2.0).outcome == "timeout"
    finally:
        three.lab.ip("third", "link del inner")


def test_open_connections_survive_the_failure_of_the_node_at_which_their_packets_arrive(three: Three) -> None:
    """The client's route moves from the failed node to another node. Neither of these two nodes has a pod of the Service."""
    three.have(nodes(*NODES), web("r1", "r2"))
    three.enter_by("third")
    connections = {
        (protocol, family): three.open(protocol, family, count)
        for protocol, count in (("TCP", 200), ("UDP", 20), ("SCTP", 20))
        for family in Family
    }
    three.kill("third")
    three.lab.ip("client", "link set third down")
    three.enter_by("node")
    for (protocol, family), opened in connections.items():
        before = [one.backend for one in opened]
        assert set(before) == {cluster.address(name, family) for name in ("r1", "r2")}
        assert [one.ask(20.0) for one in opened] == before, (protocol, family)
    for one in itertools.chain.from_iterable(connections.values()):
        one.abort()


def test_a_tunnelled_packet_for_a_removed_endpoint_is_refused_and_not_forwarded_through_another_tunnel(three: Three) -> None:
    """The third node's program was killed, so this node still sends packets to the second node, whose endpoint was removed.

    In the API, the endpoint is now on the third node, so the second node sends packets of outside clients to the third node.
    """
    three.lab.ip("client", "link set third up")
    three.have(nodes(*NODES), web("r1", "r2"))
    three.kill("third")
    service, *slices = web("p1")
    for one in slices:
        one["endpoints"][0]["nodeName"] = "node-c"
    three.have(nodes(*NODES), [service, *slices], concerns=["remote"])
    assert "172.18.0.4:80" in three.lab.run("remote", "ipvsadm", "-Ln"), "a tunnel to the third node"
    three.enter_by("third")
    address = cluster.address("balancer 1", Family.IPV4)
    assert three.lab.probe("client", "TCP", address, 80, count=4, timeout_s=20.0).outcome == "refused"


_SENT = """
import socket, sys
source, to, *ports = sys.argv[1:]
for port in map(int, ports):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.bind((source, port))
        client.sendto(b"who", (to, 53))
"""
_SAMPLE = 1000
"""The number of flows per measurement. The ports of the flows are fixed, so the results are the same in each run."""


@pytest.mark.parametrize(
    ("count", "moved_at_most", "ports"),
    [
        pytest.param(2, 1 / 3, range(10000, 13000), marks=patience.THOROUGH),
        pytest.param(3, 1 / 4, range(13000, 16000), marks=patience.THOROUGH),
        pytest.param(10, 0.11, range(16000, 19000)),
        pytest.param(50, 0.05, range(19000, 22000), marks=patience.THOROUGH),
    ],
    ids=["2", "3", "10", "50"],
)
def test_most_clients_still_reach_the_same_node_with_endpoints_through_another_node_of_entry(
    three: Three, count: int, moved_at_most: float, ports: range
) -> None:
    """The more nodes have endpoints, the fewer clients are sent to another node after a change.

    Packets of a client enter the cluster at a node of entry. The IPVS connection table of this node shows to which node it sent
    the client's datagrams. The test reads the tables of two nodes of entry. Most nodes with endpoints exist only in the API, so
    datagrams to them get no answer.

    ``count`` nodes have endpoints. The client changes its node of entry three times. At the first change, the new node of entry
    has an endpoint. At the second change, the new node of entry has no endpoint. During the third change, a node with an endpoint
    disappears before the client uses the new node of entry.
    """
    three.lab.ip("client", "link set third up")
    three.have(*_many(count - 1, "p1"))
    before, after = _choices(three, ports[:_SAMPLE])
    with_own = _share_moved(before, after)
    three.have(*_many(count))
    before, after = _choices(three, ports[_SAMPLE : 2 * _SAMPLE])
    assert len({*before.values()}) == count
    assert after == before, "no table has an endpoint of its own"
    before, after = _choices(three, ports[2 * _SAMPLE :], lambda: three.have(*_many(count - 1)))
    one_goes = _share_moved({port: chosen for port, chosen in before.items() if chosen in after.values()}, after)
    assert (0 < with_own <= moved_at_most, one_goes <= 0.03) == (True, True), (with_own, one_goes)


def _share_moved(before: Mapping[int, str], after: Mapping[int, str]) -> float:
    return sum(after[port] != chosen for port, chosen in before.items()) / len(before)


def _many(count: int, *pods: str) -> list[list[dict[str, Any]]]:
    """A Service with these endpoints, and with one endpoint on each of ``count`` other Nodes."""
    far = [node(f"far-{number}", f"172.18.7.{number}") for number in range(1, count + 1)]
    service, ipv4, ipv6 = web(*pods, protocols=("UDP",))
    ipv4["endpoints"] += [
        {"addresses": [f"10.244.7.{number}"], "conditions": {"ready": True}, "nodeName": f"far-{number}"}
        for number in range(1, count + 1)
    ]
    return [nodes(*NODES), far, [service, ipv4, ipv6]]


def _choices(three: Three, ports: Collection[int], change: Callable[[], None] = lambda: None) -> list[dict[int, str]]:
    """Returns two mappings, each from a client port to the node that gets the datagram sent from this port.

    There is one mapping for each of the two nodes through which the client sends.

    ``change`` is called before the client uses the second of these nodes.
    """
    to, source = (cluster.address(name, Family.IPV4) for name in ("balancer 1", "client"))
    chosen: dict[str, dict[int, str]] = {"third": {}, "node": {}}

    def look(entry: str) -> bool:
        found = chosen[entry]
        missing = [str(port) for port in ports if port not in found]
        three.lab.run("client", sys.executable, "-I", "-S", "-c", _SENT, source, to, *missing)
        rows = [line.split() for line in three.lab.run(entry, "cat", "/proc/net/ip_vs_conn").splitlines()[1:]]
        found.update({int(row[2], 16): row[5] for row in rows if row[0] == "UDP" and int(row[2], 16) in ports})
        return len(found) == len(ports)

    for entry in chosen:
        three.enter_by(entry)
        three.wait_until(entry, functools.partial(look, entry), "all datagrams are sent on")
        if entry == "third":
            change()
    pod, its_node = (f"{int(ipaddress.ip_address(cluster.address(name, Family.IPV4))):08X}" for name in ("p1", "node"))
    return [{port: its_node if one == pod else one for port, one in found.items()} for found in chosen.values()]
