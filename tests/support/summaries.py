"""Builds summaries of finished syncs, so that a test gives only the values that matter for the test."""

from collections.abc import Collection, Mapping
from typing import Any

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.kernel import HealthCheckPort
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Report
from ipvsproxy.model.service import Owner, ServiceName
from ipvsproxy.model.state import Rarities, ServiceState
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.objects import Changes
from ipvsproxy.translate.view import NodeView
from tests.support import builders

DONE = Report(done={}, failed={}, errors=(), pending=0)


def summary(
    changes: Changes | None = None,
    *,
    lacking: Collection[Family] = (),
    states: Collection[ServiceState] = (),
    view: NodeView | None = None,
    report: Report = DONE,
    waited_s: float = 0.0,
    applied_s: float = 0.0,
    conflicts: Collection[Conflict] = (),
    not_in_force: Collection[Family] = (),
    is_audit: bool = False,
    unmet_settings: Mapping[str, str] | None = None,
    drifted: Mapping[str, int] | None = None,
) -> SyncSummary:
    """A summary of a sync. If ``changes`` is not given, the changed Services are those of ``states``."""
    by_name = {state.owner.service: state for state in states}
    return SyncSummary(
        report=report,
        changes=changes or Changes(services=dict.fromkeys(by_name, 0.0)),
        lacking=lacking,
        states=by_name,
        view=view or builders.node_view(),
        waited_s=waited_s,
        applied_s=applied_s,
        conflicts=conflicts,
        not_in_force={*lacking, *not_in_force},
        is_audit=is_audit,
        unmet_settings=unmet_settings or {},
        drifted=drifted or {},
    )


def state(
    name: str = "web",
    *,
    ports: Mapping[int, int] | None = None,
    families: Collection[Family] = (Family.IPV4,),
    created_s: float = builders.CREATED_S,
    without_local: Collection[tuple[str, Family]] = (),
) -> ServiceState:
    """The desired state of a Service; ``ports`` maps health-check ports to the number of the Service's endpoints on this node."""
    service = ServiceName(builders.NAMESPACE, name)
    return ServiceState(
        owner=Owner(created_s, service),
        rare=Rarities(
            local_endpoints={
                HealthCheckPort(family, port): count for family in families for port, count in (ports or {}).items()
            },
            without_local=frozenset(without_local),
        ),
    )


def status(
    now_s: float,
    updated: Mapping[Family, float],
    *,
    eligible: bool = True,
    late: Collection[Family] = (),
    unmet_settings: Mapping[str, str] | None = None,
    **more: Collection[Any],
) -> Status:
    """The health of a node at the time ``now_s``, in seconds since the epoch.

    Each argument in ``more`` has the name of a function that ``Status`` calls, and its value is the result of the function.
    """
    clock = Clock()
    functions: Any = {name: lambda found=found: found for name, found in more.items()}
    made = Status(families=updated, sync_period_s=30, clock=clock, wall_clock=lambda: now_s, **functions)
    made.node = builders.node() if eligible else None
    made.syncing(clock.now)
    made.synced(summary(lacking=late, unmet_settings=unmet_settings))
    made.updated.update(updated)
    clock.now += 60
    return made


class Clock:
    """A clock that advances on request only."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
