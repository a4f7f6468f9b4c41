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


def test_what_collides_with_a_node_port_is_named_and_who_gets_the_packets(laboratory: lab.Lab, tmp_path: Path) -> None:
    """A process of the host and a NOTRACK rule; hostPort rules are those of ``test_neighbours``."""
    rules = "*raw\n-A PREROUTING -d 10.96.0.1/32 -p tcp --dport 80 -j CT --notrack\nCOMMIT\n"
    with cluster.Cluster(laboratory, tmp_path) as running:
        running.have([cluster.node()], service("web", 1, "r1", protocols=["TCP"], node_port=30001))
        node = cluster.address("node", Family.IPV4)
        laboratory.serve("node", "TCP", "0.0.0.0", 30001)
        laboratory.run("node", "iptables-restore", "--noflush", stdin=rules)
        try:
            answer = laboratory.probe("client", "TCP", node, 30001)
            assert (answer.outcome, answer.backends) == (ANSWERED, (cluster.address("r1", Family.IPV4),)), (
                "not the host's process"
            )
            untracked = laboratory.probe("client", "TCP", cluster.address("cluster 1", Family.IPV4), 80)
            assert untracked.outcome != ANSWERED or untracked.sources == (cluster.address("client", Family.IPV4),)
            doctor, explain = running.run("doctor", "explain default/web")
        finally:
            laboratory.run("node", "iptables", "-t", "raw", "-F", "PREROUTING")
            laboratory.hush("node", "TCP", "0.0.0.0", 30001)
    for output in (doctor.output, explain.output):
        named = [line for line in output.splitlines() if "collisions: " in line or "collides: " in line]
        assert any(f"listens at TCP {node}:30001, too" in line for line in named), output
        assert any("exempts packets to TCP 10.96.0.1:80 from connection tracking" in line for line in named), output


@pytest.mark.parametrize("refused", [False, True], ids=["served", "refused"])
def test_another_nodes_address_as_an_external_ip_hides_that_node(laboratory: lab.Lab, tmp_path: Path, *, refused: bool) -> None:
    agent = service("agent", 2, "r1", protocols=["TCP"])
    for item in agent[1:]:  # an agent in the host's network
        item["endpoints"] = [
            {"addresses": [cluster.address("remote", Family[item["addressType"].upper()])], "nodeName": "node-b"}
        ]
    both = [cluster.address("remote", family) for family in Family]
    web = service("web", 1, "p1", protocols=["TCP"], externalIPs=both)
    flags = ["--ipvs-refuse-node-addresses"] if refused else []
    with cluster.Cluster(laboratory, tmp_path, *flags) as running:
        running.have([cluster.node()], web, agent)
        for address in both:
            laboratory.serve("remote", "TCP", address, 7000)
        try:
            outcomes = {laboratory.probe(client, "TCP", address, 7000).outcome for client in ("host", "p2") for address in both}
        finally:
            for address in both:
                laboratory.hush("remote", "TCP", address, 7000)
        doctor, explain = running.run("doctor", "explain default/web")
    assert (outcomes == {ANSWERED}) is refused, outcomes
    hint = "not used: Service default/web spec.externalIPs" if refused else "collides: "
    for address in both:
        assert any(hint in line and f"{address} is an address of the node node-b" in line for line in explain.output.splitlines())
        assert (f"{address} is an address of the node node-b" in doctor.output) is not refused
