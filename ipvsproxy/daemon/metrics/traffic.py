"""The traffic counters of IPVS by Service port and, optionally, by endpoint.

Rule 1: the counters are read only for a scrape, and at most once every ``FRESH_S`` seconds. The ``Sampler`` reads the counters of
virtual servers.
Rule 2: a total grows by the difference between the current and the last reading. Because a total only adds up differences, a
total does not fall when one of its virtual servers is removed. A total includes traffic from before the start of this process,
because IPVS keeps its counters.
Rule 3: a port that has had no traffic has no series and takes no memory. The first ports with traffic, up to the limit, have a
separate series for as long as they exist. The ports beyond the limit share one series.
"""

import asyncio
import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Container, Generator, Hashable, Iterable, Iterator, Mapping, Sequence

from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.reader import SERVERS_AT_ONCE
from ipvsproxy.daemon.metrics import figures, series
from ipvsproxy.daemon.metrics.figures import FRESH_S, Sampler, Sources
from ipvsproxy.daemon.metrics.series import Metric
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.rows import EndpointTraffic
from ipvsproxy.model import steps
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import Service, ServiceName
from ipvsproxy.model.virtual_servers import NO_CONNECTIONS, ConnectionCounts, Counters, VirtualServerKey

LONGEST_READING_S = 5.0
"""The longest time in seconds that a scrape waits for the counters. It is half of Prometheus's default timeout, because a scrape
may first have to wait for another scrape.

If the counters have not arrived by then, the scrape shows the figures of the previous scrape.
"""
LINES_AT_ONCE = 200
"""The number of lines in each rendered part of a page (about 30 kB of text). If a page of several megabytes were rendered at
once, it would block the event loop, and each scrape would allocate memory for a whole page."""
OTHERS = "(others)"
"""Replaces namespace and name in the common series of all ports or endpoints beyond the limit (see ``Ledger``). No API
object can have this name."""
_DIRECTIONS = ("in", "out")
_METRICS = {
    "service": (series.SERVICE_CONNECTIONS, series.SERVICE_PACKETS, series.SERVICE_BYTES),
    "endpoint": (series.ENDPOINT_CONNECTIONS, series.ENDPOINT_PACKETS, series.ENDPOINT_BYTES),
}
"""For Services, and for endpoints: the metrics of connections, packets and bytes, in the order of ``Counters``."""

ZERO = Counters()


CountedObject = tuple[Hashable, str, Counters | None]
"""The key of a kernel object, the labels of its series, and its counters; the counters are None if the object exists but was not
read."""


class Ledger:
    """The traffic total for each set of labels; the values of each total are in the order of ``Counters``.

    At most ``limit`` label sets have separate totals. ``unlisted`` are the label sets beyond this limit, and ``others`` is their
    common total.
    """

    def __init__(self, limit: int) -> None:
        self.totals: dict[str, list[int]] = {}
        self.others = list(ZERO)
        self.unlisted: set[str] = set()
        self._limit = limit
        self._last: dict[Hashable, Counters] = {}

    def booking(self, rows: Collection[CountedObject], ownerless: Container[Hashable] = ()) -> Iterator[None]:
        """Add the counters of all existing objects to the totals, and yield now and then so that other tasks can run.

        A total is forgotten as soon as no object has its labels any longer. A total grows by the difference between the current
        and the last counters of an object, or, after a counter reset, by the current counters.

        ``ownerless`` are existing objects without labels. Traffic that an object had before it got labels is not added to a
        total.

        The caller may stop at any ``yield``: the counters of each object have then been added completely or not at all.
        """
        present, labelled, unlisted = set(), set(), set()
        for number, (key, labels, _) in enumerate(rows, 1):
            if number % steps.ITEMS_AT_ONCE == 0:
                yield
            present.add(key)
            labelled.add(labels)
            if labels in self.unlisted and labels not in self.totals:
                unlisted.add(labels)
        self.unlisted = unlisted
        yield from figures.forgetting(self.totals, labelled)
        yield from figures.forgetting(self._last, present, ownerless)
        for number, (key, labels, counters) in enumerate(rows, 1):
            if number % steps.ITEMS_AT_ONCE == 0:
                yield
            last = self._last.setdefault(key, ZERO)
            if counters is not None and counters != last:
                self._last[key] = counters
                total = self._total(labels)
                total[:] = map(operator.add, total, figures.growth(last, counters))

    def _total(self, labels: str) -> list[int]:
        if labels not in self.totals:
            if len(self.totals) >= self._limit:
                self.unlisted.add(labels)
                return self.others
            self.unlisted.discard(labels)
            self.totals[labels] = list(ZERO)
        return self.totals[labels]


@dataclasses.dataclass(eq=False)
class Traffic:
    """Reads the traffic counters for scrapes. With a ``limit`` of 0, counters are never read."""

    sampler: Sampler
    sources: Sources
    limit: int
    of_endpoints: bool

    def __post_init__(self) -> None:
        self._clock = self.sources.status.clock
        self._read_s: float | None = None
        self._services = Ledger(self.limit)
        self._endpoints = Ledger(self.limit)
        self._labels: dict[VirtualServerKey, tuple[Service, str]] = {}
        self._open: dict[str, ConnectionCounts] = {}

    async def refresh(self) -> None:
        """Read the counters, unless the last reading is fresh.

        If the kernel is busy or the reading fails, the previous counters are kept. Only one call of this method may run at a
        time.
        """
        now = self._clock()
        if not self.limit or (self._read_s is not None and now - self._read_s < FRESH_S):
            return
        try:
            async with asyncio.timeout(LONGEST_READING_S):
                counters = (await self.sampler.read()).counters
                endpoints = await self._read_endpoints(counters) if self.of_endpoints else {}
        except TimeoutError:
            log.debug("traffic_counters_old", hint="the kernel's thread is busy, or there are many counters")
            return
        except KernelError as error:
            log.warning("traffic_counters_unreadable", error=str(error))
            return
        await in_slices(self._booking(counters, endpoints), self._clock)
        self._read_s = now

    async def _read_endpoints(
        self, counters: Mapping[VirtualServerKey, Counters]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]]:
        """The counters of the real servers of each virtual server that has had traffic.

        Virtual servers whose counters are not in the latest reading are included. A virtual server whose endpoints are not read
        would count as removed, and its traffic would be counted from zero when its endpoints are read again.
        """
        keys = itertools.chain(counters, (key for key in self._labels if key not in counters))
        chosen = iter(await in_slices(steps.choosing(lambda key: counters.get(key) != ZERO, keys), self._clock))
        endpoints: dict[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]] = {}
        while some := list(itertools.islice(chosen, SERVERS_AT_ONCE)):
            endpoints |= await self.sampler.kernel.call(operator.methodcaller("endpoints", some))
        return endpoints

    def _booking(
        self,
        counters: Mapping[VirtualServerKey, Counters],
        endpoints: Mapping[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]],
    ) -> Generator[None, None, None]:
        yield from self._joining(counters)
        labels = self._labels
        rows: list[CountedObject] = []
        yield from steps.each(lambda key: rows.append((key, labels[key][1], counters.get(key))), labels)
        yield from self._services.booking(rows, counters)
        open_connections: dict[str, ConnectionCounts] = {}
        rows = []
        ownerless: set[Hashable] = set()
        for number, (key, servers) in enumerate(endpoints.items(), 1):
            if number % SERVERS_AT_ONCE == 0:
                yield
            if key not in labels:
                ownerless.update((key, real_server) for real_server in servers)
                continue
            for real_server, (connections, counted) in servers.items():
                name = _endpoint(labels[key][1], real_server)
                rows.append(((key, real_server), name, counted))
                open_connections[name] = open_connections.get(name, NO_CONNECTIONS).plus(connections)
        yield from self._endpoints.booking(rows, ownerless)
        if not self.of_endpoints:
            yield from self._adding_drains(open_connections)
        listed = yield from steps.choosing(lambda name: not self.of_endpoints or name in self._endpoints.totals, open_connections)
        self._open = {name: open_connections[name] for name in listed[: self.limit]}

    def _adding_drains(self, open_connections: dict[str, ConnectionCounts]) -> Iterator[None]:
        """Add the last known connections of draining real servers to ``open_connections``."""
        # ``draining_connections`` returns a copy, because drains may begin and end while this generator is paused.
        drains = self.sources.survey.draining_connections()
        for number, (virtual_server, real_server, connections) in enumerate(drains, 1):
            if number % steps.ITEMS_AT_ONCE == 0:
                yield
            if port := self._labels_of(virtual_server):
                name = _endpoint(port[1], real_server)
                open_connections[name] = open_connections.get(name, NO_CONNECTIONS).plus(connections)

    def _joining(self, counted: Collection[VirtualServerKey]) -> Iterator[None]:
        """Find the Service and the port's labels for each desired virtual server that has had traffic."""
        joined = {}
        left: set[ServiceName] = set()
        # Ports are ordered by the time of their first traffic.
        for number, key in enumerate(itertools.chain(self._labels, (key for key in counted if key not in self._labels)), 1):
            if number % steps.ITEMS_AT_ONCE == 0:
                yield
            if port := self._labels_of(key):
                joined[key] = port
            elif key in self._labels:
                left.add(self._labels[key][0].name)
        # A port keeps its series while the port has a virtual server, even if the virtual servers that had traffic have been
        # removed.
        desired = self.sources.survey.virtual_servers
        # the mapping of desired virtual servers may change between two steps
        for number, key in enumerate(list(desired) if left else (), 1):
            if number % steps.ITEMS_AT_ONCE == 0:
                yield
            if (one := desired.get(key)) and one.owner.service in left and (port := self._labels_of(key)):
                joined[key] = port
        self._labels = joined
        self.sampler.always = joined.keys()  # the next reading includes these virtual servers even if their counters are zero

    def _labels_of(self, key: VirtualServerKey) -> tuple[Service, str] | None:
        desired, before = self.sources.survey.virtual_servers.get(key), self._labels.get(key)
        service = self.sources.store.services.get(desired.owner.service) if desired else None
        if desired is None or service is None:
            return None
        if before and before[0] is service:
            return before
        port = self.sources.survey.service_port(service, desired)
        name, protocol = (port.name, port.protocol) if port else ("", key.protocol)
        return service, _labels(service.name.namespace, service.name.name, name, protocol.name)

    def render(self, *, openmetrics: bool) -> Iterator[bytes]:
        """The series in a text format of Prometheus, in parts of ``LINES_AT_ONCE`` lines."""
        lines = self._lines(openmetrics=openmetrics) if self.limit else iter(())
        while some := "".join(itertools.islice(lines, LINES_AT_ONCE)):
            yield some.encode()

    def _lines(self, *, openmetrics: bool) -> Iterator[str]:
        render = functools.partial(_series, openmetrics=openmetrics)
        kinds = {"service": self._services, "endpoint": self._endpoints}
        yield from render(series.TRAFFIC_LISTED, ((f'kind="{kind}"', len(ledger.totals)) for kind, ledger in kinds.items()))
        yield from render(series.TRAFFIC_UNLISTED, ((f'kind="{kind}"', len(ledger.unlisted)) for kind, ledger in kinds.items()))
        yield from render(series.OPEN_CONNECTIONS, _split(self._open, "state", ConnectionCounts._fields))
        for kind, ledger in kinds.items():
            totals: Mapping[str, Sequence[int]] = ledger.totals
            if ledger.unlisted or any(ledger.others):
                totals = {**totals, _others(kind): ledger.others}
            connections, *by_direction = _METRICS[kind]
            yield from render(connections, ((labels, total[0]) for labels, total in totals.items()))
            for metric, first in zip(by_direction, (1, 3), strict=True):
                yield from render(metric, _split(totals, "direction", _DIRECTIONS, first))


def _split(totals: Mapping[str, Sequence[int]], label: str, values: Sequence[str], first: int = 0) -> Iterator[tuple[str, int]]:
    """The labels and the value of each series.

    Each total is split into one series for each label value in ``values``. In each total, the value of the first series is at
    index ``first``. The values of the other series follow.
    """
    for labels, total in totals.items():
        for index, value in enumerate(values, first):
            yield f'{labels},{label}="{value}"', total[index]


def _series(metric: Metric, rows: Iterable[tuple[str, int]], *, openmetrics: bool) -> Iterator[str]:
    """The lines of one metric; each row has labels and a value."""
    name = metric.name.removesuffix("_total") if openmetrics else metric.name
    yield f"# HELP {name} {metric.meaning}\n# TYPE {name} {metric.type}\n"
    for labels, value in rows:
        yield f"{metric.name}{{{labels}}} {value}\n"


def _labels(namespace: str, service: str, port: str, protocol: str) -> str:
    pairs = (("namespace", namespace), ("service", service), ("port", port), ("protocol", protocol))
    return ",".join(f'{name}="{_escape(value)}"' for name, value in pairs)


def _others(kind: str) -> str:
    labels = _labels(OTHERS, OTHERS, "", "")
    return labels if kind == "service" else f'{labels},endpoint=""'


def _endpoint(labels: str, real_server: RealServerKey) -> str:
    return f'{labels},endpoint="{real_server}"'


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
