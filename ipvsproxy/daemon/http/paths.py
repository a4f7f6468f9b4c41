"""The health server and the metrics server of a node: their paths, and the page at each path.

To add a page, add an entry to one of the tables in this module.
"""

import dataclasses
import datetime as dt
import functools
import importlib.metadata
import inspect
import json
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping

from ipvsproxy.config import file
from ipvsproxy.config.option import parse_integer
from ipvsproxy.config.settings import Config, Format, Servers
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.server import BAD_REQUEST, HTML, JSON, NOT_ACCEPTABLE, OK, TEXT, UNAVAILABLE, Answer, Handler, Request

Page = Callable[[Request], Answer | Awaitable[Answer]]
"""A function that answers a request for one path."""
SHOWN_PATHS = ("/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz")
"""The paths that ``/statusz`` lists; kube-proxy lists the same paths."""
NEVER = "0001-01-01T00:00:00Z"
"""The text that a program in Go prints for a time that was never set."""


OK_PAGE = Answer(OK, b"ok", TEXT)
PING_PAGE = Answer(OK, b"[+]ping ok\nhealthz check passed\n", TEXT)
"""The answer of the metrics server to ``/healthz?verbose``, with the name of the server's only check."""
METHOD_PAGE = Answer(NOT_ACCEPTABLE, b"unsupported http method\n", TEXT)
"""The answer to a method other than PUT at a path that supports only PUT. kube-proxy answers with the same HTTP status."""
NOT_FOR_MACHINES = "Warning: for people who debug; no program should rely on how this looks."
MODE_PAGE = Answer(OK, b"ipvs", TEXT)
UI = "/ui/"


async def respond(pages: Mapping[str, Page], request: Request) -> Answer:
    """The answer of the page at a path, or status 404 if there is no page at that path."""
    page = pages.get(request.path)
    answer = page(request) if page else server.NOT_FOUND_PAGE
    return await answer if inspect.isawaitable(answer) else answer


def health_server(config: Callable[[], Config], status: Status, on_answer: Callable[[str, int], None]) -> Handler:
    """The health server.

    ``on_answer`` is called with the path and the HTTP status of each answer. ``config`` returns the current configuration. With
    ``?verbose``, the answer includes the data that ``ipvsproxy fleet`` reads.
    """

    def answer(request: Request) -> Answer:
        more = {"ipvsproxy": _for_fleet(status, file.digest(config()))} if "verbose" in request.query else {}
        given = healthz(status, **more) if request.path == "/healthz" else livez(status, **more)
        on_answer(request.path, given.status)
        return given

    return functools.partial(respond, dict.fromkeys(("/healthz", "/livez"), answer))


@dataclasses.dataclass(eq=False)
class MetricsPaths:
    """The metrics server. The path ``/healthz`` of the metrics server only shows that the server answers.

    ``config`` returns the current configuration. ``expose`` creates the page ``/metrics``; its arguments are the headers
    ``Accept`` and ``Accept-Encoding``, which are empty if the request has none. ``ui`` is a function that answers all requests
    below ``/ui/``.
    """

    config: Callable[[], Config]
    expose: Callable[[str, str], Awaitable[Answer]]
    ui: Handler | None = None

    def __post_init__(self) -> None:
        self._started_s = time.time()
        self._checks = 0
        self._pages: Mapping[str, Page] = {
            "/": self._index,
            "/metrics": lambda asked: self.expose(asked.headers.get("accept", ""), asked.headers.get("accept-encoding", "")),
            "/metrics/slis": self._slis,
            "/healthz": self._ping,
            "/healthz/ping": self._ping,
            "/proxyMode": lambda _: MODE_PAGE,
            "/configz": lambda _: _json(OK, {"kubeproxy.config.k8s.io": file.document(self.config())}),
            "/flagz": lambda _: _debug(
                "flagz", [f"{name}={value}" for name, value in sorted(file.flags_of(self.config()).items())]
            ),
            "/statusz": self._statusz,
            "/debug/flags/v": self._verbosity,
        }

    async def answer(self, request: Request) -> Answer:
        """Answer a request."""
        if self.ui and self.config().servers.ui and f"{request.path}/".startswith(UI):
            return await self.ui(request)
        return await respond(self._pages, request)

    def _index(self, _request: Request) -> Answer:
        # The link is relative, because an HTTP proxy may put a prefix before the path.
        paths = (UI, *SHOWN_PATHS) if self.ui and self.config().servers.ui else SHOWN_PATHS
        links = "".join(f'<li><a href="{path[1:]}">{path}</a>\n' for path in paths)
        page = f"<!doctype html><html lang=en><title>ipvsproxy</title><h1>ipvsproxy</h1><ul>\n{links}</ul>\n"
        return Answer(OK, page.encode(), HTML)

    def _slis(self, request: Request) -> Answer:
        """The number of health checks of the metrics server so far.

        Every health check that the metrics server answers counts as a success, because a broken server gives no answer.
        """
        if request.method == "DELETE":
            self._checks = 0
        lines = (
            "# HELP kubernetes_healthcheck [STABLE] This metric records the result of a single healthcheck.",
            "# TYPE kubernetes_healthcheck gauge",
            'kubernetes_healthcheck{name="ping",type="healthz"} 1',
            "# HELP kubernetes_healthchecks_total [STABLE] This metric records the results of all healthcheck.",
            "# TYPE kubernetes_healthchecks_total counter",
            f'kubernetes_healthchecks_total{{name="ping",status="success",type="healthz"}} {self._checks}',
        )
        text = "".join(f"{line}\n" for line in lines) if self._checks else ""
        return Answer(OK, text.encode(), {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _ping(self, request: Request) -> Answer:
        self._checks += 1
        return PING_PAGE if "verbose" in request.query else OK_PAGE

    def _statusz(self, _request: Request) -> Answer:
        minutes, seconds = divmod(round(time.time() - self._started_s), 60)
        hours, minutes = divmod(minutes, 60)
        facts = {
            "Started": time.strftime("%a %b %d %H:%M:%S UTC %Y", time.gmtime(self._started_s)),
            "Up": f"{hours} hr {minutes:02d} min {seconds:02d} sec",
            "Python version": platform.python_version(),
            "Binary version": _version(),
            "Paths": " ".join(SHOWN_PATHS),
        }
        return _debug("statusz", [f"{name}: {value}" for name, value in facts.items()])

    def _verbosity(self, request: Request) -> Answer:
        if not self.config().logging.profiling:
            return server.NOT_FOUND_PAGE
        if request.method != "PUT":
            return METHOD_PAGE
        try:
            level = parse_integer(request.body.decode("ascii", errors="replace").strip())
        except ValueError:
            level = -1
        if level < 0:
            return Answer(BAD_REQUEST, b"the body of a PUT must be a level of -v, a whole number\n", TEXT)
        logs.set_up(json=self.config().logging.format is Format.JSON, verbosity=level)
        log.warning("verbosity_changed", verbosity=level)
        return Answer(OK, f"successfully set klog.logging.verbosity to {level}".encode(), TEXT)


def servers(listen: Servers, health: Handler, metrics: Handler) -> Iterator[Coroutine[None, None, None]]:
    """Yields one coroutine for each server that has an address; the coroutine serves requests until it is cancelled.

    The coroutine raises ``server.BindError`` if the server's address cannot be bound and the configuration has
    ``bindAddressHardFail``.
    """
    for name, where, answer in (("health", listen.health, health), ("metrics", listen.metrics, metrics)):
        if where:
            yield server.serve(name, *where, answer, hard_fail=listen.bind_hard_fail)


def healthz(status: Status, **more: object) -> Answer:
    """``/healthz``: whether load balancers should send traffic to this node."""
    eligible = {"nodeEligible": status.is_eligible}
    return _health(status, is_fine=status.is_healthy and status.is_eligible, eligible=eligible, more=more)


def livez(status: Status, **more: object) -> Answer:
    """``/livez``: whether this process applies changes in time."""
    return _health(status, is_fine=status.is_healthy, eligible={}, more=more)


_version = functools.cache(functools.partial(importlib.metadata.version, "ipvsproxy"))
"""Returns the version of this process. The result is cached, because each call of the library would read a file."""


def _for_fleet(status: Status, digest: str) -> Mapping[str, object]:
    """Properties in which this process may differ from the ipvsproxy processes of other nodes.

    The configuration is included only as a digest.
    """
    return {
        "version": _version(),
        "configuration": digest,
        "pending": status.pending,
        "lastDrift": NEVER if status.drifted_s is None else render_time(status.drifted_s),
    }


def _health(status: Status, *, is_fine: bool, eligible: Mapping[str, bool], more: Mapping[str, object]) -> Answer:
    now_s = status.wall_clock()
    # A healthy node counts as up to date, no matter how long ago its last change was.
    updated_s = now_s if is_fine else status.updated_s
    families = {
        family.label: {"lastUpdated": render_time(at_s), "healthy": not status.is_late(family)}
        for family, at_s in sorted(status.updated.items())
    }
    document = {
        "lastUpdated": NEVER if updated_s is None else render_time(updated_s),
        "currentTime": render_time(now_s),
        **eligible,
        "healthy": status.is_healthy,
        **({"status": families} if families else {}),
        **({"staleWatches": sorted(status.stale())} if status.stale() else {}),
        **({"waitingForFirstLists": sorted(status.missing())} if status.missing() else {}),
        **({"unreadable": sorted(status.unreadable())} if status.unreadable() else {}),
        **({"unmetSettings": dict(status.unmet_settings)} if status.unmet_settings else {}),
        **({"leftovers": sorted(status.leftovers())} if status.leftovers() else {}),
        **more,
    }
    return _json(OK if is_fine else UNAVAILABLE, document)


def _json(status: int, document: Mapping[str, object]) -> Answer:
    return Answer(status, json.dumps(document, separators=(",", ":")).encode(), JSON)


def _debug(name: str, lines: Iterable[str]) -> Answer:
    return Answer(OK, f"\nipvsproxy {name}\n{NOT_FOR_MACHINES}\n\n{chr(10).join(lines)}\n".encode(), TEXT)


def render_time(epoch_s: float) -> str:
    """The time in the format of RFC 3339, in UTC, with as few digits after the decimal point as possible.

    Programs written in Go, such as kube-proxy, write times in the same format. The time is rounded to microseconds.
    """
    return f"{dt.datetime.fromtimestamp(epoch_s, dt.UTC):%Y-%m-%dT%H:%M:%S.%f}".rstrip("0").rstrip(".") + "Z"
