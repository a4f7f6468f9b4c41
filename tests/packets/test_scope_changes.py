"""Covers second scopes with each method to detect local pods, and changes of scopes.

Also covers the commands plan, verify and cleanup.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.translation_settings import Binding
from tests.packets.questions import ANSWERED, ATTEMPTS
from tests.packets.switching import configure
from tests.packets.test_scopes import API, BOTH, LOCAL
from tests.support import cluster, golden_state, harm, lab, nft_state, patience
from tests.support.cluster import Endpoint, service
from tests.support.program import Ended, run_in_turn

pytestmark = [pytest.mark.kernel]

TCP = ["TCP"]
WEB = [
    *service("here", 1, *BOTH, balancer=True, node_port=30001, protocols=TCP, **LOCAL),
    *service("elsewhere", 2, "r1", balancer=True, node_port=30002, protocols=TCP, **LOCAL),
]
"""Two Services like those of ``test_scopes.py``, but with TCP only. ``test_scopes.py`` sends requests of each kind over each
protocol."""


def ask(running: cluster.Cluster, from_: str, to: str, port: int = 80, family: Family = Family.IPV4) -> lab.Result:
    inside, source = from_, None
    # All pods of the other node are in one namespace, and all addresses of the client are in another namespace.
    if from_.startswith(("client", "r")):
        inside, source = "client" if from_.startswith("client") else "remote", cluster.address(from_, family)
    return running.lab.probe(inside, "TCP", cluster.address(to, family), port, src=source, count=ATTEMPTS, timeout_s=2.0)


def backends(*names: str, family: Family = Family.IPV4) -> tuple[str, ...]:
    return tuple(sorted(cluster.address(name, family) for name in names))


def have_web(running: cluster.Cluster, *others: list[cluster.Manifest]) -> None:
    """Set the API's objects, including ``WEB``, and wait until the node itself reaches an endpoint on each node.

    On a busy machine, a program that has just started may write the rules only at the second sync.
    """
    running.have(WEB, *others)
    reached = functools.partial(ask, running, "host", "balancer 1")
    running.wait_until(lambda: all(reached(family=one).backends == backends(*BOTH, family=one) for one in Family), "in force")


def traces(running: cluster.Cluster) -> list[str]:
    """The objects of second scopes in the kernel."""
    rules = [line for program in ("iptables-save", "ip6tables-save") for line in running.lab.run("node", program).splitlines()]
    rules += [line for chain in nft_state.read_rules().items() for line in (chain[0], *chain[1])]
    sets = [*running.lab.run("node", "ipset", "list", "-name").splitlines(), *nft_state.read_sets()]
    marks = [line for line in Path("/proc/net/ip_vs").read_text().splitlines() if line.startswith("FWM")]
    return [line for line in (*rules, *sets, *marks) if "IPVSPROXY" in line or line.startswith("FWM")]


def has_no_traces(running: cluster.Cluster) -> bool:
    """Whether the kernel has no objects of second scopes any more.

    Virtual servers are read first, because they are removed late, and because they can be read without starting a process.
    """
    return "FWM" not in Path("/proc/net/ip_vs").read_text() and traces(running) == []


BRIDGE = ("--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0")
PREFIX = ("--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cni")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((*BRIDGE, "--masquerade-all"), id="bridge, masquerade all"),
        # The following cases need the same kernel features as test_scopes.py. They also need rules that can match bridge names by
        # a wildcard.
        pytest.param(("--detect-local-mode=NodeCIDR",), id="ranges of the Node", marks=patience.THOROUGH),
        pytest.param(PREFIX, id="prefix of interfaces", marks=patience.THOROUGH),
    ],
)
def test_each_method_to_recognise_local_pods_lets_clients_of_the_node_reach_remote_endpoints(
    laboratory: lab.Lab, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    node = cluster.node()
    node["spec"] = {"podCIDRs": ["10.244.0.0/24", "fd00:10:244::/64"]}
    with cluster.Cluster(laboratory, tmp_path, *API, *flags) as running:
        have_web(running, [node])
        for family in Family:
            assert ask(running, "client", "balancer 1", family=family).backends == backends("p1", family=family)
            assert ask(running, "client", "balancer 2", family=family).outcome == "timeout"
            for client in ("p2", "host"):
                assert ask(running, client, "balancer 1", family=family).backends == backends("p1", "r1", family=family)
                assert ask(running, client, "balancer 2", family=family).backends == backends("r1", family=family)
            assert ask(running, "r2", "node", 30001, family).backends == backends("p1", family=family)
            assert ask(running, "r2", "node", 30002, family).outcome == "timeout"


def test_unrecognised_pods_are_served_as_by_kube_proxy_and_outside_clients_only_by_local_pods(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    """The node has no ``podCIDRs``, and no bridge with a network, as with Calico's own address management."""
    routed = (("10.244.0.1", "/24", "/32", "10.244.0.0/24"), ("fd00:10:244::1", "/64", "/128", "fd00:10:244::/64"))
    for address, whole, alone, route in routed:
        change = (
            f"address del {address}{whole} dev cni0",
            f"address add {address}{alone} dev cni0",
            f"route replace {route} dev cni0",
        )
        laboratory.ip("node", *change)
    try:
        with cluster.Cluster(laboratory, tmp_path, *API) as running:
            have_web(running)
            for family in Family:
                ask_here = functools.partial(ask, running, family=family)
                here, there, both = (backends(*names, family=family) for names in (["p1"], ["r1"], BOTH))
                assert ask_here("client", "balancer 1").backends == here
                assert ask_here("client", "balancer 2").outcome == "timeout"
                assert ask_here("p2", "balancer 1").backends == here
                assert ask_here("p2", "balancer 2") == lab.Result(ANSWERED, there, backends("p2", family=family))
                assert ask_here("host", "balancer 1").backends == both
                assert ask_here("r2", "node", 30001) == lab.Result(ANSWERED, here, backends("r2", family=family))
                assert ask_here("r2", "node", 30002).outcome == "timeout"
    finally:
        for address, whole, alone, _ in routed:
            laboratory.ip("node", f"address del {address}{alone} dev cni0", f"address add {address}{whole} dev cni0")


def test_a_pod_of_another_node_is_an_outside_client_even_with_an_address_in_our_pod_cidrs(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    """With Calico's own address management, a pod of another node may have an address in this node's ``spec.podCIDRs``."""
    node = cluster.node() | {"spec": {"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]}}
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        have_web(running, [node])
        for family in Family:
            here = lab.Result(ANSWERED, backends("p1", family=family), backends("r2", family=family))
            assert ask(running, "r2", "node", 30001, family) == here
            assert ask(running, "r2", "node", 30002, family).outcome == "timeout"


WITHOUT_MANGLE = """\
#!/bin/bash
IFS= read -r -d '' text
{real} "$@" <<<"${{text%%\\*mangle*}}" || exit
[[ $text != *\\*mangle* ]] || {{ echo "iptables-restore: unable to initialize table 'mangle'" >&2; exit 1; }}
"""


@pytest.mark.skipif(cluster.BACKEND is Backend.NFTABLES, reason="nf_tables has no table mangle that a kernel may lack")
def test_all_clients_are_treated_as_with_kube_proxy_if_the_kernel_has_no_table_mangle(
    laboratory: lab.Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("iptables-restore", "ip6tables-restore"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(WITHOUT_MANGLE.format(real=shutil.which(name)))
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    ranges = service("ranges", 7, *BOTH, balancer=True, protocols=TCP, loadBalancerSourceRanges=["172.18.0.50/32"], **LOCAL)
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.have(WEB, ranges)
        running.wait_until(lambda: ask(running, "client", "balancer 7").outcome == ANSWERED, "reached within source ranges")
        assert ask(running, "client2", "balancer 7").outcome == "timeout"
        running.wait_until(lambda: bool(running.logged("operation_failed.*mangle")), "the rules of mangle refused")

        def all_served() -> bool:
            """Whether all clients reach the expected pods.

            The outside client does not query load-balancer address 2, because outside clients have no endpoint there.
            """
            return all(ask(running, one, "balancer 1").backends == backends("p1") for one in ("client", "p2", "host")) and all(
                ask(running, one, "balancer 2").backends == backends("r1") for one in ("p2", "host")
            )

        running.wait_until(all_served, "everybody served")


def test_connections_survive_if_a_restart_changes_the_firewall_marks_or_turns_second_scopes_off(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.settle()
        running.have(WEB)
        held = [running.lab.open("p2", "TCP", cluster.address("balancer 1", Family.IPV4), 80) for _ in range(2)]
        assert {one.backend for one in held} == set(backends("p1", "r1"))
        running.program.__exit__(None, None, None)
        running.start("--ipvs-scope-mark-bits=0xff0000")
        assert [one.ask() for one in held] == [one.backend for one in held], "other marks end no connection"
        held += [running.lab.open("p2", "TCP", cluster.address("balancer 1", Family.IPV4), 80) for _ in range(2)]
        assert {one.backend for one in held[2:]} == set(backends("p1", "r1"))
        running.program.__exit__(None, None, None)
        running.start("--ipvs-traffic-scopes=kube-proxy")
        assert ask(running, "p2", "balancer 1").backends == backends("p1")
        assert ask(running, "p2", "balancer 2").backends == backends("r1")
        assert [one.ask() for one in held] == [one.backend for one in held]
        for one in held:
            one.abort()
        running.wait_until(lambda: has_no_traces(running), "without a trace")
        running.program.__exit__(None, None, None)


# Tests of a reload that switches second scopes off and on, and of the commands plan, verify and cleanup.

FOREIGN = ("ipvsadm", "-A", "-f", "4660", "-s", "wlc")
"""A virtual server of another program. The firewall mark of this virtual server uses bits of our marks."""
BESIDE = re.compile(r"sysctl|flow")
"""The kinds of differences and operations that this test ignores. ``sysctl``: a network namespace is not allowed to change the
size of the connection table. ``flow``: each start reads flows."""


def test_a_reload_switches_second_scopes_off_and_on_without_a_lost_connection(laboratory: lab.Lab, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    configure(path)
    with cluster.Cluster(laboratory, tmp_path, f"--config={path}") as running:
        have_web(running)
        process = running.program.process_id
        held = [running.lab.open("p2", "TCP", cluster.address("balancer 1", Family.IPV4), 80) for _ in range(2)]
        assert {one.backend for one in held} == set(backends("p1", "r1"))
        with laboratory.load("host", "TCP", cluster.address("balancer 1", Family.IPV4), 80, interval_s=0.1) as loads:
            configure(path, trafficScopes="kube-proxy")
            running.wait_until(lambda: ask(running, "p2", "balancer 1").backends == backends("p1"), "switched off")
            assert [one.ask() for one in held] == [one.backend for one in held]
            held[1].abort()
            configure(path)
            running.wait_until(lambda: ask(running, "p2", "balancer 1").backends == backends("p1", "r1"), "switched on")
            assert held[0].ask() == held[0].backend
        (load,) = loads
        assert (load.failed, load.outcomes["ok"] > 0) == (0, True), load.failures
        held[0].abort()
        # Without this drain deadline, closed connections would remain for two minutes.
        configure(path, trafficScopes="kube-proxy", drainDeadline="1s")
        running.wait_until(lambda: has_no_traces(running), "without a trace")
        assert running.program.process_id == process
        assert running.program.is_alive


def _differences(verified: Ended) -> list[str]:
    found = [" ".join((one["kind"], one["object"])) for one in json.loads(verified.output)["differences"]]
    return [one for one in found if not BESIDE.search(one)]


def test_damage_to_second_scopes_is_repaired_and_their_cleanup_keeps_marks_of_other_programs(
    laboratory: lab.Lab, tmp_path: Path
) -> None:
    with cluster.Cluster(laboratory, tmp_path, *API) as running:
        running.have(service("web", 1, *BOTH, balancer=True, protocols=TCP, **LOCAL))
        mark, whole = str(int(_marks()[0], 16)), _all_scopes()
        for damage in (
            ("ipvsadm", "-D", "-f", mark),
            ("ipvsadm", "-E", "-f", mark, "-s", "wlc"),
            harm.flush_set("KUBE-IPVSPROXY-SCOPE"),
            harm.flush_chain("mangle", "KUBE-IPVSPROXY-MARK"),
        ):
            found = len(running.logged("event=drift_found"))
            subprocess.run(damage, check=True, timeout=300)
            is_repaired = functools.partial(_is_repaired, running, found, whole)
            running.wait_until(is_repaired, f"repaired after {' '.join(damage)}")
        assert ask(running, "p2", "balancer 1").backends == backends("p1", "r1")

        laboratory.run("node", *FOREIGN)
        running.program.__exit__(None, None, None)
        assert _differences(*running.run("verify --output=json")) == []
        entry = golden_state.read_state(("ipsets",), cluster.BACKEND)["ipsets"]["KUBE-IPVSPROXY-SCOPE"]["members"][0]
        laboratory.run("node", "ipvsadm", "-D", "-f", mark)
        laboratory.run("node", *harm.remove_entry("KUBE-IPVSPROXY-SCOPE", entry.split()[0]))
        laboratory.run("node", *harm.flush_chain("mangle", "KUBE-IPVSPROXY-ARRIVAL"))
        verified, planned = running.run("verify --output=json", "plan --output=json")
        found_kinds = {one.split()[0] for one in _differences(verified)}
        operations = [one for one in json.loads(planned.output)["operations"] if not BESIDE.search(one["kind"])]
        assert found_kinds == {"virtual_server", "set_entry", "rules"}
        assert {one["kind"] for one in operations} == {"virtual_server", "real_server", "set_entry", "rules"}
        assert not [one for one in operations if one["verb"] not in ("add", "set")]
        assert len(traces(running)) > 1
        (done,) = run_in_turn(("--cleanup", *API), within_s=300)
        assert done.status == 0, done.error
        assert [line.split()[:2] for line in traces(running)] == [["FWM", f"{int(FOREIGN[3]):08X}"]]


def _marks() -> list[str]:
    return [line.split()[1] for line in Path("/proc/net/ip_vs").read_text().splitlines() if line.startswith("FWM")]


def _is_repaired(running: cluster.Cluster, found: int, state: golden_state.State) -> bool:
    """Whether ipvsproxy has reported drift more than ``found`` times, and the kernel has returned to ``state``."""
    return len(running.logged("event=drift_found")) > found and _all_scopes() == state


def _all_scopes() -> golden_state.State:
    state = golden_state.read_state(("virtual_servers", "ipsets", "iptables"), cluster.BACKEND)
    servers = {row: value for part in ("virtual_servers", "real_servers") for row, value in state[part].items()}
    sets = {name: content for name, content in state["ipsets"].items() if "IPVSPROXY" in name}
    rules = {chain: lines for chain, lines in state["iptables"].items() if "IPVSPROXY" in chain}
    return {"servers": {row: one for row, one in servers.items() if row.startswith("FWM")}, "sets": sets, "rules": rules}


# The tests below share one run of the program.


@pytest.fixture(name="running", scope="module")
def _running(laboratory: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Cluster]:
    """One run of the program for all tests that need no special flags. Each test starts with its own objects only.

    Tests with this fixture run last, because the other tests start the program themselves.
    """
    # Without this flag, a load-balancer address on an interface of the node would be an address for node ports.
    own = ",".join(f"{cluster.address('node', family)}/{family.bits}" for family in Family)
    with cluster.Cluster(laboratory, tmp_path_factory.mktemp("scopes"), *API, f"--nodeport-addresses={own}") as running:
        yield running


THIRD_NODE = {Family.IPV4: ("10.244.2.11", "10.244.2.0/24"), Family.IPV6: ("fd00:10:244:2::11", "fd00:10:244:2::/64")}
"""The address of a pod on a third node, and the pod range of the third node. The namespace of the client serves as the third
node."""


@contextlib.contextmanager
def _third_node(laboratory: lab.Lab) -> Iterator[None]:
    """A third node with a pod: answers of remote pods to this pod do not pass the node under test."""
    with contextlib.ExitStack() as undo:
        for family, (address, pods) in THIRD_NODE.items():
            route = f"{pods} via {cluster.address('client', family)}"
            for namespace, what in (("client", f"address %s {address}/{family.bits} dev lo"), ("node", ""), ("remote", "")):
                text = what or f"route %s {route}"
                laboratory.ip(namespace, text % "add")
                undo.callback(laboratory.ip, namespace, text % "del")
        yield


def test_a_node_port_without_a_local_endpoint_does_not_answer_a_pod_of_a_third_node(
    running: cluster.Cluster,
) -> None:
    """Packets from the third node's pod keep their source address, so answers of a remote endpoint would bypass this node.

    The file conformance.md names the test of Kubernetes for this case.
    """
    draining = Endpoint("p1", ready=False, terminating=True)
    have_web(running, service("draining", 8, draining, "r1", balancer=True, node_port=30008, protocols=TCP, **LOCAL))
    with _third_node(running.lab):
        for family, (source, _) in THIRD_NODE.items():
            to, local = cluster.address("node", family), cluster.address("p1", family)
            pod = functools.partial(running.lab.probe, "client", "TCP", src=source, timeout_s=2.0)
            endpoint = pod(cluster.address("r1", family), 8080)
            assert endpoint == lab.Result("ok", (cluster.address("r1", family),), (source,)), "the endpoint answers by itself"
            assert pod(to, 30001, count=ATTEMPTS) == lab.Result(ANSWERED, (local,), (source,))
            assert pod(to, 30002, count=ATTEMPTS).outcome == "timeout"
            assert pod(to, 30008, count=ATTEMPTS) == lab.Result(ANSWERED, (local,), (source,)), "the last resort here"


def test_a_packet_that_a_process_has_marked_reaches_its_destination(running: cluster.Cluster) -> None:
    """IPVS accepts every packet that has the mark of a virtual server, whatever destination the packet has.

    Many programs use the mark 1.
    """
    with socket.socket() as client:
        running.have(service("web", 1, "p1", balancer=True, protocols=TCP, **LOCAL))
        client.settimeout(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, 1)
        p2 = cluster.address("p2", Family.IPV4)
        client.connect((p2, 8080))
        client.sendall(b"?\n")
        assert f'"backend": "{p2}"' in client.recv(200).decode()


def test_connections_survive_a_change_of_the_traffic_policy_to_cluster(running: cluster.Cluster) -> None:
    running.have(service("web", 1, *BOTH, balancer=True, protocols=TCP, **LOCAL))
    held = [running.lab.open("p2", "TCP", cluster.address("balancer 1", Family.IPV4), 80) for _ in range(2)]
    running.have(service("web", 1, *BOTH, balancer=True, protocols=TCP))
    assert [one.ask() for one in held] == [one.backend for one in held]
    running.have(service("web", 1, *BOTH, balancer=True, protocols=TCP, **LOCAL))
    assert [one.ask() for one in held] == [one.backend for one in held]
    assert ask(running, "p2", "balancer 1").backends == backends("p1", "r1")
    for one in held:
        one.abort()


def test_a_host_process_reaches_all_endpoints_even_if_the_node_itself_has_the_load_balancer_address(
    running: cluster.Cluster,
) -> None:
    """The node has the address of the load balancer, as with kube-vip.

    The other node also has this address. If a request had this source address, the answer would not leave the other node.
    """
    address = cluster.address("balancer 1", Family.IPV4)
    running.lab.ip("node", f"address add {address}/32 dev eth0")
    running.lab.ip("remote", "link add kube-ipvs0 type dummy", f"address add {address}/32 dev kube-ipvs0")
    try:
        running.have(service("web", 1, *BOTH, balancer=True, protocols=TCP, **LOCAL))
        running.wait_until(lambda: address not in running.local_addresses(Binding.ADDRESSES), "made room")
        assert ask(running, "host", "balancer 1").backends == backends("p1", "r1")
    finally:
        running.lab.ip("node", f"address del {address}/32 dev eth0")
        running.lab.ip("remote", "link del kube-ipvs0")


def with_balancers(manifests: list[cluster.Manifest], *numbers: int) -> list[cluster.Manifest]:
    """Returns the manifests; the status of each Service has the load-balancer addresses with these numbers."""
    addresses = [cluster.address(f"balancer {number}", family) for number in numbers for family in Family]
    status = {"loadBalancer": {"ingress": [{"ip": one} for one in addresses]}}
    return [one | {"status": status} if one["kind"] == "Service" else one for one in manifests]


def marks(running: cluster.Cluster) -> list[str]:
    """Wait for set entries that assign marks, and return these entries."""
    entries: list[str] = []

    def are_there() -> bool:
        sets = golden_state.read_state(("ipsets",), cluster.BACKEND)["ipsets"]
        entries[:] = sets.get("KUBE-IPVSPROXY-SCOPE", {}).get("members", [])
        return bool(entries)

    running.wait_until(are_there, "marked")
    return entries


def restart_under_load(running: cluster.Cluster, *questions: tuple[int, str]) -> None:
    """Restart the program while a pod sends requests to load-balancer addresses.

    For each address, the caller gives the number of the address, and the only pod that may answer.
    """
    loads = []
    with contextlib.ExitStack() as asking:
        for number, _ in questions:
            to = cluster.address(f"balancer {number}", Family.IPV4)
            loads.append(asking.enter_context(running.lab.load("p2", "TCP", to, 80, interval_s=0.1)))
        running.program.kill()
        running.start()
    for (number, pod), (load,) in zip(questions, loads, strict=True):
        assert load.backends.keys() == {cluster.address(pod, Family.IPV4)}, f"balancer {number}"


def test_a_restart_does_not_mix_up_the_endpoints_of_two_services_that_desire_one_address(running: cluster.Cluster) -> None:
    running.have()
    old = service("a", 1, "p1", balancer=True, protocols=TCP, **LOCAL)
    young = with_balancers(service("b", 2, "r1", balancer=True, protocols=TCP, **LOCAL), 1, 2)
    running.have(young, old)
    before = sorted(marks(running))
    restart_under_load(running, (1, "p1"), (2, "r1"))
    assert sorted(marks(running)) == before


def test_an_address_that_changes_its_service_before_a_start_does_not_affect_other_addresses(
    running: cluster.Cluster,
) -> None:
    """tests/reconcile/tables/test_scopes.py also covers the case in which the order of the two Services is reversed."""
    running.have()
    giver, taker = (
        service(name, number, pod, balancer=True, protocols=TCP, **LOCAL)
        for name, number, pod in (("a", 1, "p1"), ("b", 2, "r1"))
    )
    running.have(with_balancers(taker, 2), with_balancers(giver, 1, 3))
    running.objects = [*with_balancers(giver, 3), *with_balancers(taker, 1, 2)]
    before = marks(running)
    restart_under_load(running, (2, "r1"), (3, "p1"))
    assert ask(running, "p2", "balancer 1").backends == backends("r1")
    assert differences(running) == []
    moved = cluster.address("balancer 1", Family.IPV4)
    assert [one for one in marks(running) if not one.startswith(moved)] == [one for one in before if not one.startswith(moved)]


def test_a_load_balancer_address_that_is_also_a_cluster_ip_or_a_node_address_serves_all_clients(
    running: cluster.Cluster,
) -> None:
    running.have()
    same = service("same", 1, "r1", balancer=True, protocols=TCP, **LOCAL)
    same[0]["status"] = {"loadBalancer": {"ingress": [{"ip": cluster.address("cluster 1", Family.IPV4)}]}}
    crossed = service("crossed", 2, "r1", balancer=True, protocols=TCP, **LOCAL)
    crossed[0]["status"] = {"loadBalancer": {"ingress": [{"ip": cluster.address("node", Family.IPV4)}]}}
    crossed[0]["spec"]["ports"][0]["nodePort"] = 30080
    crossed[0]["spec"]["ports"].append({"name": "other", "protocol": "TCP", "port": 30080, "nodePort": 30081})
    running.have(same, crossed)
    # Although no endpoint is local, outside clients are served at a load-balancer address that is also a cluster IP.
    assert ask(running, "client", "cluster 1").backends == backends("r1")
    for client in ("p2", "host"):
        assert ask(running, client, "cluster 1").backends == backends("r1")
        assert ask(running, client, "node", 30080).backends == backends("r1")
    assert differences(running) == []


def differences(running: cluster.Cluster) -> list[Any]:
    """The differences that ``verify`` reports."""
    (verified,) = running.run("verify --output=json")
    found: list[Any] = json.loads(verified.output)["differences"]
    return found
