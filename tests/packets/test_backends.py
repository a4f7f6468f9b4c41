"""Rules in nftables: switching backends under load, repairing drift, commands, cleanup, and the transactions of a sync.

All other packet tests run with nftables, too: see docs/testing.md.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import backends
from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from tests.packets.nf_tables import NEEDS_NF_TABLES, own_table
from tests.packets.switching import HELD, clients, configure, holds, losing_nothing, refusing_always
from tests.packets.test_scope_changes import differences
from tests.packets.test_scopes import API
from tests.support import cluster, golden_state, harm, lab, unpolled_program
from tests.support.cluster import Cluster, Manifest, service

pytestmark = [pytest.mark.kernel, NEEDS_NF_TABLES]

RANGES = ["172.18.0.50/32", "fc00:f853:ccd::50/128"]
SERVICES = [
    service("web", 1, "p1", "r1", balancer=True, external=True, node_port=30001),
    service("local", 2, "p1", "r1", balancer=True, node_port=30002, externalTrafficPolicy="Local"),
    service("ranges", 3, "p1", balancer=True, loadBalancerSourceRanges=RANGES),
]
REFUSED = [
    (name, to, port, family)
    for name, to, port in (
        # client2 is outside the source ranges. It is listed five times, because a client that gets no answers sends few requests.
        *[("client2", "balancer 3", 80)] * 5,
        ("client", "cluster 1", 22),  # The node itself listens on TCP port 22.
        ("client", "balancer 1", 22),
    )
    for family in Family
]
CLIENTS = clients(*HELD, ("p1", "cluster 1"), ("client", "balancer 2"))


def _has_logged(running: Cluster, pattern: str, count: int) -> bool:
    return len(running.logged(pattern)) == count


def test_a_switch_of_backends_neither_interrupts_allowed_clients_nor_admits_other_clients(
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
                running.wait_until(functools.partial(_has_logged, running, "event=restart_needed.*rulesBackend", count), "told")
                assert holds(laboratory, former)
                running.program.__exit__(None, None, None)
                running.start()
                running.wait_until(functools.partial(holds, laboratory, backend), f"switched to {backend}")
                check_held()
                assert differences(running) == []
        assert running.logged("event=drift") == [], "a switch is no drift"


@pytest.mark.parametrize("former", [Backend.IPTABLES, Backend.NFTABLES])
def test_a_start_with_the_other_backend_recognises_the_virtual_servers_that_a_killed_process_has_left(
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
        running.wait_until(functools.partial(holds, laboratory, new), f"switched to {new}")
        assert running.logged("event=sets_inherited")
        gone = {cluster.address(f"{kind} 1", family) for kind in ("cluster", "balancer", "external") for family in Family}
        assert set(running.virtual_servers()) == {
            (protocol, address, port) for protocol, address, port in before if address not in gone and port != 30001
        }, "those of the other Services stay, with their marks"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param("delete table inet ipvsproxy", marks=pytest.mark.distribution),
        "flush chain inet ipvsproxy IPv4-nat-KUBE-SERVICES",
        "flush set inet ipvsproxy KUBE-CLUSTER-IP",
        "flush chain inet ipvsproxy IPv6-filter-INPUT",
        "insert rule inet ipvsproxy IPv4-filter-INPUT accept",
    ],
)
def test_a_notification_from_the_kernel_is_enough_to_repair_what_another_program_has_changed(
    laboratory: lab.Lab, tmp_path: Path, command: str
) -> None:
    """No audit and no poll happens during this test."""
    flags = ("--rules-backend=nftables", "--ipvs-sync-period=1h", "--ipvs-drift-check-interval=1h")
    with Cluster(laboratory, tmp_path, *flags, starter=unpolled_program.STARTER) as running:
        running.have(*SERVICES)
        assert differences(running) == []
        before, found = own_table(laboratory), len(running.logged("event=drift_found"))
        laboratory.run("node", "nft", *command.split())
        running.wait_until(
            lambda: len(running.logged("event=drift_found")) > found and own_table(laboratory) == before, "found and healed"
        )
        assert differences(running) == []


def test_ipvsproxy_logs_and_removes_a_catch_all_element_in_its_sets(laboratory: lab.Lab, tmp_path: Path) -> None:
    flags = ("--rules-backend=nftables", "--ipvs-sync-period=2s")
    with Cluster(laboratory, tmp_path, *flags) as running:
        running.have(*SERVICES)
        before = own_table(laboratory)
        for name in ("KUBE-CLUSTER-IP", "KUBE-6-NODE-PORT-TCP"):
            laboratory.run("node", "nft", "add", "element", "inet", "ipvsproxy", name, "{ * }")
        running.wait_until(lambda: running.logged("event=drift_found") != [] and own_table(laboratory) == before, "healed")
        assert differences(running) == []
        assert running.logged("event=kernel_unreadable") == []


UNLIKE = "delete set inet ipvsproxy {name}; add set inet ipvsproxy {name} {{ type ipv4_addr; size 2; }}"


def make_unlike(laboratory: lab.Lab, name: str) -> None:
    """Replace one of our sets by a set with another definition, such as a set that another version has created.

    The rules that use the set are removed, too.
    """
    laboratory.run("node", "nft", f"flush table inet ipvsproxy; {UNLIKE.format(name=name)}")


def test_a_set_with_a_wrong_definition_is_replaced_while_the_program_runs_and_when_it_starts(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables", "--ipvs-sync-period=2s") as running:
        running.have(*SERVICES)
        before = own_table(laboratory)
        make_unlike(laboratory, "KUBE-CLUSTER-IP")
        running.wait_until(lambda: own_table(laboratory) == before, "healed")
        assert differences(running) == []
        running.program.__exit__(None, None, None)
        make_unlike(laboratory, "KUBE-LOAD-BALANCER")
        running.start()
        running.wait_until(lambda: own_table(laboratory) == before, "healed by a start")
        assert differences(running) == []


def test_cleanup_removes_our_sets_even_if_their_definition_has_been_changed(laboratory: lab.Lab, tmp_path: Path) -> None:
    with Cluster(laboratory, tmp_path, "--rules-backend=nftables") as running:
        running.have(*SERVICES)
        running.program.__exit__(None, None, None)
        make_unlike(laboratory, "KUBE-LOAD-BALANCER")
        shown, done = running.run("cleanup --dry-run", "cleanup")
        assert shown.output.count("would remove set KUBE-LOAD-BALANCER\n") == 1
        assert done.status == 0, done.output
        assert laboratory.run("node", "nft", "list", "ruleset") == ""
        assert not running.virtual_servers()


def test_virtual_servers_of_other_programs_stay_if_a_boot_has_loaded_our_saved_rules(laboratory: lab.Lab, tmp_path: Path) -> None:
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
        running.wait_until(lambda: ("TCP", cluster.address("cluster 4", Family.IPV4), 80) in running.virtual_servers(), "served")
        running.wait_until(lambda: "30001" not in laboratory.run("node", "nft", "list", "table", "inet", "ipvsproxy"), "current")
        assert theirs <= set(running.virtual_servers()), "other programs have made these in this boot"


# The commands.

BESIDE = ("sysctl", "flow")
"""The kinds of differences and operations that this test ignores. Some settings cannot be changed in a network namespace, and
every start reads the tracked flows."""
MASQUERADING = {Backend.IPTABLES: "KUBE-MARK-MASQ", Backend.NFTABLES: "KUBE-POSTROUTING"}


def told(running: Cluster) -> dict[str, Any]:
    """The output of explain, verify and plan, without the rules and sets that explain lists."""
    explained, verified, planned = (
        json.loads(one.output)
        for one in running.run("explain default/web --output=json", "verify --output=json", "plan --output=json")
    )
    ways = [way for one in _all(explained, "masquerade") for way in one]
    assert ways
    return {
        "ways": [{key: value for key, value in way.items() if key not in ("rules", "sets")} for way in ways],
        "rules": " ".join(str(way["rules"]) for way in ways),
        "differences": sorted(
            (one["kind"], one["object"]) for one in verified["differences"] if not one["kind"].startswith(BESIDE)
        ),
        "operations": sorted((one["verb"], one["kind"]) for one in planned["operations"] if not one["kind"].startswith(BESIDE)),
    }


def _all(document: Any, key: str) -> Iterator[Any]:
    """All values of a key in nested dictionaries and lists."""
    for one in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from _all(one, key)
    if isinstance(document, dict) and key in document:
        yield document[key]


def test_the_commands_explain_verify_and_plan_print_the_same_output_with_both_backends(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    before, after = {}, {}
    for backend, masquerading in MASQUERADING.items():
        (tmp_path / backend).mkdir()
        with Cluster(laboratory, tmp_path / backend, f"--rules-backend={backend}") as running:
            running.have(*SERVICES)
            running.program.__exit__(None, None, None)
            before[backend] = told(running)
            assert masquerading in before[backend].pop("rules")
            laboratory.run("node", *harm.flush_chain("filter", "KUBE-FORWARD", backend))
            laboratory.run("node", *harm.remove_entry("KUBE-CLUSTER-IP", "10.96.0.1,tcp:80", backend))
            after[backend] = told(running)
            after[backend].pop("rules")
    pairs = zip(before[Backend.NFTABLES].pop("ways"), before[Backend.IPTABLES].pop("ways"), strict=True)
    assert [(one, other) for one, other in pairs if one != other] == []
    assert before[Backend.NFTABLES] == before[Backend.IPTABLES]
    assert before[Backend.NFTABLES]["differences"] == []
    assert after[Backend.NFTABLES] == after[Backend.IPTABLES]
    assert {kind for kind, _ in after[Backend.NFTABLES]["differences"]} == {"rules", "set_entry"}
    assert after[Backend.NFTABLES]["operations"] == [("add", "set_entry"), ("set", "rules")]


@pytest.mark.parametrize(("former", "new"), [(Backend.IPTABLES, Backend.NFTABLES), (Backend.NFTABLES, Backend.IPTABLES)], ids=str)
def test_cleanup_removes_our_objects_from_both_backends_after_a_kill_during_a_switch(
    laboratory: lab.Lab, tmp_path: Path, former: Backend, new: Backend
) -> None:
    with Cluster(laboratory, tmp_path, f"--rules-backend={former}") as running:
        running.have(*SERVICES)
        running.program.kill()
        running.begin(f"--rules-backend={new}")
        running.program.wait_until(lambda: _holds(new), "moved in part", 60)
        running.program.kill()
        assert _holds(former)
        shown, done = running.run("cleanup --dry-run", "cleanup")
        assert "would remove set KUBE-CLUSTER-IP" in shown.output
        assert done.status == 0, done.output + done.error
        assert not any(_holds(backend) for backend in (former, new))
        assert all(
            not golden_state.read_state(("ipsets", "iptables"), one)[part]
            for one in (former, new)
            for part in ("ipsets", "iptables")
        )
        assert not running.virtual_servers()


def _holds(backend: Backend) -> bool:
    """Whether a backend contains at least one of our sets."""
    if backend is Backend.NFTABLES:
        return nft_tables.has_own_table()
    return "KUBE-CLUSTER-IP" in backends.held_by_other(Backend.NFTABLES, ["KUBE-CLUSTER-IP"])


# The following tests calculate the number of transactions of a sync from the generation number of nf_tables.


def plain(name: str, number: int) -> list[Manifest]:
    """A Service with every kind of address."""
    return service(name, number, "p1", "r1", balancer=True, external=True, node_port=30000 + number)


def special(*numbers: int) -> list[Manifest]:
    """For each number: a Service with source ranges, and one with externalTrafficPolicy Local and a second scope."""
    return [
        manifest
        for number in numbers
        for manifest in (
            *service(f"ranges-{number}", number, "p1", balancer=True, loadBalancerSourceRanges=RANGES),
            *service(f"local-{number}", 100 + number, "p1", "r1", balancer=True, externalTrafficPolicy="Local"),
        )
    ]


@pytest.fixture(name="serving")
def _serving(laboratory: lab.Lab, tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(laboratory, tmp_path, *API, "--rules-backend=nftables") as running:
        yield running


def transactions(serving: Cluster, *manifests: list[Manifest]) -> int:
    """The number of transactions that a sync with these objects needs, calculated from the generation number.

    Only ipvsproxy writes to nf_tables, and each transaction increases the generation number by one.
    """
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        before, syncs = nft.generation(channel), serving.synced_services
        serving.have(*manifests)
        assert serving.synced_services == syncs + 1
        return nft.generation(channel) - before


def test_a_sync_needs_two_transactions_only_if_it_both_adds_and_removes_objects(
    serving: Cluster,
) -> None:
    first = plain("first", 1)
    assert transactions(serving, first) == 1
    assert transactions(serving, first, *(plain(f"other-{number}", number) for number in range(2, 8))) == 1
    assert transactions(serving, first, plain("one-more", 9)) == 2
    assert transactions(serving, first) == 1
    assert serving.logged("level=error|Traceback") == []


def test_the_number_of_transactions_does_not_depend_on_the_number_of_source_ranges_and_scopes(
    serving: Cluster,
) -> None:
    """The rules that refuse clients outside the source ranges are written before the virtual servers.

    The set entries that give packets a mark are written after the virtual server of the mark.
    """
    serving.have(special(1))
    assert transactions(serving, special(1, 2)) == 3
    assert transactions(serving, special(*range(1, 9))) == 3
    assert serving.logged("level=error|Traceback") == []
