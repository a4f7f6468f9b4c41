"""The configuration as the program uses it: frozen, every text parsed, every default applied.

Durations are in seconds. Built by ``ipvsproxy.config.load``.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Self

from ipvsproxy.config.given import Notice, Value
from ipvsproxy.model.net import Address, Network, host_port
from ipvsproxy.translate.view import LocalMode, TrafficScopes


class Command(enum.Enum):
    """What the process is started for."""

    RUN = "run"
    INIT_ONLY = "init-only"
    CLEANUP = "cleanup"
    WRITE_CONFIG = "write-config"


class LogFormat(enum.StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class ListenAddress(NamedTuple):
    """Where a server listens."""

    address: Address
    port: int

    def __str__(self) -> str:
        return host_port(self.address, self.port)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ipvs:
    """Programming of IPVS. ``sync_period_s`` is above 0; a timeout of 0 leaves the kernel's as it is.

    ``excluded_networks`` hold addresses whose virtual servers are never removed. ``drain_deadline_s`` bounds the time that
    the connections of a removed real server have; 0 does not. ``allowed_service_addresses`` are served though they are the
    API server's, the node's or in a range of pods. ``scope_bits`` are the bits of packet marks that ``traffic_scopes`` uses.
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
    allowed_service_addresses: tuple[Network, ...] = ()
    traffic_scopes: TrafficScopes = TrafficScopes.KUBE_PROXY
    scope_bits: int = 0x3FFF


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Masquerade:
    """Masquerading. ``bit`` is that of the packet mark, 0..31; ``everything`` masquerades all traffic to cluster IPs."""

    bit: int = 14
    everything: bool = False

    @property
    def mark(self) -> int:
        """The packet mark that asks for masquerading."""
        return 1 << self.bit


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DetectLocal:
    """How traffic of local pods is told.

    ``cluster_networks`` holds at most one range of each family and counts in mode ClusterCIDR only, as the names count in
    theirs, where they are not empty.
    """

    mode: LocalMode = LocalMode.CLUSTER_CIDR
    cluster_networks: tuple[Network, ...] = ()
    bridge_interface: str = ""
    interface_name_prefix: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodePorts:
    """Where node ports answer: on the node's primary addresses, or in these ranges, or, without either, everywhere."""

    networks: tuple[Network, ...] = ()
    primary_only: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conntrack:
    """Connection tracking. ``max_per_core`` and each timeout: 0 leaves the kernel's as it is. ``minimum`` is of the total."""

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
    ``mass_deletion_percent`` is how much of all one list may lack and be believed; 0 believes every list.
    """

    manifests: str = ""
    kubeconfig: str = ""
    api_server: str = ""
    mass_deletion_percent: int = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """HTTP servers; None turns one off. ``bind_hard_fail``: an address that cannot be bound ends the process.

    A watch without contact for ``stale_watch_s`` is stale (0: never); ``stale_watch_unhealthy``: load balancers are told.
    ``profiling``: the verbosity of the log may be changed over HTTP.
    """

    health: ListenAddress | None
    metrics: ListenAddress | None
    bind_hard_fail: bool = False
    stale_watch_s: float = 900
    stale_watch_unhealthy: bool = False
    profiling: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrafficMetrics:
    """Traffic by Service port, and ``of_endpoints``. ``limit`` bounds how many of either have series of their own; 0: none."""

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

    ``node_name`` is the override, or else the host's name, in lower case. An unspecified ``bind_address`` (0.0.0.0, ::)
    leaves the choice of the primary address to the Node object. ``oom_score_adj`` is -1000..1000. ``config_file`` and
    ``write_config_to`` are paths, empty when not given.

    ``without_effect`` names what was set to other than its default and means nothing here; ``notices`` is what was accepted
    but deserves a word. ``values`` holds every setting that a file can hold, by its dotted path, for writing it back; two
    configurations that differ only in these three are equal.
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
        """The same, with these notices before its own."""
        return dataclasses.replace(self, notices=(*notices, *self.notices))
