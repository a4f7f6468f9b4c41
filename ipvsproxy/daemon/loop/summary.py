"""What the loop tells about itself, and to whom."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Protocol

from ipvsproxy.model.kernel import HealthCheck, HealthCheckPort
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.table import Conflict
from ipvsproxy.store.objects import Changes
from ipvsproxy.translate.view import NodeView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncSummary:
    """One finished sync.

    ``lacking`` are the families without all that their Services stand on (device, sets, rules, settings); ``unmet_settings`` are
    the indispensable kernel settings among that, with the value that they have. ``states`` is what each Service wants now,
    ``health_checks`` what each health-check port answers; both change with the next sync.
    ``unserved`` are the families without most of their virtual servers; all, while a first list is doubted.
    ``is_audit``: the whole kernel was read before it. ``waited_s`` is the age of the oldest change in it when it began, 0 without
    any. What follows says how long the kernel was read, changes were translated, and operations were applied. ``conflicts`` are
    those that are new.
    """

    report: Report
    changes: Changes
    lacking: Collection[Family]
    states: Mapping[ServiceName, ServiceState]
    view: NodeView
    waited_s: float
    observed_s: float
    translated_s: float
    applied_s: float
    conflicts: Collection[Conflict] = ()
    health_checks: Mapping[HealthCheckPort, HealthCheck] = dataclasses.field(default_factory=dict)
    unmet_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unserved: Collection[Family] = ()
    is_audit: bool = False

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.observed_s + self.translated_s + self.applied_s


class Watcher(Protocol):
    """Who wants to know how the loop fares: metrics, health, health-check listeners."""

    def queued(self, now: float) -> None:
        """There is something to do."""

    def syncing(self, now: float) -> None:
        """A sync begins, with all that there is to do."""

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
