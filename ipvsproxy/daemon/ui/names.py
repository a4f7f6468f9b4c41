"""The names of the pods behind the endpoints of the Services that viewers have opened.

Rule 1: the daemon does not keep the names of all pods, because the names for 100,000 endpoints would take about ten megabytes.
The names of a Service's pods are read from the source, and stored, only while a viewer looks at the Service.
Rule 2: all readings together have a rate limit, because anybody who can open the page can cause requests to the API server.
Rule 3: if a request starts a reading, its response waits for the names for at most ``WAIT_S``. Other responses do not wait. If
the names are not known, the page shows addresses. A response waits for the names before it takes the lock that all responses
share, so that a slow API server delays no other response.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable

from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.sources.source import ApiError
from ipvsproxy.model.service import EndpointSlice, ServiceName
from ipvsproxy.store.objects import Store
from ipvsproxy.translate.api.targets import Targets

WAIT_S = 1.0
SHORTEST_S, RETRY_S = 1.0, 10.0
"""The shortest pauses, in seconds, before the pod names of a Service are read again: after a successful reading, and after a
failed reading."""
BURST, REFILL_S = 16, 0.5
"""The rate limit of all readings: the number of readings that may begin at once, and the seconds before each further reading."""
MOST_AT_ONCE, MOST = 8, 32
"""The largest number of Services whose names one answer contains, and the largest number of Services whose names are kept.
The second number is larger, so that several viewers do not evict each other's names."""
MOST_FORMER = 1000
"""The largest number of former endpoints whose names are kept. The page shows these names for draining endpoints and in
events."""
ReadTargets = Callable[[ServiceName], Awaitable[Targets]]
"""Reads the pods behind the endpoints of a Service. Raises ApiError."""


@dataclasses.dataclass(eq=False)
class _SliceReading:
    """The last reading of the names for one Service.

    ``slices`` are the EndpointSlices at the beginning of the reading. If the current EndpointSlices differ from them, the Service
    has changed.
    """

    slices: tuple[EndpointSlice, ...] = ()
    began_s: float = 0.0
    has_failed: bool = True
    targets: Targets = dataclasses.field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Names:
    """Reads the names of pods. Keeps the names only for the ``MOST`` Services that viewers have looked at last."""

    def __init__(self, read: ReadTargets, store: Store, clock: Callable[[], float]) -> None:
        self._read = read
        self._store = store
        self._clock = clock
        self._readings: dict[ServiceName, _SliceReading] = {}
        self._limit = timing.Bucket(BURST, REFILL_S, clock())

    async def read(self, services: Iterable[ServiceName]) -> None:
        """Read the pods behind the endpoints of the given Services, unless the pods are known; waits at most ``WAIT_S``."""
        begun = [task for name in _first(services) if (task := self._begin(name))]
        if begun:
            await asyncio.wait(begun, timeout=WAIT_S)

    def known(self, services: Iterable[ServiceName]) -> Targets:
        """The pods behind the endpoints of the given Services, as far as the pods have been read."""
        readings = [reading for name in _first(services) if (reading := self._readings.get(name))]
        return {key: target for reading in readings for key, target in reading.targets.items()}

    def forget(self) -> None:
        """Discard all names."""
        for reading in self._readings.values():
            if reading.task:
                reading.task.cancel()
        self._readings.clear()

    def _begin(self, name: ServiceName) -> asyncio.Task[None] | None:
        """Start to read the names of the pods of a Service, unless the names are known or are being read."""
        reading = self._readings[name] = self._readings.pop(name) if name in self._readings else _SliceReading()
        if len(self._readings) > MOST:
            del self._readings[next(iter(self._readings))]
        slices, now = self._store.slices_of(name), self._clock()
        pause_s = RETRY_S if reading.has_failed else SHORTEST_S
        is_known = not reading.has_failed and reading.slices is slices
        if is_known or (reading.task and (not reading.task.done() or now < reading.began_s + pause_s)):
            return None
        if not self._limit.take(now):
            return None
        reading.slices, reading.began_s = slices, now
        reading.task = asyncio.create_task(self._follow(name, reading))
        return reading.task

    async def _follow(self, name: ServiceName, reading: _SliceReading) -> None:
        reading.has_failed = True
        try:
            found = await self._read(name)
        except ApiError:
            return
        reading.has_failed = False
        former = reading.targets if len(reading.targets) < len(found) + MOST_FORMER else {}
        reading.targets = {**former, **found}


def _first(services: Iterable[ServiceName]) -> list[ServiceName]:
    return list(itertools.islice(dict.fromkeys(services), MOST_AT_ONCE))
