"""A pod of another node whose address lies in this node's ``spec.podCIDRs``: Calico's own address management beside kubeadm's."""

from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from tests.packets.questions import ANSWERED, ATTEMPTS
from tests.packets.test_scopes import API, SERVICES
from tests.support import cluster, lab

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]


def test_a_pod_of_another_node_in_this_nodes_range_is_answered_at_a_node_port(laboratory: lab.Lab, tmp_path: Path) -> None:
    node = cluster.node()
    node["spec"] = {"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]}
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.have([node], SERVICES)
        source, to = cluster.address("r2", Family.IPV4), cluster.address("node", Family.IPV4)
        assert running.lab.probe("remote", "TCP", to, 30001, src=source, count=ATTEMPTS).outcome == ANSWERED
