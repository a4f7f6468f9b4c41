"""What people report of kube-proxy's IPVS mode, by packets: what happens, and that ``doctor`` names the cause."""

from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.packets.questions import ANSWERED
from tests.support import cluster, lab
from tests.support.cluster import service

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("ranges", "source", "level"),
    [("10.0.0.0/8,fd00::/8", "cluster 1", "warn"), ("10.244.0.0/16,fd00:10:244::/48", "node", "ok  ")],
    ids=["with the Services' range", "of pods alone"],
)
def test_the_host_is_not_masqueraded_where_the_cluster_cidr_has_cluster_ips(
    laboratory: lab.Lab, tmp_path: Path, ranges: str, source: str, level: str
) -> None:
    """The other node of the lab has a route to this one for all addresses; elsewhere, no answer comes back to a cluster IP."""
    with cluster.Cluster(laboratory, tmp_path, f"--cluster-cidr={ranges}") as running:
        running.have([cluster.node()], service("web", 1, "r1", protocols=["TCP"]))
        for family in Family:
            to = cluster.address("cluster 1", family)
            assert laboratory.probe("host", "TCP", to, 80).sources == (cluster.address(source, family),)
            assert laboratory.probe("p2", "TCP", to, 80).outcome == ANSWERED, family
        (doctor,) = running.run("doctor")
        assert any(line.startswith(f"{level}  cluster-cidr: ") for line in doctor.output.splitlines()), doctor
