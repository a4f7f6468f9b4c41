"""Covers a start with another rules backend while another program holds the iptables lock.

Policies of Services change before or after this start.

Because of the lock, the new process cannot remove the iptables rules of the former backend. Nor can a new process with the
iptables backend write its rules. No packet may be treated according to set entries of former policies.
"""

from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.chaos import moments
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.switching import holds
from tests.packets.test_scopes import API
from tests.support import cluster, lab
from tests.support.cluster import Cluster, Manifest, service
from tests.support.lab import Probe

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

RANGES = {
    name: [f"{address}/{bits}" for address, bits in zip(cluster.ADDRESSES[name], (32, 128), strict=True)]
    for name in ("client", "client2")
}


def services(*, changed: bool) -> list[Manifest]:
    """The Services; if ``changed`` is true, with changed policies, endpoints, source ranges and protocols."""
    return [
        *service("any", 1, "r1", balancer=True, node_port=30001, externalTrafficPolicy="Cluster" if changed else "Local"),
        *service(
            "local", 2, *(["p1", "r1"] if changed else ["r1"]), balancer=True, node_port=30002, externalTrafficPolicy="Local"
        ),
        *service(
            "wider", 3, "p1", balancer=True, loadBalancerSourceRanges=RANGES["client"] + (RANGES["client2"] if changed else [])
        ),
        *service("ports", 4, "p1", protocols=("TCP", "UDP") if changed else ("TCP",)),
        *service(
            "narrower", 5, "p1", balancer=True, loadBalancerSourceRanges=RANGES["client2"] + ([] if changed else RANGES["client"])
        ),
        *service("same", 6, "p1", "r1", balancer=True, node_port=30006, externalTrafficPolicy="Local"),
    ]


SERVED = [
    Probe(from_, protocol, cluster.address(to, family), port, src=cluster.address(src, family) if src else None)
    for family in Family
    for from_, src, protocol, to, port in (
        ("p1", "", "TCP", "balancer 1", 80),
        ("host", "", "TCP", "balancer 1", 80),
        ("client", "", "TCP", "balancer 1", 80),
        ("client", "", "TCP", "node", 30001),
        ("client", "", "TCP", "balancer 2", 80),
        ("client", "", "TCP", "node", 30002),
        ("client", "client2", "TCP", "balancer 3", 80),
        ("client", "client", "TCP", "balancer 3", 80),
        ("p2", "", "UDP", "cluster 4", 53),
        ("p1", "", "UDP", "cluster 4", 53),
        ("host", "", "UDP", "cluster 4", 53),
        ("client", "client2", "TCP", "balancer 5", 80),
        ("p2", "", "TCP", "balancer 6", 80),
        ("client", "", "TCP", "balancer 6", 80),
    )
]
REFUSED = [
    Probe("client", "TCP", cluster.address("balancer 5", family), 80, src=cluster.address("client", family), timeout_s=0.5)
    for family in Family
]


def wrong(laboratory: lab.Lab) -> list[str]:
    """The probes whose outcome contradicts the changed policies, each with its outcome."""
    results = zip((*SERVED, *REFUSED), laboratory.probe_all((*SERVED, *REFUSED)), strict=True)
    return [f"{probe}: {result.outcome}" for probe, result in results if (result.outcome == "ok") is (probe in REFUSED)]


@pytest.mark.parametrize("changes", ["before the start", "after the start"])
@pytest.mark.parametrize("former", [Backend.IPTABLES, Backend.NFTABLES])
def test_a_changed_policy_is_in_force_even_while_another_program_holds_the_iptables_lock(
    laboratory: lab.Lab, tmp_path: Path, former: Backend, changes: str
) -> None:
    new = next(one for one in (Backend.IPTABLES, Backend.NFTABLES) if one is not former)
    with Cluster(laboratory, tmp_path, *API, f"--rules-backend={former}") as running:
        running.have(services(changed=False))
        # if the kubelet's chain is in the legacy variant, ipvsproxy chooses this variant; only programs of this variant take the
        # lock
        for program in ("iptables-legacy", "ip6tables-legacy"):
            laboratory.run("node", program, "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
        running.program.__exit__(None, None, None)
        running.start()
        running.wait_until(lambda: holds(laboratory, former, "-legacy"), "in the legacy variant")
        running.program.__exit__(None, None, None)
        with moments.held_lock():
            if changes == "before the start":
                running.objects = services(changed=True)
            running.begin(f"--rules-backend={new}")
            before = running.synced
            running.wait_until(lambda: running.synced > before, "synced")
            running.objects = services(changed=True)
            running.show()
            running.wait_until(lambda: wrong(laboratory) == [], "served as configured")
            for _ in range(3):
                assert wrong(laboratory) == []
            sources = laboratory.probe("client", "TCP", cluster.address("balancer 6", Family.IPV4), 80).sources
            assert not holds(laboratory, new, "-legacy")
            assert sources == (cluster.address("client", Family.IPV4),), "policy Local keeps the client's address"
        running.wait_until(lambda: holds(laboratory, new, "-legacy"), f"switched to {new}")
        assert wrong(laboratory) == []
