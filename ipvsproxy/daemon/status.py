"""How the node is doing, for health and metrics: one place that the loop writes and servers read."""

from collections.abc import Callable, Collection, Mapping

from ipvsproxy.daemon.engine import SyncSummary
from ipvsproxy.model.kernel import HealthListener
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Node

LATE_PERIODS = 2
"""A change that waits for longer than this many sync periods makes the node unhealthy (pkg/proxy/healthcheck)."""


class Status:
    """When changes came and when they were programmed. Times are those of ``clock``, but where they are shown to people."""

    def __init__(
        self, *, families: Collection[Family], sync_period_s: float, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        """``wall_clock`` gives seconds since the epoch."""
        self.families = tuple(sorted(families))
        self._late_s = LATE_PERIODS * sync_period_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._queued_s: float | None = None
        self.queued_at_s = wall_clock()
        self.updated_at_s: float | None = None
        self.node: Node | None = None
        self.last: SyncSummary | None = None
        self.local_endpoints: Mapping[HealthListener, int] = {}

    def queued(self, now: float) -> None:
        """There is something to do; only the oldest unserved request counts."""
        if self._queued_s is None:
            self._queued_s = now
        self.queued_at_s = self._wall_clock()

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over. What arrived while it ran is served by the next one, which begins at once."""
        self.last = summary
        if summary.is_complete:
            self._queued_s = None
            self.updated_at_s = self._wall_clock()

    @property
    def is_healthy(self) -> bool:
        """Whether no change has been waiting for too long."""
        return self._queued_s is None or self._clock() - self._queued_s < self._late_s

    @property
    def is_eligible(self) -> bool:
        """Whether load balancers may send traffic to this node: it is known, and not about to go."""
        return self.node is not None and not self.node.leaving
