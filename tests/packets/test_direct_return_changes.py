"""Tests of direct return with various options of Services and networks.

Also covers endpoints that move to other nodes, and client packets that begin to arrive at another node.

Service addresses are local routes; ``three_nodes.py`` describes the nodes.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Collection, Iterator

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import TUNNEL_DEVICES
from tests.packets.three_nodes import CLIENTS, ENTRIES, NODES, Three, check_each_protocol, check_served, nodes, web
from tests.support import cluster, lab, patience
from tests.support.cluster import Endpoint

pytestmark = [pytest.mark.kernel]

BALANCER = cluster.address("balancer 1", Family.IPV4)
CLIENT, OTHER_CLIENT = (cluster.address(name, Family.IPV4) for name in ("client", "client2"))


FLAGS = ("--ipvs-vip-binding=routes",)
MANY_PORTS = range(20000, 20060)
PORTS = range(21000, 21012)
"""Fixed source ports of clients, so that the hash chooses the same endpoints in each run."""


@pytest.mark.parametrize("entry", [pytest.param(one, marks=[] if one == "third" else patience.THOROUGH) for one in ENTRIES])
def test_endpoints_see_the_client_address_and_answer_directly_if_addresses_have_local_routes(three: Three, entry: str) -> None:
    check_each_protocol(three, entry)


def test_a_client_with_session_affinity_reaches_the_same_endpoint_through_every_node_of_entry(three: Three) -> None:
    """Neither node of entry has endpoints of the Service.

    Session affinity at the node with the endpoint also applies to packets that arrive through a tunnel.
    """
    three.have(nodes(*NODES), web("r1", "r2", sessionAffinity="ClientIP"))
    for protocol in ("TCP", "UDP"):
        reached = set()
        for entry in ("third", "node"):
            three.enter_by(entry)
            seen = three.lab.probe("client", protocol, BALANCER, cluster.PORTS[protocol][0], src=CLIENT, count=12, timeout_s=20.0)
            assert (seen.outcome, seen.sources) == ("ok", (CLIENT,))
            reached |= {*seen.backends}
        assert len(reached) == 1, protocol


def test_packets_of_clients_outside_the_source_ranges_are_dropped_before_they_enter_the_tunnel(three: Three) -> None:
    """Packets of clients outside the source ranges do not even arrive at the node with the endpoint."""
    three.have(nodes(*NODES), web("r1", loadBalancerSourceRanges=[f"{CLIENT}/32"]))
    three.enter_by("third")
    assert three.lab.probe("client", "TCP", BALANCER, 80, src=CLIENT, count=4, timeout_s=20.0).outcome == "ok"
    before, sent = _received_by_tunnel(three.lab, "remote"), 100
    assert three.lab.probe("client", "UDP", BALANCER, 53, src=OTHER_CLIENT, count=sent, timeout_s=1.0).outcome == "timeout"
    assert three.lab.probe("client", "TCP", BALANCER, 80, src=OTHER_CLIENT, count=2, timeout_s=1.0).outcome == "timeout"
    # A few packets may still come from connections of other tests.
    assert _received_by_tunnel(three.lab, "remote") - before < sent
    assert three.lab.probe("client", "UDP", BALANCER, 53, src=CLIENT, count=sent, timeout_s=20.0).outcome == "ok"
    assert _received_by_tunnel(three.lab, "remote") - before >= sent


def _received_by_tunnel(laboratory: lab.Lab, place: str) -> int:
    (link,) = json.loads(laboratory.run(place, "ip", "-json", "-statistics", "link", "show", TUNNEL_DEVICES[Family.IPV4]))
    received: int = link["stats64"]["rx"]["packets"]
    return received


def test_no_request_fails_while_a_rolling_update_moves_the_endpoints_to_other_nodes(three: Three) -> None:
    """The new pod is ready before the old pod terminates, as in a rolling update or drain. The old pod is removed at the end."""
    steps: list[tuple[list[Endpoint | str], set[str]]] = [
        (["r1"], {"r1"}),
        (["r1", Endpoint("p1", ready=False)], {"r1"}),
        (["r1", "p1"], {"r1", "p1"}),
        ([Endpoint("r1", ready=False, terminating=True), "p1"], {"p1"}),
        (["p1"], {"p1"}),
    ]
    three.have(nodes(*NODES), web(*steps[0][0]))
    three.enter_by("third")
    with _losing_nothing(three) as held:
        for pods, serving in steps:
            three.have(nodes(*NODES), web(*pods))
            _check_new_connections(three, serving)
            held += [one for family in Family for one in three.open("TCP", family, 2)]


def test_no_request_or_connection_fails_while_a_node_is_drained_by_weights_or_by_terminating_endpoints(
    three: Three,
) -> None:
    """The node at which the client's packets arrive receives each change later than the node with the endpoint."""
    both = {"p1", "r1"}
    steps = (
        (web("p1", "r1", weights="node/node-b=0, other=1"), both, {"p1"}),
        (web("p1", "r1"), {"p1"}, both),
        (web("p1", Endpoint("r1", ready=False, terminating=True)), both, {"p1"}),
        (web("p1"), {"p1"}, {"p1"}),
    )
    three.have(nodes(*NODES), web("p1", "r1"))
    three.enter_by("third")
    with _losing_nothing(three) as held:
        held += [one for family in Family for one in three.open("TCP", family, len(PORTS), PORTS)]
        assert {one.backend for one in held} == {cluster.address(name, family) for name in both for family in Family}
        for service, before, after in steps:
            with three.pausing("third"):
                three.have(nodes(*NODES), service, concerns=["remote"])
                _check_new_connections(three, before)
            _check_new_connections(three, after)


@contextlib.contextmanager
def _losing_nothing(three: Three) -> Iterator[list[lab.Connection]]:
    """Fail if a request to the Service fails or an open connection is lost.

    The ``with`` block gets an empty list, and adds to the list each connection that the block opens. All connections are TCP
    connections, because ipvsproxy removes endpoints of UDP and SCTP at once, like kube-proxy.
    """
    held: list[lab.Connection] = []
    with contextlib.ExitStack() as loading:
        loads = [
            loading.enter_context(
                three.lab.load("client", "TCP", cluster.address("balancer 1", family), 80, interval_s=0.1, timeout_s=60.0)
            )
            for family in Family
        ]
        yield held
        assert [one.ask(20.0) for one in held] == [one.backend for one in held]
    assert [load.failures for (load,) in loads] == [[]] * len(loads)
    for one in held:
        one.abort()


def _check_new_connections(three: Three, serving: Collection[str]) -> None:
    for family in Family:
        check_served(three, "TCP", family, *serving, count=CLIENTS if len(serving) > 1 else 12)


_TRANSFER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family) as client:
    client.settimeout(300)
    client.connect((sys.argv[1], 80))
    segment = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)  # before the client learns the path MTU
    client.sendall((b"x" * 2000 + b"\\n") * 100 + b"\\n" * 1400)
    reader = client.makefile("rb")
    answers = [reader.readline() for _ in range(1500)]
    level, option = (socket.IPPROTO_IPV6, 24) if ":" in sys.argv[1] else (socket.IPPROTO_IP, 14)  # IPV6_MTU, IP_MTU
    print(sum(map(len, answers)), segment, client.getsockopt(level, option))
"""


@pytest.mark.parametrize(
    ("family", "mtu"),
    [
        (Family.IPV4, 1500),
        (Family.IPV6, 1480),
        pytest.param(Family.IPV4, 1480, marks=patience.THOROUGH),
        pytest.param(Family.IPV6, 1500, marks=patience.THOROUGH),
    ],
)
def test_large_transfers_through_a_tunnel_succeed_in_both_directions(three: Three, family: Family, mtu: int) -> None:
    """Transfer 200 kB to the endpoint of another node and 60 kB back, unfragmented, with the usual path MTU discovery.

    If the MTU between the nodes is 1,480 bytes, the segment size of our rule is too large, so the client must learn the path MTU.
    """
    three.have(nodes(*NODES), web("r1"))
    three.enter_by("third")
    address = cluster.address("balancer 1", family)
    command = ["nsenter", f"--net={three.lab.path('client')}", sys.executable, "-I", "-S", "-c", _TRANSFER, address]
    for place in ("third", "remote"):
        three.lab.ip(place, f"link set eth0 mtu {mtu}")
    try:
        # The test runs this command outside the lab's process, because the pods in that process would have to wait.
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        for place in ("third", "remote"):
            three.lab.ip(place, "link set eth0 mtu 1500")
    received, segment, path = map(int, done.stdout.split())
    assert received > 1500 * 40
    header = {Family.IPV4: 20, Family.IPV6: 40}[family]
    assert segment <= {Family.IPV4: 1440, Family.IPV6: 1400}[family]
    assert mtu == 1500 or path <= mtu - header


MOVED_AT_MOST = 1 / 3
"""If the client's packets move to a node of entry with endpoints, at most this share of open connections may end. The former node
of entry has no endpoints."""


def test_most_open_connections_survive_when_the_client_changes_to_a_node_with_endpoints(three: Three) -> None:
    three.have(nodes(*NODES), web("p1", "r1"))
    three.enter_by("third")
    connections = three.open("TCP", Family.IPV4, len(MANY_PORTS), MANY_PORTS)
    three.kill("third")
    three.lab.ip("client", "link set third down")
    three.enter_by("node")
    try:
        ended = [one.backend for one in connections if not _goes_on(one)]
        assert set(ended) <= {cluster.address("r1", Family.IPV4)}, "connections to the pod of the next node of entry go on"
        assert 0 < len(ended) <= MOVED_AT_MOST * len(MANY_PORTS)
    finally:
        three.lab.ip("client", "link set third up")
        for one in connections:
            one.abort()


def _goes_on(connection: lab.Connection) -> bool:
    try:
        return connection.ask(10.0) == connection.backend
    except lab.LabError:
        return False
