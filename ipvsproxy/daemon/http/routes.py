"""The paths of the two servers of a node, health and metrics, and the page of each.

A new page is one more entry of a table here.
"""

import importlib.metadata
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping

import structlog

from ipvsproxy.config import file
from ipvsproxy.config.option import parse_level
from ipvsproxy.config.settings import Config, Format, Servers
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.http import answers, server
from ipvsproxy.daemon.http.answers import Answer
from ipvsproxy.daemon.http.health import Health
from ipvsproxy.daemon.http.server import Handler, Request

Page = Callable[[Request], Answer | Awaitable[Answer]]
"""Answers a request for one path."""
SHOWN_PATHS = ("/configz", "/flagz", "/healthz", "/metrics", "/metrics/slis", "/proxyMode", "/statusz")
"""The paths that ``/statusz`` names, as kube-proxy does."""
UI = "/ui/"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


async def respond(pages: Mapping[str, Page], request: Request) -> Answer:
    """The answer of the page of this path; 404 without a page."""
    page = pages.get(request.path)
    answer = page(request) if page else answers.NOT_FOUND_PAGE
    return await answer if inspect.isawaitable(answer) else answer


class HealthRoutes:
    """The health server. ``on_healthz`` and ``on_livez`` are called with the status of each answer."""

    def __init__(self, health: Callable[[], Health], on_healthz: Callable[[int], None], on_livez: Callable[[int], None]) -> None:
        self._health = health
        self._on_healthz = on_healthz
        self._on_livez = on_livez
        self._pages: Mapping[str, Page] = {"/healthz": self._healthz, "/livez": self._livez}

    async def answer(self, request: Request) -> Answer:
        """Answer a request."""
        return await respond(self._pages, request)

    def _healthz(self, _request: Request) -> Answer:
        answer = answers.healthz(self._health())
        self._on_healthz(answer.status)
        return answer

    def _livez(self, _request: Request) -> Answer:
        answer = answers.livez(self._health())
        self._on_livez(answer.status)
        return answer


class MetricsRoutes:
    """The metrics server. ``expose`` makes the page of ``/metrics``. ``/healthz`` only shows that the server answers."""

    def __init__(self, config: Config, expose: Callable[[str, str], Awaitable[Answer]]) -> None:
        """``expose`` takes the headers ``Accept`` and ``Accept-Encoding``, empty if absent."""
        self._config = config
        self._expose = expose
        self.ui: Handler | None = None
        """Answers everything below ``/ui/``."""
        self._started_s = time.time()
        self._checks = 0
        self._pages: Mapping[str, Page] = {
            "/metrics": self._metrics,
            "/metrics/slis": self._slis,
            "/healthz": self._ping,
            "/healthz/ping": self._ping,
            "/proxyMode": lambda _: answers.MODE_PAGE,
            "/configz": lambda _: answers.configz(file.document(self._config)),
            "/flagz": lambda _: answers.flagz(file.flags_of(self._config)),
            "/statusz": self._statusz,
            "/debug/flags/v": self._verbosity,
        }

    def reconfigure(self, config: Config) -> None:
        """Show another configuration as in force."""
        self._config = config

    async def answer(self, request: Request) -> Answer:
        """Answer a request."""
        if self.ui and self._config.servers.ui and f"{request.path}/".startswith(UI):
            return await self.ui(request)
        return await respond(self._pages, request)

    def _metrics(self, request: Request) -> Awaitable[Answer]:
        return self._expose(request.headers.get("accept", ""), request.headers.get("accept-encoding", ""))

    def _slis(self, request: Request) -> Answer:
        if request.method == "DELETE":
            self._checks = 0
        return answers.slis(self._checks)

    def _ping(self, request: Request) -> Answer:
        self._checks += 1
        return answers.PING_PAGE if "verbose" in request.query else answers.OK_PAGE

    def _statusz(self, _request: Request) -> Answer:
        version = importlib.metadata.version("ipvsproxy")
        return answers.statusz(started_s=self._started_s, now_s=time.time(), version=version, paths=SHOWN_PATHS)

    def _verbosity(self, request: Request) -> Answer:
        if not self._config.servers.profiling:
            return answers.NOT_FOUND_PAGE
        if request.method != "PUT":
            return answers.METHOD_PAGE
        try:
            level = parse_level(request.body.decode("ascii", errors="replace").strip())
        except ValueError:
            return answers.verbosity(None)
        logs.set_up(json=self._config.logging.format is Format.JSON, verbosity=level)
        log.warning("verbosity_changed", verbosity=level)
        return answers.verbosity(level)


def servers(listen: Servers, health: Handler, metrics: Handler) -> Iterator[Coroutine[None, None, None]]:
    """The servers with an address, each as a coroutine that runs for ever.

    A coroutine raises ``server.BindError`` if its address cannot be bound and the configuration has ``bindAddressHardFail``.
    """
    for name, where, answer in (("health", listen.health, health), ("metrics", listen.metrics, metrics)):
        if where:
            yield server.serve(name, *where, answer, hard_fail=listen.bind_hard_fail)
