"""Graceful termination, tested with packets: open connections outlive their endpoint, and new connections go to other endpoints.

The tests also cover a restart during the drain, an endpoint that returns, the end of the connections, and a deadline.
"""

import urllib.request
from collections.abc import Iterator

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.packets.bindings import with_addresses, with_routes
from tests.support import cluster, lab
from tests.support.cluster import Cluster, service

pytestmark = [pytest.mark.kernel]

DEADLINE_S = 6


@pytest.fixture(scope="module", name="running")
def _running(laboratory: lab.Lab, tmp_path_factory: pytest.TempPathFactory, binding: Binding) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("drain")
    with Cluster(laboratory, directory, f"--ipvs-vip-binding={binding}") as running:
        yield running


def _drains() -> float:
    with urllib.request.urlopen("http://127.0.0.1:10249/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("ipvsproxy_drains "))


def _weights(running: Cluster, family: Family) -> dict[str, int]:
    return running.real_servers("TCP", cluster.address("cluster 1", family), 80)


@with_routes
def test_connections_survive_the_removal_of_their_endpoint_a_restart_and_the_return_of_the_endpoint(running: Cluster) -> None:
    pods = {family: (cluster.address("p1", family), cluster.address("r1", family)) for family in Family}
    running.have(service("web", 1, "p1"))
    connections = {family: running.lab.open("p2", "TCP", cluster.address("cluster 1", family), 80) for family in Family}

    running.have(service("web", 1, "r1"))
    for family, (going, staying) in pods.items():
        assert _weights(running, family) == {going: 0, staying: 1}
        assert connections[family].ask() == going
        assert running.lab.probe("p2", "TCP", cluster.address("cluster 1", family), 80, count=4).backends == (staying,)
    assert _drains() == 2

    running.program.kill()
    running.start()
    for family, (going, staying) in pods.items():
        assert _weights(running, family) == {going: 0, staying: 1}
        assert connections[family].ask() == going
    assert _drains() == 2

    running.have(service("web", 1, "p1", "r1"))
    for family, (going, staying) in pods.items():
        assert _weights(running, family) == {going: 1, staying: 1}
        assert connections[family].ask() == going
        # Reset, not closed: IPVS would keep closed connections for minutes
        new = [running.lab.open("p2", "TCP", cluster.address("cluster 1", family), 80) for _ in range(2)]
        assert {connection.backend for connection in new} == {going, staying}
        for connection in new:
            connection.abort()
    assert _drains() == 0

    running.have(service("web", 1, "r1"))
    for family, (going, _) in pods.items():
        assert connections[family].ask() == going
        connections[family].abort()
    running.wait_until(lambda: all(_weights(running, family) == {pods[family][1]: 1} for family in Family), "removed")
    assert _drains() == 0


@with_addresses
def test_connections_end_at_the_drain_deadline_which_starts_again_after_a_restart(running: Cluster) -> None:
    address, (going, staying) = cluster.address("cluster 1", Family.IPV4), ("10.244.0.11", "10.244.1.11")
    running.have(service("web", 1, "p1"))
    connection = running.lab.open("p2", "TCP", address, 80)
    running.have(service("web", 1, "r1"))
    assert _weights(running, Family.IPV4) == {going: 0, staying: 1}
    running.program.kill()
    running.start(f"--ipvs-drain-deadline={DEADLINE_S}s")
    assert connection.ask() == going
    running.wait_until(lambda: _weights(running, Family.IPV4) == {staying: 1}, "removed")
    with pytest.raises(lab.LabError):
        connection.ask()
    connection.abort()
    assert running.lab.probe("p2", "TCP", address, 80).backends == (staying,)
