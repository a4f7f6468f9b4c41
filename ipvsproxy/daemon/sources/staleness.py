"""Watches that have not heard of the API server for too long: what this node serves may be out of date.

A stale watch is no reason to restart: a new process could not even begin without the API server, while this one serves what
it knows. It is no reason either, unless the operator says so, to turn load balancers away: when the API server is down for
everyone, all nodes would go at once, and an outage of the control plane would be one of the traffic.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.model.service import ObjectKind

LOOK_EVERY_S = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Staleness:
    """Tells which watches are stale. ``clock`` is that of the watches; ``limit_s`` 0 means that none ever is."""

    def __init__(
        self, watches: Callable[[], Mapping[ObjectKind, WatchStatus]], *, limit_s: float, clock: Callable[[], float]
    ) -> None:
        self._watches = watches
        self._limit_s = limit_s
        self._clock = clock
        self._began_s = clock()
        self._told: Collection[ObjectKind] = ()

    def stale(self) -> Collection[ObjectKind]:
        """The kinds whose watch is stale now."""
        if not self._limit_s:
            return []
        oldest_s = self._clock() - self._limit_s
        return [kind for kind, one in self._watches().items() if (one.contact_s or self._began_s) <= oldest_s]

    def check(self) -> None:
        """Say which watches have become stale since the last look, and which are not any more."""
        stale = self.stale()
        for kind in stale:
            if kind not in self._told:
                log.error("watch_stale", kind=kind.value, silent_for_s=round(self._limit_s), hint="see watch_failed")
        for kind in self._told:
            if kind not in stale:
                log.info("watch_no_longer_stale", kind=kind.value)
        self._told = stale

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.check()
            await asyncio.sleep(LOOK_EVERY_S)
