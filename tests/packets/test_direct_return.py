"""Direct return on three nodes with one program each: who answers, which client address is seen, and what a dead node affects.

Service addresses are on the device; ``three_nodes.py`` describes the nodes.
"""

import itertools
import json
import re
import subprocess
import sys

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES
from tests.packets.three_nodes import CLIENTS, ENTRIES, NODES, Three, check_each_protocol, nodes, web
from tests.support import cluster, lab

pytestmark = [pytest.mark.kernel]


FLAGS = ()


@pytest.mark.parametrize("entry", ENTRIES)
def test_endpoints_see_the_client_address_and_answer_directly_whichever_node_the_client_uses(three: Three, entry: str) -> None:
    check_each_protocol(three, entry)


def test_in_a_mixed_cluster_connections_to_nodes_without_direct_return_are_masqueraded(three: Three) -> None:
    three.have(nodes("node-a", "node-c"), web("p1", "r1"), concerns=["third"])
    three.enter_by("third")
    with three.counting_answers("third") as answers:
        seen = three.lab.probe(
            "client", "TCP", cluster.address("balancer 1", Family.IPV4), 80, src="172.18.0.50", count=CLIENTS, timeout_s=20.0
        )
        assert answers() > 0, "of the node without direct return"
    assert (seen.outcome, seen.backends) == ("ok", ("10.244.0.11", "10.244.1.11"))
    assert set(seen.sources) == {"172.18.0.50", "172.18.0.4"}, "the client's address, and the node's towards the other node"


def test_clients_on_a_node_and_in_its_pods_are_served_as_without_direct_return(three: Three) -> None:
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


def test_open_connections_survive_the_failure_of_the_entry_node(three: Three) -> None:
    """The client's route moves from a dead node to another node. Neither node has a pod of the Service."""
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


def test_a_packet_for_an_endpoint_that_was_just_removed_is_refused_and_not_forwarded(three: Three) -> None:
    """The program of the third node is dead, so that kernel still has endpoints that no longer exist.

    The second node has no endpoints left and would send outside clients on to the first node.
    """
    three.lab.ip("client", "link set third up")
    three.have(nodes(*NODES), web("r1", "r2"))
    three.kill("third")
    three.have(nodes(*NODES), web("p1"), concerns=["remote"])
    three.enter_by("third")
    address = cluster.address("balancer 1", Family.IPV4)
    assert three.lab.probe("client", "TCP", address, 80, count=4, timeout_s=20.0).outcome == "refused"


FORMER = {
    "net/ipv4/conf/all/rp_filter": "2",
    "net/ipv4/conf/tunl0/rp_filter": "1",
    "net/ipv4/vs/sloppy_tcp": "0",
    "net/ipv4/vs/sloppy_sctp": "0",
}
CHANGED = {path: "1" if "sloppy" in path else "0" for path in FORMER}


def tunnels_and_settings(laboratory: lab.Lab, place: str) -> tuple[set[str], dict[str, str]]:
    """The tunnel devices that are up or have an alias, and the settings that direct return changes."""
    links = json.loads(laboratory.run(place, "ip", "-json", "link", "show"))
    used = {one["ifname"] for one in links if "UP" in one["flags"] or one.get("ifalias")}
    values = laboratory.run(place, "cat", *(f"/proc/sys/{path}" for path in FORMER)).split()
    return used & set(TUNNEL_DEVICES.values()), dict(zip(FORMER, values, strict=True))


@pytest.mark.parametrize("way", ["off", "cleanup"])
def test_without_direct_return_its_devices_settings_and_objects_are_as_before(three: Three, way: str) -> None:
    """Either a start with the flag off or a cleanup restores them; the start leaves only the objects of kube-proxy."""
    three.have(nodes(*NODES), web("p1", "r1"))
    three.stop("third")
    cleanup = [sys.executable, "-m", "tests.support.in_namespace", three.lab.path("third"), "--cleanup"]
    subprocess.run(cleanup, capture_output=True, check=True)
    three.lab.call("sysctl", namespace="third", values=FORMER)
    if way == "off":
        three.start("third", "--ipvs-direct-return=off")
        three.stop("third")
    before = objects(three.lab, "third")
    assert "IPVSPROXY" not in " ".join(before)
    assert tunnels_and_settings(three.lab, "third") == (set(), FORMER)

    three.start("third")
    up = (set(TUNNEL_DEVICES.values()), CHANGED)
    three.wait_until("third", lambda: tunnels_and_settings(three.lab, "third") == up, "up")
    three.stop("third")
    assert "IPVSPROXY" in " ".join(objects(three.lab, "third"))
    if way == "off":
        three.start("third", "--ipvs-direct-return=off")
        three.wait_until("third", lambda: objects(three.lab, "third") == before, "as before")
        three.stop("third")
    else:
        subprocess.run(cleanup, capture_output=True, check=True)
    assert objects(three.lab, "third") == before
    assert tunnels_and_settings(three.lab, "third") == (set(), FORMER)


def objects(laboratory: lab.Lab, place: str) -> list[str]:
    """The words of all rules, sets and virtual servers of a node, without counters and seeds, sorted."""
    listings = (("nft", "list", "ruleset"),) if cluster.BACKEND is Backend.NFTABLES else (("iptables-save",), ("ipset", "save"))
    text = "".join(laboratory.run(place, *one) for one in (*listings, ("ipvsadm", "--save", "--numeric")))
    ours = (line for line in text.splitlines() if not re.match(r"#|\*|COMMIT|:[A-Z]+ ACCEPT", line))
    return sorted(re.sub(r"initval \S+|\[\d+:\d+\]|,", " ", " ".join(ours)).split())
