"""A pod of another node whose address lies in this node's ``spec.podCIDRs``, as with Calico's own address management."""

from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.packets.questions import ANSWERED, ATTEMPTS
from tests.packets.test_scopes import API, SERVICES
from tests.support import cluster, lab

pytestmark = [pytest.mark.kernel]


def test_a_pod_of_another_node_with_an_address_in_this_nodes_pod_cidrs_counts_as_an_outside_client(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    node = cluster.node()
    node["spec"] = {"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]}
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.have([node], SERVICES)
        for family in Family:
            source, to = cluster.address("r2", family), cluster.address("node", family)
            here, none = (running.lab.probe("remote", "TCP", to, port, src=source, count=ATTEMPTS) for port in (30001, 30002))
            assert here == lab.Result(ANSWERED, (cluster.address("p1", family),), (source,))
            assert none.outcome == "timeout"
