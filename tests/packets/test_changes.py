"""Covers packets while API objects change: source ranges, UDP endpoints, affinity, and Services that share an address."""

import ipaddress
import time
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from tests.packets.bindings import by_ipv4, by_ipv6, with_addresses, with_routes
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, Manifest, service

pytestmark = [pytest.mark.kernel]

UDP_TIMEOUT_S = 2
FLAGS = (f"--ipvs-udp-timeout={UDP_TIMEOUT_S}s",)
LOAD_TIMEOUT_S = 0.25


def _range_of(name: str, family: Family) -> str:
    return f"{cluster.address(name, family)}/{family.bits}"


# Source ranges.


@by_ipv4
def test_a_change_of_source_ranges_does_not_affect_clients_that_stay_allowed_or_refused(running: Cluster, family: Family) -> None:
    def ranges(*texts: str) -> list[Manifest]:
        return service("web", 1, "p1", balancer=True, loadBalancerSourceRanges=texts)

    alone, other = (_range_of(name, family) for name in ("client", "client2"))
    wide = "172.18.0.0/24" if family is Family.IPV4 else "fc00:f853:ccd::50/128"
    others = ("203.0.113.0/24", "198.18.0.0/15") if family is Family.IPV4 else ("2001:db8:8::/48", "2001:db8:9::/48")
    balancer = cluster.address("balancer 1", family)
    insider, outsider = cluster.address("client", family), cluster.address("client2", family)
    running.have()
    with running.lab.load("client", "TCP", balancer, 80, src=outsider, timeout_s=LOAD_TIMEOUT_S) as refused:
        running.have(ranges(alone))
        with running.lab.load("client", "TCP", balancer, 80, src=insider) as answered:
            for texts in ([alone, *others[:1]], [wide, *others[1:]], [alone, wide, *others], [alone], [*others, alone]):
                running.have(ranges(*texts))
        running.have()
    assert answered[0].failed == 0
    assert answered[0].outcomes["ok"] > 5
    assert "ok" not in refused[0].outcomes
    running.have(ranges(alone, other))
    assert running.lab.probe("client", "TCP", balancer, 80, src=outsider).outcome == "ok"
    running.have(ranges(alone))
    assert running.lab.probe("client", "TCP", balancer, 80, src=outsider).outcome == "timeout"


# Tracked flows of UDP and SCTP.


@by_ipv6
@pytest.mark.parametrize(
    ("from_", "to", "port"), [("p2", "cluster 1", 53), ("client", "node", 30001), ("client", "balancer 1", 53)]
)
def test_udp_packets_of_a_client_go_to_the_new_endpoint_after_the_endpoint_of_the_service_has_changed(
    running: Cluster, family: Family, from_: str, to: str, port: int
) -> None:
    running.have(service("web", 1, "p1", balancer=True, node_port=30001))
    connection = running.lab.open(from_, "UDP", cluster.address(to, family), port)
    assert connection.backend == cluster.address("p1", family)
    running.have(service("web", 1, "r1", balancer=True, node_port=30001))
    assert connection.ask() == cluster.address("r1", family)
    connection.close()


@with_routes
def test_udp_packets_of_a_client_go_to_the_new_endpoint_if_the_endpoint_changes_while_the_program_is_down(
    running: Cluster,
) -> None:
    running.have(service("web", 1, "p1"))
    connections = {family: running.lab.open("p2", "UDP", cluster.address("cluster 1", family), 53) for family in Family}
    running.program.kill()
    for family, connection in connections.items():
        assert connection.ask() == cluster.address("p1", family), "the kernel serves by itself"
    running.objects = service("web", 1, "r1")
    running.start()
    for family, connection in connections.items():
        assert connection.ask() == cluster.address("r1", family)
        connection.close()


def _flows(running: Cluster, family: Family, protocol: str) -> set[tuple[str, str]]:
    """For each tracked flow of this family and protocol: its original destination, and the source of its replies."""
    name = family.label.lower()
    listing = running.lab.run("node", "conntrack", "--dump", "--family", name, "--proto", protocol.lower())
    flows = set()
    for line in listing.splitlines():
        values = [word.partition("=")[2] for word in line.split() if word.startswith(("src=", "dst="))]
        flows.add((values[1], values[2]))
    return flows


@by_ipv6
@pytest.mark.parametrize("protocol", ["UDP", "SCTP"])
def test_only_the_tracked_flows_of_the_removed_endpoint_are_deleted(running: Cluster, family: Family, protocol: str) -> None:
    running.have(service("web", 1, "p1", "r1"), service("other", 2, "p1"))
    web, other = (cluster.address(f"cluster {number}", family) for number in (1, 2))
    pod, remote = cluster.address("p1", family), cluster.address("r1", family)
    port, pod_port = cluster.PORTS[protocol]
    connections = [running.lab.open("p2", protocol, web, port) for _ in range(2)]
    connections += [running.lab.open("p2", protocol, other, port), running.lab.open("host", protocol, pod, pod_port)]
    assert _flows(running, family, protocol) >= {(web, pod), (web, remote), (other, pod), (pod, pod)}
    running.have(service("web", 1, "r1"), service("other", 2, "p1"))
    flows = _flows(running, family, protocol)
    assert (web, pod) not in flows
    assert flows >= {(web, remote), (other, pod), (pod, pod)}
    for connection in connections:
        connection.abort()


# A connection to the pod and a connection to the Service use the same port of the client.


@with_addresses
@pytest.mark.parametrize("pod", [pytest.param("p1", marks=patience.THOROUGH), "r1"])
def test_a_direct_connection_to_a_pod_times_out_while_the_same_client_port_is_connected_to_the_service(
    running: Cluster, pod: str
) -> None:
    running.have(service("web", 1, pod, protocols=["TCP"]))
    client, address = cluster.address("p2", Family.IPV4), cluster.address(pod, Family.IPV4)
    to, ports = cluster.address("cluster 1", Family.IPV4), {"p1": (41000, 41001), "r1": (41002, 41003)}[pod]
    through = running.lab.open("p2", "TCP", to, 80, src=f"{client}#{ports[0]}")
    with pytest.raises(lab.LabError, match="Timeout"):
        running.lab.open("p2", "TCP", address, 8080, src=f"{client}#{ports[0]}")
    tracked = running.lab.run("node", "conntrack", "-L", "-p", "tcp", "--orig-port-src", str(ports[0]))
    (direct,) = [line for line in tracked.splitlines() if f"sport={ports[0]} dport=8080 " in line]
    assert f"sport=8080 dport={ports[0]} " not in direct, "its answer is expected at another port"
    assert through.ask() == address, "the other connection does not suffer"
    first = running.lab.open("p2", "TCP", address, 8080, src=f"{client}#{ports[1]}")
    second = running.lab.open("p2", "TCP", to, 80, src=f"{client}#{ports[1]}")
    assert second.ask() == address
    with pytest.raises(lab.LabError, match="Timeout"):
        first.ask()
    for connection in (through, first, second):
        connection.abort()


# Session affinity.


@by_ipv4
def test_session_affinity_is_kept_until_its_timeout_and_then_expires(running: Cluster, family: Family) -> None:
    # The affinity entry must last longer than the connections, even if the last answer comes late. If a connection still exists
    # when the affinity expires, the kernel keeps the affinity for another minute (ip_vs_conn_expire).
    for_a_while = {"clientIP": {"timeoutSeconds": 2 * UDP_TIMEOUT_S}}
    running.have(service("web", 1, "p1", "r1", protocols=["UDP"], sessionAffinity="ClientIP", sessionAffinityConfig=for_a_while))
    to = cluster.address("cluster 1", family)
    client = cluster.address("p2", family)

    def backends() -> tuple[str, ...]:
        return running.lab.probe("p2", "UDP", to, 53, count=3).backends

    def is_remembered() -> bool:
        table = running.lab.run("node", "cat", "/proc/net/ip_vs_conn")
        return _hexadecimal(client) in table and _hexadecimal(to) in table

    first = backends()
    assert len(first) == 1
    assert backends() == first
    after = []
    for _ in range(2):  # the scheduler chooses an endpoint again, and may choose the same endpoint
        running.wait_until(lambda: not is_remembered(), "forgotten")
        after.append(backends())
    assert len({first, *after}) == 2


@with_addresses
def test_session_affinity_lasts_longer_than_its_timeout_if_ipvs_still_has_a_connection_of_the_client(running: Cluster) -> None:
    """Tests a statement of docs/runbook.md.

    IPVS stores a client's affinity as a connection with source port 0. The client's other connections keep this connection alive.
    """
    shortest = {"clientIP": {"timeoutSeconds": 1}}
    running.have(service("web", 1, "p1", "r1", protocols=["TCP"], sessionAffinity="ClientIP", sessionAffinityConfig=shortest))
    to = cluster.address("cluster 1", Family.IPV4)
    first = running.lab.probe("p2", "TCP", to, 80, count=3).backends
    assert len(first) == 1
    time.sleep(4)
    rows = [line for line in running.lab.run("node", "ipvsadm", "-Lnc").splitlines() if f" {to}:80 " in line]
    assert [row for row in rows if f" {cluster.address('p2', Family.IPV4)}:0 " in row]
    assert [row for row in rows if " TIME_WAIT " in row]
    assert running.lab.probe("p2", "TCP", to, 80, count=6).backends == first


def _hexadecimal(address: str) -> str:
    packed = ipaddress.ip_address(address)
    return f"{int(packed):08X}" if packed.version == 4 else packed.exploded


# Several Services with the same address.


def _twin(number: int, pod: str, **spec: Any) -> list[Manifest]:
    """One of two Services with the same external IP and node port. The Service with the number 1 is the oldest."""
    external = [cluster.address("external 1", family) for family in Family]
    manifests = service(f"twin-{number}", number, pod, node_port=30001, externalIPs=external, **spec)
    manifests[0]["metadata"]["creationTimestamp"] = f"2026-01-0{number}T00:00:00Z"
    return manifests


FIRST, SECOND = _twin(1, "p1"), _twin(2, "p2", externalTrafficPolicy="Local")


def _answers(running: Cluster, family: Family) -> set[str]:
    external, node = cluster.address("external 1", family), cluster.address("node", family)
    probes = [lab.Probe("client", "TCP", external, 80, count=3), lab.Probe("client", "TCP", node, 30001, count=3)]
    return {backend for result in running.lab.probe_all(probes) for backend in (*result.backends, result.outcome)}


@with_addresses
def test_the_older_service_is_served_at_a_shared_address_or_node_port_until_it_is_deleted(
    running: Cluster,
) -> None:
    pods = {name: {family: cluster.address(name, family) for family in Family} for name in ("p1", "p2")}
    external = cluster.address("external 1", Family.IPV4)
    running.have(SECOND)
    assert all(_answers(running, family) == {pods["p2"][family], "ok"} for family in Family)
    assert f"{external},tcp:80" in running.set_contents("KUBE-EXTERNAL-IP-LOCAL")

    running.have(FIRST, SECOND)
    assert all(_answers(running, family) == {pods["p1"][family], "ok"} for family in Family)
    assert f"{external},tcp:80" in running.set_contents("KUBE-EXTERNAL-IP")
    assert f"{external},tcp:80" not in running.set_contents("KUBE-EXTERNAL-IP-LOCAL")
    assert "30001" not in running.set_contents("KUBE-NODE-PORT-LOCAL-TCP")
    assert running.lab.probe("p2", "TCP", cluster.address("cluster 2", Family.IPV4), 80).outcome == "ok", (
        "its other addresses stay served"
    )

    running.have(SECOND)
    assert all(_answers(running, family) == {pods["p2"][family], "ok"} for family in Family)
    assert f"{external},tcp:80" not in running.set_contents("KUBE-EXTERNAL-IP")
    assert "30001" in running.set_contents("KUBE-NODE-PORT-LOCAL-TCP")
