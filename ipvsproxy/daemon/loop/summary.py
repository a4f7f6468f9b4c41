"""The result of a sync, and the interface of the objects that the loop informs about syncs."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Protocol

from ipvsproxy.model.kernel import HealthCheck, HealthCheckPort
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Changes
from ipvsproxy.translate.view import NodeView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncSummary:
    """One finished sync.

    ``lacking`` are the families that lack a part of what all their Services need (device, sets, rules, settings);
    ``unmet_settings`` are the missing ones among the indispensable kernel settings, with their observed value. ``states`` is the
    desired state of each Service, ``health_checks`` the answer of each health-check port; both change with the next sync.
    ``unserved`` are the families that lack most of their virtual servers; all families while a first list is doubted.
    ``incomplete`` are the families of which a set lacks an entry. ``is_audit``: an audit came before the sync. ``waited_s`` is
    the age of the oldest change when the sync began, 0 without changes. ``observed_s``, ``translated_s`` and ``applied_s`` are
    the durations of reading the kernel, translating changes and applying operations. ``conflicts`` are the new conflicts,
    ``without_scope`` the Service ports that newly lack a mark for a second scope. ``drifted`` counts the objects, by kind, that
    readings since the last sync have found changed by another program.
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
    without_scope: Collection[MarkedPort] = ()
    health_checks: Mapping[HealthCheckPort, HealthCheck] = dataclasses.field(default_factory=dict)
    unmet_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unserved: Collection[Family] = ()
    incomplete: Collection[Family] = ()
    is_audit: bool = False
    drifted: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def not_in_force(self) -> frozenset[Family]:
        """The families that may still need rules and sets of another proxy or backend: rules without their sets do nothing."""
        return frozenset((*self.lacking, *self.unserved, *self.incomplete))

    @property
    def duration_s(self) -> float:
        """The duration of the sync."""
        return self.observed_s + self.translated_s + self.applied_s


class Watcher(Protocol):
    """An object that the loop informs about syncs: metrics, health, health-check listeners."""

    def queued(self, now: float) -> None:
        """A change waits for the next sync."""

    def syncing(self, now: float) -> None:
        """A sync begins with all changes that wait."""

    def synced(self, summary: SyncSummary) -> None:
        """A sync has ended."""
