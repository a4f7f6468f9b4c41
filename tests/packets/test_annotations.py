"""Sends packets to test the annotations of Services.

Covers the shares and connection limits of endpoints, networks whose clients all reach the same endpoint, and changes under load.

Most tests share one run of the program. Each test starts with its own objects only. In tests of hash schedulers, each client has
a separate outside address.
"""

import collections
import ipaddress
from collections.abc import Mapping

import pytest

from ipvsproxy.model.net import Family, host_port, parse_address
from tests.packets.bindings import each_family, mainly_ipv4, mainly_ipv6, with_addresses
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, Manifest, service, slices

pytestmark = [pytest.mark.kernel, with_addresses]

PODS = ("p1", "p2", "r1", "r2")
TCP = ("TCP",)
CLIENTS = 24
FULL_WEIGHT = 100
"""The weight of an endpoint after its slow start."""


def _web(*endpoints: str, **annotations: str) -> list[Manifest]:
    named = {name.replace("_", "-"): value for name, value in annotations.items()}
    return service("web", 1, *endpoints, protocols=TCP, annotations=named)


def _shares(running: Cluster, family: Family, requests: int = 100) -> Mapping[str, float]:
    """The share of each pod in the given number of new connections, no matter how long the connections take."""
    load = running.lab.repeat("p2", "TCP", cluster.address("cluster 1", family), 80, count=requests)
    assert load.outcomes == {"ok": requests}
    return {name: load.backends.get(cluster.address(name, family), 0) / requests for name in PODS}


@mainly_ipv4
def test_weights_by_zone_and_by_node_determine_the_shares_of_new_connections(running: Cluster, family: Family) -> None:
    running.have(_web(*PODS, scheduler="wrr", weights=f"zone/zone-a=8, node/{cluster.OTHER_NODE}=2, other=1"))
    shares = _shares(running, family)
    assert shares == pytest.approx({"p1": 0.4, "p2": 0.4, "r1": 0.1, "r2": 0.1}, abs=0.03)


@mainly_ipv6
def test_an_annotation_of_an_endpoint_slice_sets_the_weight_of_its_canary_endpoints(running: Cluster, family: Family) -> None:
    canary = slices("web", "r1", protocols=TCP)
    for item in canary:
        item["metadata"] |= {"name": f"canary-{item['metadata']['name']}", "annotations": {"ipvsproxy.io/weight": "1"}}
    stable = _web("p1", scheduler="wrr")
    for item in stable[1:]:
        item["metadata"]["annotations"] = {"ipvsproxy.io/weight": "9"}
    running.have(stable, canary)
    assert _shares(running, family) == pytest.approx({"p1": 0.9, "p2": 0, "r1": 0.1, "r2": 0}, abs=0.03)


@mainly_ipv4
def test_an_endpoint_of_weight_zero_keeps_its_connections_and_gets_no_new_connections(running: Cluster, family: Family) -> None:
    running.have(_web("p1"))
    connection = running.lab.open("p2", "TCP", cluster.address("cluster 1", family), 80)
    running.have(_web("p1", "r1", weights="zone/zone-a=0"))
    assert _shares(running, family)["p1"] == 0
    assert connection.ask() == cluster.address("p1", family)
    assert running.real_servers("TCP", cluster.address("cluster 1", family), 80)[cluster.address("p1", family)] == 0
    running.have(_web("p1", "r1"))
    assert _shares(running, family)["p1"] == pytest.approx(0.5, abs=0.05)
    assert connection.ask() == cluster.address("p1", family)
    connection.close()


def test_endpoints_at_their_connection_limit_get_no_new_connections_even_if_no_other_endpoint_is_left(
    running: Cluster,
) -> None:
    running.have()
    running.have(_web("p1", "r1", max_connections="3", resume_connections="2"))
    to = {family: cluster.address("cluster 1", family) for family in Family}
    connections = {family: [running.lab.open("p2", "TCP", to[family], 80) for _ in range(6)] for family in Family}
    for family, opened in connections.items():
        p1, r1 = (cluster.address(name, family) for name in ("p1", "r1"))
        assert collections.Counter(connection.backend for connection in opened) == {p1: 3, r1: 3}
        assert running.lab.probe("p2", "TCP", to[family], 80).outcome == "refused"
        for connection in [one for one in opened if one.backend == p1][:2]:
            connection.abort()
            opened.remove(connection)
    for family, opened in connections.items():
        running.wait_until(lambda there=to[family]: running.lab.probe("p2", "TCP", there, 80).outcome == "ok", "resumed")  # type: ignore[misc]  # the default binds the value
        for connection in opened:
            connection.abort()


@each_family
def test_all_clients_of_one_network_are_sent_to_one_endpoint(running: Cluster, family: Family) -> None:
    sources = _sources(running, family)[:8]
    objects = service(
        "web", 1, *PODS, protocols=TCP, sessionAffinity="ClientIP", annotations={"affinity-netmask": "ipv4=24, ipv6=64"}
    )
    running.have(objects)
    answers = [running.lab.probe("client", "TCP", cluster.address("cluster 1", family), 80, src=one, count=2) for one in sources]
    assert len({backend for answer in answers for backend in answer.backends}) == 1
    running.have(service("web", 1, *PODS, protocols=TCP, sessionAffinity="ClientIP"))
    answers = [running.lab.probe("client", "TCP", cluster.address("cluster 1", family), 80, src=one, count=2) for one in sources]
    assert {len(answer.backends) for answer in answers} == {1}
    assert len({backend for answer in answers for backend in answer.backends}) > 1


def _sources(running: Cluster, family: Family) -> list[str]:
    """Adds addresses to the interface of the outside client, and returns the addresses.

    All addresses are in one /24 (IPv4) or one /64 (IPv6).
    """
    first = ipaddress.ip_address("172.18.2.1" if family is Family.IPV4 else "fc00:f853:ccd::2:1")
    addresses = [str(first + number) for number in range(CLIENTS)]
    length = 16 if family is Family.IPV4 else 64
    present = running.lab.run("client", "ip", "address", "show", "dev", "lan")
    if addresses[0] + "/" not in present:
        running.lab.ip("client", *(f"address add {one}/{length} dev lan{' nodad' * (length == 64)}" for one in addresses))
    return addresses


@mainly_ipv6
def test_connections_survive_a_change_of_the_scheduler_under_load(running: Cluster, family: Family) -> None:
    """A kernel with several processors refuses new clients for the milliseconds between two schedulers."""
    running.have(_web(*PODS))
    to = cluster.address("cluster 1", family)
    kept = running.lab.open("p2", "TCP", to, 80)
    before = scheduled(running, to)
    with running.lab.load("p2", "TCP", to, 80, interval_s=0.005) as loads:
        for scheduler in ("wrr", "mh", "lc", "sh", "rr"):
            running.have(_web(*PODS, scheduler=scheduler))
            assert running.lab.repeat("p2", "TCP", to, 80, count=10).outcomes == {"ok": 10}, scheduler
        running.have(_web(*PODS, scheduler="mh", scheduler_flags="port, fallback"))
        running.have(_web(*PODS, scheduler="mh"))
        running.have(_web(*PODS))
    (load,) = loads
    assert load.outcomes["ok"] > 30
    assert load.outcomes.keys() <= {"ok", "refused"}
    assert load.outcomes.get("refused", 0) < load.outcomes["ok"] / 10
    assert kept.ask() == kept.backend
    kept.close()
    assert scheduled(running, to) >= before  # the counter would be smaller if the virtual server had been removed and added again


def scheduled(running: Cluster, address: str) -> int:
    """The number of connections that the virtual server has scheduled since it was added to the kernel.

    The kernel updates the number every two seconds.
    """
    listing = running.lab.run("node", "ipvsadm", "-Ln", "--stats", "--exact")
    shown = host_port(parse_address(address), 80)
    return next(int(line.split()[2]) for line in listing.splitlines() if line.startswith(f"TCP  {shown} "))


@pytest.mark.parametrize("scheduler", [pytest.param("sh", marks=patience.THOROUGH), "mh"])
def test_two_nodes_send_a_client_to_the_same_endpoint(running: Cluster, tmp_path: pytest.TempPathFactory, scheduler: str) -> None:
    """The second node is this node with another name.

    Unless the scheduler is a hash scheduler, the order of the real servers depends on the name of the node.
    """
    sources = {family: _sources(running, family) for family in Family}
    running.have()
    maps = []
    for name in (cluster.THIS_NODE, "node-c"):
        running.program.__exit__(None, None, None)
        running.objects = [cluster.node() | {"metadata": {"name": name}}, *_web(*PODS, scheduler=scheduler)]
        running.start(f"--hostname-override={name}")
        probes = [
            lab.Probe("client", "TCP", cluster.address("cluster 1", family), 80, src=source, count=2, timeout_s=10.0)
            for family in Family
            for source in sources[family]
        ]
        answers = running.lab.probe_all(probes)
        assert {(answer.outcome, len(answer.backends)) for answer in answers} == {("ok", 1)}
        maps.append([answer.backends[0] for answer in answers])
        running.objects = []
        running.have(cluster.service("other", 9, protocols=TCP))
    assert maps[0] == maps[1]
    assert len(set(maps[0])) == len(PODS) * len(Family)


def test_a_new_endpoint_gets_a_small_but_growing_share_of_connections_during_its_slow_start(running: Cluster) -> None:
    """The first slow start takes an hour, so that the weight stays small even if requests take long on a busy machine."""
    running.have()
    running.have(_web("p1", scheduler="wrr", slow_start="1h"))
    running.have(_web("p1", "r1", scheduler="wrr", slow_start="1h"))
    for family in Family:
        assert _shares(running, family)["r1"] < 0.05
    running.have(_web("p1", "r1", "r2", scheduler="wrr", slow_start=f"{patience.seconds(8):.0f}s"))
    weights: dict[Family, list[int]] = {family: [] for family in Family}

    def risen() -> bool:
        for family, found in weights.items():
            real_servers = running.real_servers("TCP", cluster.address("cluster 1", family), 80)
            found.append(real_servers[cluster.address("r2", family)])
        return all(found[-1] == FULL_WEIGHT for found in weights.values())

    running.wait_until(risen, "risen")
    for family, found in weights.items():
        assert found == sorted(found)
        assert len(set(found)) > 3
        assert _shares(running, family) == pytest.approx({"p1": 1 / 3, "p2": 0, "r1": 1 / 3, "r2": 1 / 3}, abs=0.02)
