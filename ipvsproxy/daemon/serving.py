"""What this process tells about itself over HTTP: health, metrics, configuration, health-check ports."""

import importlib.metadata
import time
from collections.abc import Callable, Coroutine, Iterator

import structlog

from ipvsproxy.config import syntax, write
from ipvsproxy.config.settings import Config, LogFormat
from ipvsproxy.daemon import log as logs
from ipvsproxy.daemon import pages, web
from ipvsproxy.daemon.announcer import Announcer
from ipvsproxy.daemon.healthchecks import HealthChecks
from ipvsproxy.daemon.metrics import Metrics
from ipvsproxy.daemon.pages import Answer
from ipvsproxy.daemon.status import Status
from ipvsproxy.daemon.summary import SyncSummary
from ipvsproxy.model.net import Address

METRICS_PATHS = ("/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Serving:
    """Learns from the loop how it fares, and answers whoever asks."""

    def __init__(self, config: Config, status: Status, metrics: Metrics, announcer: Announcer | None = None) -> None:
        self._config = config
        self._started_s = time.time()
        self._checks = 0
        self._status = status
        self._metrics = metrics
        self._announcer = announcer
        self._health_checks = HealthChecks(
            is_healthy=lambda: status.is_healthy and not status.is_turned_away,
            open_listener=open_listener,
            on_failure=announcer.port_failed if announcer else None,
        )

    def reconfigure(self, config: Config) -> None:
        """Show another configuration as the one in force. Where servers listen does not change."""
        self._config = config

    def queued(self, now: float) -> None:
        """There is something to do."""
        self._status.queued(now)
        self._metrics.queued(now)

    def syncing(self, now: float) -> None:
        """A sync begins."""
        self._status.syncing(now)

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        self._status.synced(summary)
        self._metrics.synced(summary)
        if self._announcer:
            self._announcer.synced(summary)
        self._health_checks.put(summary.changes.services, summary.states)
        addresses = summary.view.health_check_addresses
        self._health_checks.listen_on({family: addresses[family] for family in self._status.families})

    def servers(self) -> Iterator[Coroutine[None, None, None]]:
        """All servers, each to be run for ever; ``web.BindError`` ends one whose address can not be bound, if so configured."""
        servers = self._config.servers
        if servers.health:
            yield web.serve("health", *servers.health, self.answer_health, hard_fail=servers.bind_hard_fail)
        if servers.metrics:
            yield web.serve("metrics", *servers.metrics, self.answer_metrics, hard_fail=servers.bind_hard_fail)
        yield self._health_checks.run()

    async def answer_health(self, request: web.Request) -> Answer:
        """What the health server answers."""
        match request.path:
            case "/healthz":
                answer = pages.healthz(self._status.health())
                self._metrics.healthz(answer.status)
            case "/livez":
                answer = pages.livez(self._status.health())
                self._metrics.livez(answer.status)
            case _:
                answer = pages.NOT_FOUND_PAGE
        return answer

    async def answer_metrics(self, request: web.Request) -> Answer:
        """What the metrics server answers. Its ``/healthz`` only tells that it answers."""
        match request.path:
            case "/metrics":
                accepted = (request.headers.get(name, "") for name in ("accept", "accept-encoding"))
                answer = await self._metrics.expose(*accepted)
            case "/metrics/slis":
                if request.method == "DELETE":
                    self._checks = 0
                answer = pages.slis(self._checks)
            case "/healthz" | "/healthz/ping":
                self._checks += 1
                answer = pages.PING_PAGE if "verbose" in request.query else pages.OK_PAGE
            case "/proxyMode":
                answer = pages.MODE_PAGE
            case "/configz":
                answer = pages.configz(write.document(self._config))
            case "/flagz":
                answer = pages.flagz(write.flags(self._config))
            case "/statusz":
                version = importlib.metadata.version("ipvsproxy")
                answer = pages.statusz(started_s=self._started_s, now_s=time.time(), version=version, paths=METRICS_PATHS)
            case "/debug/flags/v" if self._config.servers.profiling:
                answer = self._set_verbosity(request)
            case _:
                answer = pages.NOT_FOUND_PAGE
        return answer

    def _set_verbosity(self, request: web.Request) -> Answer:
        if request.method != "PUT":
            return pages.METHOD_PAGE
        try:
            level = syntax.parse_level(request.body.decode("ascii", errors="replace").strip())
        except ValueError:
            return pages.verbosity(None)
        logs.set_up(json=self._config.logging.format is LogFormat.JSON, verbosity=level)
        log.warning("verbosity was changed over HTTP", verbosity=level)
        return pages.verbosity(level)


async def open_listener(address: Address, port: int, answer: Callable[[], Answer]) -> web.Listener:
    """A health-check port: one answer for any request; as ``healthchecks.Open`` says."""

    async def respond(_request: web.Request) -> Answer:
        return answer()

    return await web.listen(address, port, respond, one_family=True)
