"""The health of the node: whether changes are in force in time, and whether load balancers may send traffic.

Rule 1: a family is late when one of its changes has waited for two sync periods, or the objects that all its Services need
(device, sets and rules) have been missing for so long. A single Service that cannot be programmed does not make a family late.
Rule 2: a node is eligible for traffic of load balancers from its first complete sync on, while its Node object is known and not
about to be removed.
Rule 3: ``/healthz`` names a stale watch, but turns load balancers away only if the operator has chosen that. ``/livez`` ignores
it, because a restart does not help. Unreadable manifests always turn load balancers away, because the manifests are this node's
own.
Rule 4: nothing is late before the first lists are complete, because nothing can be programmed. Until the first lists are
complete, the node gets no traffic, but ``/livez`` asks for no restart.
Rule 5: a process that is about to stop is unhealthy before it stops.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Node, ObjectKind

LATE_PERIODS = 2
"""The number of sync periods after which a change is late, as in kube-proxy (pkg/proxy/healthcheck in kubernetes/kubernetes)."""


class Notice(NamedTuple):
    """A fact about this process for a Kubernetes event at the Node, with the ``reason`` of that event."""

    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FamilyHealth:
    """The health of a family: when its last complete sync ended, in seconds since the epoch, and whether it is in time."""

    updated_s: float
    is_healthy: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The health of the node at one moment (``now_s``). ``families`` has the families with at least one complete sync.

    ``stale`` are the kinds whose watch has been silent for too long, ``missing`` the kinds without a complete first list.
    ``unreadable`` has a sentence for each part of the kernel that cannot be read. ``unmet_settings`` are the indispensable kernel
    settings that have another value, with that value. ``leftovers`` has a sentence for each place where obsolete rules or sets
    resist removal. ``pending`` counts the objects that differed from their desired state after the last sync, ``drifted_s`` is
    when objects that another program had changed were last found, None if never.

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
    leftovers: Collection[str] = ()
    pending: int = 0
    drifted_s: float | None = None

    @property
    def updated_s(self) -> float | None:
        """When the last complete sync of any family ended; None before the first."""
        return max((family.updated_s for family in self.families.values()), default=None)


@dataclasses.dataclass(eq=False, kw_only=True)
class Status:
    """Follows the syncs of the loop. ``clock`` measures the age of changes; ``wall_clock`` is for people.

    ``wall_clock`` gives seconds since the epoch. The first sync counts as due from now on.

    ``stale`` returns the kinds whose watches are stale; with ``stale_turns_away`` they turn load balancers away. ``missing``
    returns the kinds without a complete first list, ``unreadable`` a sentence for each part of the kernel that cannot be read
    now, and ``leftovers`` one for each place where rules or sets of another proxy or backend resist removal. ``source_problem``
    describes what the source has but cannot read now; empty if there is no such problem.
    """

    families: Collection[Family]
    sync_period_s: float
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    stale: Callable[[], Collection[ObjectKind]] = tuple
    stale_turns_away: bool = False
    missing: Callable[[], Collection[ObjectKind]] = tuple
    unreadable: Callable[[], Collection[str]] = tuple
    leftovers: Callable[[], Collection[str]] = tuple
    source_problem: Callable[[], str] = str

    def __post_init__(self) -> None:
        self.families = tuple(sorted(self.families))
        self.node: Node | None = None
        self.notices: list[Notice] = []
        self._queued_s: float | None = self.clock()
        self._incomplete_since_s: dict[Family, float] = {}
        self._updated: dict[Family, float] = {}
        self._unmet_settings: Mapping[str, str] = {}
        self._is_stopping = False
        self._pending = 0
        self._drifted_s: float | None = None

    def note(self, reason: str, message: str) -> None:
        """Replace the notice with this reason; an empty message takes it away."""
        kept = [notice for notice in self.notices if notice.reason != reason]
        self.notices = [*kept, Notice(reason, message)] if message else kept

    def queued(self, now: float) -> None:
        """A change waits for the next sync; only the oldest waiting change counts."""
        if self._queued_s is None:
            self._queued_s = now

    def listed(self, now: float) -> None:
        """The first lists are complete: the first sync counts as due from now on."""
        self._queued_s = now

    def syncing(self, now: float) -> None:
        """A sync begins with all waiting changes.

        A family that the sync does not complete has waited since the oldest change, or longer.
        """
        since_s = now if self._queued_s is None else self._queued_s
        self._queued_s = None
        for family in self.families:
            self._incomplete_since_s.setdefault(family, since_s)

    def synced(self, summary: SyncSummary) -> None:
        """A sync has ended."""
        now_s = self.wall_clock()
        self._unmet_settings = summary.unmet_settings
        self._pending = summary.report.pending
        if summary.drifted:
            self._drifted_s = now_s
        for family in self.families:
            if family not in summary.lacking:
                self._incomplete_since_s.pop(family, None)
                self._updated[family] = now_s

    def stop(self) -> None:
        """Turn load balancers away from now on, because this process is about to stop."""
        self._is_stopping = True

    @property
    def oldest_change_age_s(self) -> float:
        """The age of the oldest change that is not in force; 0 if all changes are."""
        waiting = [*self._incomplete_since_s.values(), *(() if self._queued_s is None else (self._queued_s,))]
        return self.clock() - min(waiting) if waiting else 0.0

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
        """The fault of its Node object that makes this node ineligible; empty if there is none."""
        if self.node is None:
            return "no Node object of this name is known; --hostname-override names it"
        return "its Node object is deleted or about to be, or has the cluster autoscaler's taint" if self.node.leaving else ""

    @property
    def is_turned_away(self) -> bool:
        """Whether load balancers are turned away, since this node may serve outdated Services."""
        return bool(self.source_problem()) or (self.stale_turns_away and bool(self.stale()))

    def health(self) -> Health:
        """The health of the node now."""
        return Health(
            now_s=self.wall_clock(),
            is_healthy=self.is_healthy,
            is_eligible=self.is_eligible,
            stale=self.stale(),
            missing=self.missing(),
            unreadable=self.unreadable(),
            leftovers=self.leftovers(),
            unmet_settings=self._unmet_settings,
            pending=self._pending,
            drifted_s=self._drifted_s,
            families={
                family: FamilyHealth(updated_s=self._updated[family], is_healthy=not self._is_late(family))
                for family in self.families
                if family in self._updated
            },
        )

    def _is_late(self, family: Family) -> bool:
        if self.missing():
            return False
        since = [time_s for time_s in (self._queued_s, self._incomplete_since_s.get(family)) if time_s is not None]
        return bool(since) and self.clock() - min(since) >= LATE_PERIODS * self.sync_period_s
