"""The answers of the HTTP servers as values: codes, headers and bodies.

They have kube-proxy's form, down to key order and white space: probes, load balancers and scripts compare them.
"""

import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.daemon.http.health import Health
from ipvsproxy.model.service import ServiceName

OK = 200
BAD_REQUEST = 400
NOT_FOUND = 404
NOT_ACCEPTABLE = 406
UNAVAILABLE = 503
JSON = {"Content-Type": "application/json", "X-Content-Type-Options": "nosniff"}
TEXT = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
NEVER = "0001-01-01T00:00:00Z"
"""Go's notation of a time that was never set."""


class Answer(NamedTuple):
    """An HTTP response.

    ``more`` follows ``body`` in a long response, in parts of some ten kilobytes: handling all of it at once blocks the loop.
    """

    status: int
    body: bytes
    headers: Mapping[str, str]
    more: Sequence[bytes] = ()

    @property
    def whole(self) -> bytes:
        """The body with all of its parts."""
        return b"".join((self.body, *self.more))


NOT_FOUND_PAGE = Answer(NOT_FOUND, b"404 page not found\n", TEXT)
OK_PAGE = Answer(OK, b"ok", TEXT)
PING_PAGE = Answer(OK, b"[+]ping ok\nhealthz check passed\n", TEXT)
"""``/healthz?verbose`` of the metrics server, with the name of its one check."""
METHOD_PAGE = Answer(NOT_ACCEPTABLE, b"unsupported http method\n", TEXT)
"""The answer to other methods where only PUT is supported; the code is kube-proxy's."""
NOT_FOR_MACHINES = "Warning: for people who debug; no program should rely on how this looks."
MODE_PAGE = Answer(OK, b"ipvs", TEXT)


def healthz(health: Health) -> Answer:
    """``/healthz``: whether load balancers should send traffic to this node."""
    return _health(health, is_fine=health.is_healthy and health.is_eligible, eligible={"nodeEligible": health.is_eligible})


def livez(health: Health) -> Answer:
    """``/livez``: whether this process works in time."""
    return _health(health, is_fine=health.is_healthy, eligible={})


def _health(health: Health, *, is_fine: bool, eligible: Mapping[str, bool]) -> Answer:
    # A fine node is up to date, however long ago its last change was.
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
        **({"waitingForFirstLists": sorted(health.missing)} if health.missing else {}),
        **({"unreadable": sorted(health.unreadable)} if health.unreadable else {}),
        **({"unmetSettings": dict(health.unmet_settings)} if health.unmet_settings else {}),
        **({"leftovers": sorted(health.leftovers)} if health.leftovers else {}),
    }
    return Answer(OK if is_fine else UNAVAILABLE, json.dumps(document, separators=(",", ":")).encode(), JSON)


def service_health(service: ServiceName, local_endpoints: int, *, is_healthy: bool) -> Answer:
    """The answer of a ``healthCheckNodePort``: whether this node has endpoints of the Service and is healthy."""
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


def slis(checks: int) -> Answer:
    """``/metrics/slis``: the number of health checks of the metrics server. All succeed, as a dead server answers none."""
    labels = 'name="ping",type="healthz"'
    lines = (
        "# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.",
        "# TYPE kubernetes_healthcheck gauge",
        f"kubernetes_healthcheck{{{labels}}} 1",
        "# HELP kubernetes_healthchecks_total [STABLE] This metric records the results of all healthcheck.",
        "# TYPE kubernetes_healthchecks_total counter",
        f'kubernetes_healthchecks_total{{name="ping",status="success",type="healthz"}} {checks}',
    )
    text = "".join(f"{line}\n" for line in lines) if checks else ""
    return Answer(OK, text.encode(), {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def flagz(values: Mapping[str, str]) -> Answer:
    """``/flagz``: all flags with their values in force."""
    return _debug("flagz", [f"{name}={value}" for name, value in sorted(values.items())])


def statusz(*, started_s: float, now_s: float, version: str, paths: Sequence[str]) -> Answer:
    """``/statusz``: version, time of start and paths. Times are in seconds since the epoch."""
    minutes, seconds = divmod(round(now_s - started_s), 60)
    hours, minutes = divmod(minutes, 60)
    facts = {
        "Started": time.strftime("%a %b %d %H:%M:%S UTC %Y", time.gmtime(started_s)),
        "Up": f"{hours} hr {minutes:02d} min {seconds:02d} sec",
        "Python version": platform.python_version(),
        "Binary version": version,
        "Paths": " ".join(paths),
    }
    return _debug("statusz", [f"{name}: {value}" for name, value in facts.items()])


def _debug(name: str, lines: Iterable[str]) -> Answer:
    return Answer(OK, f"\nipvsproxy {name}\n{NOT_FOR_MACHINES}\n\n{chr(10).join(lines)}\n".encode(), TEXT)


def verbosity(level: int | None) -> Answer:
    """``/debug/flags/v``: the level in force from now on; None if the request had no valid level."""
    if level is None:
        return Answer(BAD_REQUEST, b"the body of a PUT must be a level of -v, a whole number\n", TEXT)
    return Answer(OK, f"successfully set klog.logging.verbosity to {level}".encode(), TEXT)


def render_time(epoch_s: float) -> str:
    """RFC 3339 in UTC with the fewest digits after the point, as Go writes it; microseconds at most."""
    seconds, microseconds = divmod(round(epoch_s * 1e6), 10**6)
    fraction = f".{microseconds:06d}".rstrip("0") if microseconds else ""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}{fraction}Z"
