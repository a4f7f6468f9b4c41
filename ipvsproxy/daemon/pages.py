"""What the HTTP servers answer: codes, headers and bodies, as values.

Shapes are kube-proxy's, down to key order and white space: probes, load balancers and scripts compare them.
"""

import json
import time
from collections.abc import Mapping
from typing import NamedTuple

from ipvsproxy.daemon.status import Health
from ipvsproxy.model.service import ServiceName

OK = 200
NOT_FOUND = 404
UNAVAILABLE = 503
JSON = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
TEXT = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
NEVER = "0001-01-01T00:00:00Z"
"""How Go shows a time that was never set."""


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    body: bytes
    headers: Mapping[str, str]


NOT_FOUND_PAGE = Answer(NOT_FOUND, b"404 page not found\n", TEXT)
OK_PAGE = Answer(OK, b"ok", TEXT)
PING_PAGE = Answer(OK, b"[+]ping ok\nhealthz check passed\n", TEXT)
"""``/healthz?verbose`` of the metrics server: its one check, by name."""
MODE_PAGE = Answer(OK, b"ipvs", TEXT)


def healthz(health: Health) -> Answer:
    """``/healthz``: whether load balancers should send traffic to this node."""
    return _health(health, is_fine=health.is_healthy and health.is_eligible, eligible={"nodeEligible": health.is_eligible})


def livez(health: Health) -> Answer:
    """``/livez``: whether this process does its work."""
    return _health(health, is_fine=health.is_healthy, eligible={})


def _health(health: Health, *, is_fine: bool, eligible: Mapping[str, bool]) -> Answer:
    # A node that is fine is up to date, whenever something last had to be done.
    updated_s = health.now_s if is_fine else health.updated_s
    status = {
        family.label: {"lastUpdated": render_time(one.updated_s), "healthy": one.is_healthy}
        for family, one in sorted(health.families.items())
    }
    document = {
        "lastUpdated": NEVER if updated_s is None else render_time(updated_s),
        "currentTime": render_time(health.now_s),
        **eligible,
        "healthy": health.is_healthy,
        **({"status": status} if status else {}),
        **({"staleWatches": sorted(health.stale)} if health.stale else {}),
    }
    return Answer(OK if is_fine else UNAVAILABLE, json.dumps(document, separators=(",", ":")).encode(), JSON)


def service_health(service: ServiceName, local_endpoints: int, *, is_healthy: bool) -> Answer:
    """What a ``healthCheckNodePort`` answers: whether this node has endpoints of the Service, and can be relied upon."""
    document = {
        "service": {"namespace": service.namespace, "name": service.name},
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": is_healthy,
    }
    headers = {**JSON, "X-Load-Balancing-Endpoint-Weight": str(local_endpoints)}
    return Answer(OK if local_endpoints and is_healthy else UNAVAILABLE, json.dumps(document, indent="\t").encode(), headers)


def configz(document: Mapping[str, object]) -> Answer:
    """``/configz``: the configuration in force, as a KubeProxyConfiguration."""
    return Answer(OK, json.dumps({"kubeproxy.config.k8s.io": document}, separators=(",", ":")).encode(), JSON)


def render_time(epoch_s: float) -> str:
    """RFC 3339 in UTC with as many digits after the point as it needs, as Go writes it; microseconds at most."""
    seconds, microseconds = divmod(round(epoch_s * 1e6), 10**6)
    fraction = f".{microseconds:06d}".rstrip("0") if microseconds else ""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}{fraction}Z"
