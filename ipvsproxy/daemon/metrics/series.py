"""The declarations of all metrics: the name, type, meaning, labels and buckets of each metric.

A new metric is declared in this module, and recorded where its value is known; docs/metrics.md is generated from these
declarations. The declarations of kube-proxy's metrics come from pkg/proxy/metrics in kubernetes/kubernetes, and from client-go.
"""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from ipvsproxy.model.kind import DriverName
from ipvsproxy.model.service import ObjectKind

FAST_S = tuple(round(0.001 * 2**step, 3) for step in range(15))
"""The upper bounds in seconds of kube-proxy's histogram buckets for durations from 1 ms to 16 s."""
SLOW_S = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
"""The upper bounds, in seconds, of kube-proxy's buckets for durations from 0.25 s to 5 minutes."""
REQUEST_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
"""client-go's histogram buckets, in seconds, for the duration of a request to the API server
(component-base/metrics/prometheus/restclient)."""
POLICIES = ("internal", "external")
NETLINK_DRIVERS = (DriverName.IPVS, DriverName.IPSET, DriverName.ADDRESSES, DriverName.CONNTRACK)
PHASES = ("waiting", "observe", "translate", "apply")
BY_FAMILY = ("ip_family",)
_BY_PORT = ("namespace", "service", "port", "protocol")
_BY_ENDPOINT = (*_BY_PORT, "endpoint")
_SYNC = "kubeproxy_sync_proxy_rules"


class Metric(NamedTuple):
    """One metric. The series of a metric differ in the values of their labels.

    ``bounds`` are the upper bounds of a histogram's buckets. ``at_zero`` are the label values of the series that exist from the
    start, with the value zero. ``is_late`` means that the metric is missing on the metrics page until the metric has a value,
    because zero would be a wrong value.
    """

    name: str
    type: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    bounds: Sequence[float] = ()
    at_zero: Collection[tuple[str, ...]] = ()
    is_late: bool = False


def _counter(name: str, meaning: str, *labels: str, at_zero: Collection[tuple[str, ...]] = ()) -> Metric:
    return Metric(name, "counter", meaning, labels, at_zero=at_zero)


def _gauge(name: str, meaning: str, *labels: str, is_late: bool = False) -> Metric:
    return Metric(name, "gauge", meaning, labels, is_late=is_late)


def _histogram(
    name: str, meaning: str, bounds: Sequence[float], *labels: str, at_zero: Collection[tuple[str, ...]] = ()
) -> Metric:
    return Metric(name, "histogram", meaning, labels, bounds, at_zero)


# kube-proxy's metrics about syncs; each value is recorded when a sync ends.

SYNC_DURATION = _histogram(f"{_SYNC}_duration_seconds", "How long a sync took.", FAST_S, *BY_FAMILY)
PROGRAMMING_DURATION = _histogram(
    "kubeproxy_network_programming_duration_seconds",
    "Time from a change of endpoints (its time is in an annotation of the EndpointSlice) until this change was programmed.",
    SLOW_S,
    *BY_FAMILY,
)
LAST_SYNC = _gauge(f"{_SYNC}_last_timestamp_seconds", "When the last sync was completed.", *BY_FAMILY)
LAST_QUEUED = _gauge(f"{_SYNC}_last_queued_timestamp_seconds", "When a sync was last requested.", *BY_FAMILY)
RESTORE_FAILURES = _counter(f"{_SYNC}_iptables_restore_failures_total", "Failed attempts to write rules.", *BY_FAMILY)
NO_LOCAL_ENDPOINTS = _gauge(
    f"{_SYNC}_no_local_endpoints_total",
    "Services with a Local traffic policy whose endpoints are all on other nodes.",
    "traffic_policy",
    "ip_family",
)
SERVICE_CHANGES = _counter(f"{_SYNC}_service_changes_total", "Changes of Services.")
ENDPOINT_CHANGES = _counter(f"{_SYNC}_endpoint_changes_total", "Changes of EndpointSlices.")
CONNTRACK_DURATION = _histogram(
    "kubeproxy_conntrack_reconciler_sync_duration_seconds", "How long the removal of tracked flows took.", FAST_S, *BY_FAMILY
)
DELETED_FLOWS = _counter("kubeproxy_conntrack_reconciler_deleted_entries_total", "Tracked flows removed.", *BY_FAMILY)

# kube-proxy's metrics about health checks and about requests to the API server; each request is recorded when the request ends.

_CODES = (("200",), ("503",))
HEALTHZ = _counter("kubeproxy_proxy_healthz_total", "Answers of /healthz.", "code", at_zero=_CODES)
LIVEZ = _counter("kubeproxy_proxy_livez_total", "Answers of /livez.", "code", at_zero=_CODES)
REQUESTS = _counter("rest_client_requests_total", "Requests to the API server.", "code", "host", "method")
REQUEST_DURATION = _histogram(
    "rest_client_request_duration_seconds", "Time until the API server began to answer.", REQUEST_S, "host", "verb"
)

# Metrics that only ipvsproxy has. A value is recorded when something happens, and is not computed at a scrape.

PHASE_DURATION = _histogram(
    "ipvsproxy_sync_phase_duration_seconds",
    "Time of a sync by phase; phase=waiting is the age of the oldest change when the sync began.",
    FAST_S,
    "phase",
    at_zero=[(phase,) for phase in PHASES],
)
APPLY_DURATION = _histogram("ipvsproxy_apply_duration_seconds", "How long operations of one driver took.", FAST_S, "driver")
NETLINK_BATCHES = _counter(
    "ipvsproxy_netlink_batches_total",
    "Batches of consecutive operations that one driver sent over netlink.",
    "driver",
    at_zero=[(driver,) for driver in NETLINK_DRIVERS],
)
NETLINK_ERRORS = _counter(
    "ipvsproxy_netlink_errors_total",
    "Operations over netlink that the kernel refused or did not answer, by the name of the error number.",
    "driver",
    "error",
)
OPERATIONS = _counter("ipvsproxy_operations_total", "Operations on the kernel.", "verb", "kind", "outcome")
SURPRISES = _counter("ipvsproxy_surprises_total", "Operations that found the kernel in a state other than the observed state.")
INVALID_OBJECTS = _counter(
    "ipvsproxy_invalid_objects_total",
    "Invalid API objects and invalid parts of API objects, counted at each change; none of them is used.",
    "kind",
    "extent",
    at_zero=[(kind.value, extent) for kind in ObjectKind for extent in ("object", "part")],
)
EVENTS = _counter(
    "ipvsproxy_events_total",
    "Kubernetes events: written, refused by the API server, or dropped by a rate limit.",
    "outcome",
    at_zero=[("posted",), ("failed",), ("dropped",)],
)
CONFIG_IN_FORCE = _gauge(
    "ipvsproxy_config_in_force",
    "Whether the present configuration file is in force, except for settings that need a restart.",
)
BUILD_INFO = _gauge("ipvsproxy_build_info", "Version of this program.", "version", "python_version")
DRY_RUN_DIFFERENCES = _gauge(
    "ipvsproxy_dry_run_differences",
    "Kernel objects that a run without --dry-run would change, as of the last reading of the kernel.",
    "kind",
    is_late=True,
)
DRY_RUN_LAST_LOOK = _gauge("ipvsproxy_dry_run_last_look_timestamp_seconds", "When a dry run last read the kernel.", is_late=True)

# Metrics whose values are counted at a scrape, from the tables of desired and observed state.

SERVICE_CHANGES_PENDING = _gauge(f"{_SYNC}_service_changes_pending", "Changes of Services that wait for a sync.")
ENDPOINT_CHANGES_PENDING = _gauge(f"{_SYNC}_endpoint_changes_pending", "Changes of endpoints that wait for a sync.")
OLDEST_CHANGE_AGE = _gauge("ipvsproxy_oldest_change_age_seconds", "Age of the oldest change that is not in force.")
UNREADABLE_PARTS = _gauge(
    "ipvsproxy_unreadable_parts",
    "Parts of the kernel that cannot be read, plus 1 if a manifest cannot be read; unread objects are not removed.",
)
LEFTOVER_RULES = _gauge(
    "ipvsproxy_leftover_rules",
    "Whether leftover rules of kube-proxy, or of ipvsproxy in an unused variant of iptables, could not be removed.",
    "ip_family",
    "variant",
)
OTHER_BACKEND_LEFT = _gauge(
    "ipvsproxy_other_backend_left",
    "Whether sets or the table of ipvsproxy remain in the unused --rules-backend, because their removal failed.",
)
UNOPENED_PORTS = _gauge(
    "ipvsproxy_health_check_ports_unopened", "Health-check node ports that could not be opened, counted once per address."
)
VIRTUAL_SERVERS = _gauge("ipvsproxy_virtual_servers", "Virtual servers of ipvsproxy.", *BY_FAMILY)
REAL_SERVERS = _gauge("ipvsproxy_real_servers", "Real servers of ipvsproxy.", *BY_FAMILY)
TUNNELS = _gauge(
    "ipvsproxy_tunnels", "Real servers that are other nodes, to which direct return sends packets by tunnel.", *BY_FAMILY
)
ADDRESSES = _gauge("ipvsproxy_addresses", "Addresses on kube-ipvs0.", *BY_FAMILY)
ROUTES = _gauge("ipvsproxy_routes", "Local routes to Service addresses, with --ipvs-vip-binding=routes.", *BY_FAMILY)
SET_ENTRIES = _gauge("ipvsproxy_set_entries", "Entries of each set; a hash set starts with room for 65536.", "set")
PENDING = _gauge("ipvsproxy_pending", "Kernel objects whose observed state differs from the desired one.", "kind")
DRIFT = _counter("ipvsproxy_drift_total", "Kernel objects that ipvsproxy found changed by another program.", "kind")
DOUBTED_DELETIONS = _gauge(
    "ipvsproxy_doubted_deletions",
    "Services or endpoints that are missing from a list, and are served until a second list confirms their removal.",
    "kind",
)
CONFLICTS = _gauge("ipvsproxy_conflicts", "Addresses and ports that several Services desire.")
WITHOUT_SCOPE = _gauge(
    "ipvsproxy_ports_without_scope",
    "Service ports with externalTrafficPolicy Local that have no second scope, because no packet mark is free.",
)
DRAINS = _gauge("ipvsproxy_drains", "Real servers that drain: they keep their connections and get no new connections.")
WAITING_REMOVALS = _gauge(
    "ipvsproxy_waiting_removals",
    "Real servers at weight 0 that have no connections and wait for their removal.",
)
OLDEST_DRAIN_AGE = _gauge("ipvsproxy_oldest_drain_age_seconds", "Age of the oldest drain.")
WATCH_CONNECTED = _gauge("ipvsproxy_watch_connected", "Whether a watch is open.", "kind")
WATCH_STALE = _gauge("ipvsproxy_watch_stale", "Whether a watch has been silent for too long.", "kind")
WATCH_CONTACT_AGE = _gauge("ipvsproxy_watch_contact_age_seconds", "Time since the last message of the API server.", "kind")
WATCH_RESTARTS = _counter("ipvsproxy_watch_restarts_total", "Restarts of lists and watches.", "kind", "reason")

# Metrics that show the counters of IPVS.

TRAFFIC_LISTED = _gauge("ipvsproxy_traffic_listed", "Service ports and endpoints with separate traffic series.", "kind")
TRAFFIC_UNLISTED = _gauge(
    "ipvsproxy_traffic_unlisted",
    "Service ports and endpoints beyond the limit; their traffic is counted in common series.",
    "kind",
)
OPEN_CONNECTIONS = _gauge(
    "ipvsproxy_endpoint_open_connections",
    "Connections by endpoint; without --endpoint-metrics, only for draining endpoints.",
    *_BY_ENDPOINT,
    "state",
)
_IN_AND_OUT = "from clients (in) and to clients (out)."
SERVICE_CONNECTIONS = _counter("ipvsproxy_service_connections_total", "Connections by service.", *_BY_PORT)
SERVICE_PACKETS = _counter("ipvsproxy_service_packets_total", f"Packets by service, {_IN_AND_OUT}", *_BY_PORT, "direction")
SERVICE_BYTES = _counter("ipvsproxy_service_bytes_total", f"Bytes by service, {_IN_AND_OUT}", *_BY_PORT, "direction")
ENDPOINT_CONNECTIONS = _counter("ipvsproxy_endpoint_connections_total", "Connections by endpoint.", *_BY_ENDPOINT)
ENDPOINT_PACKETS = _counter("ipvsproxy_endpoint_packets_total", f"Packets by endpoint, {_IN_AND_OUT}", *_BY_ENDPOINT, "direction")
ENDPOINT_BYTES = _counter("ipvsproxy_endpoint_bytes_total", f"Bytes by endpoint, {_IN_AND_OUT}", *_BY_ENDPOINT, "direction")

ALL = tuple(value for value in vars().values() if isinstance(value, Metric))
"""All metrics in the order of their declarations; the metrics page has the same order."""
RECORDED = ALL[: ALL.index(SERVICE_CHANGES_PENDING)]
"""The metrics whose values are recorded when an event, such as the end of a sync, occurs. The values of all other metrics are
counted at a scrape."""
