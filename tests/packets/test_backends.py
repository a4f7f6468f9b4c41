"""Rules in nftables: a switch under load, removal by other programs, inspection, clean-up.

All other packet tests run with nftables, too: see docs/testing.md.
"""

import functools
import itertools
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.packets.switching import configure, holds, losing_nothing, refusing_always
from tests.packets.test_scopes import API
from tests.support import cluster, lab, patience, program, unpolled_program
from tests.support.cluster import Cluster, service

pytestmark = [
    pytest.mark.kernel,
    NEEDS_NF_TABLES,
]

HEALED_WITHIN_S = patience.seconds(90.0)
SERVICES = [
    service("web", 1, "p1", "r1", balancer=True, external=True, node_port=30001),
    service("local", 2, "p1", "r1", balancer=True, node_port=30002, externalTrafficPolicy="Local"),
    service("ranges", 3, "p1", balancer=True, loadBalancerSourceRanges=["172.18.0.50/32", "fc00:f853:ccd::50/128"]),
]
REFUSED = [
    (name, to, port, family)
    for name, to, port in (
        *[("client2", "balancer 3", 80)] * 5,  # client2 is outside the source ranges; without answers, it sends few requests.
        ("client", "cluster 1", 22),  # Port 22 is the host's own port.
        ("client", "balancer 1", 22),
    )
    for family in Family
]
CLIENTS = [
    (from_, protocol, to, family)
    for from_, to in (
        ("client", "balancer 1"),
        ("p2", "cluster 1"),
        ("host", "cluster 1"),
        ("p1", "cluster 1"),
        ("client", "balancer 2"),
    )
    for protocol in ("TCP", "UDP")
    for family in Family
]


def wait_until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HEALED_WITHIN_S
    while not reached():
        assert time.monotonic() < deadline, f"not {what} within {HEALED_WITHIN_S} s"
        time.sleep(0.2)


def _has_logged(running: Cluster, pattern: str, count: int) -> bool:
    return len(running.logged(pattern)) == count


def test_a_switch_of_backends_disturbs_no_allowed_client_and_admits_no_excluded_client(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    configure(path, rulesBackend=Backend.IPTABLES)
    with Cluster(laboratory, tmp_path, f"--config={path}") as running:
        running.have(*SERVICES)
        with refusing_always(running, REFUSED), losing_nothing(running, CLIENTS) as check_held:
            ways = (Backend.IPTABLES, Backend.NFTABLES, Backend.IPTABLES, Backend.NFTABLES)
            for count, (former, backend) in enumerate(itertools.pairwise(ways), 1):
                configure(path, rulesBackend=backend)
                wait_until(functools.partial(_has_logged, running, "event=restart_needed.*rulesBackend", count), "told")
                assert holds(laboratory, former)
                running.program.__exit__(None, None, None)
                running.start()
                wait_until(functools.partial(holds, laboratory, backend), f"switched to {backend}")
                check_held()
                assert json.loads(verify(running).output)["differences"] == []
        assert running.logged("event=drift") == [], "a switch is no drift"


@pytest.mark.parametrize("former", [Backend.IPTABLES, Backend.NFTABLES])
def test_a_start_with_the_other_backend_recognises_the_virtual_servers_of_a_killed_process(
    laboratory: lab.Lab, tmp_path: Path, former: Backend
) -> None:
    new = next(one for one in (Backend.IPTABLES, Backend.NFTABLES) if one is not former)
    with Cluster(laboratory, tmp_path, *API, f"--rules-backend={former}") as running:
        running.have(*SERVICES)
        before = set(running.virtual_servers())
        assert any(protocol == "FWM" for protocol, _, _ in before)
        running.program.kill()
        running.objects = [*SERVICES[1], *SERVICES[2]]
        running.start(f"--rules-backend={new}")
        wait_until(functools.partial(holds, laboratory, new), f"switched to {new}")
        assert running.logged("event=sets_inherited")
        gone = {cluster.address(f"{kind} 1", family) for kind in ("cluster", "balancer", "external") for family in Family}
        assert set(running.virtual_servers()) == {
            (protocol, address, port) for protocol, address, port in before if address not in gone and port != 30001
        }, "those of the other Services stay, with their marks"


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param("delete table inet ipvsproxy", marks=pytest.mark.distribution),
        "flush chain inet ipvsproxy IPv4-nat-KUBE-SERVICES",
        "flush set inet ipvsproxy KUBE-CLUSTER-IP",
        "flush chain inet ipvsproxy IPv6-filter-INPUT",
        "insert rule inet ipvsproxy IPv4-filter-INPUT accept",
    ],
)
def test_drift_caused_by_other_programs_is_repaired_after_the_notification_alone(
    laboratory: lab.Lab, tmp_path: Path, harm: str
) -> None:
    """No audit and no poll happens during this test."""
    flags = ("--rules-backend=nftables", "--ipvs-sync-period=1h", "--ipvs-drift-check-interval=1h")
    with Cluster(laboratory, tmp_path, *flags, starter=unpolled_program.STARTER) as running:
        running.have(*SERVICES)
        assert json.loads(verify(running).output)["differences"] == []
        before, found = listed(), len(running.logged("event=drift_found"))
        laboratory.run("node", "nft", *harm.split())
        wait_until(lambda: len(running.logged("event=drift_found")) > found and listed() == before, "found and healed")
        assert json.loads(verify(running).output)["differences"] == []


def test_a_catch_all_element_in_our_sets_is_removed_and_logged(laboratory: lab.Lab, tmp_path: Path) -> None:
    flags = ("--rules-backend=nftables", "--ipvs-sync-period=2s")
    with Cluster(laboratory, tmp_path, *flags) as running:
        running.have(*SERVICES)
        before = listed()
        for name in ("KUBE-CLUSTER-IP", "KUBE-6-NODE-PORT-TCP"):
            laboratory.run("node", "nft", "add", "element", "inet", "ipvsproxy", name, "{ * }")
        wait_until(lambda: running.logged("event=drift_found") != [] and listed() == before, "healed")
        assert json.loads(verify(running).output)["differences"] == []
        assert running.logged("event=kernel_unreadable") == []


def test_cleanup_removes_all_objects_of_ipvsproxy_from_nftables(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables") as running:
        running.have(*SERVICES)
        running.program.__exit__(None, None, None)
        shown, done = running.run("cleanup --dry-run", "cleanup")
        assert "would remove set KUBE-CLUSTER-IP" in shown.output
        assert done.status == 0, done.output
        assert laboratory.run("node", "nft", "list", "ruleset") == ""
        assert not running.virtual_servers()


UNLIKE = "delete set inet ipvsproxy {name}; add set inet ipvsproxy {name} {{ type ipv4_addr; size 2; }}"


def make_unlike(laboratory: lab.Lab, name: str) -> None:
    """Replace one of our sets by a set with another definition, as another version may have created it.

    The rules that use the set are removed, too.
    """
    laboratory.run("node", "nft", f"flush table inet ipvsproxy; {UNLIKE.format(name=name)}")


def test_a_set_with_another_definition_is_replaced_while_running_and_at_the_next_start(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables", "--ipvs-sync-period=2s") as running:
        running.have(*SERVICES)
        before = listed()
        make_unlike(laboratory, "KUBE-CLUSTER-IP")
        wait_until(lambda: listed() == before, "healed")
        assert json.loads(verify(running).output)["differences"] == []
        running.program.__exit__(None, None, None)
        make_unlike(laboratory, "KUBE-LOAD-BALANCER")
        running.start()
        wait_until(lambda: listed() == before, "healed by a start")
        assert json.loads(verify(running).output)["differences"] == []


def test_cleanup_removes_sets_with_another_definition(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables") as running:
        running.have(*SERVICES)
        running.program.__exit__(None, None, None)
        make_unlike(laboratory, "KUBE-LOAD-BALANCER")
        shown, done = running.run("cleanup --dry-run", "cleanup")
        assert shown.output.count("would remove set KUBE-LOAD-BALANCER\n") == 1
        assert done.status == 0, done.output
        assert laboratory.run("node", "nft", "list", "ruleset") == ""


def verify(running: Cluster) -> program.Ended:
    (ended,) = running.run("verify --output=json")
    return ended


def listed() -> list[str]:
    """Our table without handles, in an order that does not depend on the order of set elements in memory."""
    done = subprocess.run(("nft", "list", "ruleset"), capture_output=True, text=True, check=True)
    return sorted(word for line in done.stdout.splitlines() for word in line.strip().split(", "))


def test_a_ruleset_loaded_after_a_boot_does_not_prove_that_virtual_servers_belong_to_ipvsproxy(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    theirs = {("TCP", cluster.address("node", Family.IPV4), 30001), ("TCP", cluster.address("balancer 1", Family.IPV4), 80)}
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables") as running:
        running.have(*SERVICES)
        assert theirs <= set(running.virtual_servers())
        running.program.__exit__(None, None, None)
        saved = laboratory.run("node", "nft", "list", "table", "inet", "ipvsproxy")
        cluster.clear()
        laboratory.run("node", "nft", "-f", "-", stdin=saved)
        for _, address, port in theirs:
            laboratory.run("node", "ipvsadm", "-A", "-t", f"{address}:{port}", "-s", "wrr")
        running.objects = list(service("other", 4, "p1"))
        running.start()
        wait_until(lambda: ("TCP", cluster.address("cluster 4", Family.IPV4), 80) in running.virtual_servers(), "served")
        wait_until(lambda: "30001" not in laboratory.run("node", "nft", "list", "table", "inet", "ipvsproxy"), "current")
        assert theirs <= set(running.virtual_servers()), "other programs have made these in this boot"
