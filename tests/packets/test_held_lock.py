"""A start with another backend while a different program holds the iptables lock and policies of Services change.

Because of the lock, old iptables rules cannot be removed, or new iptables rules cannot be written. No packet may be treated
according to set entries of former policies.
"""

import contextlib
import fcntl
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.test_scopes import API
from tests.support import cluster, lab, patience
from tests.support.cluster import Cluster, Manifest, service
from tests.support.lab import Probe

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

WITHIN_S = patience.seconds(40.0)
PROGRAMS = ("iptables-legacy", "ip6tables-legacy")
LOCK = Path("/run/xtables.lock")
RANGES = {
    name: [f"{address}/{bits}" for address, bits in zip(cluster.ADDRESSES[name], (32, 128), strict=True)]
    for name in ("client", "client2")
}


def services(*, changed: bool) -> list[Manifest]:
    """Services before and after the change of their policies."""
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


@contextlib.contextmanager
def held_lock() -> Iterator[None]:
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_until(reached: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while (last := reached()) is not True:
        assert time.monotonic() < deadline, f"not {what} within {WITHIN_S} s: {last}"
        time.sleep(0.2)


def holds(laboratory: lab.Lab, backend: Backend) -> bool:
    """Whether this backend has our rules and sets, and the other backend has none of our objects."""
    rules = "".join(laboratory.run("node", f"{program}-save") for program in PROGRAMS)
    in_iptables = (":KUBE-SERVICES" in rules, "KUBE-CLUSTER-IP" in laboratory.run("node", "ipset", "list", "-name"))
    wanted = backend is Backend.IPTABLES
    return in_iptables == (wanted, wanted) and nft_tables.has_own_table() is not wanted


def wrong(laboratory: lab.Lab) -> list[str] | bool:
    """Returns True, or the clients that are still treated according to a former policy."""
    results = zip((*SERVED, *REFUSED), laboratory.probe_all((*SERVED, *REFUSED)), strict=True)
    return [f"{probe}: {result.outcome}" for probe, result in results if (result.outcome == "ok") is (probe in REFUSED)] or True


@pytest.mark.parametrize("changes", ["before the start", "after the start"])
@pytest.mark.parametrize("former", [Backend.IPTABLES, Backend.NFTABLES])
def test_no_packet_is_treated_according_to_a_former_policy_while_another_program_holds_the_iptables_lock(
    laboratory: lab.Lab, tmp_path: Path, former: Backend, changes: str
) -> None:
    new = next(one for one in (Backend.IPTABLES, Backend.NFTABLES) if one is not former)
    with Cluster(laboratory, tmp_path, *API, f"--rules-backend={former}") as running:
        running.have(services(changed=False))
        # a kubelet with the legacy variant of iptables makes this chain; programs of the other variant take no lock
        for program in PROGRAMS:
            laboratory.run("node", program, "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
        running.program.__exit__(None, None, None)
        running.start()
        wait_until(lambda: holds(laboratory, former), "in the legacy variant")
        running.program.__exit__(None, None, None)
        with held_lock():
            if changes == "before the start":
                running.objects = services(changed=True)
            running.begin(f"--rules-backend={new}")
            before = running.synced
            wait_until(lambda: running.synced > before, "synced")
            running.objects = services(changed=True)
            running.show()
            wait_until(functools.partial(wrong, laboratory), "served as configured")
            for _ in range(3):
                assert wrong(laboratory) is True
            sources = laboratory.probe("client", "TCP", cluster.address("balancer 6", Family.IPV4), 80).sources
            assert not holds(laboratory, new)
            assert sources == (cluster.address("client", Family.IPV4),), "policy Local keeps the client's address"
        wait_until(functools.partial(holds, laboratory, new), f"switched to {new}")
        assert wrong(laboratory) is True
