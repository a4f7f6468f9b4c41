"""Detects stale watches: the API server has been silent for too long, so this node may serve outdated Services.

A stale watch is no reason for a restart: a new process could not begin without the API server, while this one serves the Services
that it knows. Load balancers are turned away only if the operator has chosen that: without an API server, all nodes would turn
them away at once, and an outage of the control plane would become an outage of the traffic.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping

import structlog

from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.model.service import ObjectKind

CHECK_INTERVAL_S = 5.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Staleness:
    """Detects stale watches. ``clock`` is the one of the watches. With ``limit_s`` 0, no watch is ever stale."""

    def __init__(
        self, watches: Callable[[], Mapping[ObjectKind, WatchStatus]], *, limit_s: float, clock: Callable[[], float]
    ) -> None:
        self._watches = watches
        self._limit_s = limit_s
        self._clock = clock
        self._began_s = clock()
        self._logged: Collection[ObjectKind] = ()

    def stale(self) -> Collection[ObjectKind]:
        """The kinds whose watch is stale now."""
        if not self._limit_s:
            return []
        oldest_s = self._clock() - self._limit_s
        return [kind for kind, one in self._watches().items() if (one.contact_s or self._began_s) <= oldest_s]

    def check(self) -> None:
        """Log watches that have become stale since the last check, and watches that are no longer stale."""
        stale = self.stale()
        for kind in stale:
            if kind not in self._logged:
                log.error("watch_stale", kind=kind.value, silent_for_s=round(self._limit_s), hint="see watch_failed")
        for kind in self._logged:
            if kind not in stale:
                log.info("watch_no_longer_stale", kind=kind.value)
        self._logged = stale

    async def run(self) -> None:
        """Check for ever."""
        while True:
            self.check()
            await asyncio.sleep(CHECK_INTERVAL_S)
