"""The configuration as the program uses it: frozen, every text parsed, every default applied.

Durations are in seconds. Built by ``ipvsproxy.config.load``.
"""

import dataclasses
import enum
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from ipvsproxy.config.option import Value
from ipvsproxy.model.kernel import ROUTE_PROTOCOL, Sysctl, Timeouts
from ipvsproxy.model.net import Address, Family, host_port
from ipvsproxy.model.rules import Backend
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.translate.settings import (
    TUNNEL_MODULES,
    ConntrackChoices,
    DirectReturn,
    Settings,
    conntrack_sysctls,
    direct_return_sysctls,
    ipvs_sysctls,
)


class Format(enum.StrEnum):
    """The format of log lines, or of a command's output: for people, or for programs."""

    TEXT = "text"
    JSON = "json"


class Sort(enum.StrEnum):
    """What ``top`` sorts Services by: the busiest first, or by name."""

    NAME = "name"
    CONNECTIONS = "connections"
    PACKETS = "packets"
    BYTES = "bytes"
    PROBLEMS = "problems"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What ``top`` shows and how often. An empty ``server`` means the metrics server of the configuration."""

    once: bool = False
    interval_s: float = 2.0
    sort: Sort = Sort.CONNECTIONS
    filter: str = ""
    server: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The pods that ``fleet`` asks: their namespace, and the selector of their labels."""

    namespace: str = "kube-system"
    selector: str = "app.kubernetes.io/name=ipvsproxy"


class ListenAddress(NamedTuple):
    """The address and port on which a server listens."""

    address: Address
    port: int

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the loop runs.

    ``audit_interval_s`` is the time between two regular audits, ``drift_check_interval_s`` the time between two regular polls of
    everything. Polls of a part of the kernel come every few seconds. ``sysctls`` and ``timeouts`` are the desired values.
    """

    min_interval_s: float
    audit_interval_s: float
    drift_check_interval_s: float
    node_name: str = ""
    sysctls: tuple[Sysctl, ...] = ()
    timeouts: Timeouts | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """The backend that holds rules and sets, and the protocol number of our local routes, whichever binding is used.

    ``direct_return``: whether this node takes part in direct return.
    """

    rules_backend: Backend = Backend.IPTABLES
    route_protocol: int = ROUTE_PROTOCOL
    direct_return: DirectReturn = DirectReturn.OFF

    @property
    def modules(self) -> Sequence[str]:
        """The modules that are needed beside those of IPVS and the backend."""
        return tuple(TUNNEL_MODULES.values()) if self.direct_return is DirectReturn.ON else ()


class Choices(NamedTuple):
    """The configuration on this host: the settings of the loop, of translation and of the reconciler."""

    settings: EngineSettings
    translation: Settings
    policy: Policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSource:
    """Where Services come from: the directory ``manifests`` if not empty, else an API server.

    ``kubeconfig`` is a file, ``api_server`` a URL that replaces the kubeconfig's. Without either, the pod's service account is
    used. ``mass_deletion_percent``: a list that lacks more than this share of all objects needs a second one; 0 accepts every
    list.
    """

    manifests: str = ""
    kubeconfig: str = ""
    api_server: str = ""
    mass_deletion_percent: int = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """HTTP servers; None turns one off. ``bind_hard_fail``: an address that cannot be bound ends the process.

    A watch without contact for ``stale_watch_s`` is stale (0: never); ``stale_watch_unhealthy``: the health checks of load
    balancers then fail. ``ui``: the metrics server shows the node as a page. Service ports have traffic metrics, at most
    ``service_metrics_limit`` of them (0: none) series of their own; with ``endpoint_metrics``, endpoints have traffic metrics,
    too.
    """

    health: ListenAddress | None
    metrics: ListenAddress | None
    bind_hard_fail: bool = False
    stale_watch_s: float = 900
    stale_watch_unhealthy: bool = False
    ui: bool = True
    service_metrics_limit: int = 20_000
    endpoint_metrics: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """Logging; ``verbosity`` is klog's, 0 the default level. ``profiling``: HTTP requests may change the verbosity."""

    format: Format = Format.TEXT
    verbosity: int = 0
    profiling: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of flags and file.

    ``translation``, ``policy`` and ``engine`` are as for any host; ``on_host`` completes them. An unspecified bind address
    (0.0.0.0, ::) leaves the choice of the primary address to the Node object. ``node_name`` is the override or the host's name,
    in lower case. ``oom_score_adj`` is -1000..1000. ``config_file`` and ``write_config_to`` are paths, empty when not given. With
    ``write_config_to``, ``cleanup`` or ``init_only`` (the first one counts), the process does only that task. ``dry_run``,
    ``output``, ``only``, ``top`` and ``fleet`` belong to commands: they are no settings, and no file has them. If ``only`` is
    ``own``, ``cleanup`` removes only the objects that kube-proxy does not know.

    ``without_effect`` names the options that differ from their default and have no effect here; ``notices`` tell the operator
    about accepted options. ``values`` holds every setting that a file can hold, by its dotted path, for writing a file. Two
    configurations that differ only in ``values``, ``without_effect`` and ``notices`` are equal.
    """

    node_name: str
    servers: Servers
    translation: Settings
    policy: Policy
    engine: EngineSettings
    drivers: Drivers
    conntrack: ConntrackChoices
    strict_arp: bool
    ipvs_sysctls: tuple[Sysctl, ...] = ()
    config_file: str = ""
    write_config_to: str = ""
    cleanup: bool = False
    init_only: bool = False
    source: ServiceSource = ServiceSource()
    oom_score_adj: int = -999
    logging: Logging = Logging()
    dry_run: bool = False
    output: Format = Format.TEXT
    only: str = ""
    top: TopOptions = TopOptions()
    fleet: FleetOptions = FleetOptions()
    without_effect: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def as_json(self) -> bool:
        """Whether a command prints JSON."""
        return self.output is Format.JSON

    @property
    def guard_percent(self) -> int:
        """The share of objects that a list may lack; 0 accepts any share.

        Lists from a directory of manifests are never doubted.
        """
        return 0 if self.source.manifests else self.source.mass_deletion_percent

    @property
    def takes_direct_return(self) -> bool:
        """Whether this node takes part in direct return."""
        return self.drivers.direct_return is DirectReturn.ON

    def sysctls(self, kernel_version: tuple[int, int], processors: int) -> tuple[Sysctl, ...]:
        """The desired settings of the kernel on a host with these properties."""
        return (
            *ipvs_sysctls(kernel_version, strict_arp=self.strict_arp),
            *(direct_return_sysctls(self.translation.families) if self.takes_direct_return else ()),
            *self.ipvs_sysctls,
            *conntrack_sysctls(self.conntrack, processors),
        )

    def on_host(
        self, random_fully: Mapping[Family, bool], scheduler: str, backend: Backend, kernel_sysctls: tuple[Sysctl, ...]
    ) -> Choices:
        """The settings on a host. ``random_fully`` has the served families, and whether their rules support that option.

        ``scheduler`` is the configured one, or its replacement on a kernel without it. ``backend`` (never ``AUTO``) holds the
        rules.
        """
        families = frozenset(random_fully)
        return Choices(
            dataclasses.replace(self.engine, node_name=self.node_name, sysctls=kernel_sysctls),
            dataclasses.replace(
                self.translation,
                scheduler=scheduler,
                random_fully=random_fully,
                families=families,
                backend=backend,
                direct_return=self.takes_direct_return,
            ),
            dataclasses.replace(self.policy, families=families),
        )

    def keeping(self, before: Self, attributes: Iterable[str]) -> Self:
        """This configuration, but with the former values of the given attributes, which are dotted paths (``Option.to``)."""
        kept = self
        for attribute in attributes:
            section, _, name = attribute.rpartition(".")
            owner: Any = getattr(kept, section) if section else kept
            changed = dataclasses.replace(owner, **{name: operator.attrgetter(attribute)(before)})
            kept = dataclasses.replace(kept, **{section: changed}) if section else changed
        return kept

    def warnings(self, families: Collection[Family]) -> Iterator[str]:
        """A sentence for each field of the configuration that leaves out a served family.

        The sentences are kube-proxy's warnings (checkBadConfig and checkBadIPConfig in cmd/kube-proxy/app/server.go), except for
        the one about an unset ``nodePortAddresses``, which is the default, and one more warning about loopback addresses alone.
        The module that knows the Node warns about ``clusterCIDR`` and ``spec.podCIDRs``; what ``primary`` leaves out is unknown
        here.
        """
        node_ports = () if self.translation.node_port_primary else self.translation.node_port_networks
        for field, networks in (("nodePortAddresses", node_ports), ("ipvs.excludeCIDRs", self.policy.excluded)):
            missing = [family.label for family in families if family not in {network.family for network in networks}]
            if networks and missing and (field == "nodePortAddresses" or len(missing) == len(families)):
                yield f"{field} has no range of {' and '.join(missing)}, which this node serves"
        for family in families:
            ranges = [network for network in node_ports if network.family is family]
            if ranges and all(network.address.is_loopback for network in ranges):
                yield f"nodePortAddresses has only loopback addresses of {family.label}, where IPVS serves no node ports"
        for field, listen in (("healthzBindAddress", self.servers.health), ("metricsBindAddress", self.servers.metrics)):
            address = listen.address if listen else None
            if address and not address.is_unspecified and not address.is_loopback and address.family not in families:
                yield f"{field} is an address of {address.family.label}, which this node does not serve"
