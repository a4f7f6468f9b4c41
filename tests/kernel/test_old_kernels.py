"""Drivers and the whole program on a real kernel whose answers are changed to the answers of an older kernel.

If ipvsproxy has a workaround, the kernel must reach the desired state. If ipvsproxy has no workaround, it must say in a readable
sentence why it refuses.
"""

import contextlib
import pathlib
import re
from collections.abc import Iterator

import pytest

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset import ipset_driver as ipset
from ipvsproxy.kernel.network.routes import RouteDriver
from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.model.kernel import LocalRoutes
from ipvsproxy.model.net import Family, Protocol, parse_address
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS, SetEntries, SetEntry
from tests.kernel.drivers import run
from tests.packets.nf_tables import NEEDS_NF_TABLES
from tests.support import cluster, lab, old_kernel, old_program
from tests.support.cluster import Cluster, service
from tests.support.old_kernel import OLD_KERNELS
from tests.support.program import Program

V4, V6 = parse_address("10.96.0.1"), parse_address("fd00:96::1")
MANIFESTS = """
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.0.80
  ports: [{name: http, port: 80}, {name: dns, port: 53, protocol: UDP}, {name: call, port: 5060, protocol: SCTP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [ENDPOINTS]
ports:
- {name: http, port: 8080}
- {name: dns, port: 5353, protocol: UDP}
- {name: call, port: 5060, protocol: SCTP}
---
apiVersion: v1
kind: Node
metadata: {name: node-a}
"""


@pytest.fixture(params=OLD_KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> old_kernel.OldKernel:
    """Make all netlink sockets of this test answer like netlink sockets of an old kernel."""
    chosen = OLD_KERNELS[request.param]
    monkeypatch.setitem(vars(netlink), "socket", old_kernel.sockets(chosen))
    return chosen


@pytest.mark.usefixtures("network_namespace", "kernel")
def test_our_local_routes_are_found_even_if_the_kernel_lists_all_routes_of_the_host() -> None:
    run("ip", "route", "add", "local", "10.97.0.1", "dev", "lo", "table", "local", "protocol", "250", "metric", "1024")
    with contextlib.closing(RouteDriver()) as driver:
        outcomes = driver.apply([Operation(Verb.ADD, LocalRoutes.of(address)) for address in (V4, V6)])
        assert not any(one.error or one.surprise for one in outcomes)
        assert driver.observe() == {V4, V6}
        driver.apply([Operation(Verb.REMOVE, LocalRoutes.of(V4))])
        assert driver.observe() == {V6}


@pytest.mark.usefixtures("network_namespace")
def test_the_nftables_backend_needs_a_kernel_with_nat_chains_in_inet_tables(kernel: old_kernel.OldKernel) -> None:
    with contextlib.closing(NftRulesDriver(chains=(), jumps=())) as driver:
        refusals = {driver.try_writing(family) for family in Family}
    if kernel.has_nat_in_inet:
        assert refusals == {None}
        return
    (refusal,) = refusals
    assert refusal is not None
    assert refusal.is_certain
    assert refusal.reason == (
        "the nf_tables of this kernel has no chains of the type nat in a table of the family inet, which came with Linux 5.2: "
        "load the module that has it, use a newer kernel, or hold rules in iptables (--rules-backend=iptables)"
    )


@pytest.mark.usefixtures("network_namespace", "kernel")
def test_an_old_kernel_accepts_all_sets_and_entries_of_all_protocols() -> None:
    entries = [SetEntry("KUBE-CLUSTER-IP", V4, protocol, 80) for protocol in Protocol]
    with contextlib.closing(ipset.IpsetDriver()) as driver:
        made = driver.apply([Operation(Verb.ADD, ip_set) for ip_set in IP_SETS.values()])
        filled = driver.apply([Operation(Verb.ADD, SetEntries.of(*entries))])
        assert not any(outcome.error or outcome.surprise for outcome in (*made, *filled))
        assert driver.observe(["KUBE-CLUSTER-IP"])["KUBE-CLUSTER-IP"].entries == set(entries)


# The whole program.


OLDEST = "4.18"
"""The oldest supported version of Linux. Every later version has all features of this version."""


@pytest.fixture
def program(network_namespace: None, tmp_path: pathlib.Path) -> Iterator[Program]:
    """The running program on the oldest supported kernel, with a Service that has two endpoints."""
    del network_namespace
    write(tmp_path, "10.244.0.1", "10.244.0.2")
    flags = ("--hostname-override=node-a", "--conntrack-max-per-core=0", "--ipvs-vip-binding=routes")
    starter = (*old_program.STARTER, OLDEST)
    with Program(tmp_path / "manifests", tmp_path / "log", *flags, starter=starter) as running:
        yield running


def write(folder: pathlib.Path, *endpoints: str) -> None:
    (folder / "manifests").mkdir(exist_ok=True)
    listed = ", ".join(f"{{addresses: [{address}], nodeName: node-a}}" for address in endpoints)
    (folder / "manifests/all.yaml").write_text(MANIFESTS.replace("ENDPOINTS", listed))


def track(client: str, address: str) -> None:
    """Open a tracked connection that is answered by an endpoint."""
    sent = ("-s", client, "-d", address, "--sport", "1000", "--dport", "53")
    answered = ("--reply-src", "10.244.0.2", "--reply-dst", client, "--reply-port-src", "5353", "--reply-port-dst", "1000")
    run("conntrack", "-I", "-p", "udp", *sent, *answered, "-t", "100")


@pytest.mark.kernel
def test_a_start_on_an_old_kernel_uses_workarounds_and_reaches_the_desired_state(
    program: Program, tmp_path: pathlib.Path
) -> None:
    program.wait_until_synced()
    log = (tmp_path / "log").read_text()
    assert "features=filtered-routes,filtered-connections,prompt-reuse" in re.search("event=kernel_lacks.*", log)[0]  # type: ignore[index]
    assert "level=error" not in log
    table = run("ipvsadm", "-Ln")
    assert re.findall(r"(\w+) +(10\.96\.0\.80:\d+)", table) == [
        ("TCP", "10.96.0.80:80"),
        ("UDP", "10.96.0.80:53"),
        ("SCTP", "10.96.0.80:5060"),
    ]
    assert table.count("10.244.0.2:") == 3
    assert pathlib.Path("/proc/sys/net/ipv4/vs/conn_reuse_mode").read_text().strip() == "0"
    assert set(run("ipset", "list", "-name").split()) >= {name for name in IP_SETS if "IPVSPROXY" not in name}
    assert "10.96.0.80,sctp:5060" in run("ipset", "list", "KUBE-CLUSTER-IP")
    assert "local 10.96.0.80 dev lo proto 251" in run("ip", "route", "show", "table", "local")

    # Only the Service's connection to its removed endpoint is deleted, although this kernel lists all connections.
    track("192.0.2.7", "10.96.0.80")
    track("192.0.2.8", "10.96.0.99")
    write(tmp_path, "10.244.0.1")
    program.wait_until(lambda: "10.96.0.80" not in run("conntrack", "-L", "-p", "udp"), "the connection is deleted", 30)
    assert "10.96.0.99" in run("conntrack", "-L", "-p", "udp")


# Tests with rules in nftables.


@pytest.mark.kernel
@NEEDS_NF_TABLES
@pytest.mark.parametrize(("starter", "is_old"), [((*old_program.STARTER, "5.4"), True), (("-m", "ipvsproxy"), False)])
def test_local_pods_are_masqueraded_only_if_postrouting_rules_cannot_match_the_arrival_interface(
    starter: tuple[str, ...], tmp_path: pathlib.Path, *, is_old: bool
) -> None:
    flags = ("--rules-backend=nftables", "--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0")
    with lab.Lab() as laboratory, Cluster(laboratory, tmp_path, *flags, starter=starter) as running:
        running.have(service("far", 1, "r1", protocols=["TCP"]))
        for family in Family:
            answered = laboratory.probe("p2", "TCP", cluster.address("cluster 1", family), 80)
            assert answered.outcome == "ok"
            assert answered.sources == (cluster.address("node" if is_old else "p2", family),)
        lacks = [one for line in running.logged("event=kernel_lacks") for one in re.findall("arrival-behind-ipvs", line)]
        assert len(lacks) == is_old
        assert running.logged("level=error|Traceback") == []
