"""Tests both scopes of an address with externalTrafficPolicy Local: who answers clients on this node, and who answers others."""

from collections.abc import Mapping
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from tests.packets import questions
from tests.packets.bindings import with_addresses
from tests.packets.questions import ANSWERED, ATTEMPTS, MASQUERADED, Question, Row
from tests.support import cluster, lab
from tests.support.cluster import Endpoint, service

pytestmark = [pytest.mark.kernel, with_addresses]

API = FLAGS = ("--ipvs-traffic-scopes=api",)
BOTH = ("p1", "r1")
LOCAL: dict[str, Any] = {"externalTrafficPolicy": "Local"}
SERVICES = [
    *service("here", 1, *BOTH, balancer=True, external=True, node_port=30001, **LOCAL),
    *service("elsewhere", 2, "r1", balancer=True, external=True, node_port=30002, **LOCAL),
    *service("nowhere", 3, balancer=True, external=True, node_port=30003, **LOCAL),
    *service("affinity", 4, *BOTH, balancer=True, node_port=30004, sessionAffinity="ClientIP", **LOCAL),
    *service("hairpin", 5, "p1", balancer=True, node_port=30005, **LOCAL),
    *service("internal", 6, *BOTH, balancer=True, internalTrafficPolicy="Local", **LOCAL),
    *service("ranges", 7, *BOTH, balancer=True, loadBalancerSourceRanges=["172.18.0.50/32", "fc00:f853:ccd::50/128"], **LOCAL),
    *service("draining", 8, Endpoint("p1", ready=False, terminating=True), "r1", balancer=True, node_port=30008, **LOCAL),
    *service("zone", 9, "p1", Endpoint("r1", zones=("zone-a",)), balancer=True, **LOCAL),
    *service("hinted", 10, Endpoint("p1", zones=("zone-b",)), Endpoint("r1", zones=("zone-a",)), balancer=True, **LOCAL),
    *service("everywhere", 11, *BOTH, balancer=True, node_port=30011),
]


ROWS = [
    *(
        Row(f"{who} to {to}: {about}", who, to, port, ANSWERED, endpoints, who)
        for to, port in (("balancer 1", 0), ("external 1", 0), ("node", 30001), ("bridge", 30001))
        for who, about, endpoints in (
            ("client", "local endpoints, address kept", "p1"),
            ("p2", "all endpoints, address kept", "p1 r1"),
        )
    ),
    *(
        row
        for to, port in (("balancer 2", 0), ("external 2", 0), ("node", 30002))
        for row in (
            Row(f"client to {to} without a local endpoint: dropped", "client", to, port, "timeout"),
            Row(f"p2 to {to} without a local endpoint: all endpoints, address kept", "p2", to, port, ANSWERED, "r1", "p2"),
        )
    ),
    Row("a process of this host to a balancer: all endpoints", "host", "balancer 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a process of this host to an external IP: all endpoints", "host", "external 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a process of this host to a node port: all endpoints", "host", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a process of this host, to another address of it", "host", "bridge", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a process of this host, no local endpoint", "host", "balancer 2", 0, ANSWERED, "r1", "node"),
    Row("a process of this host to a node port, no local endpoint", "host", "node", 30002, ANSWERED, "r1", "node"),
    Row("another node to a node port: local endpoints", "remote", "node", 30001, ANSWERED, "p1", "remote"),
    Row("another node to a node port without a local endpoint: dropped", "remote", "node", 30002, "timeout"),
    Row("a pod of another node to a node port: local endpoints, address kept", "r2", "node", 30001, ANSWERED, "p1", "r2"),
    Row("a pod of another node, no local endpoint: no answer", "r2", "node", 30002, "timeout"),
    Row("a pod of another node, a last resort here: that one", "r2", "node", 30008, ANSWERED, "p1", "r2"),
    Row("no endpoint at all: a client outside is refused", "client", "balancer 3", 0, "refused"),
    Row("no endpoint at all: a pod is refused", "p2", "balancer 3", 0, "refused"),
    Row("no endpoint at all: a process of this host is refused", "host", "balancer 3", 0, "refused", protocols=("TCP", "SCTP")),
    Row("no endpoint at all: a node port refuses", "p2", "node", 30003, "refused"),
    Row("a pod reaches itself through a balancer", "p1", "balancer 5", 0, ANSWERED, "p1", "bridge"),
    Row("a pod reaches itself through a node port", "p1", "node", 30005, ANSWERED, "p1", "bridge"),
    Row("internal traffic policy Local does not bind a pod at a balancer", "p2", "balancer 6", 0, ANSWERED, "p1 r1", "p2"),
    Row("internal traffic policy Local binds it at the cluster IP", "p2", "cluster 6", 0, ANSWERED, "p1", "p2"),
    Row("a client in the source ranges comes to local endpoints", "client", "balancer 7", 0, ANSWERED, "p1", "client"),
    Row("a client outside of the source ranges is dropped", "client2", "balancer 7", 0, "timeout"),
    Row("a pod outside of the source ranges is dropped", "p2", "balancer 7", 0, "timeout"),
    Row("a process of this host outside of the source ranges is dropped", "host", "balancer 7", 0, "timeout"),
    Row("a terminating endpoint is the last resort of the local scope", "client", "balancer 8", 0, ANSWERED, "p1", "client"),
    Row("and not of the cluster scope, which has a ready one", "p2", "balancer 8", 0, ANSWERED, "r1", "p2"),
    Row("hints that not all endpoints have count for nothing", "p2", "balancer 9", 0, ANSWERED, "p1 r1", "p2"),
    Row("hints narrow the cluster scope", "p2", "balancer 10", 0, ANSWERED, "r1", "p2"),
    Row("hints do not narrow the local scope", "client", "balancer 10", 0, ANSWERED, "p1", "client"),
    Row("the cluster IP leads to all nodes as before", "p2", "cluster 1", 0, ANSWERED, "p1 r1", "p2"),
    Row("policy Cluster is as before", "client", "balancer 11", 0, ANSWERED, "p1 r1", MASQUERADED),
]

QUESTIONS = questions.questions(ROWS)


@pytest.fixture(scope="module", name="running")
def _running(running: cluster.Cluster) -> cluster.Cluster:
    running.have(SERVICES)
    running.settle()
    return running


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_clients_on_this_node_and_outside_clients_are_answered_by_the_endpoints_of_their_scope(
    answers: Mapping[Question, lab.Result], question: Question
) -> None:
    assert answers[question] == question.expected


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
@pytest.mark.parametrize("protocol", cluster.PORTS)
@pytest.mark.parametrize(("name", "to"), [("p2", "balancer 4"), ("p2", "node"), ("host", "balancer 4")])
def test_one_endpoint_answers_all_requests_of_a_client_on_this_node_if_there_is_session_affinity(
    running: cluster.Cluster, name: str, to: str, protocol: str, family: Family
) -> None:
    port = 30004 if to == "node" else cluster.PORTS[protocol][0]
    seen = running.lab.probe(name, protocol, cluster.address(to, family), port, count=ATTEMPTS, timeout_s=4.0)
    assert (seen.outcome, len(seen.backends)) == (ANSWERED, 1)
