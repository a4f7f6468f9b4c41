"""Faults that users report about kube-proxy's IPVS mode: their effect on packets, and the cause that ``doctor`` reports."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest

from ipvsproxy.model.net import Family
from ipvsproxy.translate.translation_settings import Binding
from tests.packets.questions import ANSWERED, ATTEMPTS
from tests.support import cluster, lab, neighbours, patience
from tests.support.cluster import service

pytestmark = [pytest.mark.kernel]

ARP_DEFAULTS = ("net.ipv4.conf.all.arp_ignore=0", "net.ipv4.conf.all.arp_announce=0")
REFUSING = ("--ipvs-refuse-node-addresses",)
MARKERS = itertools.count(100)
"""The numbers of marker Services (see ``have``). A marker Service exists only until the next marker Service replaces it."""
Start = Callable[..., cluster.Cluster]


@pytest.fixture(scope="module", name="start")
def _start(laboratory: lab.Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yields a function that starts the program with given flags, unless the program already runs with exactly these flags."""
    directory = tmp_path_factory.mktemp("reported")
    present: dict[tuple[str, ...], cluster.Cluster] = {}
    with contextlib.ExitStack() as running:

        def start(*flags: str) -> cluster.Cluster:
            if flags not in present:
                running.close()
                present.clear()
                # A program without the flag for strict ARP does not change these settings.
                laboratory.run("node", "sysctl", "-w", *ARP_DEFAULTS)
                present[flags] = running.enter_context(cluster.Cluster(laboratory, directory, *flags))
            return present[flags]

        yield start
    laboratory.run("node", "sysctl", "-w", *ARP_DEFAULTS)


def have(running: cluster.Cluster, *manifests: Iterable[cluster.Manifest]) -> None:
    """Set the API's objects, and wait until they are programmed.

    ``Cluster.have`` waits only for the next sync of changed Services. The removal of an interface by an earlier test causes a
    sync as well. Therefore, this function adds a marker Service, waits until the marker is programmed, and then does the same
    with a second marker. The sync of the second marker begins only after the sync of the objects.
    """
    objects = [*itertools.chain.from_iterable(manifests)]
    for number in itertools.islice(MARKERS, 2):
        running.objects = [*objects, *service(f"marker-{number}", number, protocols=["TCP"])]
        running.show()
        marker = ("TCP", cluster.address(f"cluster {number}", Family.IPV4), 80)
        running.wait_until(lambda marker=marker: marker in running.virtual_servers(), "programmed")  # type: ignore[misc]  # the default binds the value


@contextlib.contextmanager
def serving(laboratory: lab.Lab, *servers: tuple[str, str, int]) -> Iterator[None]:
    """While the block runs, TCP servers run in these namespaces, on these addresses and ports."""
    with contextlib.ExitStack() as served:
        for namespace, address, port in servers:
            laboratory.serve(namespace, "TCP", address, port)
            served.callback(laboratory.hush, namespace, "TCP", address, port)
        yield


def are_reachable(laboratory: lab.Lab, *addresses: str) -> bool:
    """Starts a server on each of these addresses, on the other node. Returns whether every server answers the host and a pod."""
    with serving(laboratory, *(("remote", address, 7000) for address in addresses)):
        probes = [laboratory.probe(client, "TCP", address, 7000) for client in ("host", "p2") for address in addresses]
    return {one.outcome for one in probes} == {ANSWERED}


AGENT = service("agent", 2, "remote", protocols=["TCP"])
"""A Service whose pod runs in the network namespace of the other node."""


def test_packets_of_the_host_are_not_masqueraded_if_the_cluster_cidr_contains_the_cluster_ips(start: Start) -> None:
    """In this lab, the other node routes all addresses to this node.

    On a network without these routes, the answer would not come back, because its destination is the cluster IP.
    """
    running = start("--cluster-cidr=10.0.0.0/8,fd00::/8")
    have(running, service("web", 1, "r1", protocols=["TCP"]))
    for family in Family:
        to = cluster.address("cluster 1", family)
        assert running.lab.probe("host", "TCP", to, 80).sources == (to,), "not masqueraded"
        assert running.lab.probe("p2", "TCP", to, 80).outcome == ANSWERED, family
    (doctor,) = running.run("doctor --output=json")
    assert {one["level"] for one in json.loads(doctor.output)["findings"] if one["topic"] == "cluster-cidr"} == {"warn"}


def test_doctor_reports_a_host_process_and_a_notrack_rule_that_collide_with_a_service(start: Start) -> None:
    """Rules for a hostPort are tested in ``test_neighbours``."""
    running = start()
    laboratory = running.lab
    rules = "*raw\n-A PREROUTING -d 10.96.0.1/32 -p tcp --dport 80 -j CT --notrack\nCOMMIT\n"
    have(running, service("web", 1, "r1", protocols=["TCP"], node_port=30001))
    node = cluster.address("node", Family.IPV4)
    laboratory.run("node", "iptables-restore", "--noflush", stdin=rules)
    with contextlib.ExitStack() as undo:
        undo.callback(laboratory.run, "node", "iptables", "-t", "raw", "-F", "PREROUTING")
        undo.enter_context(serving(laboratory, ("node", "0.0.0.0", 30001)))
        answer = laboratory.probe("client", "TCP", node, 30001)
        assert (answer.outcome, answer.backends) == (ANSWERED, (cluster.address("r1", Family.IPV4),)), "not the host's process"
        untracked = laboratory.probe("client", "TCP", cluster.address("cluster 1", Family.IPV4), 80)
        assert untracked.outcome != ANSWERED or untracked.sources == (cluster.address("client", Family.IPV4),)
        doctor, explain = running.run("doctor", "explain default/web")
    for output in (doctor.output, explain.output):
        named = [line for line in output.splitlines() if "collisions: " in line or "collides: " in line]
        assert any(f"listens at TCP {node}:30001, too" in line for line in named), output
        assert any("exempts packets to TCP 10.96.0.1:80 from connection tracking" in line for line in named), output


DNS_RULES = """*raw
-A PREROUTING -d {0}/32 -p udp -m udp --dport 53 -j NOTRACK
-A OUTPUT -s {0}/32 -p udp -m udp --sport 53 -j NOTRACK
-A OUTPUT -d {0}/32 -p udp -m udp --dport 53 -j NOTRACK
COMMIT
"""
"""The rules for UDP that node-cache of kubernetes/dns writes for an address in its flag ``-localip``."""
LINK_LOCAL = "169.254.20.10"


def test_nodelocal_dns_works_with_ipvs_only_if_its_interface_does_not_have_the_cluster_ip(start: Start) -> None:
    """The interface, addresses and rules are those of nodelocaldns.yaml (k8s-dns-node-cache 1.26.4).

    The cache itself does not run: a server of the test answers in its place.
    """
    running = start()
    laboratory, dns = running.lab, cluster.address("cluster 1", Family.IPV4)
    have(running, service("kube-dns", 1, "r1", protocols=["UDP"]))
    laboratory.ip("node", "link add nodelocaldns type dummy")

    def add(address: str) -> tuple[lab.Result, list[str]]:
        """Add this address to the interface of the DNS cache, with the cache's rules for the address.

        Return the answer that the host gets from the cluster IP, and the collisions that ``doctor`` reports.
        """
        laboratory.ip("node", f"address add {address}/32 dev nodelocaldns")
        laboratory.run("node", "iptables-restore", "--noflush", stdin=DNS_RULES.format(address))
        laboratory.serve("node", "UDP", address, 53)
        served.callback(laboratory.hush, "node", "UDP", address, 53)
        asked = {(client, to): laboratory.probe(client, "UDP", to, 53) for client in ("p2", "host") for to in (LINK_LOCAL, dns)}
        assert {asked[client, LINK_LOCAL].backends for client in ("p2", "host")} == {(LINK_LOCAL,)}, "the cache answers"
        assert asked["p2", dns].backends == (cluster.address("r1", Family.IPV4),), "pods bypass the cache at the cluster IP"
        (doctor,) = running.run("doctor")
        return asked["host", dns], [line for line in doctor.output.splitlines() if "collisions: default/kube-dns" in line]

    with contextlib.ExitStack() as served:
        served.callback(laboratory.ip, "node", "link delete nodelocaldns")
        served.callback(laboratory.run, "node", "iptables", "-t", "raw", "-F")
        answer, named = add(LINK_LOCAL)
        assert (answer.outcome, named) == (ANSWERED, []), "the layout for IPVS"
        answer, named = add(dns)
        assert answer.outcome == "timeout" or answer.sources == (dns,), "not masqueraded"
        assert any("the interface nodelocaldns has the cluster IP" in line for line in named), named
        assert any("exempts packets to UDP" in line for line in named), named


@pytest.mark.parametrize("annotations", [{}, {"skip-load-balancer-ips": "true"}], ids=["none", "the annotation"])
def test_k3s_servicelb_makes_other_nodes_unreachable_unless_a_workaround_is_configured(
    start: Start, annotations: Mapping[str, str]
) -> None:
    """ServiceLB puts the addresses of all nodes into the status of each load balancer (k3s#2804, k3s#5000).

    ``tests/translate`` tests two other workarounds, ``ipMode=Proxy`` and ``--ipvs-refuse-node-addresses``. They also keep these
    addresses out of the desired state.
    """
    running = start()
    laboratory = running.lab
    addresses = [cluster.address(name, Family.IPV4) for name in ("node", "remote")]
    traefik, *slices = service("traefik", 1, "p1", protocols=["TCP"], balancer=True, node_port=30001, annotations=annotations)
    traefik["status"]["loadBalancer"]["ingress"] = [{"ip": one} for one in addresses]
    have(running, [traefik, *slices], AGENT)
    assert are_reachable(laboratory, addresses[1]) is bool(annotations)
    assert laboratory.probe("client", "TCP", addresses[0], 30001).outcome == ANSWERED, "the node port is served anyway"


def test_each_node_answers_arp_requests_for_addresses_of_load_balancers_if_strict_arp_is_off(start: Start) -> None:
    """In layer 2 mode, MetalLB answers ARP requests itself, so MetalLB needs strict ARP. A later test covers kube-vip."""
    running = start()
    laboratory, balancer = running.lab, cluster.address("balancer 1", Family.IPV4)
    have(running, service("web", 1, "p1", protocols=["TCP"], balancer=True))
    assert balancer in running.local_addresses()
    laboratory.ip("client", f"route add {balancer}/32 dev lan", "neighbour flush dev lan")
    try:
        assert laboratory.probe("client", "TCP", balancer, 80, timeout_s=5.0).outcome == ANSWERED
    finally:
        laboratory.ip("client", f"route delete {balancer}/32 dev lan")


@pytest.mark.parametrize("flags", [(), REFUSING], ids=["served", "refused"])
def test_an_external_ip_equal_to_the_address_of_another_node_makes_that_node_unreachable(
    start: Start, flags: tuple[str, ...]
) -> None:
    running, refused = start(*flags), flags == REFUSING
    both = [cluster.address("remote", family) for family in Family]
    web = service("web", 1, "p1", protocols=["TCP"], externalIPs=both)
    have(running, web, AGENT)
    assert are_reachable(running.lab, *both) is refused
    (explain,) = running.run("explain default/web")
    hint = "not used: Service default/web spec.externalIPs" if refused else "collides: "
    for address in both:
        assert any(hint in line and f"{address} is an address of the node node-b" in line for line in explain.output.splitlines())


@pytest.mark.parametrize("binding", [Binding.ADDRESSES, pytest.param(Binding.ROUTES, marks=patience.THOROUGH)], ids=str)
def test_an_address_of_kube_vip_is_served_whether_or_not_this_node_is_the_leader(start: Start, binding: Binding) -> None:
    """kube-vip adds the address to an interface of its leader, here ``eth0``, and removes the address when another node leads.

    With strict ARP, only the leader of kube-vip answers ARP requests for the address. With MetalLB, only the chosen node answers
    them.
    """
    running = start("--ipvs-strict-arp=true", f"--ipvs-vip-binding={binding}")
    laboratory, balancer = running.lab, cluster.address("balancer 1", Family.IPV4)
    have(running, service("web", 1, "p1", protocols=["TCP"], balancer=True, node_port=30001))
    laboratory.ip("client", f"route add {balancer}/32 dev lan")
    asked = [*((who, 80) for who in ("host", "p2", "client")), ("client", 30001)]
    answered: dict[str, list[bool]] = {}

    try:
        for stage in ("before", "leads", "after"):
            laboratory.ip("node", f"address {'add' if stage == 'leads' else 'flush to'} {balancer}/32 dev eth0")
            laboratory.ip("client", "neighbour flush dev lan")
            leads = stage == "leads"
            running.wait_until(
                # The virtual servers are checked first, because this check is cheap: it starts no process.
                lambda leads=leads: (  # type: ignore[misc]  # the default binds the value
                    (("TCP", balancer, 30001) in running.virtual_servers()) is leads
                    and (balancer in running.local_addresses(binding)) is not leads
                ),
                stage,
            )
            outcomes = [laboratory.probe(who, "TCP", balancer, port, timeout_s=5.0).outcome for who, port in asked]
            answered[stage] = [outcome == ANSWERED for outcome in outcomes]
    finally:
        laboratory.ip("client", f"route delete {balancer}/32 dev lan")
        laboratory.ip("node", f"address flush to {balancer}/32 dev eth0")
    other_node_leads = [True, True, False, False]
    assert answered == {"before": other_node_leads, "leads": [True] * 4, "after": other_node_leads}


@pytest.mark.parametrize("scopes", [pytest.param("kube-proxy", marks=patience.THOROUGH), "api"])
def test_rules_of_calico_prevent_pods_from_using_second_scopes_and_change_no_other_traffic(start: Start, scopes: str) -> None:
    """IPVS compares whole firewall marks, and Felix marks packets of pods before IPVS sees them.

    Packets of the host keep the marks that our rules have set.
    """
    flags = [f"--ipvs-traffic-scopes={scopes}", "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cni"]
    running = start(*flags)
    laboratory = running.lab
    balanced = service("local", 1, "p1", "r1", protocols=["TCP"], balancer=True, externalTrafficPolicy="Local")
    elsewhere = service("elsewhere", 4, "r1", protocols=["TCP"], balancer=True, externalTrafficPolicy="Local")
    web = service("web", 2, "p1", "r1", protocols=["TCP"], node_port=30002)
    typha = service("typha", 3, "node", "remote", protocols=["TCP"])  # the pods of typha are in the host's network
    asked = [(who, "balancer 1", 80) for who in ("p2", "host", "client")]
    asked += [("p2", "cluster 2", 80), ("host", "cluster 2", 80), ("p2", "node", 30002), ("client", "node", 30002)]
    asked += [("host", "cluster 3", 80), ("p2", "balancer 4", 80), ("host", "balancer 4", 80)]

    def answers() -> list[lab.Result]:
        return [laboratory.probe(who, "TCP", cluster.address(to, Family.IPV4), port, count=ATTEMPTS) for who, to, port in asked]

    have(running, balanced, web, typha, elsewhere)
    places = [(place, cluster.address(place, Family.IPV4), 8080) for place in ("node", "remote")]
    with serving(laboratory, *places):
        pod_before, *before = answers()
        laboratory.run("node", "iptables-restore", "--noflush", stdin=neighbours.CALICO)
        try:
            pod, *others = answers()
            (doctor,) = running.run("doctor")
        finally:
            for table, chain in (("raw", "PREROUTING"), ("nat", "POSTROUTING"), ("filter", "INPUT"), ("filter", "OUTPUT")):
                for command in (["-D", chain, "-j", f"cali-{chain}"], ["-F", f"cali-{chain}"], ["-X", f"cali-{chain}"]):
                    laboratory.run("node", "iptables", "-t", table, *command)
    p1, r1 = (cluster.address(one, Family.IPV4) for one in ("p1", "r1"))
    assert (pod_before.backends, pod.backends) == ((p1, r1) if scopes == "api" else (p1,), (p1,))
    assert {one.outcome for one in (pod, *others)} == {ANSWERED}
    assert others == before
    assert ("marks: rules of other programs write other bits" in doctor.output) is (scopes == "api")
