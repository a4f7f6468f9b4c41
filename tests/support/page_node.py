"""A node with an in-memory kernel, and the web page of the node.

The traffic counters grow with time, and a real HTTP server can serve the page.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Collection, Container, Generator, Iterator
from typing import Any

import msgspec

from ipvsproxy.daemon.http import server
from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.http.server import Request
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics.figures import Sampler, Sources
from ipvsproxy.daemon.sources.source import ApiError, WatchStatus
from ipvsproxy.daemon.ui import counters
from ipvsproxy.daemon.ui.explanation import Explainer
from ipvsproxy.daemon.ui.node_page import NodePage
from ipvsproxy.daemon.ui.pages import Pages
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.ipvs.rows import EndpointTraffic, TrafficReader
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family, parse_address
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ApiObject, Node, ObjectKind, ServiceName
from ipvsproxy.model.virtual_servers import ConnectionCounts, Counters, VirtualServerKey
from ipvsproxy.translate.api.targets import Target, Targets
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.memory_node import MemoryNode

PROGRAM = Program((1, 8, 9), "nf_tables")


class Traffic(TrafficReader):
    """The counters of an in-memory kernel: the traffic of a virtual server is ``per_second`` times the age of this object.

    Connection counts are read from ``FakeKernel.connection_counts``. ``readings`` counts how often all virtual servers have been
    read.
    """

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.began_s = self._now()
        self.per_second: dict[VirtualServerKey, float] = {}
        self.swing = 0.0
        """The variation of the traffic: 0 means constant traffic, and 1 is the largest variation."""
        self.readings = 0
        self.totals_read = 0
        self.connections_wanted: list[bool] = []
        self.error: Exception | None = None

    def _now(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:  # this method also runs in the kernel's thread
            return time.monotonic()

    def totals_at(self, age_s: float) -> Counters:
        """The counters of the whole node at the moment when this object was ``age_s`` old."""
        return self._counted(sum(self.per_second.values()), age_s)

    def _counted(self, rate: float, age_s: float | None = None) -> Counters:
        if age_s is None:
            age_s = self._now() - self.began_s
        waves = 2.2 * math.sin(0.2 * age_s + rate) + 15 * math.sin(0.02 * age_s + rate)
        connections = int(rate * (age_s + self.swing * waves))
        return Counters(connections, connections * 10, connections * 8, connections * 1000, connections * 9000)

    def totals(self) -> Counters:
        if self.error:
            raise self.error
        self.totals_read += 1
        return self._counted(sum(self.per_second.values()))

    def services(self, always: Container[VirtualServerKey]) -> Iterator[dict[VirtualServerKey, Counters]]:
        self.readings += 1
        each = {key: self._counted(rate) for key, rate in list(self.per_second.items()) if key in self.kernel.virtual_servers}
        yield {key: counters for key, counters in each.items() if any(counters)}

    def open_connections(self, *, is_wanted: bool) -> ConnectionCounts | None:
        self.connections_wanted.append(is_wanted)
        counts = self.kernel.connection_counts.values()
        return ConnectionCounts(sum(one.active for one in counts), sum(one.inactive for one in counts)) if is_wanted else None

    def endpoints(self, keys: Collection[VirtualServerKey]) -> dict[VirtualServerKey, dict[RealServerKey, EndpointTraffic]]:
        return {key: dict(self._of_virtual_server(key)) for key in keys}

    def _of_virtual_server(self, key: VirtualServerKey) -> Iterator[tuple[RealServerKey, EndpointTraffic]]:
        found = self.kernel.virtual_servers.get(key)
        servers = found.real_servers if found else {}
        share = self.per_second.get(key, 0.0) / max(1, sum(weight > 0 for weight in servers.values()))
        for one, weight in servers.items():
            connections = self.kernel.connection_counts.get((key, one), ConnectionCounts(0, 0))
            yield one, EndpointTraffic(connections, self._counted(share if weight else 0.0))


class _Watcher(memory_node.Watcher):
    """Passes each notification of the loop also to the health status and to the page of the node."""

    status: Status
    pages: Pages

    def queued(self, now: float) -> None:
        super().queued(now)
        self.status.queued(now)

    def syncing(self, now: float) -> None:
        super().syncing(now)
        self.status.syncing(now)

    def synced(self, summary: SyncSummary) -> None:
        super().synced(summary)
        self.status.synced(summary)
        self.pages.synced(summary)


class PageNode(MemoryNode):
    """One process of ipvsproxy with its web page. ``watches`` are the watches of the process's source; a test may change them."""

    def __init__(self, **arguments: Any) -> None:
        watcher = _Watcher()
        self.targets: dict[tuple[ServiceName, RealServerKey], Target] = {}
        self.names_read: list[ServiceName] = []
        self.names_error: ApiError | None = None
        self.names_delay_s = 0.0
        super().__init__(watcher=watcher, **arguments)
        self.traffic = Traffic(self.kernel)
        self._began_s = time.time() - self._now()
        self.watches = {kind: WatchStatus(connected=True, contact_s=self._now()) for kind in ObjectKind}
        self.status = Status(
            families=self.settings.families,
            sync_period_s=memory_node.AUDIT_INTERVAL_S,
            clock=self._now,
            wall_clock=self.wall_clock,
            missing=lambda: self.store.missing,
        )
        sources = Sources(
            store=self.store,
            survey=self.engine.survey,
            status=self.status,
            watches=lambda: self.watches,
        )
        self.pages = Pages(
            NodePage(
                sources=sources,
                node_name=builders.THIS_NODE,
                source="API server",
                programs=dict.fromkeys(Family, PROGRAM),
            ),
            Sampler(KernelThread(self.executor, self.traffic), self._now),
            lambda: self.engine.translation,
            self.read_targets,
        )
        watcher.pages, watcher.status = self.pages, self.status

    async def read_targets(self, service: ServiceName) -> Targets:
        """Replaces the real source: returns the pods of a Service, and records each query in ``names_read``."""
        self.names_read.append(service)
        await asyncio.sleep(self.names_delay_s)
        if self.names_error:
            raise self.names_error
        return {key: target for key, target in self.targets.items() if key[0] == service}

    def wall_clock(self) -> float:
        """Seconds since the epoch; this clock advances with the time of the event loop."""
        return self._began_s + self._now()

    def begin_with(self, *objects: ApiObject) -> None:
        super().begin_with(*objects)
        self.status.node = next((one for one in objects if isinstance(one, Node)), None)

    @contextlib.asynccontextmanager
    async def showing(self, port: int = 0) -> AsyncIterator[int]:
        """Run the loop and the readings for the page, and answer HTTP on loopback; yields the port."""
        async with self.reading():
            listener = await server.listen(parse_address("127.0.0.1"), port, self.pages.answer)
            try:
                yield listener.port
            finally:
                await listener.close()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Run the loop and the readings for the page, without an HTTP server."""
        async with self.running():
            reading = asyncio.create_task(self.pages.run())
            try:
                yield
            finally:
                reading.cancel()
                await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()

    def describing(self, name: ServiceName) -> Generator[None, None, dict[str, Any]]:
        """Describes a Service after the last sync, without its connections in the kernel; yields so that other tasks can run."""
        survey = self.engine.survey
        explainer = Explainer(
            survey=survey,
            store=self.store,
            translation=self.engine.translation,
            view=self.watcher.summaries[-1].view,
            connections=lambda *_: None,
        )
        return explainer.describing(name, counters.keys_of(survey, name))

    async def ask(self, what: str, /, **query: str) -> dict[str, Any]:
        """A document of the page's API, read without HTTP."""
        answer = await self.pages.answer(Request(f"/ui/api/{what}.json", query, {"host": "localhost"}))
        document: dict[str, Any] = msgspec.json.decode(answer.body)
        assert answer.status == 200, document
        return document
