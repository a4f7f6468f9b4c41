"""The node as a document: whether everything is in force and why not, what is left to do, and how it went lately."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ipvsproxy.daemon.http.health import Health
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.ui.history import COLUMNS, History, Point
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import KINDS
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.reconcile.survey import Statistics
from ipvsproxy.store.mass_deletion import Doubt

SYNCS = 10
REASONS = 20
SERVERS_AT_ONCE = 500
RECENT_S = 120.0
"""A rate that is older than this is not one of now: while nobody looks, there is one with each audit."""
_KINDS = {kind.name: kind for kind in KINDS.values()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The watch of one kind, with the age of its last contact with the API server, None without one."""

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What does not change while the process runs.

    ``variants`` returns what holds the rules of each served family now: a variant of iptables, or nftables.
    """

    version: str
    node_name: str
    started_s: float
    release: str
    source: str
    variants: Callable[[], Mapping[Family, str]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The node at one moment. ``numbers`` are those of virtual servers and of real servers of ours."""

    identity: Identity
    zone: str
    scheduler: str
    health: Health
    oldest_change_age_s: float
    services: int
    numbers: tuple[int, int]
    statistics: Statistics
    doubts: Mapping[ObjectKind, Doubt]
    watches: Mapping[ObjectKind, Watch]


class Syncs:
    """The last syncs, the newest first."""

    def __init__(self) -> None:
        self._syncs: collections.deque[dict[str, Any]] = collections.deque(maxlen=SYNCS)
        self.failed = 0
        """Operations that failed in the last sync that had any; none once nothing is pending."""

    def synced(self, summary: SyncSummary, at_s: float) -> None:
        """A sync has ended."""
        report = summary.report
        failed, done = sum(report.failed.values()), sum(report.done.values())
        if failed or not report.pending:
            self.failed = failed
        self._syncs.appendleft(
            {
                "endedAt": at_s,
                "isAudit": summary.is_audit,
                "services": len(summary.changes.services),
                "done": done,
                "failed": failed,
                "pending": report.pending,
                "waitedSeconds": summary.waited_s,
                "readSeconds": summary.observed_s,
                "translatedSeconds": summary.translated_s,
                "appliedSeconds": summary.applied_s,
                "durationSeconds": summary.duration_s,
            }
        )

    def describe(self) -> list[dict[str, Any]]:
        """As documents."""
        return list(self._syncs)


def counting(statistics: Statistics, numbers: list[int]) -> Iterator[None]:
    """Count virtual servers and real servers of ours, with pauses; adds both to ``numbers``."""
    servers = real_servers = 0
    for number, (key, observed) in enumerate(zip(statistics.virtual_servers, statistics.observed, strict=True), 1):
        if key not in statistics.foreign:
            servers += 1
            real_servers += len(observed.real_servers)
        if number % SERVERS_AT_ONCE == 0:
            yield
    numbers += (servers, real_servers)


def describe(facts: Facts, syncs: Syncs, history: History, since_s: float) -> dict[str, Any]:
    """The document of ``node.json``."""
    identity, health, statistics = facts.identity, facts.health, facts.statistics
    reasons = list(_reasons(facts, syncs))[:REASONS]
    pending = {kind: number for kind, number in statistics.pending.items() if number}
    drifted = {kind: number for kind, number in statistics.drifted.items() if number}
    last = history.last if history.last and health.now_s - history.last.at_s < RECENT_S else None
    return {
        "version": identity.version,
        "node": identity.node_name,
        "zone": facts.zone,
        "now": health.now_s,
        "startedAt": identity.started_s,
        "inForce": not reasons,
        "reasons": reasons,
        "healthy": health.is_healthy,
        "eligible": health.is_eligible,
        "oldestChangeAgeSeconds": facts.oldest_change_age_s,
        "services": facts.services,
        "virtualServers": facts.numbers[0],
        "realServers": facts.numbers[1],
        "pending": {"total": sum(pending.values()), "byKind": pending},
        "drifted": {"total": sum(drifted.values()), "byKind": drifted},
        "failed": syncs.failed,
        "draining": statistics.drains,
        "waitingRemovals": statistics.waiting_removals,
        "conflicts": statistics.conflicts,
        "syncs": syncs.describe(),
        "source": identity.source,
        "watches": [
            {
                "kind": kind.value,
                "connected": watch.is_open,
                "stale": watch.is_stale,
                "contactAgeSeconds": watch.contact_age_s,
            }
            for kind, watch in facts.watches.items()
        ],
        "kernel": {
            "release": identity.release,
            "scheduler": facts.scheduler,
            "families": [
                {
                    "family": family.label,
                    "iptables": variant,
                    "healthy": family in health.families and health.families[family].is_healthy,
                    "updatedAt": health.families[family].updated_s if family in health.families else None,
                }
                for family, variant in identity.variants().items()
            ],
        },
        "connectionsPerSecond": last.connections if last else None,
        "packetsPerSecond": _sum(last.packets_in, last.packets_out) if last else None,
        "bytesPerSecond": _sum(last.bytes_in, last.bytes_out) if last else None,
        "history": {"columns": COLUMNS, "points": [_point(point) for point in history.since(since_s)]},
    }


def _point(point: Point) -> list[float | None]:
    # The time as it is: a viewer asks for what is later.
    return [point.at_s, *(None if figure is None else round(figure, 3) for figure in point[1:])]


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _reasons(facts: Facts, syncs: Syncs) -> Iterator[str]:
    health, statistics = facts.health, facts.statistics
    if health.missing:
        yield f"the first list of {_and(kind.value for kind in health.missing)} is not complete"
    for kind, doubt in facts.doubts.items():
        yield f"a list of {kind.value} is not believed: it lacks {doubt.missing} of {doubt.known}; nothing of it is removed"
    for path, value in health.unmet_settings.items():
        yield f"the kernel setting {path} is {value}"
    yield from sorted(health.unreadable)
    if syncs.failed:
        yield f"{syncs.failed} operations failed; they are tried again"
    for name, number in statistics.pending.items():
        if number:
            words = _KINDS[name]
            yield f"{number} {words.one if number == 1 else words.several} differ from what is desired"
    if not health.missing and facts.oldest_change_age_s > 0:
        yield f"a change has waited for {facts.oldest_change_age_s:.1f} s"


def _and(words: Iterator[str]) -> str:
    return ", ".join(sorted(words))
