"""The values that the metrics and the web page share.

The values are the numbers of virtual and real servers, and the counters of all virtual servers. This module also declares the
sources of the values.

Rule: a scrape and the web page share one reading of the counters. Counters are read in parts, so that changes can be written to
the kernel between two parts.
"""

import asyncio
import collections
import dataclasses
import operator
import time
from collections.abc import Callable, Container, Generator, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.leftover_removal import AnyPlace
from ipvsproxy.daemon.sources.source import WatchStatus
from ipvsproxy.kernel.ipvs.rows import TrafficReader
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model import steps
from ipvsproxy.model.net import FAMILY_BY_LENGTH, Family
from ipvsproxy.model.real_servers import TUNNELLED
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.model.virtual_servers import Counters, FirewallMark, VirtualServerKey
from ipvsproxy.reconcile.survey import Statistics, Survey
from ipvsproxy.store.objects import Store

FRESH_S = 2.0
"""The time, in seconds, for which one reading of the counters is used instead of a new reading. The kernel itself adds up the
counters of its processors every two seconds."""

K = TypeVar("K", bound=Hashable)


class Watch(NamedTuple):
    """Whether a watch is open, whether the watch is stale, and the age of its last contact with the API server.

    An age of None means that there was no contact yet.
    """

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of the values that the metrics and the web page show.

    The age of drains and of watches is measured with the clock of ``status``. ``leftovers`` says for each place whether rules of
    another proxy may remain. ``other_backend`` says whether objects of ipvsproxy may remain in the unused backend (iptables or
    nftables). ``unopened_ports`` counts the health-check node ports that could not be opened.
    """

    survey: Survey
    store: Store
    status: Status
    watches: Callable[[], Mapping[ObjectKind, WatchStatus]] = dict
    leftovers: Callable[[], Mapping[AnyPlace, bool]] = dict
    other_backend: Callable[[], bool] = bool
    unopened_ports: Callable[[], int] = int

    def watch_states(self) -> Mapping[ObjectKind, Watch]:
        """The current state of the watch of each kind."""
        stale, now = self.status.stale(), self.status.clock()
        return {
            kind: Watch(watch.connected, kind in stale, None if watch.contact_s is None else max(0.0, now - watch.contact_s))
            for kind, watch in self.watches().items()
        }


class Numbers(NamedTuple):
    """The numbers of ipvsproxy's virtual servers and real servers in the kernel, by IP family.

    ``tunnels`` has the numbers of real servers that get their packets through a tunnel.
    """

    virtual_servers: collections.Counter[Family]
    real_servers: collections.Counter[Family]
    tunnels: collections.Counter[Family]


def counting(statistics: Statistics) -> Generator[None, None, Numbers]:
    """Counts the virtual and real servers; yields after each ``ITEMS_AT_ONCE`` objects."""
    numbers = Numbers(collections.Counter(), collections.Counter(), collections.Counter())
    for number, (key, server) in enumerate(zip(statistics.virtual_servers, statistics.observed, strict=True), 1):
        if number % steps.ITEMS_AT_ONCE == 0:
            yield
        if key not in statistics.foreign:
            family = FAMILY_BY_LENGTH[len(key.address)]
            numbers.virtual_servers[family] += 1
            numbers.real_servers[family] += len(server.real_servers)
            if isinstance(key, FirewallMark):
                numbers.tunnels[family] += sum(weight >= TUNNELLED for weight in server.real_servers.values())
    return numbers


def growth(before: Sequence[int], now: Sequence[int]) -> Sequence[int]:
    """The increase of an object's counters between two readings; if the counters were reset, the values of the second reading."""
    return now if any(map(int.__lt__, now, before)) else list(map(operator.sub, now, before))


def forgetting(known: dict[K, Any], *present: Container[K]) -> Generator[None, None, None]:
    """Remove each entry of ``known`` whose key is in none of the collections ``present``. Yields so that other tasks can run."""
    gone = yield from steps.choosing(lambda key: not any(key in some for some in present), known)
    yield from steps.each(known.pop, gone)


@dataclasses.dataclass(slots=True)
class Sample:
    """The counters of one reading, and the time when the reading began.

    Virtual servers whose counters are zero may be missing.
    """

    began_s: float
    counters: dict[VirtualServerKey, Counters] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Sampler:
    """Reads counters. If several callers read counters at the same time, each caller waits for the previous reading.

    Virtual servers in ``always`` are read even if their counters are zero.
    """

    kernel: KernelThread[TrafficReader]
    clock: Callable[[], float] = time.monotonic
    always: Container[VirtualServerKey] = ()

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last: Sample | None = None

    async def read(self) -> Sample:
        """The counters, read from the kernel unless the last reading is fresh.

        Raises:
            KernelError: the counters could not be read.
        """
        async with self._turn:
            now = self.clock()
            if self._last and now - self._last.began_s < FRESH_S:
                return self._last
            sample, parts = Sample(now), await self.kernel.call(lambda reader: reader.services(self.always))
            while (part := await self.kernel.call(lambda _: next(parts, None))) is not None:
                sample.counters |= part
            self._last = sample
            # The counters are forgotten soon, because they take hundreds of bytes for each virtual server.
            asyncio.get_running_loop().call_later(FRESH_S, self._forget, sample)
            return sample

    def _forget(self, sample: Sample) -> None:
        if self._last is sample:
            self._last = None
