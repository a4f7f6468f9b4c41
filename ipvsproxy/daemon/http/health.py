"""The health of the node: whether changes are applied in time, and whether load balancers may send traffic.

Rule 1: an IP family is late if one of its changes has waited for two sync periods. An IP family is also late if an object that
all of its Services need (device, sets and rules) has been missing for two sync periods. If only a single Service fails to be
programmed, its IP family does not count as late.
Rule 2: load balancers may use a node after its first complete sync, while its Node object is known and is not about to be
removed.
Rule 3: ``/healthz`` reports a stale watch. A stale watch turns load balancers away only with ``--stale-watch-unhealthy``.
``/livez`` ignores a stale watch, because a restart does not help. Unreadable manifests always turn load balancers away, because
the manifests belong to this node alone.
Rule 4: before the first lists are complete, no IP family counts as late, because no Service can be programmed yet. Before the
first lists are complete, load balancers are turned away, but ``/livez`` reports a live process, because a restart would not help.
Rule 5: a process that is about to stop reports itself as unhealthy before it stops.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Node, ObjectKind

LATE_PERIODS = 2
"""The number of sync periods after which a change is late, as in kube-proxy (pkg/proxy/healthcheck in kubernetes/kubernetes)."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Status:
    """Receives the beginning and the result of each sync from the event loop.

    ``clock`` measures the age of changes. ``wall_clock`` gives seconds since the epoch, for times that people read. The delay of
    the first sync is counted from the creation of this object.

    ``updated`` has the time when the last complete sync of each IP family ended. ``drifted_s`` is the time when ipvsproxy last
    found an object that another program had changed. ``unmet_settings`` maps the path of each indispensable sysctl with a wrong
    value to the observed value. ``pending`` counts the objects that differed from their desired state after the last sync.

    ``stale`` returns the kinds of API objects whose watches are stale; if ``stale_turns_away`` is true, a stale watch turns load
    balancers away. ``missing`` returns the kinds of API objects whose first list is not complete. ``unreadable`` returns a
    sentence for each part of the kernel that cannot be read now. ``leftovers`` returns a sentence for each place from which rules
    or sets of another proxy or backend could not be removed. If objects in the source cannot be read now, ``source_problem``
    returns a sentence about these objects; otherwise the text is empty.
    """

    families: Collection[Family]
    sync_period_s: float
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    stale: Callable[[], Collection[ObjectKind]] = tuple
    stale_turns_away: bool = False
    missing: Callable[[], Collection[ObjectKind]] = tuple
    unreadable: Callable[[], Collection[str]] = tuple
    leftovers: Callable[[], Collection[str]] = tuple
    source_problem: Callable[[], str] = str

    def __post_init__(self) -> None:
        self.families = tuple(sorted(self.families))
        self.node: Node | None = None
        self.notices: dict[str, str] = {}
        """Messages about this process that become Kubernetes events about the Node; the key is the reason of the event."""
        self._queued_s: float | None = self.clock()
        self._incomplete_since_s: dict[Family, float] = {}
        self._is_stopping = False
        self.updated: dict[Family, float] = {}
        self.unmet_settings: Mapping[str, str] = {}
        self.pending = 0
        self.drifted_s: float | None = None

    def note(self, reason: str, message: str) -> None:
        """Replace the notice that has the given reason; an empty message removes the notice."""
        self.notices.pop(reason, None)
        if message:
            self.notices[reason] = message

    def queued(self, now: float) -> None:
        """Called when a change begins to wait for the next sync. ``now`` is stored only if no older change is waiting."""
        if self._queued_s is None:
            self._queued_s = now

    def listed(self, now: float) -> None:
        """Called when the first list of every kind is complete. The delay of the first sync is counted from this call on."""
        self._queued_s = now

    def syncing(self, now: float) -> None:
        """Called when a sync begins; all waiting changes are part of the sync.

        If the sync does not complete an IP family, the waiting time of the family still counts from its oldest change.
        """
        since_s = now if self._queued_s is None else self._queued_s
        self._queued_s = None
        for family in self.families:
            self._incomplete_since_s.setdefault(family, since_s)

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
        now_s = self.wall_clock()
        self.unmet_settings = summary.unmet_settings
        self.pending = summary.report.pending
        if summary.drifted:
            self.drifted_s = now_s
        for family in self.families:
            if family not in summary.lacking:
                self._incomplete_since_s.pop(family, None)
                self.updated[family] = now_s

    def stop(self) -> None:
        """From now on, turn load balancers away, because this process is about to stop."""
        self._is_stopping = True

    @property
    def oldest_change_age_s(self) -> float:
        """The age of the oldest change that has not been applied; 0 if all changes have been applied."""
        waiting = [*self._incomplete_since_s.values(), *(() if self._queued_s is None else (self._queued_s,))]
        return self.clock() - min(waiting) if waiting else 0.0

    @property
    def is_healthy(self) -> bool:
        """Whether the changes of every IP family are applied in time."""
        return not self._is_stopping and not any(map(self.is_late, self.families))

    @property
    def is_eligible(self) -> bool:
        """Whether load balancers may send traffic to this node."""
        is_programmed = len(self.updated) == len(self.families)
        return is_programmed and not self.node_trouble and not self._is_stopping and not self.is_turned_away

    @property
    def node_trouble(self) -> str:
        """The reason, found in the Node object, why load balancers must not use this node; empty if the node is eligible."""
        if self.node is None:
            return "no Node object of this name is known; set the name with --hostname-override"
        return "its Node object is deleted or about to be, or has the cluster autoscaler's taint" if self.node.leaving else ""

    @property
    def is_turned_away(self) -> bool:
        """Whether load balancers are turned away because this node may serve outdated Services."""
        return bool(self.source_problem()) or (self.stale_turns_away and bool(self.stale()))

    @property
    def updated_s(self) -> float | None:
        """The time when the last complete sync of any IP family ended; None before the first complete sync."""
        return max(self.updated.values(), default=None)

    def is_late(self, family: Family) -> bool:
        """Whether the programming of a change is overdue in an IP family."""
        if self.missing():
            return False
        since = [time_s for time_s in (self._queued_s, self._incomplete_since_s.get(family)) if time_s is not None]
        return bool(since) and self.clock() - min(since) >= LATE_PERIODS * self.sync_period_s
