"""How the node is doing: when changes came, whether they are in force, and what follows for those who ask.

Rule 1: a family is late when what it lacks was asked for two sync periods ago or longer. What it lacks may be a change, or what
all its Services stand on: device, sets and rules. That one Service cannot be programmed does not make a node unfit.
Rule 2: a node is eligible for traffic of load balancers once everything was programmed for the first time, as long as its Node
is known and not about to go.
Rule 3: a stale watch is told; only if the operator wants it, load balancers are turned away. It never asks for a restart.
Rule 4: before the first lists are complete nothing can be late: there is nothing to program yet. The node gets no traffic, and
the process is not to be restarted for it.
Rule 5: a process that is about to stop says so before it stops.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Node, ObjectKind

LATE_PERIODS = 2
"""As kube-proxy has it (pkg/proxy/healthcheck in kubernetes/kubernetes)."""


class Notice(NamedTuple):
    """Something about this process that its operators should find at the Node: ``reason`` is that of a Kubernetes event."""

    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyHealth:
    """One family: when its last complete sync ended, in seconds since the epoch, and whether it is in time."""

    updated_s: float
    is_healthy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The node at one moment (``now_s``). ``families`` has those that were programmed completely at least once.

    ``stale`` are the kinds whose watch has heard nothing for too long, ``missing`` those whose first list is not complete.
    ``unreadable`` says which parts of the kernel cannot be read. ``unmet_settings`` are kernel settings without which Services do
    not work, with the value that they have.

    Times are in seconds since the epoch.
    """

    now_s: float
    is_healthy: bool
    is_eligible: bool
    families: Mapping[Family, FamilyHealth]
    stale: Collection[ObjectKind] = ()
    missing: Collection[ObjectKind] = ()
    unreadable: Collection[str] = ()
    unmet_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def updated_s(self) -> float | None:
        """When a family was last programmed completely."""
        return max((family.updated_s for family in self.families.values()), default=None)


class Status:
    """Learns from the loop how it fares. The age of a change is measured by ``clock``; ``wall_clock`` is for people."""

    def __init__(
        self,
        *,
        families: Collection[Family],
        sync_period_s: float,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        stale: Callable[[], Collection[ObjectKind]] = tuple,
        stale_turns_away: bool = False,
        missing: Callable[[], Collection[ObjectKind]] = tuple,
    ) -> None:
        """``wall_clock`` gives seconds since the epoch. Everything is asked for from now on.

        ``stale`` tells which watches are stale, ``stale_turns_away`` whether load balancers should then look elsewhere.
        ``missing`` tells which kinds have not been listed yet.
        """
        self.families = tuple(sorted(families))
        self.node: Node | None = None
        self.notices: list[Notice] = []
        self.unreadable: Callable[[], Collection[str]] = tuple
        """Why parts of the kernel cannot be read just now, one sentence each."""
        self._stale = stale
        self._stale_turns_away = stale_turns_away
        self._missing = missing
        self.sync_period_s = sync_period_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._queued_s: float | None = clock()
        self._unserved: dict[Family, float] = {}
        self._updated: dict[Family, float] = {}
        self._unmet_settings: Mapping[str, str] = {}
        self._is_stopping = False

    def queued(self, now: float) -> None:
        """There is something to do; only the oldest request that no sync has taken up yet counts."""
        if self._queued_s is None:
            self._queued_s = now

    def listed(self, now: float) -> None:
        """The first lists are complete: what is to be programmed is asked for from now on."""
        self._queued_s = now

    def syncing(self, now: float) -> None:
        """A sync begins, and takes up what was queued. A family that it does not serve waits on, from then or before."""
        since_s = now if self._queued_s is None else self._queued_s
        self._queued_s = None
        for family in self.families:
            self._unserved.setdefault(family, since_s)

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        now_s = self._wall_clock()
        self._unmet_settings = summary.unmet_settings
        for family in self.families:
            if family not in summary.lacking:
                self._unserved.pop(family, None)
                self._updated[family] = now_s

    def stop(self) -> None:
        """This process is about to stop: load balancers should look elsewhere."""
        self._is_stopping = True

    @property
    def oldest_change_age_s(self) -> float:
        """For how long the oldest change that is not in force has been waiting; 0 without one."""
        waiting = [*self._unserved.values(), *(() if self._queued_s is None else (self._queued_s,))]
        return self._clock() - min(waiting) if waiting else 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether every family is in time."""
        return not self._is_stopping and not any(map(self._is_late, self.families))

    @property
    def is_eligible(self) -> bool:
        """Whether load balancers may send traffic to this node."""
        is_programmed = len(self._updated) == len(self.families)
        return is_programmed and not self.node_trouble and not self._is_stopping and not self.is_turned_away

    @property
    def node_trouble(self) -> str:
        """What of its Node object keeps load balancers from this node; empty when nothing does."""
        if self.node is None:
            return "no Node object of this name is known; --hostname-override names it"
        return "its Node object is deleted or about to be, or has the cluster autoscaler's taint" if self.node.leaving else ""

    @property
    def is_turned_away(self) -> bool:
        """Whether load balancers should look elsewhere because what this node serves may be out of date."""
        return self._stale_turns_away and bool(self._stale())

    def health(self) -> Health:
        """All of it, at this moment."""
        return Health(
            now_s=self._wall_clock(),
            is_healthy=self.is_healthy,
            is_eligible=self.is_eligible,
            stale=self._stale(),
            missing=self._missing(),
            unreadable=self.unreadable(),
            unmet_settings=self._unmet_settings,
            families={
                family: FamilyHealth(updated_s=self._updated[family], is_healthy=not self._is_late(family))
                for family in self.families
                if family in self._updated
            },
        )

    def _is_late(self, family: Family) -> bool:
        if self._missing():
            return False
        since = [time_s for time_s in (self._queued_s, self._unserved.get(family)) if time_s is not None]
        return bool(since) and self._clock() - min(since) >= LATE_PERIODS * self.sync_period_s
