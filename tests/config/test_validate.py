"""Covers each validation rule, and the attributes of the ``Config`` that each option sets."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import pytest

from ipvsproxy.config import catalogue, file, load
from ipvsproxy.config.option import ConfigError
from ipvsproxy.config.settings import Drivers, EngineSettings, Format, ListenAddress, Logging, ServiceSource
from ipvsproxy.model.annotations import Annotation
from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import parse_address, parse_network
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate.translation_settings import Binding, ConntrackChoices, LocalMode, Settings
from tests.config.loading import file_line, from_file, from_flags, problems_of_file, problems_of_flags
from tests.support import builders


def listen(address: str, port: int) -> ListenAddress:
    return ListenAddress(parse_address(address), port)


# Each case has an attribute of the configuration, a value, and the texts of the options that together give the attribute this
# value.
CASES: Sequence[tuple[str, object, Mapping[str, str]]] = [
    ("translation.scheduler", "mh", {"ipvs.scheduler": "mh"}),
    ("engine.audit_interval_s", 60, {"ipvs.syncPeriod": "1m"}),
    ("engine.min_interval_s", 2.5, {"ipvs.minSyncPeriod": "2.5s"}),
    ("engine.min_interval_s", 30, {"ipvs.minSyncPeriod": "30s"}),
    ("policy.excluded", builders.networks("10.0.0.0/8", "fd00::/8"), {"ipvs.excludeCIDRs": "010.1.0.0/8,fd00::1/8"}),
    ("strict_arp", True, {"ipvs.strictARP": "true"}),
    (
        "ipvs_sysctls",
        (Sysctl("net/ipv4/vs/sloppy_sctp", "1"), Sysctl("net/ipv4/vs/conn_lfactor", "-8")),
        {"ipvsproxy.ipvsSysctls": "sloppy_sctp=1,conn_lfactor=-8"},
    ),
    ("engine.timeouts", Timeouts(800, 0, 0), {"ipvs.tcpTimeout": "800s"}),
    ("engine.timeouts", Timeouts(0, 100, 0), {"ipvs.tcpFinTimeout": "100s"}),
    ("engine.timeouts", Timeouts(0, 0, 200), {"ipvs.udpTimeout": "200s"}),
    ("translation.masquerade_bit", 15, {"iptables.masqueradeBit": "15"}),
    ("translation.scope_bits", 0x3FF7, {"iptables.masqueradeBit": "3"}),
    ("translation.scope_bits", 0xFF, {"ipvsproxy.scopeMarkBits": "0xff"}),
    ("translation.binding", Binding.ROUTES, {"ipvsproxy.vipBinding": "routes"}),
    ("translation.masquerade_all", True, {"iptables.masqueradeAll": "true"}),
    ("translation.detect_local", LocalMode.NODE_CIDR, {"detectLocalMode": "NodeCIDR"}),
    ("translation.cluster_networks", builders.networks("10.0.0.0/8", "fd00::/8"), {"clusterCIDR": "10.0.0.0/8,fd00::/8"}),
    ("translation.local_interface", "br0", {"detectLocalMode": "BridgeInterface", "detectLocal.bridgeInterface": "br0"}),
    ("translation.local_interface", "en", {"detectLocalMode": "InterfaceNamePrefix", "detectLocal.interfaceNamePrefix": "en"}),
    ("translation.node_port_networks", builders.networks("10.0.0.0/8"), {"nodePortAddresses": "10.0.0.0/8"}),
    ("translation.node_port_primary", True, {"nodePortAddresses": "primary"}),
    ("translation.node_port_networks", builders.networks("127.0.0.0/8", "::1/128"), {"nodePortAddresses": "localhost"}),
    ("translation.node_port_networks", builders.networks("0.0.0.0/0", "::/0"), {"nodePortAddresses": "all"}),
    (
        "translation.node_port_networks",
        builders.networks("127.0.0.0/8", "::1/128", "10.0.0.0/8"),
        {"nodePortAddresses": "primary,localhost,10.0.0.0/8"},
    ),
    ("conntrack.max_per_core", 0, {"conntrack.maxPerCore": "0"}),
    ("conntrack.minimum", 7, {"conntrack.min": "7"}),
    ("conntrack.tcp_established_timeout_s", 0, {"conntrack.tcpEstablishedTimeout": "0"}),
    ("conntrack.tcp_close_wait_timeout_s", 5, {"conntrack.tcpCloseWaitTimeout": "5s"}),
    ("conntrack.tcp_be_liberal", True, {"conntrack.tcpBeLiberal": "true"}),
    ("conntrack.udp_timeout_s", 5, {"conntrack.udpTimeout": "5s"}),
    ("conntrack.udp_stream_timeout_s", 6, {"conntrack.udpStreamTimeout": "6s"}),
    ("oom_score_adj", -1000, {"oomScoreAdj": "-1000"}),
    ("translation.bind_address", parse_address("10.0.0.1"), {"bindAddress": "010.0.0.1"}),
    ("translation.bind_address", parse_address("10.0.0.1"), {"bindAddress": "::ffff:10.0.0.1"}),
    ("servers.health", listen("10.0.0.1", 80), {"healthzBindAddress": "10.0.0.1:80"}),
    ("servers.health", listen("fd00::1", 10256), {"healthzBindAddress": "fd00::1"}),
    ("servers.metrics", listen("::", 9), {"metricsBindAddress": "[::]:9"}),
    ("servers.metrics", listen("0.0.0.0", 10249), {"metricsBindAddress": "0.0.0.0"}),
    ("servers.bind_hard_fail", True, {"bindAddressHardFail": "true"}),
    ("logging", Logging(format=Format.JSON), {"logging.format": "json"}),
    ("logging", Logging(verbosity=4), {"logging.verbosity": "4"}),
    ("translation.external_addresses", False, {"featureGates": "AllowServiceExternalIPs=false"}),
    ("source", ServiceSource(kubeconfig="/k"), {"clientConnection.kubeconfig": "/k"}),
    ("source", ServiceSource(manifests="/m"), {"ipvsproxy.manifests": "/m"}),
    ("source.mass_deletion_percent", 0, {"ipvsproxy.massDeletionGuardPercent": "0"}),
    ("translation.allowed_addresses", (parse_network("10.0.0.0/8"),), {"ipvsproxy.allowServiceAddresses": "10.0.0.0/8"}),
    ("policy.drain_deadline_s", 600, {"ipvsproxy.drainDeadline": "10m"}),
    ("translation.annotations", frozenset(), {"ipvsproxy.serviceAnnotations": "none"}),
    (
        "translation.annotations",
        frozenset({Annotation.SCHEDULER, Annotation.WEIGHTS}),
        {"ipvsproxy.serviceAnnotations": "scheduler,ipvsproxy.io/weights"},
    ),
    ("engine.drift_check_interval_s", 30, {"ipvsproxy.driftCheckInterval": "30s"}),
    ("node_name", "other", {"hostnameOverride": " OTHER "}),
]


@pytest.mark.parametrize(("attribute", "value", "texts"), CASES, ids=[f"{case[0]}-{index}" for index, case in enumerate(CASES)])
def test_a_flag_and_its_field_give_the_same_setting(attribute: str, value: object, texts: Mapping[str, str]) -> None:
    read = operator.attrgetter(attribute)
    options = {catalogue.BY_KEY[key]: text for key, text in texts.items()}
    assert read(from_flags()) != value
    assert read(from_flags(*(f"--{option.flag}={text}" for option, text in options.items()))) == value
    lines = [file_line(option, file._plain(option, option.parse(text))) for option, text in options.items()]
    assert read(from_file("\n".join(lines))) == value


def test_an_unknown_annotation_is_refused_in_the_list_of_allowed_annotations() -> None:
    (problem,) = problems_of_flags("--service-annotations=scheduler,weight,speed")
    assert "'speed' must be all, none, or some of affinity-netmask, direct-return, drain-deadline" in problem
    assert from_flags("--service-annotations=all").translation.annotations == frozenset(Annotation)


def test_flags_have_the_same_defaults_as_in_kube_proxy() -> None:
    config = from_flags()
    assert config.translation == Settings(bind_address=parse_address("0.0.0.0"))
    assert config.policy == Policy()
    assert config.engine == EngineSettings(min_interval_s=1, audit_interval_s=30, drift_check_interval_s=5, timeouts=None)
    assert config.drivers == Drivers()
    assert config.conntrack == ConntrackChoices(
        max_per_core=32768, minimum=131072, tcp_established_timeout_s=86400, tcp_close_wait_timeout_s=3600
    )
    assert (config.servers.health, config.servers.metrics) == (listen("0.0.0.0", 10256), listen("127.0.0.1", 10249))
    assert config.node_name == "host-1"
    assert (config.without_effect, config.notices) == ((), ())


def test_the_defaults_of_a_file_and_of_flags_differ_only_in_the_minimum_sync_period() -> None:
    by_flags, by_file = from_flags(), from_file("")
    assert by_file.engine == dataclasses.replace(by_flags.engine, min_interval_s=0)
    assert dataclasses.replace(by_file, engine=by_flags.engine, config_file="") == by_flags


def test_the_servers_take_their_family_from_the_bind_address_of_a_file_but_not_of_a_flag() -> None:
    by_file, by_flags = from_file("bindAddress: '::'"), from_flags("--bind-address=::")
    assert (by_file.servers.health, by_file.servers.metrics) == (listen("::", 10256), listen("::1", 10249))
    assert (by_flags.servers.health, by_flags.servers.metrics) == (listen("0.0.0.0", 10256), listen("127.0.0.1", 10249))


def test_a_zero_or_empty_field_of_a_file_means_the_default() -> None:
    config = from_file(
        "ipvs: {syncPeriod: 0s}\nbindAddress: ''\nhealthzBindAddress: ''\nlogging: {format: '', flushFrequency: 0}\n"
    )
    assert config == from_file("")


@pytest.mark.parametrize("mode", ["", "iptables", "nftables"])
def test_the_error_for_a_proxy_mode_other_than_ipvs_says_what_to_set(mode: str) -> None:
    reason = (
        f"'{mode}' is a mode that ipvsproxy does not support"
        if mode
        else "is not set, and ipvs is the only mode that ipvsproxy supports"
    )
    assert problems_of_flags(f"--proxy-mode={mode}") == [f"--proxy-mode: {reason}; set --proxy-mode=ipvs"]
    assert problems_of_file(f"mode: '{mode}'") == [f"4: mode: {reason}; set mode: ipvs in the file"]


def test_an_unknown_proxy_mode_is_refused_even_by_cleanup() -> None:
    assert problems_of_flags("--proxy-mode=ebpf", "--cleanup") == ["--proxy-mode: 'ebpf' is no mode; set --proxy-mode=ipvs"]


@pytest.mark.parametrize("mode", ["", "iptables", "nftables", "ipvs"])
def test_cleanup_accepts_every_known_proxy_mode_and_an_empty_proxy_mode(mode: str) -> None:
    assert from_flags(f"--proxy-mode={mode}", "--cleanup").cleanup


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--iptables-masquerade-bit=32", "32 must be 0..31"),
        ("--iptables-masquerade-bit=-1", "-1 must be 0..31"),
        *(
            (f"--{name}=-1", "-1 must be at least 0")
            for name in ("v", "conntrack-max-per-core", "conntrack-min", "kube-api-burst")
        ),
        ("--oom-score-adj=1001", "1001 must be -1000..1000"),
        *((f"--conntrack-tcp-timeout-{name}=-1s", "-1s must be at least 0s") for name in ("established", "close-wait")),
        ("--conntrack-udp-timeout=-1s", "-1s must be at least 0s"),
        ("--conntrack-udp-timeout-stream=-1m", "-1m0s must be at least 0s"),
        ("--ipvs-sync-period=0s", "0s must be greater than 0s"),
        ("--ipvs-min-sync-period=31s", "31s must not be longer than --ipvs-sync-period (30s)"),
        *(
            (f"--ipvs-{name}=-1s", "-1s must be at least 0s")
            for name in ("min-sync-period", "tcp-timeout", "tcpfin-timeout", "udp-timeout")
        ),
        ("--ipvs-scheduler=no such", "'no such' must be the name of an IPVS scheduler, such as rr, lc, sh or mh"),
        ("--ipvs-exclude-cidrs=10.0.0.0/8,10.0.0.1", "'10.0.0.1' is not a CIDR range such as 10.0.0.0/8"),
        ("--config-sync-period=0", "0s must be greater than 0s"),
        ("--bind-address=localhost", "'localhost' must be an IP address"),
        *(
            (f"--{name}-bind-address={text}", f"'{text}' must be IP or IP:port with a port in 1..65535")
            for name in ("healthz", "metrics")
            for text in (":10256", "1.2.3.4:0", "1.2.3.4:65536", "[::1]", "host:80")
        ),
        ("--healthz-port=65536", "65536 must be 0..65535"),
        (
            "--detect-local-mode=Magic",
            "'Magic' must be one of ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix",
        ),
        ("--cluster-cidr=10.0.0.0", "'10.0.0.0' is not a CIDR range such as 10.0.0.0/8"),
        *(
            (f"--cluster-cidr={text}", f"'{text}' must be one CIDR range, or one IPv4 and one IPv6 range")
            for text in ("10.0.0.0/8,11.0.0.0/8", "10.0.0.0/8,fd00::/8,fd01::/16")
        ),
        (
            "--nodeport-addresses=10.0.0.1",
            "'10.0.0.1' is not a CIDR range such as 10.0.0.0/8, nor one of localhost, all, primary",
        ),
        (
            "--nodeport-addresses=primary,Localhost",
            "'Localhost' is not a CIDR range such as 10.0.0.0/8, nor one of localhost, all, primary",
        ),
        *(
            (
                f"--ipvs-sysctls=svc_lfactor=8,{text}",
                f"'{text}' is none of sloppy_sctp=0..1, sloppy_tcp=0..1, conn_lfactor=-8..8, svc_lfactor=-8..8",
            )
            for text in ("sloppy_sctp=2", "sloppy_sctp", "conn_lfactor=-9", "conn_lfactor=+1", "conntrack=0", "=1")
        ),
        ("--ipvs-scope-mark-bits=0", "'0' must be a number such as 0x3fff, with 1 to 16 of 32 bits set"),
        (
            "--ipvs-scope-mark-bits=0x4001",
            "'0x4001' must not have the bits 0xc000, by which Kubernetes asks to masquerade and to drop a packet",
        ),
        ("--logging-format=xml", "'xml' must be one of text, json"),
        ("--hostname-override=  ", "must not be blank"),
        ("--show-hidden-metrics-for-version=1", "'1' must be MAJOR.MINOR, such as 1.35"),
        (
            "--feature-gates=MultiCIDRServiceAllocator=false",
            "MultiCIDRServiceAllocator must be true; it can no longer be turned off",
        ),
    ],
)
def test_an_invalid_value_is_refused_with_a_single_sentence(flag: str, problem: str) -> None:
    assert problems_of_flags(flag) == [f"{flag.partition('=')[0]}: {problem}"]


INTERFACE_MODES = pytest.mark.parametrize(
    ("mode", "flag", "longest"),
    [("BridgeInterface", "pod-bridge-interface", 15), ("InterfaceNamePrefix", "pod-interface-name-prefix", 14)],
)


@INTERFACE_MODES
def test_the_local_pod_detection_by_interface_needs_the_name_of_an_interface(mode: str, flag: str, longest: int) -> None:
    assert problems_of_flags(f"--detect-local-mode={mode}") == [f"--{flag}: is required with --detect-local-mode {mode}"]
    for name in ("a" * longest, "cbr0", "ñ" * (longest // 2)):
        assert from_flags(f"--detect-local-mode={mode}", f"--{flag}={name}").translation.detect_local == mode


@INTERFACE_MODES
@pytest.mark.parametrize("name", ["a b", "a\nb", "a\x00b", "a\x7fb", 'a"', "a'", "a\\", "a+", "a/b", "ñ" * 8, ""])
def test_an_interface_name_that_cannot_be_written_in_a_rule_is_refused(mode: str, flag: str, longest: int, name: str) -> None:
    """The longest prefix is one character shorter than the longest name, because a rule appends a plus sign to the prefix.

    In the parameters, an empty text stands for a name that is one character too long.
    """
    name = name or "a" * (longest + 1)
    assert problems_of_flags(f"--detect-local-mode={mode}", f"--{flag}={name}") == [
        f"--{flag}: {name!r} must be a name of 1 to {longest} characters that an interface can have"
    ]


def test_the_cluster_cidr_is_ignored_if_the_detect_local_mode_is_node_cidr() -> None:
    assert from_flags("--detect-local-mode=NodeCIDR", "--cluster-cidr=junk").translation.cluster_networks == ()


def test_options_that_kube_proxy_does_not_check_in_ipvs_mode_are_not_checked() -> None:
    config = from_file("iptables: {syncPeriod: -1s, minSyncPeriod: 99h}\nnftables: {masqueradeBit: 99}\n")
    assert config.without_effect == ("iptables.syncPeriod", "iptables.minSyncPeriod", "nftables.masqueradeBit")


def test_a_problem_in_a_list_of_the_file_is_reported_with_the_element_and_its_line() -> None:
    text = "nodePortAddresses:\n- 10.0.0.0/8\n- 10.0.0.1\nipvs:\n  excludeCIDRs: ['x']\n  minSyncPeriod: 40s\n"
    assert problems_of_file(text) == [
        "9: ipvs.minSyncPeriod: 40s must not be longer than ipvs.syncPeriod (30s)",
        "8: ipvs.excludeCIDRs[0]: 'x' is not a CIDR range such as 10.0.0.0/8",
        "6: nodePortAddresses[1]: '10.0.0.1' is not a CIDR range such as 10.0.0.0/8, nor one of localhost, all, primary",
    ]


def test_a_value_that_cannot_be_parsed_is_not_compared_with_other_values() -> None:
    assert problems_of_flags("--ipvs-sync-period=1x", "--ipvs-min-sync-period=40s") == [
        "--ipvs-sync-period: '1x' must be a duration such as 30s, 1m30s or 1h"
    ]


def test_port_zero_turns_the_health_or_metrics_server_off() -> None:
    servers = from_flags("--healthz-port=0", "--metrics-port=0").servers
    assert (servers.health, servers.metrics) == (None, None)


def test_a_configuration_with_a_server_turned_off_cannot_be_written_to_a_file() -> None:
    rule = "0 cannot be written to a file: v1alpha1 has no way to say that a server is off"
    assert problems_of_flags("--write-config-to=/x", "--healthz-port=0") == [f"--healthz-port: {rule}"]


def test_the_healthz_port_flag_sets_the_port_if_the_address_has_no_port() -> None:
    config = from_flags("--healthz-bind-address=10.0.0.1", "--healthz-port=8080")
    assert config.servers.health == listen("10.0.0.1", 8080)
    assert [str(notice) for notice in config.notices] == ["--healthz-port: deprecated; use --healthz-bind-address"]


def test_feature_gates_of_other_modes_of_kube_proxy_have_no_effect() -> None:
    names = ["KubeProxyIPVS", "NFTablesNetlink", "KubeProxyNFTablesLocalhostNodePorts"]
    config = from_flags("--feature-gates=" + ",".join(f"{name}=false" for name in names))
    assert config == from_flags()
    assert config.without_effect == tuple(f"--feature-gates {name}" for name in names)


def test_a_port_flag_is_reported_as_without_effect_if_the_address_already_has_a_port() -> None:
    config = from_flags("--healthz-port=8080")
    assert config.servers.health == listen("0.0.0.0", 10256)
    assert str(config.notices[1]) == "--healthz-port: 8080 has no effect, because the default address 0.0.0.0:10256 has a port"


def test_manifests_and_an_api_server_cannot_both_be_configured() -> None:
    assert problems_of_flags("--manifests=/m", "--kubeconfig=/k", "--master=http://a") == [
        "--kubeconfig: '/k' and --manifests exclude each other; remove one",
        "--master: 'http://a' and --manifests exclude each other; remove one",
    ]


def test_a_host_that_has_no_name_needs_the_hostname_override() -> None:
    with pytest.raises(ConfigError, match="--hostname-override: must be set, because this host has no name"):
        load.load(["--proxy-mode=ipvs"], hostname="", read_file=lambda _: b"")


def test_options_that_have_no_effect_are_reported_if_they_differ_from_their_defaults() -> None:
    config = from_flags(
        "--kube-api-content-type=x", "--kube-api-qps=50", "--kube-api-burst=10", "--vmodule=a=1", "--feature-gates=Some=true"
    )
    assert config.without_effect == ("--kube-api-content-type", "--kube-api-qps", "--vmodule", "--feature-gates Some")


def test_a_configuration_file_of_kubeadm_results_in_the_defaults_and_in_no_notices() -> None:
    text = """
        bindAddress: 0.0.0.0
        bindAddressHardFail: false
        clientConnection: {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /k, qps: 0}
        clusterCIDR: 10.244.0.0/16
        configSyncPeriod: 0s
        conntrack: {maxPerCore: null, min: null, tcpBeLiberal: false, tcpCloseWaitTimeout: null, udpTimeout: 0s}
        detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
        detectLocalMode: ""
        enableProfiling: false
        healthzBindAddress: ""
        hostnameOverride: ""
        iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
        ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpTimeout: 0s}
        logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
        metricsBindAddress: ""
        nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
        nodePortAddresses: null
        oomScoreAdj: null
        portRange: ""
        showHiddenMetricsForVersion: ""
        winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
    """
    config = from_file(text)
    assert config == from_file("clientConnection: {kubeconfig: /k}\nclusterCIDR: 10.244.0.0/16\n")
    assert (config.without_effect, config.notices) == ((), ())
