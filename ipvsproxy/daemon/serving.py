"""What this process tells about itself over HTTP: health, metrics, configuration, health-check ports."""

import importlib.metadata
import time
from collections.abc import Callable, Coroutine, Iterator

import structlog

from ipvsproxy.config import syntax, write
from ipvsproxy.config.settings import Config, LogFormat
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.events.announcer import Announcer
from ipvsproxy.daemon.http import answers, server
from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.health_check_node_ports import HealthChecks
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics.metrics import Metrics
from ipvsproxy.model.net import Address

METRICS_PATHS = ("/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Serving:
    """Learns from the loop how it fares, and answers whoever asks."""

    def __init__(
        self,
        config: Config,
        status: Status,
        metrics: Metrics,
        announcer: Announcer | None = None,
        on_synced: Callable[[SyncSummary], None] = lambda _: None,
    ) -> None:
        """``on_synced`` is called after each sync, when all that is told of it is told."""
        self._on_synced = on_synced
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
        self._on_synced(summary)

    def servers(self) -> Iterator[Coroutine[None, None, None]]:
        """All servers, each to be run for ever; ``web.BindError`` ends one whose address can not be bound, if so configured."""
        servers = self._config.servers
        if servers.health:
            yield server.serve("health", *servers.health, self.answer_health, hard_fail=servers.bind_hard_fail)
        if servers.metrics:
            yield server.serve("metrics", *servers.metrics, self.answer_metrics, hard_fail=servers.bind_hard_fail)
        yield self._health_checks.run()

    async def answer_health(self, request: server.Request) -> Answer:
        """What the health server answers."""
        match request.path:
            case "/healthz":
                answer = answers.healthz(self._status.health())
                self._metrics.healthz(answer.status)
            case "/livez":
                answer = answers.livez(self._status.health())
                self._metrics.livez(answer.status)
            case _:
                answer = answers.NOT_FOUND_PAGE
        return answer

    async def answer_metrics(self, request: server.Request) -> Answer:
        """What the metrics server answers. Its ``/healthz`` only tells that it answers."""
        match request.path:
            case "/metrics":
                accepted = (request.headers.get(name, "") for name in ("accept", "accept-encoding"))
                answer = await self._metrics.expose(*accepted)
            case "/metrics/slis":
                if request.method == "DELETE":
                    self._checks = 0
                answer = answers.slis(self._checks)
            case "/healthz" | "/healthz/ping":
                self._checks += 1
                answer = answers.PING_PAGE if "verbose" in request.query else answers.OK_PAGE
            case "/proxyMode":
                answer = answers.MODE_PAGE
            case "/configz":
                answer = answers.configz(write.document(self._config))
            case "/flagz":
                answer = answers.flagz(write.flags(self._config))
            case "/statusz":
                version = importlib.metadata.version("ipvsproxy")
                answer = answers.statusz(started_s=self._started_s, now_s=time.time(), version=version, paths=METRICS_PATHS)
            case "/debug/flags/v" if self._config.servers.profiling:
                answer = self._set_verbosity(request)
            case _:
                answer = answers.NOT_FOUND_PAGE
        return answer

    def _set_verbosity(self, request: server.Request) -> Answer:
        if request.method != "PUT":
            return answers.METHOD_PAGE
        try:
            level = syntax.parse_level(request.body.decode("ascii", errors="replace").strip())
        except ValueError:
            return answers.verbosity(None)
        logs.set_up(json=self._config.logging.format is LogFormat.JSON, verbosity=level)
        log.warning("verbosity was changed over HTTP", verbosity=level)
        return answers.verbosity(level)


async def open_listener(address: Address, port: int, answer: Callable[[], Answer]) -> server.Listener:
    """A health-check port: one answer for any request; as ``healthchecks.Open`` says."""

    async def respond(_request: server.Request) -> Answer:
        return answer()

    return await server.listen(address, port, respond, one_family=True)
