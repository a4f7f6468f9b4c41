"""The web page of the node: its files and its API, on the metrics server.

Rule 1: no request changes anything. Only the path, the parameters and the header ``Host`` of a request are used.
Rule 2: API requests are answered one after the other. An answer that takes long to compute is made in steps, so that the event
loop can handle changes between the steps.
Rule 3: the page loads nothing from other sites, and no other site may read the page or show the page in a frame.
"""

import asyncio
import contextlib
import dataclasses
import importlib.resources
import math
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.http.paths import UI
from ipvsproxy.daemon.http.server import Answer, Request
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics import figures
from ipvsproxy.daemon.metrics.figures import Numbers, Sampler
from ipvsproxy.daemon.ui import board, counters, endpoint_changes, node_page
from ipvsproxy.daemon.ui.board import Board, Selection, Troubles
from ipvsproxy.daemon.ui.counters import CounterFollower
from ipvsproxy.daemon.ui.explanation import Explainer
from ipvsproxy.daemon.ui.names import Names, ReadTargets
from ipvsproxy.daemon.ui.node_page import NodePage
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import parse_address
from ipvsproxy.model.service import ServiceName, ServiceType
from ipvsproxy.reconcile.survey import Statistics
from ipvsproxy.translate.translation_settings import Settings
from ipvsproxy.translate.view import NodeView

LARGEST_PAGE = 200
ENDPOINTS_PER_S = 300
"""An answer about a Service with this many endpoints is kept for one second. With twice as many endpoints, the answer is
kept for two seconds. Because answers are kept this long, making them takes about 2 % of a processor."""
SHORTEST_KEPT_S, LONGEST_KEPT_S = 1.0, 10.0
ANSWERS_KEPT = 4
"""The number of answers that are kept; each has some megabytes."""
_JSON = "application/json"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
FILES = ("index.html", "style.css", "icon.svg", "page.js", "parts.js", "node.js", "services.js", "service.js", "events.js")
"""The files of the page, in ``static/``."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NAME = re.compile(r"[^/]{1,63}/[^/]{1,253}")


class RefusedError(Exception):
    """A request cannot be answered; the error has the HTTP status and a sentence for the client."""

    def __init__(self, status: int, sentence: str) -> None:
        self.status = status
        super().__init__(sentence)


@dataclasses.dataclass(eq=False)
class Pages:
    """Answers every request below ``/ui/``.

    The caller must report each sync to this object; ``run`` reads the counters regularly.

    ``translation`` returns the settings by which Services are translated. ``targets`` is a function that reads the pods of a
    Service.
    """

    node: NodePage
    sampler: Sampler
    translation: Callable[[], Settings]
    targets: ReadTargets

    def __post_init__(self) -> None:
        sources = self.sources = self.node.sources
        self._clock, self._wall_clock = sources.status.clock, sources.status.wall_clock
        self._hosts = {"localhost", self.node.node_name.lower(), socket.gethostname().lower()}
        self._viewers = counters.Viewers()
        self._troubles = Troubles(sources.survey)
        self._board: Board | None = None
        self._view: NodeView | None = None
        self._numbers: Numbers | None = None
        self._names = Names(self.targets, sources.store, self._clock)
        self._turn = asyncio.Lock()
        self._told: dict[ServiceName, tuple[float, msgspec.Raw]] = {}
        self._counters = CounterFollower(sources, self.sampler, self._viewers, self.node.history)
        self._api: Mapping[str, Callable[[Mapping[str, str]], Any]] = {
            "node": self._describe_node,
            "services": self._services,
            "service": self._service,
            "events": self._list_events,
        }

    async def run(self) -> None:
        """Read the counters regularly until this task is cancelled."""
        await self._counters.run()

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended. While nobody looks at the page, this call takes only some microseconds."""
        at_s = self._wall_clock()
        self._view = summary.view
        names = summary.changes.services
        weights = summary.report.weights if len(names) <= node_page.SERVICES_NAMED else ()
        self.node.events.synced(summary, at_s, *endpoint_changes.describe(weights, self.sources.survey, self.sources.store))
        self.node.history.note_changes(len(names), summary.waited_s + summary.duration_s)
        self._numbers = None
        self._note_states(at_s)
        for outcome in summary.report.errors:
            if owner := self.sources.survey.owner_of(outcome.operation.item):
                self._troubles.failed(owner.service, outcome.error)
        if not self._viewers.have_looked(self._clock()):
            self._board = None
            self._told.clear()
            self._names.forget()
        elif self._board is not None:
            self._board.changed(names)
        self._counters.synced()

    def _note_states(self, at_s: float) -> None:
        health = self.sources.status
        self.node.events.note("health", "changes", "in time" if health.is_healthy else "late", at_s)
        self.node.events.note("health", "load balancers", "accepted" if health.is_eligible else "turned away", at_s)
        for kind, watch in self.sources.watch_states().items():
            state = "stale" if watch.is_stale else "connected" if watch.is_open else "not connected"
            self.node.events.note("watch", kind.value, state, at_s)

    async def answer(self, request: Request) -> Answer:
        """Answer a request whose path begins with ``UI``, or whose path is ``UI`` without the final slash."""
        try:
            return await self._answer(request)
        except RefusedError as error:
            headers = {**HEADERS, "Content-Type": _JSON, **({"Allow": "GET, HEAD"} if error.status == _METHOD else {})}
            return Answer(error.status, msgspec.json.encode({"error": str(error)}), headers)

    async def _answer(self, request: Request) -> Answer:
        self._check(request)
        name = request.path.removeprefix(UI)
        if request.path == UI.removesuffix("/"):
            # the link is relative, because an HTTP proxy may put a prefix before the path
            return Answer(308, b"", {**HEADERS, "Location": "ui/"})
        if not name.startswith("api/"):
            return self._file(name or FILES[0])
        part = name.removeprefix("api/").removesuffix(".json")
        describe = self._api.get(part) if name.endswith(".json") else None
        if describe is None:
            raise RefusedError(404, f"there is no {request.path[:100]}; docs/ui.md lists what there is")
        if not counters.NAME.fullmatch(viewer := request.query.get("viewer", "")):
            raise RefusedError(400, "viewer must be up to 32 letters, digits and hyphens")
        if not self._viewers.admit(viewer, self._clock()):
            raise RefusedError(503, f"{counters.MOST_VIEWERS} viewers look at this node already; close one of them")
        await self._names.read(self._services_to_name(part, request.query))
        async with self._turn:
            return Answer(200, msgspec.json.encode(await describe(request.query)), {**HEADERS, "Content-Type": _JSON})

    def _services_to_name(self, part: str, query: Mapping[str, str]) -> Sequence[ServiceName]:
        """The Services for which the answer to a request should contain the names of the pods."""
        if part == "service":
            name = ServiceName(*query.get("name", "").partition("/")[::2])
            return [name] if name in self.sources.store.services else []
        return _without_names(self.node.events.since(int(_number(query, "since", 0)))) if part == "events" else []

    def _check(self, request: Request) -> None:
        if request.method not in ("GET", "HEAD"):
            raise RefusedError(_METHOD, "only GET and HEAD are answered: nothing can be changed here")
        host = _host(request.headers.get("host", ""))
        is_known = host in self._hosts
        with contextlib.suppress(ValueError):
            is_known = is_known or bool(parse_address(host))
        if not is_known:
            raise RefusedError(
                421, "the name in Host is not that of this node: use localhost, an IP address, or the name of the Node or host"
            )

    def _file(self, name: str) -> Answer:
        if name not in FILES:
            raise RefusedError(404, "there is no such page; the first one is /ui/")
        body = importlib.resources.files(__package__).joinpath("static", name).read_bytes()
        return Answer(200, body, {**HEADERS, "Content-Type": _TYPES[name.rpartition(".")[2]]})

    # The documents.

    async def _describe_node(self, query: Mapping[str, str]) -> Any:
        since_s = _number(query, "since", 0.0)
        self._counters.looked_at()
        self._note_states(self._wall_clock())
        statistics = self.sources.survey.statistics(self._clock())
        return self.node.describe(
            statistics,
            await self._count(statistics),
            zone=self._view.zone if self._view else "",
            scheduler=self.translation().scheduler,
            since_s=since_s,
        )

    async def _count(self, statistics: Statistics) -> Numbers:
        """The numbers of virtual servers and of real servers, which are counted again after each sync."""
        if self._numbers is None:
            self._numbers = await in_slices(figures.counting(statistics), self._clock)
        return self._numbers

    async def _fresh_board(self) -> Board:
        self._counters.looked_at()
        if self._board is None:
            self._board = Board(self.sources.store, self.sources.survey, self._counters, self._troubles)
        table = self._board
        await in_slices(table.refreshing(), self._clock)
        return table

    async def _services(self, query: Mapping[str, str]) -> Any:
        selection = _selection(query)
        table = await self._fresh_board()
        found = await in_slices(table.finding(selection), self._clock)
        names, document = table.answer(selection, found)
        self._counters.show(names)
        return document

    async def _service(self, query: Mapping[str, str]) -> Any:
        text = query.get("name", "")
        if not _NAME.fullmatch(text):
            raise RefusedError(400, "name must be namespace/name of a Service")
        name, survey = ServiceName(*text.split("/")), self.sources.survey
        table = await self._fresh_board()
        if name not in self.sources.store.services:
            raise RefusedError(404, f"there is no Service {text}")
        known = self._told.get(name)
        if known and self._clock() < known[0]:
            return known[1]
        if self._view is None or name not in survey.states:
            raise RefusedError(503, f"the Service {text} has not been looked at yet; ask again in a moment")
        targets = self._names.known([name])
        try:
            opened = await self._counters.open(name)
        except KernelError as error:
            raise RefusedError(503, f"the kernel cannot be read: {error}") from error
        explainer = Explainer(
            survey=survey,
            store=self.sources.store,
            translation=self.translation(),
            view=self._view,
            connections=opened.connections,
            rates=lambda key, real_server: counters.described(opened.rates(key, real_server)),
            targets=targets,
        )
        # the Service may have been deleted while the kernel was read
        if name not in self.sources.store.services or name not in survey.states:
            raise RefusedError(404, f"there is no Service {text}")
        counted = [one.connections for servers in opened.traffic.values() for one in servers.values()]
        row = {
            **table.describe(name),
            "activeConnections": sum(one.active for one in counted),
            "inactiveConnections": sum(one.inactive for one in counted),
        }
        keys = set(counters.keys_of(survey, name))
        document = await in_slices(explainer.describing(name, keys), self._clock)
        place = {"node": self.node.node_name, "zone": self._view.zone, "now": self._wall_clock()}
        answer = {**place, "row": row, "service": document}
        self._told.pop(name, None)
        kept_s = min(LONGEST_KEPT_S, sum(len(port["endpoints"]) for port in document["ports"]) / ENDPOINTS_PER_S)
        if kept_s < SHORTEST_KEPT_S:
            return answer
        told = msgspec.Raw(msgspec.json.encode(answer))
        self._told[name] = (self._clock() + kept_s, told)
        if len(self._told) > ANSWERS_KEPT:
            del self._told[next(iter(self._told))]
        return told

    async def _list_events(self, query: Mapping[str, str]) -> Any:
        since = int(_number(query, "since", 0))
        self._note_states(self._wall_clock())
        last, events = self.node.events.last, list(self.node.events.since(since))
        targets = self._names.known(_without_names(events))
        endpoint_changes.name(events, targets)
        return {"startedAt": self.node.started_s, "last": last, "events": events}


def _without_names(events: Iterable[Mapping[str, Any]]) -> list[ServiceName]:
    """Returns the Services of those endpoints whose pod name is missing in the events."""
    endpoints = (one for event in events for one in event["endpoints"])
    return [ServiceName(*one["service"].split("/", 1)) for one in endpoints if one["service"] and not one["target"]]


_METHOD = 405


def _host(text: str) -> str:
    """The name or address in a ``Host`` header, without the port number."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{1,5})?", text.strip())
    return found[1].strip("[]").rstrip(".").lower() if found else ""


def _number(query: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(query.get(name, default))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RefusedError(400, f"{name} must be a number")
    return number


def _whole(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= most):  # noqa: PLR2004 - at most 9 digits
        raise RefusedError(400, f"{name} must be a whole number from 1 to {most}")
    return int(text)


def _selection(query: Mapping[str, str]) -> Selection:
    words = {"sort": board.SORTS, "order": ("asc", "desc"), "type": tuple(ServiceType), "problems": ("only",)}
    for name, allowed in words.items():
        if query.get(name) and query[name] not in allowed:
            raise RefusedError(400, f"{name} must be {' or '.join(allowed)}")
    sort, order = query.get("sort") or "name", query.get("order", "")
    texts = [query.get(name, "").strip() for name in ("query", "namespace", "node")]
    if max(map(len, texts)) > board.LONGEST_QUERY:
        raise RefusedError(400, f"query, namespace and node must have at most {board.LONGEST_QUERY} characters")
    text, namespace, node = texts
    return Selection(
        query=board.parse_query(text)._replace(
            namespace=namespace, type=query.get("type", ""), node=node, only_problems=bool(query.get("problems"))
        ),
        sort=sort,
        descending=order == "desc" if order else sort != "name",
        page=_whole(query, "page", 1, 10**8),
        size=_whole(query, "size", 50, LARGEST_PAGE),
    )
