"""What the configuration means to each part of the program."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon.loop.engine import EngineSettings
from ipvsproxy.kernel import host
from ipvsproxy.kernel.iptables import Program
from ipvsproxy.model.kernel import Timeouts
from ipvsproxy.model.net import Family, Network
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.store.mass_deletion import Guard
from ipvsproxy.translate import sysctls, view


class Choices(NamedTuple):
    """What the configuration means to the loop, to translation, to the reconciler."""

    settings: EngineSettings
    translation: view.Settings
    policy: Policy


def choices(config: Config, programs: Mapping[Family, Program], scheduler: str) -> Choices:
    """All of it, on this host; the rest as for ``translation_settings``."""
    return Choices(
        engine_settings(config, host.kernel_version(), host.processor_count()),
        translation_settings(config, {family: program.random_fully for family, program in programs.items()}, scheduler),
        policy(config, programs),
    )


def warnings(config: Config, families: Collection[Family]) -> Iterator[str]:
    """The fields of the configuration that leave out a family that is served, each with a sentence.

    These are the warnings of kube-proxy (checkBadConfig and checkBadIPConfig in cmd/kube-proxy/app/server.go), but for the one on
    ``nodePortAddresses`` that is unset, which is the default. Those on ``clusterCIDR`` and ``spec.podCIDRs`` are given where the
    Node is known.
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


def translation_settings(config: Config, random_fully: Mapping[Family, bool], scheduler: str) -> view.Settings:
    """For translation. ``random_fully`` has the families that are served, and whether their iptables knows that option.

    ``scheduler`` is the configured one, or what replaces it on a kernel that has not got it.
    """
    detect = config.detect_local
    by_bridge = detect.mode is view.LocalMode.BRIDGE_INTERFACE
    return view.Settings(
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
    )


def known_node_port_ranges(config: Config) -> tuple[Network, ...]:
    """Where node ports are served, as far as that is known without an API server: none where only the Node object tells it."""
    bind_address = config.bind_address
    if config.node_ports.primary_only and (bind_address is None or bind_address.is_unspecified):
        return ()
    return view.node_port_ranges(translation_settings(config, {}, ""), None)


def guard(config: Config) -> Guard:
    """For the store: a directory of manifests is believed, whatever it lacks."""
    return Guard(0 if config.source.manifests else config.source.mass_deletion_percent)


def policy(config: Config, families: Collection[Family]) -> Policy:
    """For the reconciler. ``families`` are those that are served."""
    ipvs = config.ipvs
    return Policy(drain_deadline_s=ipvs.drain_deadline_s, excluded=ipvs.excluded_networks, families=frozenset(families))


def engine_settings(config: Config, kernel_version: tuple[int, int], processors: int) -> EngineSettings:
    """For the loop."""
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
        sysctls=(
            *sysctls.ipvs_sysctls(kernel_version, strict_arp=ipvs.strict_arp),
            *sysctls.conntrack_sysctls(choices, processors),
        ),
        timeouts=timeouts if any(timeouts) else None,
    )
