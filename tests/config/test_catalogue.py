"""Compares the catalogue of options with kube-proxy's flags and fields, and the output of ``--help`` with the catalogue."""

import operator

import pytest

from ipvsproxy.config import catalogue, commands
from ipvsproxy.config.option import AT_START, Likeness, Option
from ipvsproxy.model.kernel import Timeouts
from tests.config import loading

# The flags in cmd/kube-proxy/app/options.go, and the logging flags of component-base, in kubernetes/kubernetes v1.36.
KUBE_PROXY_FLAGS = """
    bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period conntrack-max-per-core
    conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait conntrack-tcp-timeout-established
    conntrack-udp-timeout conntrack-udp-timeout-stream detect-local-mode feature-gates healthz-bind-address healthz-port help
    hostname-override init-only iptables-localhost-nodeports iptables-masquerade-bit iptables-min-sync-period
    iptables-sync-period ipvs-exclude-cidrs ipvs-min-sync-period ipvs-scheduler ipvs-strict-arp ipvs-sync-period
    ipvs-tcp-timeout ipvs-tcpfin-timeout ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig
    log-flush-frequency log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream
    logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port nodeport-addresses oom-score-adj
    pod-bridge-interface pod-interface-name-prefix profiling proxy-mode show-hidden-metrics-for-version v version vmodule
    write-config-to
""".split()  # noqa: SIM905 - without quotes, the names are easy to compare with the code of kube-proxy

# The fields in staging/src/k8s.io/kube-proxy/config/v1alpha1/types.go in kubernetes/kubernetes v1.36.
KUBE_PROXY_FIELDS = """
    bindAddress bindAddressHardFail clientConnection.acceptContentTypes clientConnection.burst clientConnection.contentType
    clientConnection.kubeconfig clientConnection.qps clusterCIDR configSyncPeriod conntrack.maxPerCore conntrack.min
    conntrack.tcpBeLiberal conntrack.tcpCloseWaitTimeout conntrack.tcpEstablishedTimeout conntrack.udpStreamTimeout
    conntrack.udpTimeout detectLocal.bridgeInterface detectLocal.interfaceNamePrefix detectLocalMode enableProfiling
    featureGates healthzBindAddress hostnameOverride iptables.localhostNodePorts iptables.masqueradeAll iptables.masqueradeBit
    iptables.minSyncPeriod iptables.syncPeriod ipvs.excludeCIDRs ipvs.minSyncPeriod ipvs.scheduler ipvs.strictARP
    ipvs.syncPeriod ipvs.tcpFinTimeout ipvs.tcpTimeout ipvs.udpTimeout logging.flushFrequency logging.format
    logging.options.json.infoBufferSize logging.options.json.splitStream logging.options.text.infoBufferSize
    logging.options.text.splitStream logging.verbosity logging.vmodule metricsBindAddress mode nftables.masqueradeAll
    nftables.masqueradeBit nftables.minSyncPeriod nftables.syncPeriod nodePortAddresses oomScoreAdj portRange
    showHiddenMetricsForVersion windowsRunAsService winkernel.enableDSR winkernel.forwardHealthCheckVip winkernel.networkName
    winkernel.rootHnsEndpointName winkernel.sourceVip
""".split()  # noqa: SIM905 - without quotes, the names are easy to compare with the code of kube-proxy

ALL = [option for options in catalogue.OPTIONS.values() for option in options]


def test_the_catalogue_has_exactly_the_flags_of_kube_proxy_and_our_own_flags() -> None:
    flags = {option.flag for option in ALL if option.flag and option.status is not Likeness.OWN}
    assert flags == set(KUBE_PROXY_FLAGS)


def test_the_catalogue_has_exactly_the_fields_of_kube_proxys_file_and_our_own_fields() -> None:
    fields = {option.field for option in ALL if option.field and option.status is not Likeness.OWN}
    assert fields == set(KUBE_PROXY_FIELDS)


def test_fields_that_only_ipvsproxy_has_are_in_the_section_ipvsproxy_of_the_file() -> None:
    assert {option.field.split(".")[0] for option in ALL if option.status is Likeness.OWN} == {"ipvsproxy"}


def test_no_two_options_have_the_same_key() -> None:
    assert len(catalogue.BY_KEY) == len((*ALL, *catalogue.OF_COMMANDS))


@pytest.mark.parametrize("option", ALL, ids=[option.key for option in ALL])
def test_the_default_of_every_option_can_be_parsed_and_is_allowed(option: Option) -> None:
    for file in (False, True):
        value = option.parse(option.default_in(file=file))
        if isinstance(value, int | float):
            assert option.allows(value)
        if option.choices:
            assert value in option.choices


def test_help_shows_every_field_and_every_flag_and_the_defaults_of_the_flags() -> None:
    text = commands.render_help()
    plain = " ".join(text.split())
    for option in ALL:
        if option.flag:
            dashes = "-" if option.flag == "v" else "--"
            assert any(line.strip().split(" ")[0] == f"{dashes}{option.flag}" for line in text.splitlines()), option.flag
        if option.flag and option.default not in ("", "false"):
            assert f"default {option.default}" in plain
        assert not option.field or option.field in plain
        assert " ".join(option.help.split()) in plain or not option.flag


def test_the_help_fits_a_terminal_and_has_a_star_after_flags_that_override_the_file() -> None:
    lines = commands.render_help().splitlines()
    assert max(map(len, lines)) <= 110
    assert "  --hostname-override NAME *  [hostnameOverride]" in lines
    assert "  --ipvs-scheduler NAME  [ipvs.scheduler]" in lines


@pytest.mark.parametrize("option", [option for option in catalogue.BY_KEY.values() if option.to], ids=lambda option: option.key)
def test_the_value_of_each_option_is_stored_in_an_attribute_of_the_configuration(option: Option) -> None:
    section, _, name = option.to.rpartition(".")
    if section == "timeouts":
        assert name in Timeouts._fields
    else:
        operator.attrgetter(option.to)(loading.from_flags())


def test_an_option_needs_a_restart_if_the_program_reads_it_only_at_startup() -> None:
    late = {option.to for option in catalogue.BY_KEY.values() if option.restart and option.field}
    assert late >= {"node_name", "translation.allowed_addresses", "source.manifests", "servers.health"}
    assert late.isdisjoint({"", "translation.scheduler", "logging.profiling"})
    assert {part for part in AT_START if not any(f"{one}.".startswith(f"{part}.") for one in late)} == set()
