"""The result of a sync, and the interface of objects that the event loop notifies about syncs."""

import dataclasses
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from ipvsproxy.model.kernel import HealthCheck, HealthCheckPort
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Changes
from ipvsproxy.translate.view import NodeView

NOTHING_DONE = Report(done={}, failed={}, errors=(), pending=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncSummary:
    """The summary of one finished sync.

    ``lacking`` are the IP families that lack an object (a device, set, rule or sysctl) that all Services of the family need.
    ``unmet_settings`` has the indispensable sysctls whose values are wrong; it maps their paths to the observed values.
    ``states`` has the desired state of each Service, and ``health_checks`` the answer of each health-check node port. The next
    sync changes the mappings ``states`` and ``health_checks``. ``not_in_force`` are the IP families whose traffic may still need
    the rules and sets of another proxy or backend. ``is_audit`` means that an audit was made directly before the sync.
    ``waited_s`` is the age of the oldest change when the sync began; 0 if there were no changes. ``observed_s``, ``translated_s``
    and ``applied_s`` are the durations of reading the kernel, translating changes and applying operations. ``conflicts`` are the
    conflicts that are new since the last sync. ``without_scope`` are the Service ports that wait for a packet mark for their
    second scope, and have begun to wait since the last sync. ``drifted`` counts, by kind, the changes of objects by other
    programs. Only changes that were found since the last sync are counted.
    """

    changes: Changes
    states: Mapping[ServiceName, ServiceState]
    view: NodeView
    report: Report = NOTHING_DONE
    lacking: Collection[Family] = ()
    waited_s: float = 0
    observed_s: float = 0
    translated_s: float = 0
    applied_s: float = 0
    conflicts: Collection[Conflict] = ()
    without_scope: Collection[MarkedPort] = ()
    health_checks: Mapping[HealthCheckPort, HealthCheck] = dataclasses.field(default_factory=dict)
    unmet_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_in_force: AbstractSet[Family] = frozenset()
    is_audit: bool = False
    drifted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """The duration of the sync, in seconds."""
        return self.observed_s + self.translated_s + self.applied_s


class Watcher:
    """The interface of objects that the event loop notifies about syncs. The base class ignores all notifications."""

    def queued(self, now: float) -> None:
        """Called when a change waits for the next sync."""

    def syncing(self, now: float) -> None:
        """Called when a sync begins; all waiting changes are part of the sync."""

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
