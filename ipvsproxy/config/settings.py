"""The configuration as the program uses it: frozen, every text parsed, every default applied.

Durations are in seconds. Built by ``ipvsproxy.config.load``.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from ipvsproxy.config.given import Notice, Value
from ipvsproxy.model.annotations import ALL_ANNOTATIONS, Annotation
from ipvsproxy.model.kernel import ROUTE_PROTOCOL
from ipvsproxy.model.net import Address, Network, host_port
from ipvsproxy.model.rules import Backend
from ipvsproxy.translate.settings import Binding, LocalMode, TrafficScopes


class Command(enum.Enum):
    """The task of the process."""

    RUN = "run"
    INIT_ONLY = "init-only"
    CLEANUP = "cleanup"
    WRITE_CONFIG = "write-config"


class LogFormat(enum.StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class ListenAddress(NamedTuple):
    """The address and port on which a server listens."""

    address: Address
    port: int

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ipvs:
    """Programming of IPVS. ``sync_period_s`` is above 0; a timeout of 0 keeps the kernel's.

    Virtual servers with an address in ``excluded_networks`` are never removed. ``drain_deadline_s`` bounds how long the
    connections of a removed real server may last; 0 sets no bound. ``allowed_service_addresses`` are served even if they
    belong to the API server, the node or a range of pods. ``scope_bits`` are the bits of packet
    marks that ``traffic_scopes`` uses. ``annotations`` of Services and EndpointSlices are those that count.
    ``route_protocol`` is the protocol number of local routes of ours, with any ``binding``.
    ``rules_backend`` holds rules and sets.
    """

    scheduler: str = "rr"
    sync_period_s: float = 30
    min_sync_period_s: float = 1
    excluded_networks: tuple[Network, ...] = ()
    strict_arp: bool = False
    tcp_timeout_s: float = 0
    tcp_fin_timeout_s: float = 0
    udp_timeout_s: float = 0
    drain_deadline_s: float = 0
    drift_check_interval_s: float = 5
    allowed_service_addresses: tuple[Network, ...] = ()
    traffic_scopes: TrafficScopes = TrafficScopes.API
    scope_bits: int = 0x3FFF
    annotations: frozenset[Annotation] = ALL_ANNOTATIONS
    binding: Binding = Binding.ADDRESSES
    route_protocol: int = ROUTE_PROTOCOL
    rules_backend: Backend = Backend.IPTABLES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Masquerade:
    """Masquerading. ``bit`` of the packet mark is 0..31; ``everything`` masquerades all traffic to cluster IPs."""

    bit: int = 14
    everything: bool = False

    @property
    def mark(self) -> int:
        """The packet mark that requests masquerading."""
        return 1 << self.bit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetectLocal:
    """How traffic of local pods is recognised.

    ``cluster_networks`` holds at most one range of each family and applies in mode ClusterCIDR only. Each name applies in
    its own mode only, where it is not empty.
    """

    mode: LocalMode = LocalMode.CLUSTER_CIDR
    cluster_networks: tuple[Network, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """The node addresses that serve node ports: the primary ones, or those in ``networks``; with neither, all."""

    networks: tuple[Network, ...] = ()
    primary_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conntrack:
    """Connection tracking. 0 as ``max_per_core`` or a timeout keeps the kernel's. ``minimum`` is that of the total limit."""

    max_per_core: int = 32768
    minimum: int = 131072
    tcp_established_timeout_s: float = 86400
    tcp_close_wait_timeout_s: float = 3600
    tcp_be_liberal: bool = False
    udp_timeout_s: float = 0
    udp_stream_timeout_s: float = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSource:
    """Where Services come from: the directory ``manifests`` if not empty, else an API server.

    ``kubeconfig`` is a file, ``api_server`` a URL that replaces the kubeconfig's. With neither: the pod's service account.
    ``mass_deletion_percent``: a list that lacks more than this share of all objects needs a second one; 0 accepts every list.
    """

    manifests: str = ""
    kubeconfig: str = ""
    api_server: str = ""
    mass_deletion_percent: int = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """HTTP servers; None turns one off. ``bind_hard_fail``: an address that cannot be bound ends the process.

    A watch without contact for ``stale_watch_s`` is stale (0: never); ``stale_watch_unhealthy``: the health checks of load
    balancers then fail. ``profiling``: HTTP requests may change the verbosity of the log. ``ui``: the metrics
    server shows the node as a page.
    """

    health: ListenAddress | None
    metrics: ListenAddress | None
    bind_hard_fail: bool = False
    stale_watch_s: float = 900
    stale_watch_unhealthy: bool = False
    profiling: bool = False
    ui: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMetrics:
    """Traffic by Service port, and ``of_endpoints``. ``limit`` bounds how many of each have their own series; 0: none."""

    limit: int = 20_000
    of_endpoints: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logging:
    """Logging; ``verbosity`` is klog's, 0 the default level."""

    format: LogFormat = LogFormat.TEXT
    verbosity: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that flags and file say.

    ``node_name`` is the override or the host's name, in lower case. An unspecified ``bind_address`` (0.0.0.0, ::)
    leaves the choice of the primary address to the Node object. ``oom_score_adj`` is -1000..1000. ``config_file`` and
    ``write_config_to`` are paths, empty when not given.

    ``without_effect`` names the options that differ from their default and have no effect here; ``notices`` tell the
    operator about accepted options. ``values`` holds every setting that a file can hold, by its dotted path, for writing a
    file. Two configurations that differ only in these three are equal.
    """

    node_name: str
    servers: Servers
    bind_address: Address
    command: Command = Command.RUN
    config_file: str = ""
    write_config_to: str = ""
    source: ServiceSource = ServiceSource()
    ipvs: Ipvs = Ipvs()
    masquerade: Masquerade = Masquerade()
    detect_local: DetectLocal = DetectLocal()
    node_ports: NodePorts = NodePorts()
    conntrack: Conntrack = Conntrack()
    oom_score_adj: int = -999
    traffic_metrics: TrafficMetrics = TrafficMetrics()
    logging: Logging = Logging()
    external_addresses_served: bool = True
    without_effect: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    notices: tuple[Notice, ...] = dataclasses.field(default=(), compare=False)
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict, compare=False)

    def with_notices(self, notices: Iterable[Notice]) -> Self:
        """This configuration with these notices before its own."""
        return dataclasses.replace(self, notices=(*notices, *self.notices))
