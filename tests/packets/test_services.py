"""Every feature of the Service API, tested with packets: who answers, which source address is seen, what is refused or dropped.

Each request is sent over TCP, UDP and SCTP, and over IPv4 and IPv6. A single run of the program serves all Services of this
module. ``test_changes.py`` covers changes.
"""

from collections.abc import Mapping

import pytest

from ipvsproxy.model.net import Family, host_port, parse_address
from tests.packets import questions
from tests.packets.questions import ANSWERED, ATTEMPTS, MASQUERADED, Question, Row
from tests.support import cluster, lab
from tests.support.cluster import Endpoint, service

pytestmark = [pytest.mark.kernel]


ALL_NODES = ("p1", "r1")
RANGES = {
    "client alone": ["172.18.0.50/32", "fc00:f853:ccd::50/128"],
    "client and node": ["172.18.0.0/24", "fc00:f853:ccd::50/128", "fc00:f853:ccd::2/128"],
    "everybody": ["172.18.0.50/32", "fc00:f853:ccd::50/128", "0.0.0.0/0", "::/0"],
    "unreadable": ["172.18.0.50", "everybody"],
}
SERVICES = [
    *service("plain", 1, *ALL_NODES, node_port=30001),
    *service("external", 2, *ALL_NODES, external=True),
    *service("balancer", 3, *ALL_NODES, balancer=True, node_port=30003),
    *service("external-local", 4, *ALL_NODES, external=True, externalTrafficPolicy="Local"),
    *service(
        "balancer-local", 5, *ALL_NODES, balancer=True, node_port=30005, externalTrafficPolicy="Local", healthCheckNodePort=32005
    ),
    *service(
        "balancer-local-elsewhere",
        6,
        "r1",
        balancer=True,
        node_port=30006,
        externalTrafficPolicy="Local",
        healthCheckNodePort=32006,
    ),
    *service("internal-local", 7, *ALL_NODES, internalTrafficPolicy="Local"),
    *service("internal-local-elsewhere", 8, "r1", node_port=30008, internalTrafficPolicy="Local"),
    *service("ranges-client", 9, *ALL_NODES, balancer=True, node_port=30009, loadBalancerSourceRanges=RANGES["client alone"]),
    *service("ranges-node", 10, *ALL_NODES, balancer=True, loadBalancerSourceRanges=RANGES["client and node"]),
    *service("ranges-everybody", 11, *ALL_NODES, balancer=True, loadBalancerSourceRanges=RANGES["everybody"]),
    *service("ranges-unreadable", 12, *ALL_NODES, balancer=True, loadBalancerSourceRanges=RANGES["unreadable"]),
    *service("hairpin", 13, "p1"),
    *service("draining", 14, Endpoint("p1", ready=False, terminating=True), Endpoint("r1", ready=False, terminating=True)),
    *service("draining-beside-ready", 15, Endpoint("p1", ready=False, terminating=True), "r1"),
    *service("zone", 16, Endpoint("p1", zones=("zone-b",)), Endpoint("r1", zones=("zone-a",))),
    *service("zone-half-hinted", 17, Endpoint("p1", zones=("zone-b",)), "r1"),
    *service("node-hints", 18, Endpoint("p1", nodes=("node-b",)), Endpoint("r1", nodes=("node-a",))),
    *service("empty", 19, balancer=True, node_port=30019),
    *service("affinity", 20, *ALL_NODES, node_port=30020, sessionAffinity="ClientIP"),
    *service("shared-one", 21, "p1", balancer=True, protocols=["TCP"]),
]
SHARED = service("shared-two", 22, "r1", protocols=["UDP"])
PROXIED = service("proxied", 23, *ALL_NODES, balancer=True)
SHARED[0]["status"] = {"loadBalancer": {"ingress": [{"ip": cluster.address("balancer 21", family)} for family in Family]}}
PROXIED[0]["status"]["loadBalancer"]["ingress"] = [
    entry | {"ipMode": "Proxy"} for entry in PROXIED[0]["status"]["loadBalancer"]["ingress"]
]


EVERY_KIND = [
    Row("a pod keeps its address on the way to a cluster IP", "p2", "cluster 1", 0, ANSWERED, "p1 r1", "p2"),
    Row("the node itself is masqueraded", "host", "cluster 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a pod reaches itself through its Service", "p1", "cluster 13", 0, ANSWERED, "p1", "bridge"),
    Row("a node port leads to all nodes", "client", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("an external IP leads to all nodes", "client", "external 2", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a load balancer's IP leads to all nodes", "client", "balancer 3", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a local load balancer stays here and keeps the client's address", "client", "balancer 5", 0, ANSWERED, "p1", "client"),
    Row("a local load balancer keeps pods here, too", "p2", "balancer 5", 0, ANSWERED, "p1", "p2"),
    Row("internal traffic stays here", "p2", "cluster 7", 0, ANSWERED, "p1", "p2"),
    Row("a client in the source ranges is served", "client", "balancer 9", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client outside the source ranges is dropped", "client2", "balancer 9", 0, "timeout"),
    Row("a cluster IP without endpoints refuses", "p2", "cluster 19", 0, "refused"),
    Row("a node port without endpoints refuses", "client", "node", 30019, "refused"),
    Row("the host's ssh is not on a cluster IP", "client", "cluster 1", 22, "refused", protocols=("TCP",)),
    Row("the host's ssh is not on an external IP", "client", "external 2", 22, "refused", protocols=("TCP",)),
    Row("the host's ssh is not on a load balancer's IP", "client", "balancer 5", 22, "refused", protocols=("TCP",)),
]
ROWS = [
    *(row._replace(is_of_every_kind=True) for row in EVERY_KIND),
    Row("a cluster IP answers outside clients that are routed here", "client", "cluster 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a node port answers on every address of the node", "client", "bridge", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a node port answers pods", "p2", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a node port answers the other node", "remote", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a node port answers its node", "host", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a node port is not on the cluster IP", "client", "cluster 1", 30001, "refused"),
    Row("an external IP answers pods", "p2", "external 2", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("an external IP answers its node", "host", "external 2", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a load balancer's IP answers pods", "p2", "balancer 3", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a load balancer's IP answers its node", "host", "balancer 3", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a local external IP stays here and keeps the client's address", "client", "external 4", 0, ANSWERED, "p1", "client"),
    Row("a local Service's cluster IP leads to all nodes", "p2", "cluster 4", 0, ANSWERED, "p1 r1", "p2"),
    Row("a local node port stays here and keeps the client's address", "client", "node", 30005, ANSWERED, "p1", "client"),
    Row("a local load balancer without a local endpoint leads pods to other nodes", "p2", "balancer 6", 0, ANSWERED, "r1", "p2"),
    Row("internal traffic of the node stays here", "host", "cluster 7", 0, ANSWERED, "p1", "bridge"),
    Row("internal traffic without a local endpoint is refused despite a node port", "p2", "cluster 8", 0, "refused"),
    Row("a node port of a Service with internal traffic", "client", "node", 30008, ANSWERED, "r1", "node"),
    Row("a pod outside the source ranges is dropped", "p2", "balancer 9", 0, "timeout"),
    Row("a node outside the source ranges is dropped", "host", "balancer 9", 0, "timeout"),
    Row("source ranges do not restrict the cluster IP", "p2", "cluster 9", 0, ANSWERED, "p1 r1", "p2"),
    Row("source ranges do not restrict the node port", "client2", "node", 30009, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client in one of several source ranges is served", "client", "balancer 10", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client in none of several source ranges is dropped", "client2", "balancer 10", 0, "timeout"),
    Row("a node in the source ranges is served", "host", "balancer 10", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a range of all addresses allows every client", "client2", "balancer 11", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("unreadable ranges allow no client", "client", "balancer 12", 0, "timeout"),
    Row("unreadable ranges allow no node", "host", "balancer 12", 0, "timeout"),
    Row("unreadable ranges do not restrict the cluster IP", "p2", "cluster 12", 0, ANSWERED, "p1 r1", "p2"),
    Row("terminating endpoints serve as a last resort", "p2", "cluster 14", 0, ANSWERED, "p1 r1", "p2"),
    Row("terminating endpoints do not serve beside ready ones", "p2", "cluster 15", 0, ANSWERED, "r1", "p2"),
    Row("hints keep traffic in the zone", "p2", "cluster 16", 0, ANSWERED, "r1", "p2"),
    Row("hints are ignored if an endpoint has none", "p2", "cluster 17", 0, ANSWERED, "p1 r1", "p2"),
    Row("hints keep traffic for a node", "p2", "cluster 18", 0, ANSWERED, "r1", "p2"),
    Row("a load balancer without endpoints refuses", "client", "balancer 19", 0, "refused"),
    Row("two Services share an address: one port", "client", "balancer 21", 0, ANSWERED, "p1", "bridge", ("TCP",)),
    Row("two Services share an address: the other port", "client", "balancer 21", 0, ANSWERED, "r1", "node", ("UDP",)),
]

QUESTIONS = questions.questions(ROWS)


@pytest.fixture(scope="module", name="running")
def _running(running: cluster.Cluster) -> cluster.Cluster:
    running.have(SERVICES, SHARED, PROXIED)
    running.settle()
    return running


@pytest.mark.parametrize(
    "question",
    [pytest.param(one, marks=[pytest.mark.distribution] * one.row.is_of_every_kind, id=str(one)) for one in QUESTIONS],
)
def test_each_request_has_the_result_that_the_service_api_defines(
    answers: Mapping[Question, lab.Result], question: Question
) -> None:
    assert answers[question] == question.expected


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("protocol", cluster.PORTS)
@pytest.mark.parametrize("name", ["client", "client2"])
def test_a_client_with_session_affinity_is_always_answered_by_one_endpoint(
    running: cluster.Cluster, name: str, protocol: str, family: Family
) -> None:
    node, source = cluster.address("node", family), cluster.address(name, family)
    result = running.lab.probe("client", protocol, node, 30020, src=source, count=ATTEMPTS, timeout_s=4.0)
    assert (result.outcome, len(result.backends)) == (ANSWERED, 1)


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize(
    ("port", "status"),
    [
        pytest.param(32005, "200", id="with a local endpoint", marks=pytest.mark.distribution),
        pytest.param(32006, "503", id="without a local endpoint", marks=pytest.mark.distribution),
    ],
)
def test_the_health_check_node_port_reports_whether_this_node_has_an_endpoint(
    running: cluster.Cluster, port: int, status: str, family: Family
) -> None:
    url = f"http://{host_port(parse_address(cluster.address('node', family)), port)}/"
    asked = ("curl", "--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_code}", "--max-time", "30")
    assert running.lab.run("client", *asked, url) == status


def test_a_load_balancer_address_with_ip_mode_proxy_is_not_served(running: cluster.Cluster) -> None:
    addresses = {family: cluster.address("balancer 23", family) for family in Family}
    assert not {address for _, address, _ in running.virtual_servers()} & set(addresses.values())
    assert not any(address in running.local_addresses() for address in addresses.values())
