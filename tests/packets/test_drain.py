"""Graceful termination, tested with packets: open connections outlive their endpoint, and new connections go to other endpoints.

Also covers a restart during the drain, an endpoint that is added again, the end of the connections, and the deadline of a drain.
"""

from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.support import cluster, lab
from tests.support.cluster import Cluster, service
from tests.support.own_pages import metrics

pytestmark = [pytest.mark.kernel]

DEADLINE_S = 10
TCP = ["TCP"]


def _weights(running: Cluster, family: Family) -> dict[str, int]:
    return running.real_servers("TCP", cluster.address("cluster 1", family), 80)


def test_connections_survive_a_restart_and_a_returning_endpoint_but_not_the_drain_deadline(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path) as running:
        pods = {family: (cluster.address("p1", family), cluster.address("r1", family)) for family in Family}
        running.have(service("web", 1, "p1", protocols=TCP))
        connections = {family: running.lab.open("p2", "TCP", cluster.address("cluster 1", family), 80) for family in Family}

        running.have(service("web", 1, "r1", protocols=TCP))
        for family, (going, staying) in pods.items():
            assert _weights(running, family) == {going: 0, staying: 1}
            assert connections[family].ask() == going
            assert running.lab.probe("p2", "TCP", cluster.address("cluster 1", family), 80, count=4).backends == (staying,)
        assert metrics()["ipvsproxy_drains"] == 2

        running.program.kill()
        running.start()
        for family, (going, staying) in pods.items():
            assert _weights(running, family) == {going: 0, staying: 1}
            assert connections[family].ask() == going
        assert metrics()["ipvsproxy_drains"] == 2

        running.have(service("web", 1, "p1", "r1", protocols=TCP))
        for family, (going, staying) in pods.items():
            assert _weights(running, family) == {going: 1, staying: 1}
            assert connections[family].ask() == going
            # the new connections are reset and not closed, because IPVS would keep closed connections for minutes
            new = [running.lab.open("p2", "TCP", cluster.address("cluster 1", family), 80) for _ in range(2)]
            assert {connection.backend for connection in new} == {going, staying}
            for connection in new:
                connection.abort()
        assert metrics()["ipvsproxy_drains"] == 0

        running.have(service("web", 1, "r1", protocols=TCP))
        assert [connections[family].ask() for family in Family] == [pods[family][0] for family in Family]
        connections[Family.IPV6].abort()
        remaining = {pods[Family.IPV6][1]: 1}
        running.wait_until(lambda: _weights(running, Family.IPV6) == remaining, "removed")
        running.wait_until(lambda: metrics()["ipvsproxy_drains"] == 1, "counted")

        # After a restart, the deadline of the drain is counted from the restart.
        going, staying = pods[Family.IPV4]
        assert _weights(running, Family.IPV4) == {going: 0, staying: 1}
        running.program.kill()
        running.start(f"--ipvs-drain-deadline={DEADLINE_S}s")
        assert connections[Family.IPV4].ask() == going
        running.wait_until(lambda: _weights(running, Family.IPV4) == {staying: 1}, "removed")
        with pytest.raises(lab.LabError):
            connections[Family.IPV4].ask()
        connections[Family.IPV4].abort()
        assert running.lab.probe("p2", "TCP", cluster.address("cluster 1", Family.IPV4), 80).backends == (staying,)
