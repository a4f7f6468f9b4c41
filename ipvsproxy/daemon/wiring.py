"""Converts the configuration into the settings of each part of the program."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.loop.engine import EngineSettings
from ipvsproxy.kernel import host
from ipvsproxy.kernel.iptables.driver import Program
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.rules import Backend
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.store.mass_deletion import Guard
from ipvsproxy.translate.node import sysctls, view
from ipvsproxy.translate.settings import LocalMode, Settings


class Choices(NamedTuple):
    """The settings of the loop, of translation and of the reconciler."""

    settings: EngineSettings
    translation: Settings
    policy: Policy


def choices(config: Config, programs: Mapping[Family, Program], scheduler: str) -> Choices:
    """The settings on this host. ``scheduler`` is as for ``translation_settings``."""
    return Choices(
        engine_settings(config, host.kernel_version(), host.processor_count()),
        translation_settings(
            config,
            {family: program.random_fully for family, program in programs.items()},
            scheduler,
            backend=next((program.backend for program in programs.values()), Backend.IPTABLES),
        ),
        policy(config, programs),
    )


def warnings(config: Config, families: Collection[Family]) -> Iterator[str]:
    """A sentence for each field of the configuration that leaves out a served family.

    These are kube-proxy's warnings (checkBadConfig and checkBadIPConfig in cmd/kube-proxy/app/server.go), except for the one
    about an unset ``nodePortAddresses``, which is the default. The module that knows the Node warns about ``clusterCIDR`` and
    ``spec.podCIDRs``.
    """
    ports = config.node_ports
    for field, networks in (("nodePortAddresses", ports.networks), ("ipvs.excludeCIDRs", config.ipvs.excluded_networks)):
        missing = [family.label for family in families if family not in {network.family for network in networks}]
        if networks and missing and (field == "nodePortAddresses" or len(missing) == len(families)):
            yield f"{field} has no range of {' and '.join(missing)}, which this node serves"
    for field, listen in (("healthzBindAddress", config.servers.health), ("metricsBindAddress", config.servers.metrics)):
        address = listen.address if listen else None
        if address and not address.is_unspecified and not address.is_loopback and address.family not in families:
            yield f"{field} is an address of {address.family.label}, which this node does not serve"


def translation_settings(
    config: Config, random_fully: Mapping[Family, bool], scheduler: str, *, backend: Backend = Backend.IPTABLES
) -> Settings:
    """Settings of translation. ``random_fully`` has the served families, and whether their rules support that option.

    ``scheduler`` is the configured one, or its replacement on a kernel without it. ``backend`` (never ``AUTO``) holds the rules.
    """
    detect = config.detect_local
    by_bridge = detect.mode is LocalMode.BRIDGE_INTERFACE
    return Settings(
        scheduler=scheduler,
        masquerade_all=config.masquerade.everything,
        masquerade_bit=config.masquerade.bit,
        random_fully=random_fully,
        detect_local=detect.mode,
        cluster_networks=detect.cluster_networks,
        local_interface=detect.bridge_interface if by_bridge else detect.interface_name_prefix,
        node_port_networks=config.node_ports.networks,
        node_port_primary=config.node_ports.primary_only,
        bind_address=config.bind_address,
        external_addresses=config.external_addresses_served,
        allowed_addresses=config.ipvs.allowed_service_addresses,
        families=frozenset(random_fully),
        scopes=config.ipvs.traffic_scopes,
        scope_bits=config.ipvs.scope_bits,
        annotations=config.ipvs.annotations,
        binding=config.ipvs.binding,
        backend=backend,
    )


def known_node_port_ranges(config: Config) -> tuple[Network, ...]:
    """The ranges of addresses with node ports that are known without an API server: none if they depend on the Node object."""
    bind_address = config.bind_address
    if config.node_ports.primary_only and (bind_address is None or bind_address.is_unspecified):
        return ()
    return view.node_port_ranges(translation_settings(config, {}, ""), None)


def guard(config: Config) -> Guard:
    """The guard of the store. It never doubts a directory of manifests."""
    return Guard(0 if config.source.manifests else config.source.mass_deletion_percent)


def policy(config: Config, families: Collection[Family]) -> Policy:
    """The policy of the reconciler. ``families`` are the served ones."""
    ipvs = config.ipvs
    return Policy(
        drain_deadline_s=ipvs.drain_deadline_s,
        excluded=ipvs.excluded_networks,
        families=frozenset(families),
        scope_bits=ipvs.scope_bits,
    )


def engine_settings(config: Config, kernel_version: tuple[int, int], processors: int) -> EngineSettings:
    """Settings of the loop."""
    conntrack, ipvs = config.conntrack, config.ipvs
    choices = sysctls.ConntrackChoices(
        max_per_core=conntrack.max_per_core,
        minimum=conntrack.minimum,
        tcp_established_timeout_s=int(conntrack.tcp_established_timeout_s),
        tcp_close_wait_timeout_s=int(conntrack.tcp_close_wait_timeout_s),
        tcp_be_liberal=conntrack.tcp_be_liberal,
        udp_timeout_s=int(conntrack.udp_timeout_s),
        udp_stream_timeout_s=int(conntrack.udp_stream_timeout_s),
    )
    timeouts = Timeouts(int(ipvs.tcp_timeout_s), int(ipvs.tcp_fin_timeout_s), int(ipvs.udp_timeout_s))
    return EngineSettings(
        node_name=config.node_name,
        min_interval_s=ipvs.min_sync_period_s,
        audit_interval_s=ipvs.sync_period_s,
        drift_check_interval_s=ipvs.drift_check_interval_s,
        sysctls=(
            *sysctls.ipvs_sysctls(kernel_version, strict_arp=ipvs.strict_arp),
            *sysctls.conntrack_sysctls(choices, processors),
        ),
        timeouts=timeouts if any(timeouts) else None,
    )
