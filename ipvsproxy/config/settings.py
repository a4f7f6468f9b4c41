"""The configuration as the program uses it: immutable, with every text parsed and every default applied.

Durations are in seconds. ``ipvsproxy.config.load`` creates it.
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
from ipvsproxy.translate.translation_settings import (
    TUNNEL_MODULES,
    ConntrackChoices,
    DirectReturn,
    Settings,
    conntrack_sysctls,
    direct_return_sysctls,
    ipvs_sysctls,
)


class Format(enum.StrEnum):
    """The format of log lines or of a command's output: text for people, or JSON for programs."""

    TEXT = "text"
    JSON = "json"


class Sort(enum.StrEnum):
    """The order in which ``top`` shows Services: by traffic with the busiest Service first, by problems, or by name."""

    NAME = "name"
    CONNECTIONS = "connections"
    PACKETS = "packets"
    BYTES = "bytes"
    PROBLEMS = "problems"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """What ``top`` shows, and how often ``top`` refreshes its screen.

    An empty ``server`` means the metrics server that the configuration describes.
    """

    once: bool = False
    interval_s: float = 2.0
    sort: Sort = Sort.CONNECTIONS
    filter: str = ""
    server: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The pods that ``fleet`` queries: their namespace, and the selector for their labels.

    If ``pods`` names pods, ``fleet`` queries only these pods, and does not list pods by their labels.
    """

    namespace: str = "kube-system"
    selector: str = "app.kubernetes.io/name=ipvsproxy"
    pods: Sequence[str] = ()


class ListenAddress(NamedTuple):
    """The address and port on which a server listens."""

    address: Address
    port: int

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of the event loop.

    ``audit_interval_s`` is the time between two regular audits, and ``drift_check_interval_s`` is the time between two regular
    polls of the whole kernel state. Polls of single kinds of kernel objects happen every few seconds. ``sysctls`` and
    ``timeouts`` are the values that the kernel should have.
    """

    min_interval_s: float
    audit_interval_s: float
    drift_check_interval_s: float
    node_name: str = ""
    sysctls: tuple[Sysctl, ...] = ()
    timeouts: Timeouts | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """The backend that holds rules and sets, and the protocol number of the local routes that ipvsproxy adds.

    ``direct_return``: whether this node takes part in direct return between nodes.
    """

    rules_backend: Backend = Backend.IPTABLES
    route_protocol: int = ROUTE_PROTOCOL
    direct_return: DirectReturn = DirectReturn.OFF

    @property
    def modules(self) -> Sequence[str]:
        """The kernel modules that are needed in addition to the modules of IPVS and of the backend."""
        return tuple(TUNNEL_MODULES.values()) if self.direct_return is DirectReturn.ON else ()


class Choices(NamedTuple):
    """The configuration for this host: the settings of the event loop, of the translation and of the reconciler."""

    settings: EngineSettings
    translation: Settings
    policy: Policy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSource:
    """Where Services come from: the directory ``manifests`` if it is not empty, otherwise an API server.

    ``kubeconfig`` is the path of a file, and ``api_server`` is a URL that replaces the URL in the kubeconfig. If ``kubeconfig``
    and ``api_server`` are empty, the pod's service account is used. ``mass_deletion_percent``: if a larger percentage of all
    objects is absent from a list, a second list must confirm the absence; 0 accepts every list.
    """

    manifests: str = ""
    kubeconfig: str = ""
    api_server: str = ""
    mass_deletion_percent: int = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The HTTP servers; None means that a server is turned off.

    ``bind_hard_fail``: if an address cannot be bound, the process ends. A watch is stale after ``stale_watch_s`` seconds without
    contact with the API server; 0 means that no watch becomes stale. With ``stale_watch_unhealthy``, the health checks of load
    balancers fail while a watch is stale. ``ui``: the metrics server also serves a web page about the node. At most
    ``service_metrics_limit`` Service ports have their own series of traffic metrics (0: none). With ``endpoint_metrics``,
    endpoints have traffic metrics, too.
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
    """Settings of the log; ``verbosity`` is klog's verbosity, where 0 is the default level.

    If ``profiling`` is true, HTTP requests may change the verbosity.
    """

    format: Format = Format.TEXT
    verbosity: int = 0
    profiling: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings from the flags and the configuration file.

    ``translation``, ``policy`` and ``engine`` do not depend on the host; ``on_host`` adds the settings that depend on the host.
    If the bind address is unspecified (0.0.0.0 or ::), the Node object determines the primary address. ``node_name``, in lower
    case, is the value of ``--hostname-override`` or, if that is empty, the host's name. ``oom_score_adj`` is a number from -1000
    to 1000. ``config_file`` and ``write_config_to`` are paths; an empty path means that the flag was not given.
    ``write_config_to``, ``cleanup`` and ``init_only`` each limit the process to one task. If several of ``write_config_to``,
    ``cleanup`` and ``init_only`` are given, only the first option in this order has an effect. ``dry_run``, ``output``, ``only``,
    ``top`` and ``fleet`` are options of commands; a file cannot contain these options. If ``only`` is ``own``, ``cleanup``
    removes only the objects that kube-proxy does not know.

    ``without_effect`` names the given options that have no effect in ipvsproxy; ``notices`` are messages for the operator about
    accepted options. ``values`` maps the dotted path of each field of a file to its value, and is used to write a file. Two
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
        """Whether the output of a command is JSON."""
        return self.output is Format.JSON

    @property
    def guard_percent(self) -> int:
        """The percentage of all objects that may be absent from a list; 0 means that any percentage may be absent.

        Lists from a directory of manifests are always trusted.
        """
        return 0 if self.source.manifests else self.source.mass_deletion_percent

    @property
    def takes_direct_return(self) -> bool:
        """Whether this node takes part in direct return."""
        return self.drivers.direct_return is DirectReturn.ON

    def sysctls(self, kernel_version: tuple[int, int], processors: int) -> tuple[Sysctl, ...]:
        """The desired sysctls on a host with this kernel version and this number of processors."""
        return (
            *ipvs_sysctls(kernel_version, strict_arp=self.strict_arp),
            *(direct_return_sysctls(self.translation.families) if self.takes_direct_return else ()),
            *self.ipvs_sysctls,
            *conntrack_sysctls(self.conntrack, processors),
        )

    def on_host(
        self, random_fully: Mapping[Family, bool], scheduler: str, backend: Backend, kernel_sysctls: tuple[Sysctl, ...]
    ) -> Choices:
        """The settings for a host.

        ``random_fully`` says for each served IP family whether masquerade rules can choose the source port fully at random.

        ``scheduler`` is the configured scheduler, or another scheduler if the kernel lacks the configured scheduler.
        ``backend`` is the backend that holds the rules, and is never ``AUTO``.
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
        """A copy of this configuration in which the given attributes have their values from ``before``.

        Attributes are dotted paths (``Option.to``).
        """
        kept = self
        for attribute in attributes:
            section, _, name = attribute.rpartition(".")
            owner: Any = getattr(kept, section) if section else kept
            changed = dataclasses.replace(owner, **{name: operator.attrgetter(attribute)(before)})
            kept = dataclasses.replace(kept, **{section: changed}) if section else changed
        return kept

    def warnings(self, families: Collection[Family]) -> Iterator[str]:
        """Yields a sentence for each field of the configuration whose addresses do not fit the IP families that this node serves.

        The sentences are kube-proxy's warnings (checkBadConfig and checkBadIPConfig in cmd/kube-proxy/app/server.go), with two
        differences. An unset ``nodePortAddresses`` causes no warning, because unset is the default. If ``nodePortAddresses`` has
        only loopback addresses, there is an additional warning. The module ``translator`` warns about ``clusterCIDR`` and
        ``spec.podCIDRs``, because this method does not know the Node. If ``nodePortAddresses`` is the word ``primary``, this
        method gives no warning about the field, because the method does not know which IP families the word excludes.
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
