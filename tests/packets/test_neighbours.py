"""Rules of other programs next to our rules, tested with packets: kube-proxy's nftables, Docker, a network plug-in, firewalld.

Each test ends with a check that only our table has changed.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate import skeleton
from tests.packets import questions
from tests.packets.nf_tables import NEEDS_NF_TABLES, own_table
from tests.packets.questions import ANSWERED, MASQUERADED, Row
from tests.packets.switching import losing_nothing
from tests.support import firewalld, lab, neighbours
from tests.support.cluster import Cluster, address, clear, service
from tests.support.firewalld import Firewalld
from tests.support.left_tables import nftables_mode

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

BACKENDS = pytest.mark.parametrize("backend", [Backend.IPTABLES, Backend.NFTABLES], ids=str)
NFTABLES = "--rules-backend=nftables"
EVERYBODY = ("p1", "r1")
SERVICES = [
    service("web", 1, *EVERYBODY, balancer=True, external=True, node_port=30001),
    service("hairpin", 2, "p1"),
    service("local", 3, *EVERYBODY, balancer=True, node_port=30003, externalTrafficPolicy="Local"),
    service("empty", 4),
]
ROWS = [
    Row("a pod reaches a cluster IP", "p2", "cluster 1", 0, ANSWERED, "p1 r1", "p2"),
    Row("the node reaches a cluster IP", "host", "cluster 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a pod reaches itself through its Service", "p1", "cluster 2", 0, ANSWERED, "p1", "bridge"),
    Row("a client reaches a node port", "client", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a pod reaches a node port", "p2", "node", 30001, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client reaches an external IP", "client", "external 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client reaches a load balancer's IP", "client", "balancer 1", 0, ANSWERED, "p1 r1", MASQUERADED),
    Row("a client reaches a local load balancer with its address", "client", "balancer 3", 0, ANSWERED, "p1", "client"),
    Row("a cluster IP without endpoints refuses", "p2", "cluster 4", 0, "refused"),
]


@pytest.fixture(autouse=True)
def _clean(laboratory: lab.Lab) -> Iterator[None]:
    """Removes all nftables tables from the node before and after each test."""
    laboratory.run("node", "nft", "flush", "ruleset")
    yield
    laboratory.run("node", "nft", "flush", "ruleset")


def foreign(laboratory: lab.Lab) -> list[Any]:
    """All tables and chains of other programs, without counters (packets change them) and handles (the kernel assigns them).

    In tables of iptables-nft, which other programs use as well, our chains are recognised by their names.
    """
    listing = json.loads(laboratory.run("node", "nft", "-j", "--stateless", "list", "ruleset"))["nftables"]
    return [_lasting(entry) for entry in listing if "metainfo" not in entry and not _is_ours(entry)]


def _is_ours(entry: dict[str, dict[str, Any]]) -> bool:
    named = {str(value.get(key)) for value in entry.values() for key in ("name", "chain")}
    named |= {str(one["jump"]["target"]) for one in entry.get("rule", {}).get("expr", ()) if "jump" in one}
    return "ipvsproxy" in _names(entry) or not named.isdisjoint(key.chain for key in skeleton.CHAINS)


def _names(entry: dict[str, dict[str, Any]]) -> set[str]:
    return {str(value.get(key)) for value in entry.values() for key in ("name", "table") if isinstance(value, dict)}


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(one) for key, one in value.items() if key not in ("handle", "counter")}
    return [_lasting(one) for one in value] if isinstance(value, list) else value


def wrong(laboratory: lab.Lab, rows: list[Row]) -> list[str]:
    """Send the requests of these rows, and return each request that has an unexpected result, with this result."""
    answers = questions.ask(laboratory, questions.questions(rows))
    return [f"{question}: {answer}" for question, answer in answers.items() if answer != question.expected]


def doctor(running: Cluster, topic: str) -> list[str]:
    """The findings of ``doctor`` on a topic, except findings that are ``ok``."""
    (ended,) = running.run("doctor --output=json")
    found = json.loads(ended.output)["findings"]
    return [f"{one['text']}; {one['remedy']}" for one in found if one["topic"] == topic and one["remedy"]]


# A leftover table of kube-proxy's nftables mode.


def kube_proxys(pod: str) -> str:
    """Tables that kube-proxy wrote when the Service ``web`` had the endpoint ``pod`` and the Service ``late`` had no endpoint."""
    return "".join(
        nftables_mode(
            family,
            served={(address(to, family), 80): (address(pod, family), 8080) for to in ("balancer 1", "cluster 1")},
            refused={address("cluster 5", family): 80},
        )
        for family in Family
    )


def tables(laboratory: lab.Lab) -> set[str]:
    return set(laboratory.run("node", "nft", "list", "tables").splitlines())


LEFT = {"table ip kube-proxy", "table ip6 kube-proxy"}
LATE = [service("web", 1, "r1", balancer=True), service("late", 5, "r1")]


@pytest.mark.distribution
@BACKENDS
def test_no_connection_is_lost_when_our_rules_replace_the_nftables_tables_of_kube_proxy(
    laboratory: lab.Lab, tmp_path: Path, backend: Backend
) -> None:
    with Cluster(laboratory, tmp_path, f"--rules-backend={backend}") as running:
        running.program.__exit__(None, None, None)
        laboratory.run("node", "nft", "-f", "-", stdin=kube_proxys("p1") + neighbours.FLANNEL)
        before = [entry for entry in foreign(laboratory) if "kube-proxy" not in _names(entry)]
        held = [laboratory.open("client", "TCP", address("balancer 1", family), 80) for family in Family]
        assert [one.backend for one in held] == [address("p1", family) for family in Family]
        running.objects = list(itertools.chain.from_iterable(LATE))
        running.start()
        running.wait_until(lambda: not LEFT & tables(laboratory), "removed")
        assert [one.ask() for one in held] == [address("p1", family) for family in Family]
        for family in Family:
            for to in ("balancer 1", "cluster 5"):
                result = laboratory.probe("client", "TCP", address(to, family), 80)
                assert (result.outcome, result.backends) == ("ok", (address("r1", family),)), (to, family)
        assert len(running.logged("event=leftover_table_found")) == len(Family)
        assert len(running.logged("event=leftover_rules_removed.*nftables")) == len(Family)
        assert foreign(laboratory) == before
        for one in held:
            one.abort()


@BACKENDS
def test_a_leftover_table_of_kube_proxy_gets_the_packets_of_services_until_the_next_audit(
    laboratory: lab.Lab, tmp_path: Path, backend: Backend
) -> None:
    """Tables are examined only at audits, so the leftover table stays while clients send requests."""
    with Cluster(laboratory, tmp_path, f"--rules-backend={backend}", "--ipvs-sync-period=300s") as running:
        running.have(*LATE)
        laboratory.run("node", "nft", "-f", "-", stdin=kube_proxys("p1"))
        redirected = "p1" if backend is Backend.IPTABLES else "r1"
        for family in Family:
            web = laboratory.probe("client", "TCP", address("balancer 1", family), 80)
            late = laboratory.probe("client", "TCP", address("cluster 5", family), 80)
            assert (web.outcome, web.backends) == ("ok", (address(redirected, family),)), family
            assert late.outcome == "refused", family
        assert tables(laboratory) >= LEFT
        assert "tables of its nftables mode (ip kube-proxy, ip6 kube-proxy)" in doctor(running, "kube-proxy")[0]


# Docker, and a network plug-in.


@pytest.mark.parametrize(
    ("program", "rules"),
    [
        (("iptables-nft-restore",), neighbours.DOCKER_IPTABLES.replace("FORWARD DROP", "FORWARD ACCEPT")),
        (("nft", "-f", "-"), neighbours.DOCKER_NFTABLES),
        (("nft", "-f", "-"), neighbours.FLANNEL),
        (("nft", "-f", "-"), neighbours.KINDNET),
    ],
    ids=["Docker with iptables", "Docker with nftables", "flannel", "kindnet"],
)
def test_services_work_next_to_rules_of_another_program_and_leave_these_rules_unchanged(
    laboratory: lab.Lab, tmp_path: Path, program: tuple[str, ...], rules: str
) -> None:
    with Cluster(laboratory, tmp_path, NFTABLES) as running:
        laboratory.run("node", *program, stdin=rules)
        before = foreign(laboratory)
        running.have(*SERVICES)
        assert wrong(laboratory, ROWS) == []
        assert doctor(running, "firewall") == []
        assert foreign(laboratory) == before
        running.run("cleanup")
    assert foreign(laboratory) == before


def test_a_service_gets_the_packets_of_its_node_port_although_docker_publishes_the_same_port(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path, NFTABLES) as running:
        running.have(*SERVICES)
        laboratory.run("node", "nft", "-f", "-", stdin=neighbours.DOCKER_NFTABLES.replace("dport 8080", "dport 30001"))
        before = foreign(laboratory)
        assert wrong(laboratory, [row for row in ROWS if row.port == 30001]) == []
        assert foreign(laboratory) == before


def test_if_the_chain_docker_user_is_empty_docker_drops_forwarded_packets_and_doctor_says_so(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    outside = Row("a pod reaches an endpoint of another node", "p2", "cluster 5", 0, ANSWERED, "r1", "p2", ("TCP",))
    with Cluster(laboratory, tmp_path, NFTABLES) as running:
        running.have(*LATE)
        assert wrong(laboratory, [outside]) == []
        laboratory.run("node", "iptables-nft-restore", stdin=neighbours.DOCKER_IPTABLES)
        (dropped,) = {laboratory.probe("p2", "TCP", address("cluster 5", Family.IPV4), 80).outcome}
        assert dropped == "timeout"
        (told,) = doctor(running, "firewall")
        assert "the chain FORWARD of the table ip filter (hook forward) refuses what pods send" in told
        # The chain that Docker reserves for rules of operators.
        laboratory.run("node", "iptables-nft", "-I", "DOCKER-USER", "-o", "cni0", "-j", "ACCEPT")
        assert wrong(laboratory, [outside]) == []


# Host ports of the network plug-in.

REACHED = [("client", "cluster 1"), ("host", "cluster 1"), ("client", "balancer 1"), ("client", "external 1")]


def with_host_ports(laboratory: lab.Lab, program: str) -> None:
    rules = neighbours.PORTMAP_NFTABLES if program == "nft" else neighbours.PORTMAP
    laboratory.run("node", *(("nft", "-f", "-") if program == "nft" else (f"{program}-restore", "--noflush")), stdin=rules)


def reached(laboratory: lab.Lab) -> set[str]:
    """The pods that answer when port 80 of the Service's addresses is probed.

    If a probe gets no answer, the set contains the probe's outcome, such as ``timeout``, instead of a pod.
    """
    probes = [laboratory.probe(from_, "TCP", address(to, Family.IPV4), 80) for from_, to in REACHED]
    return {backend for one in probes for backend in one.backends or (one.outcome,)}


@pytest.mark.parametrize(
    ("ours", "theirs", "place", "is_first"),
    [
        ("iptables-nft", "iptables-legacy", "legacy IPv4", True),
        ("iptables-nft", "nft", "nf_tables IPv4", False),
        ("iptables-nft", "iptables-nft", "", False),
        ("iptables-legacy", "iptables-nft", "nf_tables IPv4", False),
        (NFTABLES, "iptables-legacy", "", True),
        (NFTABLES, "nft", "", False),
    ],
)
def test_host_port_rules_are_reported_only_if_they_take_packets_of_services(
    laboratory: lab.Lab, tmp_path: Path, ours: str, theirs: str, place: str, *, is_first: bool
) -> None:
    """If ``doctor`` reports host port rules, the pod of the host port answers; otherwise, the pod of the Service answers.

    ``is_first``: whether the host port rules exist before the program starts.
    """
    backend = NFTABLES if ours == NFTABLES else "--rules-backend=iptables"
    running = Cluster(laboratory, tmp_path, backend, "--ipvs-sync-period=2s")
    running.objects = service("web", 1, "p1", balancer=True, external=True)
    clear()
    if ours != NFTABLES:
        laboratory.run("node", ours, "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
    if is_first:
        with_host_ports(laboratory, theirs)
    with contextlib.ExitStack() as stack:
        stack.callback(clear)
        stack.push(running.__exit__)
        running.start()
        if not is_first:
            assert not running.logged("event=host_ports_before_services")
            with_host_ports(laboratory, theirs)
        if place:
            running.wait_until(lambda: bool(running.logged(f'event=host_ports_before_services.* rules="{place}"')), "told")
        assert reached(laboratory) == {address("p2" if place else "p1", Family.IPV4)}
        told = [one for one in doctor(running, "iptables") if "hostPort rules" in one]
        assert [(place in one, "--rules-backend=nftables" in one) for one in told] == ([(True, True)] if place else [])
        assert bool(running.logged("event=host_ports_before_services")) == bool(place)


# A real firewalld.


@pytest.fixture(name="wall")
def _wall(tmp_path: Path) -> Firewalld:
    """A firewalld that the test must start after the cluster, because the start of a cluster removes all rules."""
    if missing := firewalld.missing():
        reason = f"not installed: {missing}"
        if "IPVSPROXY_KERNEL_REQUIRED" in os.environ:
            pytest.fail(f"{reason}; scripts/setup --with-nf-tables-kernel installs it", pytrace=False)
        pytest.skip(reason)
    directory = tmp_path / "wall"
    directory.mkdir()
    return Firewalld(directory)


def trust(wall: Firewalld) -> None:
    """As docs/running.md requires, put the interfaces of pods and of incoming clients into a zone that accepts packets."""
    for interface in ("cni0", "eth0"):
        wall.command("--zone=trusted", f"--change-interface={interface}")
        wall.command("--permanent", "--zone=trusted", f"--add-interface={interface}")


@pytest.mark.distribution
def test_doctor_reports_that_firewalld_drops_packets_if_its_zones_do_not_accept_the_packets(
    laboratory: lab.Lab, tmp_path: Path, wall: Firewalld
) -> None:
    with Cluster(laboratory, tmp_path, NFTABLES) as running, wall:
        running.have(*SERVICES)
        refused = laboratory.probe("client", "TCP", address("balancer 1", Family.IPV4), 80)
        assert refused.outcome != "ok"
        told = doctor(running, "firewall")
        assert [one.partition(" refuses")[0] for one in told] == [
            "the chain filter_INPUT of the table inet firewalld (hook input)",
            "the chain filter_FORWARD of the table inet firewalld (hook forward)",
        ]
        trust(wall)
        before = foreign(laboratory)
        assert wrong(laboratory, ROWS) == []
        assert foreign(laboratory) == before


@pytest.mark.parametrize("event", [pytest.param("reload", marks=pytest.mark.distribution), "restart", "flush ruleset"])
def test_rules_removed_by_a_reload_of_firewalld_are_restored_without_a_lost_connection(
    laboratory: lab.Lab, tmp_path: Path, wall: Firewalld, event: str
) -> None:
    with Cluster(laboratory, tmp_path, NFTABLES) as running, wall:
        running.have(*SERVICES)
        trust(wall)
        ours = own_table(laboratory)
        with losing_nothing(running, []) as check_held:
            if event == "reload":
                wall.reload()
            elif event == "restart":
                wall.restart()
            else:
                laboratory.run("node", "nft", "flush", "ruleset")
                wall.restart()
            check_held()
            running.wait_until(lambda: own_table(laboratory) == ours, "healed")
            check_held()
        before = foreign(laboratory)
        assert any("firewalld" in _names(entry) for entry in before)
        assert wrong(laboratory, ROWS) == []
        assert foreign(laboratory) == before
