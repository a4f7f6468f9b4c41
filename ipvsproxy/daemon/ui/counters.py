"""Reads the kernel's counters for the page, at its own times.

Rule 1: while nobody looks, only the counters of the whole node are read, one small file, and only after a sync: the process is
awake then.
Rule 2: while somebody looks, all virtual servers are read every ``SAMPLE_S``, or less often, so that a reading costs no more than
``SHARE`` of a processor.
Rule 3: the real servers of a few Services are read with them: of those that a viewer has opened, and of those on a viewer's page.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

import structlog

from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.kernel import SERVERS_AT_ONCE, CounterReader
from ipvsproxy.daemon.ui import board, rates
from ipvsproxy.daemon.ui.rates import History, Rates, ServiceRates
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.traffic import EndpointTraffic
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.virtual_servers import Connections, VirtualServerKey
from ipvsproxy.reconcile.survey import Survey

SAMPLE_S = 2.0
SHARE = 0.007
QUIET_S = 10.0
"""The least time between two readings while nobody looks."""
SERVERS_OF_PAGES = 100
"""The most virtual servers whose real servers are read for the pages of all viewers."""
SERVERS_OF_SERVICE = 400
"""The most of one Service: it may have one for each port and address of the node."""
OPENED = 16
"""The most Services whose endpoints are remembered."""

MOST_VIEWERS = 16
VIEWER_S = 4.0
"""How long a viewer counts as one after its last request."""
IDLE_S = 60.0
"""How long after the last request of all viewers the page's figures are kept up to date."""
NAME = re.compile(r"[0-9A-Za-z-]{0,32}")
"""What a viewer may call itself. All that have no name are one viewer."""


class Viewers:
    """The viewers of the last seconds. Times are those of a monotonic clock."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._last_s: float | None = None

    def admit(self, name: str, now: float) -> bool:
        """Count a request of a viewer; False if there are too many others."""
        self._seen_s = {viewer: seen_s for viewer, seen_s in self._seen_s.items() if now - seen_s < VIEWER_S}
        if name not in self._seen_s and len(self._seen_s) >= MOST_VIEWERS:
            return False
        self._seen_s[name] = self._last_s = now
        return True

    def idle_at_s(self) -> float | None:
        """When nobody has looked for ``IDLE_S``; None before the first request."""
        return None if self._last_s is None else self._last_s + IDLE_S


T = TypeVar("T")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


Traffic = Mapping[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]]


class Opened:
    """The endpoints of one Service: their last reading, and the rates since the one before."""

    def __init__(self) -> None:
        self.read_s: float | None = None
        self.counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections]] = {}
        """The connections at the last reading."""
        self._traffic: Traffic = {}
        self._rates: dict[tuple[VirtualServerKey, RealServerKey], Rates] = {}

    def taking(self, traffic: Traffic, now: float) -> Iterator[None]:
        """Take in another reading, with pauses."""
        seconds = 0.0 if self.read_s is None else now - self.read_s
        counts: dict[VirtualServerKey, dict[RealServerKey, Connections]] = {}
        found: dict[tuple[VirtualServerKey, RealServerKey], Rates] = {}
        for key, servers in traffic.items():
            known, of_key = self._traffic.get(key), counts.setdefault(key, {})
            for number, (real_server, (connections, counters)) in enumerate(servers.items(), 1):
                of_key[real_server] = connections
                if known is not None and seconds > 0:
                    last = known.get(real_server)
                    found[key, real_server] = rates.between(last.counters if last else None, counters, seconds)
                if number % SERVERS_AT_ONCE == 0:
                    yield
        self.counts, self._rates, self._traffic, self.read_s = counts, found, traffic, now

    def rates(self, key: VirtualServerKey, real_server: RealServerKey) -> Rates | None:
        """The rates of a real server; None before its second reading."""
        return self._rates.get((key, real_server))


class CounterFollower:
    """Follows the counters. Times are those of ``clock``, which is monotonic; ``wall_clock`` gives seconds since the epoch."""

    def __init__(
        self,
        *,
        kernel: KernelThread[CounterReader],
        survey: Survey,
        viewers: Viewers,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``processor_clock`` is the processor time of the calling thread."""
        self.rates = ServiceRates()
        self.active: Mapping[ServiceName, Connections] = {}
        self._kernel = kernel
        self._survey = survey
        self._viewers = viewers
        self._history = history
        self._clock = clock
        self._wall_clock = wall_clock
        self._processor_clock = processor_clock
        self._wake = asyncio.Event()
        self._sampled_s: float | None = None
        self._cost_s = 0.0
        self._opened: dict[ServiceName, Opened] = {}
        self._shown: dict[ServiceName, float] = {}
        self._is_readable = True

    def looked_at(self) -> None:
        """Somebody looks: read at once, unless the last reading is fresh."""
        self._wake.set()

    def synced(self) -> None:
        """A sync has ended: the node's counters are read, unless they were a moment ago."""
        if self._sampled_s is None or self._clock() - self._sampled_s >= QUIET_S:
            self._wake.set()

    def show(self, names: Collection[ServiceName]) -> None:
        """These Services are on the page of a viewer."""
        now = self._clock()
        self._shown.update(dict.fromkeys(names, now))

    async def run(self) -> None:
        """Read for ever."""
        while True:
            idle_at_s = self._viewers.idle_at_s()
            is_watched = idle_at_s is not None and idle_at_s > self._clock()
            if not is_watched:
                self._forget()
            due_s = self._due_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - self._clock()) if is_watched else None):
                    await self._wake.wait()
            self._wake.clear()
            if self._clock() >= self._due_s():
                await self.sample()

    def _due_s(self) -> float:
        return 0.0 if self._sampled_s is None else self._sampled_s + max(SAMPLE_S, self._cost_s / SHARE)

    def _forget(self) -> None:
        if self.rates.readings or self._opened or self._shown:
            self.rates.clear()
            self.active = {}
            self._opened.clear()
            self._shown.clear()
        self._cost_s = 0.0

    async def sample(self) -> None:
        """Read what is due now. What cannot be read is unknown until the next time."""
        now = self._sampled_s = self._clock()
        idle_at_s = self._viewers.idle_at_s()
        try:
            self._history.add(await self._kernel.call(lambda reader: reader.totals()), now, self._wall_clock())
            if idle_at_s is not None and idle_at_s > now:
                await self._read_services(now)
                await self._read_shown(now)
        except KernelError as error:
            self._history.add(None, now, self._wall_clock())
            if self._is_readable:
                log.warning("page_counters_unreadable", error=str(error))
            self._is_readable = False
        else:
            self._is_readable = True

    async def _read_services(self, now: float) -> None:
        cost_s, figures = 0.0, self.rates
        parts = await self._kernel.call(lambda reader: reader.services(()))
        figures.begin(now)
        while True:
            part, took_s = await self._kernel.call(lambda _: self._timed(lambda: next(parts, None)))
            cost_s += took_s
            if part is None:
                break
            steps = self._timing(figures.take(part, self._survey.virtual_servers))
            await in_slices(steps, self._clock)
            cost_s += steps.took_s
        steps = self._timing(figures.finish(self._survey.virtual_servers))
        await in_slices(steps, self._clock)
        self._cost_s = cost_s + steps.took_s

    def _timed(self, do: Callable[[], T]) -> tuple[T, float]:
        began_s = self._processor_clock()
        return do(), self._processor_clock() - began_s

    def _timing(self, steps: Iterator[None]) -> "Timing":
        return Timing(steps, self._processor_clock)

    async def _read_shown(self, now: float) -> None:
        """Count the open connections of the Services on viewers' pages."""
        self._shown = {name: shown_s for name, shown_s in self._shown.items() if now - shown_s < VIEWER_S}
        keys: list[VirtualServerKey] = []
        owners: dict[VirtualServerKey, ServiceName] = {}
        for name in self._shown:
            own = board.keys_of(self._survey, name)
            if len(keys) + len(own) <= SERVERS_OF_PAGES:
                keys += own
                owners.update(dict.fromkeys(own, name))
        sums: dict[ServiceName, Connections] = dict.fromkeys(owners.values(), Connections(0, 0))
        traffic = await self._read_endpoints(keys)
        for key, servers in traffic.items():
            for one in servers.values():
                before = sums[owners[key]]
                sums[owners[key]] = Connections(
                    before.active + one.connections.active, before.inactive + one.connections.inactive
                )
        self.active = sums

    async def _read_endpoints(self, keys: Collection[VirtualServerKey]) -> Traffic:
        wanted, traffic = list(keys), dict[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]]()
        for first in range(0, len(wanted), SERVERS_AT_ONCE):
            some = wanted[first : first + SERVERS_AT_ONCE]
            (part, took_s) = await self._kernel.call(lambda reader: self._timed(lambda: reader.endpoints(some)))  # noqa: B023 - done before the next
            self._cost_s += took_s
            traffic.update(part)
        return traffic

    async def open(self, name: ServiceName) -> Opened:
        """The endpoints of a Service, read now unless they were a moment ago.

        Raises:
            KernelError: they could not be read.
        """
        opened = self._opened.pop(name, None) or Opened()
        self._opened[name] = opened
        if len(self._opened) > OPENED:
            del self._opened[next(iter(self._opened))]
        now = self._clock()
        if opened.read_s is None or now - opened.read_s >= SAMPLE_S:
            keys = board.keys_of(self._survey, name)[:SERVERS_OF_SERVICE]
            await in_slices(opened.taking(await self._read_endpoints(keys), now), self._clock)
        return opened


class Timing(Iterator[None]):
    """Steps, with the processor time that they take."""

    def __init__(self, steps: Iterator[None], processor_clock: Callable[[], float]) -> None:
        self._steps = steps
        self._processor_clock = processor_clock
        self.took_s = 0.0

    def __next__(self) -> None:
        began_s = self._processor_clock()
        try:
            next(self._steps)
        finally:
            self.took_s += self._processor_clock() - began_s
