"""Which metrics there are: name, type, meaning, labels and buckets of each.

A new one is declared here, and set where its figure is known; docs/metrics.md is written from these declarations.
kube-proxy's own are those of pkg/proxy/metrics in kubernetes/kubernetes, and of client-go.
"""

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ipvsproxy.daemon.metrics.histogram import FAST_S, REQUEST_S, SLOW_S
from ipvsproxy.model.kind import DriverName
from ipvsproxy.model.service import ObjectKind

POLICIES = ("internal", "external")
NETLINK_DRIVERS = (DriverName.IPVS, DriverName.IPSET, DriverName.ADDRESSES, DriverName.CONNTRACK)
PHASES = ("waiting", "observe", "translate", "apply")
BY_FAMILY = ("ip_family",)
_BY_PORT = ("namespace", "service", "port", "protocol")
_BY_ENDPOINT = (*_BY_PORT, "endpoint")
_SYNC = "kubeproxy_sync_proxy_rules"


class Type(enum.Enum):
    """As the text format has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric: its series differ in the values of its labels.

    ``bounds`` are the upper bounds of a histogram's buckets. ``at_zero`` are label values whose series are there from the start.
    ``is_late``: it is not on the page before it has a value, because zero would be a statement, too.
    """

    name: str
    type: Type
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()
    at_zero: Collection[tuple[str, ...]] = ()
    is_late: bool = False


def _counter(name: str, meaning: str, *labels: str, at_zero: Collection[tuple[str, ...]] = ()) -> Metric:
    return Metric(name, Type.COUNTER, meaning, labels, at_zero=at_zero)


def _gauge(name: str, meaning: str, *labels: str, is_late: bool = False) -> Metric:
    return Metric(name, Type.GAUGE, meaning, labels, is_late=is_late)


def _histogram(
    name: str, meaning: str, bounds: Sequence[float], *labels: str, at_zero: Collection[tuple[str, ...]] = ()
) -> Metric:
    return Metric(name, Type.HISTOGRAM, meaning, labels, bounds, at_zero)


# Recorded when something happens. kube-proxy's, about syncs.

SYNC_DURATION = _histogram(f"{_SYNC}_duration_seconds", "How long a sync took.", FAST_S, *BY_FAMILY)
PROGRAMMING_DURATION = _histogram(
    "kubeproxy_network_programming_duration_seconds",
    "From a change of endpoints, by its annotation, until it was programmed.",
    SLOW_S,
    *BY_FAMILY,
)
LAST_SYNC = _gauge(f"{_SYNC}_last_timestamp_seconds", "When a sync was last complete.", *BY_FAMILY)
LAST_QUEUED = _gauge(f"{_SYNC}_last_queued_timestamp_seconds", "When a sync was last asked for.", *BY_FAMILY)
RESTORE_FAILURES = _counter(f"{_SYNC}_iptables_restore_failures_total", "Rules that could not be written.", *BY_FAMILY)
NO_LOCAL_ENDPOINTS = _gauge(
    f"{_SYNC}_no_local_endpoints_total",
    "Services with a Local traffic policy whose endpoints are all on other nodes.",
    "traffic_policy",
    "ip_family",
)
SERVICE_CHANGES = _counter(f"{_SYNC}_service_changes_total", "Changes of Services.")
ENDPOINT_CHANGES = _counter(f"{_SYNC}_endpoint_changes_total", "Changes of EndpointSlices.")
CONNTRACK_DURATION = _histogram(
    "kubeproxy_conntrack_reconciler_sync_duration_seconds", "How long the cleaning of tracked flows took.", FAST_S, *BY_FAMILY
)
DELETED_FLOWS = _counter("kubeproxy_conntrack_reconciler_deleted_entries_total", "Tracked flows removed.", *BY_FAMILY)

# kube-proxy's, about requests: for its health, and its own to the API server.

_CODES = (("200",), ("503",))
HEALTHZ = _counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", "code", at_zero=_CODES)
LIVEZ = _counter("kubeproxy_proxy_livez_total", "Answers of /livez.", "code", at_zero=_CODES)
REQUESTS = _counter("rest_client_requests_total", "Requests to the API server.", "code", "host", "method")
REQUEST_DURATION = _histogram(
    "rest_client_request_duration_seconds", "Until the API server began to answer.", REQUEST_S, "host", "verb"
)

# What kube-proxy does not tell.

PHASE_DURATION = _histogram(
    "ipvsproxy_sync_phase_duration_seconds",
    "What a sync spent its time with; waiting is that of its oldest change, before it began.",
    FAST_S,
    "phase",
    at_zero=[(phase,) for phase in PHASES],
)
APPLY_DURATION = _histogram(
    "ipvsproxy_apply_duration_seconds", "How long a run of operations took that went to one driver.", FAST_S, "driver"
)
NETLINK_BATCHES = _counter(
    "ipvsproxy_netlink_batches_total",
    "Runs of operations that went to one driver by netlink, in as few system calls as they fit into.",
    "driver",
    at_zero=[(driver,) for driver in NETLINK_DRIVERS],
)
NETLINK_ERRORS = _counter(
    "ipvsproxy_netlink_errors_total",
    "Operations that the kernel refused by netlink, or did not answer, by the name of the error number.",
    "driver",
    "error",
)
OPERATIONS = _counter("ipvsproxy_operations_total", "Operations on the kernel.", "verb", "kind", "outcome")
SURPRISES = _counter("ipvsproxy_surprises_total", "Operations that found the kernel otherwise than believed.")
INVALID_OBJECTS = _counter(
    "ipvsproxy_invalid_objects_total",
    "Changed objects, or parts of them, that break the API's rules and are not used.",
    "kind",
    "extent",
    at_zero=[(kind.value, extent) for kind in ObjectKind for extent in ("object", "part")],
)
WATCH_RESTARTS = _counter("ipvsproxy_watch_restarts_total", "Lists and watches that were started again.", "kind", "reason")
EVENTS = _counter(
    "ipvsproxy_events_total",
    "Kubernetes events: written, not taken, or too many.",
    "outcome",
    at_zero=[("posted",), ("failed",), ("dropped",)],
)
CONFIG_IN_FORCE = _gauge(
    "ipvsproxy_config_in_force",
    "Whether the configuration file, as it was last read, is in force, but for what needs a restart.",
)
BUILD_INFO = _gauge("ipvsproxy_build_info", "Version of this program.", "version", "python_version")
DRY_RUN_DIFFERENCES = _gauge(
    "ipvsproxy_dry_run_differences",
    "Kernel objects that a run would change, when the kernel was last read.",
    "kind",
    is_late=True,
)
DRY_RUN_LAST_LOOK = _gauge("ipvsproxy_dry_run_last_look_timestamp_seconds", "When a dry run last read the kernel.", is_late=True)

# Counted from the tables when somebody asks.

SERVICE_CHANGES_PENDING = _gauge(f"{_SYNC}_service_changes_pending", "Changes of services that no sync has taken yet.")
ENDPOINT_CHANGES_PENDING = _gauge(f"{_SYNC}_endpoint_changes_pending", "Changes of endpoints that no sync has taken yet.")
OLDEST_CHANGE_AGE = _gauge("ipvsproxy_oldest_change_age_seconds", "Age of the oldest change that is not in force.")
UNREADABLE_PARTS = _gauge(
    "ipvsproxy_unreadable_parts", "Parts of the kernel that cannot be read: nothing of them is removed meanwhile."
)
LEFTOVER_RULES = _gauge(
    "ipvsproxy_leftover_rules",
    "Whether rules of kube-proxy's iptables mode, or of ours in a variant of iptables that is not used, resist removal.",
    "ip_family",
    "variant",
)
VIRTUAL_SERVERS = _gauge("ipvsproxy_virtual_servers", "Virtual servers of ours.", *BY_FAMILY)
REAL_SERVERS = _gauge("ipvsproxy_real_servers", "Real servers of ours.", *BY_FAMILY)
ADDRESSES = _gauge("ipvsproxy_addresses", "Addresses on kube-ipvs0.", *BY_FAMILY)
SET_ENTRIES = _gauge("ipvsproxy_set_entries", "Entries of each set; 65536 is the most.", "set")
PENDING = _gauge("ipvsproxy_pending", "Kernel objects that differ from what is wanted.", "kind")
DRIFT = _counter("ipvsproxy_drift_total", "Kernel objects that an audit found otherwise than they were left.", "kind")
DOUBTED_DELETIONS = _gauge(
    "ipvsproxy_doubted_deletions",
    "Services, or endpoints, that a list lacked and that are served until another list confirms it.",
    "kind",
)
CONFLICTS = _gauge("ipvsproxy_conflicts", "Addresses and ports that several Services want.")
DRAINS = _gauge("ipvsproxy_drains", "Real servers that keep their connections and get no new ones.")
WAITING_REMOVALS = _gauge(
    "ipvsproxy_waiting_removals",
    "Real servers at weight 0 that wait until the kernel has forgotten others: empty, or not asked about yet.",
)
OLDEST_DRAIN_AGE = _gauge("ipvsproxy_oldest_drain_age_seconds", "Age of the oldest drain.")
WATCH_CONNECTED = _gauge("ipvsproxy_watch_connected", "Whether a watch is open.", "kind")
WATCH_STALE = _gauge("ipvsproxy_watch_stale", "Whether a watch has heard nothing for too long.", "kind")
WATCH_CONTACT_AGE = _gauge("ipvsproxy_watch_contact_age_seconds", "How long ago the API server was last heard of.", "kind")

# IPVS's own counters.

TRAFFIC_LISTED = _gauge("ipvsproxy_traffic_listed", "Service ports and endpoints with traffic series of their own.", "kind")
TRAFFIC_UNLISTED = _gauge("ipvsproxy_traffic_unlisted", "Those beyond the limit, counted together.", "kind")
OPEN_CONNECTIONS = _gauge(
    "ipvsproxy_endpoint_open_connections", "Connections of an endpoint; of draining ones at least.", *_BY_ENDPOINT, "state"
)
_IN_AND_OUT = "from clients (in) and to them (out)."
SERVICE_CONNECTIONS = _counter("ipvsproxy_service_connections_total", "Connections by service.", *_BY_PORT)
SERVICE_PACKETS = _counter("ipvsproxy_service_packets_total", f"Packets by service, {_IN_AND_OUT}", *_BY_PORT, "direction")
SERVICE_BYTES = _counter("ipvsproxy_service_bytes_total", f"Bytes by service, {_IN_AND_OUT}", *_BY_PORT, "direction")
ENDPOINT_CONNECTIONS = _counter("ipvsproxy_endpoint_connections_total", "Connections by endpoint.", *_BY_ENDPOINT)
ENDPOINT_PACKETS = _counter("ipvsproxy_endpoint_packets_total", f"Packets by endpoint, {_IN_AND_OUT}", *_BY_ENDPOINT, "direction")
ENDPOINT_BYTES = _counter("ipvsproxy_endpoint_bytes_total", f"Bytes by endpoint, {_IN_AND_OUT}", *_BY_ENDPOINT, "direction")

ALL = tuple(value for value in vars().values() if isinstance(value, Metric))
"""In the order of their declarations, which is that of the page."""
RECORDED = ALL[: ALL.index(SERVICE_CHANGES_PENDING)]
"""Those that are recorded when something happens."""
EACH_FAMILY = (
    SYNC_DURATION,
    PROGRAMMING_DURATION,
    CONNTRACK_DURATION,
    LAST_SYNC,
    RESTORE_FAILURES,
    DELETED_FLOWS,
)
"""Those that are there from the start for each family that is served."""
