"""Reads the counters of all virtual servers: one reading serves a scrape and the page.

Rule: they are read in parts, because programming comes first. A reading that a scrape has given up is continued by the next one.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from typing import TypeVar

from ipvsproxy.daemon.loop.kernel import CounterReader
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.virtual_servers import Counters, VirtualServerKey

FRESH_S = 2.0
"""How long counters count as fresh: the kernel itself adds up those of its processors every two seconds."""
LONGEST_PAUSE_S = 120.0
"""A reading that began so long ago begins anew: after a long pause, its figures would be old."""

T = TypeVar("T")


async def soon(part: Awaitable[T], patience_s: float | None) -> T:
    """The result. Raises TimeoutError if it has not come in time."""
    async with asyncio.timeout(patience_s):
        return await part


@dataclasses.dataclass(slots=True)
class Sample:
    """The counters of one reading, when it began, and its processor time. Virtual servers at zero may be missing."""

    began_s: float
    parts: Iterator[Mapping[VirtualServerKey, Counters]]
    counters: dict[VirtualServerKey, Counters] = dataclasses.field(default_factory=dict)
    cost_s: float = 0.0


class Sampler:
    """Reads counters. The readings of several callers take turns."""

    def __init__(
        self,
        kernel: KernelThread[CounterReader],
        clock: Callable[[], float],
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``processor_clock`` is the processor time of the calling thread."""
        self.kernel = kernel
        self.always: Container[VirtualServerKey] = ()
        """The virtual servers that are read at zero, too."""
        self._clock = clock
        self._processor_clock = processor_clock
        self._turn = asyncio.Lock()
        self._last: Sample | None = None
        self._under_way: Sample | None = None

    async def read(self, patience_s: float | None = None) -> Sample:
        """The counters, read now unless they are fresh. Waits for each part as long as ``patience_s``; None is no limit.

        A part that has not come in time is lost: its virtual servers count as not read.

        Raises:
            TimeoutError: a part has not come in time. The next call continues.
            KernelError: they could not be read.
        """
        async with self._turn:
            now = self._clock()
            if self._last and now - self._last.began_s < FRESH_S:
                return self._last
            sample = self._under_way
            if sample is None or now - sample.began_s > LONGEST_PAUSE_S:
                sample = Sample(now, await self.kernel.call(lambda reader: reader.services(self.always)))
            self._under_way = sample
            try:
                await self._read_parts(sample, patience_s)
            except KernelError:
                self._under_way = None
                raise
            self._under_way, self._last = None, sample
            # They take hundreds of bytes for each virtual server.
            asyncio.get_running_loop().call_later(FRESH_S, self._forget, sample)
            return sample

    async def _read_parts(self, sample: Sample, patience_s: float | None) -> None:
        while True:
            call = self.kernel.call(lambda _: self.timed(lambda: next(sample.parts, None)))
            part, took_s = await soon(call, patience_s)
            sample.cost_s += took_s
            if part is None:
                return
            sample.counters |= part

    def timed(self, do: Callable[[], T]) -> tuple[T, float]:
        """The result, and the processor time that it took."""
        began_s = self._processor_clock()
        return do(), self._processor_clock() - began_s

    def _forget(self, sample: Sample) -> None:
        if self._last is sample:
            self._last = None
