"""Reads the kernel's counters for the web page when a reading is due, and computes rates.

The rates are connections, packets and bytes per second.

Rule 1: while nobody looks at the page, only the counters of the whole node are read (from one small file), and only after a sync.
Rule 2: while somebody looks at the page, the counters of all virtual servers are read every ``SAMPLE_S``. If there are many
virtual servers, the pauses between readings are longer (``READ_PER_S``).
Rule 3: the real servers of a Service are read only if a viewer has opened the Service, or sees the Service in the table.
Rule 4: a rate is computed from two readings of the same virtual server; if the counters were reset in between, the first reading
counts as zero.
Rule 5: the page shows the mean of the last two rates. The kernel updates its totals every two seconds, so the rate over one short
interval may be zero or twice the true rate.
Rule 6: a Service that had no traffic in all remembered readings takes no memory.
Rule 7: while somebody looks at the page, each reading that searches all real servers for drift also counts the node's open
connections.
"""

import asyncio
import contextlib
import dataclasses
import operator
import re
import struct
from array import array
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.reader import SERVERS_AT_ONCE
from ipvsproxy.daemon.metrics import figures
from ipvsproxy.daemon.metrics.figures import Sampler, Sources
from ipvsproxy.daemon.ui.node_page import History
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipvs.rows import EndpointTraffic
from ipvsproxy.model import steps
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import Clients
from ipvsproxy.model.virtual_servers import NO_CONNECTIONS, ConnectionCounts, Counters, VirtualServer, VirtualServerKey
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.reconcile.tables.scopes import MarkedPort

SAMPLE_S = 2.0
READ_PER_S = 1500
"""The number of virtual and real servers that may be read per second on average. After a larger reading, the pause is longer.
Readings at this rate take 0.7 % of a processor."""
QUIET_S = 10.0
"""The shortest time between two readings while the page has no viewer."""
SERVERS_OF_PAGES = 100
"""The real servers of at most this many virtual servers are read for the table pages of all viewers together."""
SERVERS_OF_SERVICE = 400
"""The largest number of virtual servers of one Service whose real servers are read. A Service may have a virtual server for each
of its ports on each address of the node."""
OPENED = 16
"""The largest number of Services for which the last two readings of the endpoints are kept."""

MOST_VIEWERS = 16
VIEWER_S = 4.0
"""The number of seconds for which a viewer counts as present after the viewer's last request."""
IDLE_S = 60.0
"""The time for which the page's figures are kept up to date after the last request of any viewer."""
NAME = re.compile(r"[0-9A-Za-z-]{0,32}")
"""The syntax of a viewer's name. All viewers without a name count as one."""


class Viewers:
    """The viewers of the page during the last seconds. Times are times of a monotonic clock."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        self._last_s: float | None = None

    def admit(self, name: str, now: float) -> bool:
        """Count a request of a viewer; returns False if there are too many other viewers."""
        self._seen_s = {viewer: seen_s for viewer, seen_s in self._seen_s.items() if now - seen_s < VIEWER_S}
        if name not in self._seen_s and len(self._seen_s) >= MOST_VIEWERS:
            return False
        self._seen_s[name] = self._last_s = now
        return True

    def have_looked(self, now: float) -> bool:
        """Whether a viewer has requested anything in the last ``IDLE_S``."""
        return self._last_s is not None and now - self._last_s < IDLE_S


REMEMBERED = 24
"""The number of readings that the small line charts show."""
_COUNTERS = struct.Struct("=5Q")
_NOTHING = Counters()
_ZERO = _COUNTERS.pack(*_NOTHING)


class Rates(NamedTuple):
    """Connections, packets and bytes per second; packets and bytes include both directions."""

    connections: float = 0.0
    packets: float = 0.0
    bytes: float = 0.0


def described(rates: Rates | None) -> dict[str, float | None]:
    """Rates in the form that the browser gets, with three digits after the decimal point; None if the rates are unknown."""
    known = rates or (None,) * len(Rates._fields)
    return {f"{name}PerSecond": None if rate is None else round(rate, 3) for name, rate in zip(Rates._fields, known, strict=True)}


class _History(msgspec.Struct, gc=False):
    """The rates of one Service in the last ``REMEMBERED`` readings.

    All numbers are in one array, because each array takes 64 bytes in addition to its content. ``busy`` is the number of the last
    reading that showed traffic.
    """

    figures: "array[float]"
    busy: int

    def rates(self, number: int) -> "array[float]":
        """The rates of the reading with the given number."""
        return self.figures[_place(number)]


def between(before: Sequence[int], now: Sequence[int], seconds: float) -> Rates:
    """The rates between two readings of the counters of one object."""
    connections, packets_in, packets_out, bytes_in, bytes_out = figures.growth(before, now)
    return Rates(connections / seconds, (packets_in + packets_out) / seconds, (bytes_in + bytes_out) / seconds)


class ServiceRates:
    """The recent rates of connections, packets and bytes of each Service."""

    def __init__(self) -> None:
        self.readings = 0
        """The number of complete readings after the first reading. The rates of Services change only when this number changes."""
        self.interval_s: float | None = None
        """The number of seconds between the last two readings. The latest rates are computed from these two readings."""
        self._read_s: float | None = None
        self._last: dict[VirtualServerKey, bytes] = {}
        self._histories: dict[ServiceName, _History] = {}

    def taking(
        self, counters: Mapping[VirtualServerKey, Counters], began_s: float, desired: Mapping[VirtualServerKey, VirtualServer]
    ) -> Generator[None, None, None]:
        """Add a reading to the histories of all Services; yields so that other tasks can run.

        Virtual servers that belong to no Service are ignored. The reading may lack virtual servers whose counters are zero.

        Services that have had no traffic for a long time are removed.
        """
        if began_s == self._read_s:
            return
        before_s, self._read_s = self._read_s, began_s
        if before_s is None:
            yield from self._adding(counters, desired, None)
            return
        number = self.readings + 1
        ended = yield from steps.choosing(lambda name: self._begin(self._histories[name], number), self._histories)
        for name in ended:
            del self._histories[name]
        interval_s = max(began_s - before_s, 0.001)
        yield from self._adding(counters, desired, interval_s)
        self.interval_s = interval_s
        self.readings = number

    @staticmethod
    def _begin(history: _History, number: int) -> bool:
        """Set a Service's rates in the reading ``number`` to zero; returns whether no remembered reading shows traffic."""
        history.figures[_place(number)] = _NO_TRAFFIC
        return number - history.busy >= REMEMBERED

    def _adding(
        self,
        counters: Mapping[VirtualServerKey, Counters],
        desired: Mapping[VirtualServerKey, VirtualServer],
        interval_s: float | None,
    ) -> Iterator[None]:
        """Add the traffic that each virtual server has counted since the last reading.

        The first reading has no interval, and only sets the start values.
        """
        last, seen = self._last, 0
        for index, (key, counted) in enumerate(counters.items(), 1):
            if index % steps.ITEMS_AT_ONCE == 0:
                yield
            server = desired.get(key)
            if server is None:
                continue
            packed, before = _COUNTERS.pack(*counted), last.get(key, _ZERO)
            if packed != before:
                last[server.key] = packed
                if interval_s is not None:
                    self._add(server.owner.service, between(_COUNTERS.unpack(before), counted, interval_s))
            seen += key in last
        if seen != len(last):
            yield from figures.forgetting(last, desired)

    def _add(self, name: ServiceName, rates: Rates) -> None:
        number = self.readings + 1
        history = self._histories.get(name)
        if history is None:
            history = self._histories[name] = _History(_NO_TRAFFIC * REMEMBERED, number)
        history.busy = number
        history.figures[_place(number)] = array("f", map(operator.add, history.rates(number), rates))

    def of(self, name: ServiceName) -> Rates | None:
        """The current rates of a Service; None until its counters have been read twice."""
        if not self.readings:
            return None
        history = self._histories.get(name)
        if history is None:
            return Rates()
        now, before = history.rates(self.readings), history.rates(max(1, self.readings - 1))
        return Rates._make((new + old) / 2 for new, old in zip(now, before, strict=True))

    def line(self, name: ServiceName) -> tuple[list[float], list[float]]:
        """Connections and bytes per second in the last readings, the oldest first.

        The list of connections and the list of bytes are empty if there was no traffic.
        """
        history = self._histories.get(name)
        if history is None:
            return [], []
        first = max(1, self.readings - REMEMBERED + 1)
        rates = [Rates._make(history.rates(number)) for number in range(first, self.readings + 1)]
        return [round(one.connections, 2) for one in rates], [round(one.bytes, 1) for one in rates]


_NO_TRAFFIC = array("f", Rates())


def _place(number: int) -> slice:
    """The position of a reading's rates in ``_History.figures``."""
    first = number % REMEMBERED * len(_NO_TRAFFIC)
    return slice(first, first + len(_NO_TRAFFIC))


def keys_of(survey: Survey, name: ServiceName, *, outside: bool = True) -> list[VirtualServerKey]:
    """The virtual servers of a Service, including those with firewall marks, which serve only some clients.

    With ``outside``, the virtual servers for clients outside the cluster are included; their real servers include the ends of
    tunnels to other nodes.
    """
    state = survey.states.get(name)
    if state is None:
        return []
    scopes = (
        survey.scope(MarkedPort(name, one.protocol, one.port, one.clients), one.family)
        for one in state.rare.scopes
        if outside or one.clients is not Clients.OUTSIDE
    )
    return [*(one.key for one in state.served), *(key for key in scopes if key)]


Traffic = Mapping[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]]


class Opened:
    """The last reading of the endpoints of one Service, and the rates between the last two readings."""

    def __init__(self) -> None:
        self.read_s: float | None = None
        self.traffic: Traffic = {}
        self._before: Traffic = {}
        self._seconds = 0.0

    def take(self, traffic: Traffic, now: float) -> None:
        """Store a new reading of the endpoints."""
        if self.read_s is not None:
            self._before, self._seconds = self.traffic, now - self.read_s
        self.traffic, self.read_s = traffic, now

    def connections(self, key: VirtualServerKey, real_server: RealServerKey) -> ConnectionCounts | None:
        """The connections of a real server at the last reading; None if the real server was not read."""
        one = self.traffic.get(key, {}).get(real_server)
        return one and one.connections

    def rates(self, key: VirtualServerKey, real_server: RealServerKey) -> Rates | None:
        """The rates of a real server; None until its virtual server has been read twice."""
        before, one = self._before.get(key), self.traffic.get(key, {}).get(real_server)
        if before is None or one is None:
            return None
        last = before.get(real_server)
        return between(last.counters if last else _NOTHING, one.counters, self._seconds)


@dataclasses.dataclass(eq=False)
class CounterFollower:
    """Reads counters regularly and keeps the rates."""

    sources: Sources
    sampler: Sampler
    viewers: Viewers
    history: History

    def __post_init__(self) -> None:
        self._clock = self.sources.status.clock
        self.rates = ServiceRates()
        self.active: Mapping[ServiceName, ConnectionCounts] = {}
        self._wake = asyncio.Event()
        self._sampled_s: float | None = None
        self._read = 0
        """The number of virtual and real servers that were read since the last reading began."""
        self._opened: dict[ServiceName, Opened] = {}
        self._shown: dict[ServiceName, float] = {}
        self._is_readable = True

    def looked_at(self) -> None:
        """Called when a viewer looks at the page; the counters are read at once, unless the last reading is fresh."""
        self._wake.set()

    def synced(self) -> None:
        """Read the counters of the node after a sync, unless they were read a moment ago."""
        if self._sampled_s is None or self._clock() - self._sampled_s >= QUIET_S:
            self._wake.set()

    def show(self, names: Collection[ServiceName]) -> None:
        """Called with the Services that a viewer sees on a page of the table."""
        now = self._clock()
        self._shown.update(dict.fromkeys(names, now))

    async def run(self) -> None:
        """Read counters until this task is cancelled."""
        while True:
            is_watched = self.viewers.have_looked(self._clock())
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
        return 0.0 if self._sampled_s is None else self._sampled_s + max(SAMPLE_S, self._read / READ_PER_S)

    def _forget(self) -> None:
        self.rates, self.active = ServiceRates(), {}
        self._opened.clear()
        self._shown.clear()
        self._read = 0

    async def sample(self) -> None:
        """Make the readings that are due now. Counters that cannot be read are unknown until the next reading."""
        now = self._sampled_s = self._clock()
        is_watched = self.viewers.have_looked(now)
        try:
            call = self.sampler.kernel.call(lambda reader: (reader.totals(), reader.open_connections(is_wanted=is_watched)))
            self.history.add(*await call, now, self.sources.status.wall_clock())
            if is_watched:
                sample = await self.sampler.read()
                desired = self.sources.survey.virtual_servers
                await in_slices(self.rates.taking(sample.counters, sample.began_s, desired), self._clock)
                self._read = len(desired)
                await self._read_shown(now)
        except KernelError as error:
            self.history.add(None, None, now, self.sources.status.wall_clock())
            if self._is_readable:
                log.warning("page_counters_unreadable", error=str(error))
            self._is_readable = False
        else:
            self._is_readable = True

    async def _read_shown(self, now: float) -> None:
        """Count the open connections of the Services on the pages that viewers see."""
        self._shown = {name: shown_s for name, shown_s in self._shown.items() if now - shown_s < VIEWER_S}
        keys: list[VirtualServerKey] = []
        owners: dict[VirtualServerKey, ServiceName] = {}
        for name in self._shown:
            own = keys_of(self.sources.survey, name)
            if len(keys) + len(own) <= SERVERS_OF_PAGES:
                keys += own
                owners.update(dict.fromkeys(own, name))
        sums: dict[ServiceName, ConnectionCounts] = dict.fromkeys(owners.values(), NO_CONNECTIONS)
        traffic = await self._read_endpoints(keys)
        for key, servers in traffic.items():
            for one in servers.values():
                sums[owners[key]] = sums[owners[key]].plus(one.connections)
        self.active = sums

    async def _read_endpoints(self, keys: Collection[VirtualServerKey]) -> Traffic:
        wanted, traffic = list(keys), dict[VirtualServerKey, Mapping[RealServerKey, EndpointTraffic]]()
        for first in range(0, len(wanted), SERVERS_AT_ONCE):
            some = wanted[first : first + SERVERS_AT_ONCE]
            traffic.update(await self.sampler.kernel.call(operator.methodcaller("endpoints", some)))
        self._read += sum(map(len, traffic.values()))
        return traffic

    async def open(self, name: ServiceName) -> Opened:
        """The endpoints of a Service. Reads the endpoints, unless they were read a moment ago.

        Raises:
            KernelError: the endpoints could not be read.
        """
        opened = self._opened.pop(name, None) or Opened()
        self._opened[name] = opened
        if len(self._opened) > OPENED:
            del self._opened[next(iter(self._opened))]
        now = self._clock()
        if opened.read_s is None or now - opened.read_s >= SAMPLE_S:
            keys = keys_of(self.sources.survey, name)[:SERVERS_OF_SERVICE]
            opened.take(await self._read_endpoints(keys), now)
        return opened
