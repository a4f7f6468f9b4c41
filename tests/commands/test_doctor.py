"""The findings of ``doctor``: each check has a result, and each fault has a remedy."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from ipvsproxy.commands import doctor
from ipvsproxy.commands.service_checks import Finding, Level, fail, note, ok, warn
from ipvsproxy.kernel.backends import BackendChoice
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.facts import Facts, Loopback, MarkRule
from ipvsproxy.kernel.host import Lack, Missing
from ipvsproxy.kernel.iptables.variant import Variant, VariantChoice
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend, BaseChain, ChainKey, NftTable
from ipvsproxy.model.sets import SetKind
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServerSettings
from tests.config import loading
from tests.reconcile import examples
from tests.support import builders, left_tables

WANTED = (Sysctl("net/ipv4/ip_forward", "1"),)
SEEN = Observation(
    virtual_servers={},
    sets={},
    addresses=frozenset(),
    interface_addresses=(builders.interface_address("eth0", "192.168.0.10"), builders.interface_address("eth0", "fd00:168::10")),
)
SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv4/conf/all/rp_filter": "0",
    "net/bridge/bridge-nf-call-iptables": "1",
    "net/bridge/bridge-nf-call-ip6tables": "1",
    "net/ipv4/ip_no_pmtu_disc": "0",
    "net/ipv4/vs/conn_reuse_mode": "1",
    "net/netfilter/nf_conntrack_tcp_timeout_established": "86400",
}
NO_IPV6 = {Family.IPV6: "no table nat"}
LEFT = frozenset({ChainKey("nat", "KUBE-SVC-ERIFXISQEP7F7OF4"), ChainKey("filter", "KUBE-SERVICES")})
FINE = Facts(
    release="6.1.0-1-amd64",
    version=(6, 1),
    privileges=(),
    features=(),
    modules={"ip_vs": ModuleState.LOADED, "ip_vs_rr": ModuleState.LOADABLE, "dummy": ModuleState.BUILT_IN},
    sysctls=SYSCTLS,
    sysctls_writable=True,
    iptables_choice=VariantChoice({}, Variant.NF_TABLES, "it is the variant in PATH"),
    unserved={},
    chains=frozenset({ChainKey("nat", "KUBE-SERVICES"), ChainKey("filter", "INPUT")}),
    tables=(),
    listeners={},
    observation=SEEN,
    timeouts=Timeouts(900, 120, 300),
    unreadable="",
)


FIREWALLD = NftTable(
    family="inet",
    name="firewalld",
    chains={"filter_INPUT": BaseChain("filter", "input", 10), "raw": BaseChain("filter", "prerouting", -290, drops=True)},
    closed=("filter_INPUT", "raw"),
)
INPUT = NftTable(family="ip", name="filter", chains={"INPUT": BaseChain("filter", "input", 0)}, closed=("INPUT",))
DOCKER = NftTable(
    family="ip",
    name="filter",
    chains={"FORWARD": BaseChain("filter", "forward", 0, drops=True), "DOCKER": None},
    closed=("FORWARD",),
)
NFTABLES: dict[str, Any] = {"backend": BackendChoice(Backend.NFTABLES, "it is configured")}
MIXED = VariantChoice({}, Variant.LEGACY, "most rules are in it", Variant.NF_TABLES)
NAMESAKE = dataclasses.replace(left_tables.LEFT, maps=frozenset())


def _all(*flags: str, **facts: Any) -> list[Finding]:
    """All findings on a node that has these facts; all other facts are the facts of a node without faults."""
    return list(doctor.judge(dataclasses.replace(FINE, **facts), WANTED, loading.from_flags(*flags)))


def _judge(*flags: str, sysctls: Mapping[str, str] | None = None, **facts: Any) -> list[Finding]:
    """The findings whose level is not ``ok``, except the note about the MTU, which every node gets."""
    found = _all(*flags, **facts, sysctls={**SYSCTLS, **(sysctls or {})})
    return [one for one in found if one.level is not Level.OK and not _reminds(one)]


def _reminds(finding: Finding) -> bool:
    return (finding.level, finding.topic) == (Level.NOTE, "mtu")


def test_doctor_reports_ok_for_every_topic_on_a_node_without_faults() -> None:
    found = _all("--ipvs-traffic-scopes=api")
    assert {one.level for one in found if not _reminds(one)} == {Level.OK}
    topics = "privileges kernel modules sysctl ipvs mtu iptables kube-proxy firewall marks ports timeouts"
    assert {one.topic for one in found} == set(topics.split())


@pytest.mark.parametrize(
    ("facts", "level", "topic", "text"),
    [
        ({"privileges": (Missing("no CAP_NET_ADMIN", "be root"),)}, Level.FAIL, "privileges", "no CAP_NET_ADMIN"),
        ({"features": (Missing("no IPVS", "modprobe ip_vs"),)}, Level.FAIL, "ipvs", "no IPVS"),
        ({"version": (4, 15), "release": "4.15.0"}, Level.WARN, "kernel", "Linux 4.15.0 is older than 4.18"),
        ({"lacks": (Lack("routes", "it dumps all"),)}, Level.WARN, "kernel", "it lacks routes, so it dumps all"),
        (
            {"unreadable": "list sets: EIO", "observation": Observation()},
            Level.FAIL,
            "ipvs",
            "the kernel cannot be read: list sets: EIO",
        ),
        ({"modules": {"ip_vs_rr": ModuleState.MISSING}}, Level.FAIL, "modules", "this kernel lacks 1 module (ip_vs_rr)"),
        ({"sysctls": {"net/ipv4/ip_forward": "0"}}, Level.NOTE, "sysctl", "net/ipv4/ip_forward is 0, desired 1"),
        ({"sysctls": {"net/ipv4/conf/all/rp_filter": "1"}}, Level.WARN, "sysctl", "net/ipv4/conf/all/rp_filter is 1"),
        ({"sysctls": {"net/bridge/bridge-nf-call-iptables": "0"}}, Level.WARN, "sysctl", "bridge-nf-call-iptables is 0"),
        ({"sysctls": {"net/ipv4/vs/conn_reuse_mode": "0"}}, Level.WARN, "sysctl", "net/ipv4/vs/conn_reuse_mode is 0"),
        ({"sysctls": {"net/ipv6/conf/all/forwarding": "0"}}, Level.WARN, "sysctl", "net/ipv6/conf/all/forwarding is 0"),
        ({"iptables_choice": None}, Level.FAIL, "iptables", "there is no iptables in PATH"),
        ({"host_ports": ("legacy IPv4",)}, Level.WARN, "iptables", "hostPort rules (legacy IPv4) take their ports from all"),
        ({"iptables_choice": MIXED}, Level.NOTE, "iptables", "the unused variant nf_tables has rules of ours, too"),
        ({**NFTABLES, "unserved": NO_IPV6}, Level.WARN, "rules", "IPv6 cannot be served: no table nat"),
        ({"unserved": NO_IPV6}, Level.WARN, "iptables", "IPv6 cannot be served: no table nat"),
        ({"unread_backend": "EIO"}, Level.WARN, "rules", "whether another backend still holds rules or sets of ours: EIO"),
        ({"chains": LEFT}, Level.WARN, "kube-proxy", "iptables mode (2 chains)"),
        ({"tables": (left_tables.LEFT,)}, Level.WARN, "kube-proxy", "nftables mode (ip kube-proxy)"),
        ({"tables": (NAMESAKE,)}, Level.WARN, "kube-proxy", "only has the name of kube-proxy's: it has no map service-ips"),
        # No rule of ipvsproxy accepts packets to Services at the hook input. Therefore doctor warns about chains that refuse
        # packets there.
        ({"tables": (INPUT,)}, Level.WARN, "firewall", "the chain INPUT of the table ip filter (hook input) refuses"),
        ({"tables": (FIREWALLD,)}, Level.WARN, "firewall", "table inet firewalld (hook input) refuses connections to Services"),
        ({"listeners": {10256: "kube-proxy (process 7)"}}, Level.WARN, "ports", "health port 10256 is held by kube-proxy"),
        ({"listeners": {10249: "nginx (process 7)"}}, Level.FAIL, "ports", "metrics port 10249 is held by nginx"),
        ({"timeouts": Timeouts(90000, 120, 300)}, Level.WARN, "timeouts", "IPVS keeps idle TCP connections for 90000 s"),
    ],
)
def test_doctor_reports_each_fault_with_its_remedy(facts: dict[str, Any], level: Level, topic: str, text: str) -> None:
    (finding,) = _judge(**facts)
    assert (finding.level, finding.topic) == (level, topic)
    assert text in finding.text
    assert finding.remedy


TABLE, IPSET = "nftables still holds the table inet ipvsproxy", "iptables still holds 1 ipset of ours"


@pytest.mark.parametrize(
    ("flags", "used", "why", "left", "expected"),
    [
        ([], Backend.IPTABLES, "it is configured", TABLE, f"{TABLE}|iptables (--rules-backend=iptables)"),
        (["--rules-backend=nftables"], Backend.NFTABLES, "", IPSET, f"{IPSET}|nftables (--rules-backend=nftables)"),
        (["--rules-backend=auto"], Backend.NFTABLES, "no PATH", IPSET, f"{IPSET}|nftables (--rules-backend=auto: no PATH)"),
    ],
)
def test_doctor_names_the_used_backend_and_its_flag_if_the_unused_backend_has_our_objects(
    flags: list[str], used: Backend, why: str, left: str, expected: str
) -> None:
    (found,) = _judge(*flags, backend=BackendChoice(used, why), other_backend=left)
    assert (found.level, found.topic) == (Level.WARN, "rules")
    assert found.text == expected.replace("|", ", though the configuration of this command chooses ")
    assert found.remedy.startswith("if run has another --rules-backend, give that to doctor, too; else run removes this")


LEGACY = {"iptables_choice": VariantChoice({}, Variant.LEGACY, "it is the variant in PATH")}


@pytest.mark.parametrize(
    ("facts", "family", "is_told"),
    [
        ({}, "ip", False),
        ({}, "iptables-legacy", True),
        (LEGACY, "ip6", True),
        (LEGACY, "ip6tables-legacy", False),
        ({}, "inet", True),
        (NFTABLES | {"iptables_choice": None}, "ip", True),
    ],
)
def test_doctor_reports_a_chain_that_drops_forwarded_packets_unless_our_own_iptables_rules_accept_the_packets_first(
    facts: dict[str, Any], family: str, *, is_told: bool
) -> None:
    found = _judge(**facts, tables=(dataclasses.replace(DOCKER, family=family),))
    assert [one.topic for one in found] == (["firewall"] if is_told else [])
    assert not is_told or f"the chain FORWARD of the table {family} filter (hook forward) refuses what pods send" in found[0].text


def test_doctor_does_not_report_unreadable_nftables_tables_as_absent() -> None:
    reason = "list the chains: the data changed during each attempt"
    (told,) = [one for one in _all(unread_tables=(reason,)) if one.topic in ("firewall", "kube-proxy")]
    assert told.level is Level.WARN
    assert reason in told.text
    closed = _all(unread_tables=(reason,), tables=(dataclasses.replace(DOCKER, name="theirs"),))
    assert [one.level for one in closed if one.topic == "firewall"] == [Level.WARN, Level.WARN], (
        "what is known is told all the same"
    )


def test_doctor_reports_only_the_missing_privileges_if_it_lacks_privileges() -> None:
    lacking = (Missing("this process may not change the network", "give it CAP_NET_ADMIN"),)
    found = _judge(privileges=lacking, unread_tables=("not permitted",), unread_backend="not permitted")
    assert {one.topic for one in found} == {"privileges"}


def test_chains_of_kube_proxys_nftables_mode_do_not_count_as_a_firewall() -> None:
    table = dataclasses.replace(left_tables.LEFT, closed=("filter-input",))
    assert [one.topic for one in _judge(tables=(table,))] == ["kube-proxy"]


def test_doctor_does_not_require_iptables_if_nftables_is_the_backend_of_rules() -> None:
    found = _all("--rules-backend=nftables", iptables_choice=None, **NFTABLES)
    assert [one for one in found if one.topic in ("rules", "iptables")] == [
        ok("rules", "the configuration of this command chooses nftables (--rules-backend=nftables)")
    ]


def test_doctor_finds_no_fault_on_a_fresh_node_whose_modules_can_be_loaded() -> None:
    without_ipvs: dict[str, Any] = {
        "features": (Missing("this kernel has no IPVS", "modprobe ip_vs"),),
        "unreadable": "this kernel has no IPVS: modprobe ip_vs",
        "observation": Observation(),
        "timeouts": None,
    }
    fresh = _all(**without_ipvs, modules={"ip_vs": ModuleState.LOADABLE, "ip_vs_rr": ModuleState.LOADABLE})
    assert not [one for one in fresh if one.level is Level.FAIL]
    assert "the kernel has no IPVS yet; run and --init-only load the module ip_vs" in {one.text for one in fresh}
    lacking = _all(**without_ipvs, modules={"ip_vs": ModuleState.MISSING})
    assert "this kernel has no IPVS" in {one.text for one in lacking if one.level is Level.FAIL}


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        ({"loopback": Loopback(is_up=False)}, Level.FAIL, "lo is down"),
        ({"loopback": Loopback(networkd="configured")}, Level.WARN, "systemd-networkd manages lo"),
        ({"sysctls": {"net/ipv6/conf/lo/disable_ipv6": "1"}}, Level.WARN, "net/ipv6/conf/lo/disable_ipv6 is not 0"),
    ],
)
def test_doctor_reports_obstacles_to_local_routes_only_if_local_routes_are_configured(
    facts: dict[str, Any], level: Level, said: str
) -> None:
    (finding,) = _judge("--ipvs-vip-binding=routes", **facts)
    assert (finding.level, finding.topic) == (level, "binding")
    assert said in finding.text
    assert finding.remedy
    assert _judge(**facts) == []


def test_doctor_reports_local_routes_only_if_the_configuration_does_not_use_local_routes() -> None:
    left = dataclasses.replace(SEEN, routes=frozenset(builders.addresses("10.96.0.1")))
    for loopback in (Loopback(), Loopback(networkd="unmanaged")):
        assert _judge("--ipvs-vip-binding=routes", observation=left, loopback=loopback) == []
    (finding,) = _judge(observation=left)
    assert finding.text == "1 local route of an earlier run, but Service addresses are to be on kube-ipvs0"
    assert "kube-proxy would leave them" in finding.remedy


def test_doctor_reports_node_port_addresses_with_only_loopback_addresses_of_a_served_family() -> None:
    assert _judge("--nodeport-addresses=primary,localhost") == []
    (finding,) = _judge("--nodeport-addresses=localhost,10.0.0.0/8", unserved={})
    assert finding.text == "nodePortAddresses has only loopback addresses of IPv6, where IPVS serves no node ports"
    assert _judge("--nodeport-addresses=10.0.0.0/8", unserved={Family.IPV6: "no tables"})[0].topic != "configuration"


def test_doctor_warns_if_a_host_has_bridges_and_br_netfilter_is_not_loaded() -> None:
    settings = {path: value for path, value in SYSCTLS.items() if not path.startswith("net/bridge/")}
    for bridges, expected in (((), 0), (("cni0", "docker0"), 1)):
        findings = [one for one in _all(sysctls=settings, bridges=bridges) if one.level is Level.WARN]
        assert len(findings) == expected
        assert all("bridges (cni0, docker0), and br_netfilter is not loaded" in one.text for one in findings)
        assert all("modprobe br_netfilter" in one.remedy for one in findings)


def test_a_kernel_setting_that_cannot_be_written_is_a_failure_only_if_its_value_is_wrong() -> None:
    assert _judge(sysctls_writable=False) == []
    (finding,) = _judge(sysctls_writable=False, sysctls={"net/ipv4/ip_forward": "0"})
    assert finding.level is Level.FAIL


def test_disabled_ipv6_forwarding_is_a_failure_only_if_the_host_has_ipv6() -> None:
    off = {"net/ipv6/conf/all/forwarding": "0"}
    (finding,) = _judge("--cluster-cidr=10.0.0.0/8,fd00::/48", sysctls=off)
    assert finding.level is Level.FAIL
    seen = dataclasses.replace(SEEN, interface_addresses=SEEN.interface_addresses and SEEN.interface_addresses[:1])
    assert _judge(observation=seen, sysctls=off) == []


def test_doctor_reports_virtual_servers_of_other_programs() -> None:
    server = ObservedVirtualServer(VirtualServerSettings("rr"), {})
    seen = dataclasses.replace(SEEN, virtual_servers={builders.frontend("192.0.2.1", 80): server}, foreign_virtual_servers=1)
    (finding,) = _judge(observation=seen)
    assert finding.text.startswith("2 virtual servers of other programs")
    assert finding.text.endswith(": TCP 192.0.2.1:80")


def test_doctor_reports_a_virtual_server_on_our_node_port_if_its_address_serves_no_node_ports() -> None:
    entry = examples.port_entry(SetKind.NODE_PORT_TCP, 30080)
    server = ObservedVirtualServer(VirtualServerSettings("rr"), {})
    found = {builders.frontend("203.0.113.9", 30080): server, builders.frontend("203.0.113.9", 80): server}
    first, second = _judge(observation=dataclasses.replace(SEEN, virtual_servers=found, sets={entry.set: frozenset({entry})}))
    assert first.text == "TCP 203.0.113.9:30080: the port is one of our node ports, but no node port is served at this address"
    assert "ipvsadm -D" in first.remedy
    assert second.text.startswith("2 virtual servers of other programs")


def test_doctor_finds_no_fault_if_a_scheduler_is_in_use_and_our_own_process_holds_our_ports() -> None:
    server = ObservedVirtualServer(VirtualServerSettings("rr"), {})
    seen = dataclasses.replace(
        SEEN, virtual_servers={builders.frontend("10.96.0.1", 80): server}, addresses=frozenset(builders.addresses("10.96.0.1"))
    )
    ours = dict.fromkeys((10256, 10249), "ipvsproxy (process 7)")
    assert _judge(observation=seen, modules={"ip_vs_rr": ModuleState.UNKNOWN}, listeners=ours) == []


def test_doctor_prints_faults_with_remedies_then_notes_then_topics_that_are_ok_and_then_a_summary() -> None:
    findings = [
        ok("kernel", "Linux 6.1"),
        note("sysctl", "net/ipv4/ip_forward is 0, desired 1", "run sets it"),
        warn("modules", "it is unknown"),
        ok("modules", "12 modules loaded or built in"),
        fail("ports", "held", "stop it"),
        ok("ipvs", "it is there"),
    ]
    assert list(doctor.render(doctor.describe("node-a", findings))) == [
        "fail  ports: held",
        "      stop it",
        "warn  modules: it is unknown",
        "note  sysctl: net/ipv4/ip_forward is 0, desired 1",
        "      run sets it",
        "ok    kernel, ipvs",
        "node-a: 1 failure, 1 warning, 1 note; --output=json shows every check",
    ]


def test_doctor_reports_many_unknown_modules_in_one_finding() -> None:
    (found,) = _judge(modules={f"ip_set_{number}": ModuleState.UNKNOWN for number in range(33)})
    assert found.text == "it is unknown whether this kernel has 33 modules (ip_set_0, ip_set_1, ip_set_2, 30 more)"


@pytest.mark.parametrize(
    ("count", "value", "facts", "text", "remedy"),
    [
        (2, "0", {}, "net/ipv4/vs/0 is 0, desired 1; net/ipv4/vs/1 is 0, desired 1", "run sets this"),
        (8, "0", {}, "desired 1; net/ipv4/vs/2 is 0, desired 1; 5 more", "run sets this; plan names all"),
        (2, "", {}, "there is no net/ipv4/vs/0, net/ipv4/vs/1", "run goes on without"),
        (2, "", {"features": (Missing("no IPVS", "modprobe ip_vs"),)}, "", ""),
    ],
    ids=["two", "many", "absent", "without IPVS"],
)
def test_doctor_reports_wrong_settings_in_one_finding(
    count: int, value: str, facts: dict[str, Any], text: str, remedy: str
) -> None:
    paths = [f"net/ipv4/vs/{number}" for number in range(count)]
    judged = dataclasses.replace(FINE, **facts, sysctls=SYSCTLS | (dict.fromkeys(paths, value) if value else {}))
    found = list(doctor.judge(judged, [Sysctl(path, "1") for path in paths], loading.from_flags()))
    told = [one for one in found if one.topic == "sysctl" and one.level is not Level.OK]
    assert [(one.level, one.text[-len(text) :], one.remedy[: len(remedy)]) for one in told] == (
        [(Level.NOTE, text, remedy)] if text else []
    )


OTHER_BITS = MarkRule("-t filter -A INPUT -i cni0 -j MARK --set-xmark 0x10000/0x10000", 0x10000)
SAME_BITS = MarkRule("-t mangle -A PREROUTING -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80", 0x80)


@pytest.mark.parametrize(
    ("rules", "level", "text"),
    [
        ((), Level.OK, "no rule of another program"),
        ((OTHER_BITS,), Level.WARN, OTHER_BITS.text),
        ((SAME_BITS,), Level.FAIL, SAME_BITS.text),
        ((OTHER_BITS,) * 9, Level.WARN, f"{OTHER_BITS.text}; 6 more"),
    ],
)
def test_doctor_reports_rules_that_set_the_mark_of_a_packet_before_the_packet_reaches_ipvs(
    rules: tuple[MarkRule, ...], level: Level, text: str
) -> None:
    (found,) = (one for one in _all("--ipvs-traffic-scopes=api", mark_rules=rules) if one.topic == "marks")
    assert (found.level, text in found.text) == (level, True)


def test_doctor_ignores_rules_that_set_marks_of_packets_if_no_virtual_server_uses_a_firewall_mark() -> None:
    assert _judge("--ipvs-traffic-scopes=kube-proxy", mark_rules=(SAME_BITS,)) == []


def test_doctor_warns_that_large_datagrams_from_pods_on_bridges_do_not_reach_ipv6_services() -> None:
    (found,) = _judge(bridges=("cni0", "docker0"))
    assert (found.level, found.topic) == (Level.WARN, "mtu")
    assert (
        "from pods on bridges (cni0, docker0) do not reach IPv6 Services: net/bridge/bridge-nf-call-ip6tables is 1" in found.text
    )
    assert "or use TCP; with 0 they arrive, but pods that reach a pod of their own node" in found.remedy
    assert not _judge(bridges=("cni0",), sysctls={"net/bridge/bridge-nf-call-ip6tables": "0"})
    assert {one.topic for one in _judge(bridges=("cni0",), unserved=NO_IPV6)} == {"iptables"}


@pytest.mark.parametrize(
    ("flags", "discovery", "unserved", "text"),
    [
        (
            ("--ipvs-vip-binding=addresses",),
            "0",
            {},
            "may lose all of a socket to an IPv4 Service (net/ipv4/ip_no_pmtu_disc is 0) and all to",
        ),
        (("--ipvs-vip-binding=routes",), "0", NO_IPV6, "may lose the first to an IPv4 Service (net/ipv4/ip_no_pmtu_disc is 0)"),
        ((), "1", {}, "may lose all to IPv6 Services"),
        ((), "1", NO_IPV6, ""),
    ],
)
def test_doctor_reports_which_large_datagrams_from_programs_of_the_host_may_be_lost(
    flags: tuple[str, ...], discovery: str, unserved: Mapping[Family, str], text: str
) -> None:
    sysctls = {**SYSCTLS, "net/ipv4/ip_no_pmtu_disc": discovery}
    found = [one for one in _all(*flags, sysctls=sysctls, unserved=unserved) if one.topic == "mtu"]
    assert {one.level for one in found} <= {Level.NOTE}
    assert [text in one.text for one in found] == ([True] if text else [])


@pytest.mark.parametrize(("interface", "expected"), [("eth1", ["sysctl"]), ("tunl0", [])])
def test_doctor_does_not_require_settings_of_direct_return_if_another_program_uses_the_tunnel_device(
    interface: str, expected: list[str]
) -> None:
    seen = dataclasses.replace(SEEN, interface_addresses=(builders.interface_address(interface, "10.244.3.0"),))
    desired = [Sysctl("net/ipv4/vs/conn_reuse_mode", "0", for_tunnels=True)]
    found = doctor.judge(dataclasses.replace(FINE, observation=seen), desired, loading.from_flags())
    assert [one.topic for one in found if one.topic == "sysctl" and one.level is not Level.OK] == expected
