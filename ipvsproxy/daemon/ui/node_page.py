"""The node as a document: whether all changes have been applied, its last syncs, its history, and a limited list of events."""

import collections
import dataclasses
import importlib.metadata
import itertools
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.metrics.figures import Numbers, Sources
from ipvsproxy.daemon.ui import endpoint_changes
from ipvsproxy.daemon.ui.endpoint_changes import Document
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Outcome, counted_kinds
from ipvsproxy.model.virtual_servers import ConnectionCounts, Counters
from ipvsproxy.reconcile.survey import Statistics

LENGTH_S = 900.0
POINTS = 450
"""The largest number of points in the history; one point is added every two seconds."""
SHORT_S = 5.0
"""If the last two intervals together are shorter than this time in seconds, the rates cover both intervals, because the kernel
adds up its counters only every two seconds."""


class Point(msgspec.Struct, frozen=True, gc=False, array_like=True, rename="camel"):
    """The state of the node at one moment; rates and ``changes`` refer to the time since the previous point.

    ``at`` is in seconds since the epoch; ``latency_seconds`` is the longest latency of the changes. None means unknown.
    """

    at: float
    connections_per_second: float | None = None
    packets_in_per_second: float | None = None
    packets_out_per_second: float | None = None
    bytes_in_per_second: float | None = None
    bytes_out_per_second: float | None = None
    changes: int = 0
    latency_seconds: float | None = None
    active_connections: int | None = None
    inactive_connections: int | None = None


COLUMNS = tuple(field.encode_name for field in msgspec.structs.fields(Point))
"""The names that the figures of a point have in JSON."""
_UNKNOWN = (None,) * len(Counters._fields)


class History:
    """The points in the history of the node."""

    def __init__(self) -> None:
        self._points: collections.deque[Point] = collections.deque(maxlen=POINTS)
        self._samples: collections.deque[tuple[float, Counters]] = collections.deque(maxlen=3)
        self._changes = 0
        self._latency_s: float | None = None

    def note_changes(self, count: int, latency_s: float) -> None:
        """Record that changes have been applied; ``latency_s`` is the time since the arrival of the oldest change."""
        if count:
            self._changes += count
            self._latency_s = max(round(latency_s, 3), self._latency_s or 0.0)

    def add(self, counters: Counters | None, connections: ConnectionCounts | None, now: float, at_s: float) -> None:
        """Add a point to the history.

        ``counters`` are the counters of the whole node, and ``connections`` the open connections of the node; None means that a
        value is not known. ``now`` is a time of the monotonic clock.
        """
        if counters is None:
            self._samples.clear()
            rates: Sequence[float | None] = _UNKNOWN
        else:
            self._samples.append((now, counters))
            rates = self._rates()
        if self._points and at_s < self._points[-1].at:
            self._points.clear()  # The node's clock has been set back.
        # The time is not rounded, because a viewer requests the points that are later than the viewer's last point.
        figures = (at_s, *rates, self._changes, self._latency_s, *(connections or ()))
        self._points.append(msgspec.convert(figures, Point))
        self._changes, self._latency_s = 0, None
        while self._points[0].at < at_s - LENGTH_S:
            self._points.popleft()

    def _rates(self) -> Sequence[float | None]:
        now_s, now = self._samples[-1]
        before_s, before = next(
            (one for one in self._samples if 0 < now_s - one[0] < SHORT_S), self._samples[max(0, len(self._samples) - 2)]
        )
        seconds = now_s - before_s
        if seconds <= 0:
            return _UNKNOWN
        # After a reset of the counters (ipvsadm --zero), the increase is counted from zero.
        return [round((new - old if new >= old else new) / seconds, 3) for new, old in zip(now, before, strict=True)]

    @property
    def last(self) -> Point | None:
        """The newest point; None before the first point."""
        return self._points[-1] if self._points else None

    def since(self, at_s: float) -> Iterator[Point]:
        """The points after a given time, the oldest point first."""
        later = itertools.takewhile(lambda point: point.at > at_s, reversed(self._points))
        return reversed(list(later))


SYNCS = 10
REASONS = 20
RECENT_S = 120.0
"""A rate that is older than this time is not shown as the current rate. Rates can become older than this, because new rates are
computed only at audits while the page has no viewer."""


def _sync(summary: SyncSummary, at_s: float) -> dict[str, Any]:
    """The result of a sync as a document."""
    return {
        "endedAt": at_s,
        "isAudit": summary.is_audit,
        "services": len(summary.changes.services),
        "done": sum(summary.report.done.values()),
        "failed": sum(summary.report.failed.values()),
        "pending": summary.report.pending,
        "waitedSeconds": summary.waited_s,
        "readSeconds": summary.observed_s,
        "translatedSeconds": summary.translated_s,
        "appliedSeconds": summary.applied_s,
        "durationSeconds": summary.duration_s,
    }


@dataclasses.dataclass(eq=False, kw_only=True)
class NodePage:
    """The node as a document, with its events and its history.

    ``source`` says where Services come from; ``programs`` are the programs that write the rules, by IP family.
    """

    sources: Sources
    node_name: str
    source: str
    programs: Mapping[Family, Program]

    def __post_init__(self) -> None:
        self.started_s = self.sources.status.wall_clock()
        self.version = importlib.metadata.version("ipvsproxy")
        self.history = History()
        self.events = EventLog()

    def describe(self, statistics: Statistics, numbers: Numbers, *, zone: str, scheduler: str, since_s: float) -> Document:
        """The document for ``node.json``, with the points of the history after a given time."""
        status = self.sources.status
        now_s = status.wall_clock()
        reasons = list(_reasons(self.sources, statistics, self.events.failed))[:REASONS]
        last = self.history.last
        if last is None or now_s - last.at >= RECENT_S:
            last = Point(now_s)
        return {
            "version": self.version,
            "node": self.node_name,
            "zone": zone,
            "now": now_s,
            "startedAt": self.started_s,
            "inForce": not reasons,
            "reasons": reasons,
            "healthy": status.is_healthy,
            "eligible": status.is_eligible,
            "oldestChangeAgeSeconds": status.oldest_change_age_s,
            "services": len(self.sources.store.services),
            "virtualServers": sum(numbers.virtual_servers.values()),
            "realServers": sum(numbers.real_servers.values()),
            "pending": _counted(statistics.pending),
            "drifted": _counted(statistics.drifted),
            "failed": self.events.failed,
            "draining": statistics.drains,
            "waitingRemovals": statistics.waiting_removals,
            "conflicts": statistics.conflicts,
            "syncs": list(self.events.syncs),
            "source": self.source,
            "watches": [
                {
                    "kind": kind.value,
                    "connected": watch.is_open,
                    "stale": watch.is_stale,
                    "contactAgeSeconds": watch.contact_age_s,
                }
                for kind, watch in self.sources.watch_states().items()
            ],
            "kernel": {
                "release": platform.release(),
                "scheduler": scheduler,
                "families": [
                    {
                        "family": family.label,
                        "iptables": "nft" if program.variant == "nf_tables" else program.variant,
                        "healthy": family in status.updated and not status.is_late(family),
                        "updatedAt": status.updated.get(family),
                    }
                    for family, program in self.programs.items()
                ],
            },
            "connectionsPerSecond": last.connections_per_second,
            "packetsPerSecond": _sum(last.packets_in_per_second, last.packets_out_per_second),
            "bytesPerSecond": _sum(last.bytes_in_per_second, last.bytes_out_per_second),
            "activeConnections": last.active_connections,
            "inactiveConnections": last.inactive_connections,
            "history": {"columns": COLUMNS, "points": list(self.history.since(since_s))},
        }


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _counted(numbers: Mapping[str, int]) -> dict[str, Any]:
    kinds = {kind: number for kind, number in numbers.items() if number}
    return {"total": sum(kinds.values()), "byKind": kinds, "text": counted_kinds(kinds)}


def _reasons(sources: Sources, statistics: Statistics, failed: int) -> Iterator[str]:
    status = sources.status
    missing = status.missing()
    yield from (f"the first list of {kind} is not complete" for kind in sorted(missing))
    for kind, doubt in sources.store.doubts.items():
        yield f"a list of {kind} lacks {doubt.missing} of {doubt.known} objects: they stay until a second list confirms it"
    for path, value in status.unmet_settings.items():
        yield f"the kernel setting {path} is {value}"
    yield from sorted(status.unreadable())
    if failed:
        yield f"{counted(failed, 'operation')} failed and will be tried again"
    for name, number in statistics.pending.items():
        if number:
            yield f"not yet as desired: {counted_kinds({name: number})}"
    if not missing and (age_s := status.oldest_change_age_s) > 0:
        yield f"a change has waited for {age_s:.1f} s"


EVENTS = 500
SERVICES_NAMED = 5
"""The largest number of Services that an event names."""
LONGEST_TEXT = 500
"""The largest number of characters in a sentence. The number is limited, because an error may contain names of objects."""


class EventLog:
    """The last events and syncs of the node, each as a JSON document.

    The ``id`` of the first event is 1, and each later event has the next number; times are in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.syncs: collections.deque[dict[str, Any]] = collections.deque(maxlen=SYNCS)
        """The last syncs, the newest first."""
        self.failed = 0
        """The number of failed operations in the last sync with failures; 0 once a later sync has left nothing pending."""
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=EVENTS)
        self._failing: frozenset[str] = frozenset()
        self._states: dict[tuple[str, str], str] = {}

    @property
    def last(self) -> int:
        """The ``id`` of the newest event; 0 if there is no event."""
        return self._events[-1]["id"] if self._events else 0

    def since(self, number: int) -> Iterator[dict[str, Any]]:
        """The events after the event with the given number, the newest event first."""
        return itertools.takewhile(lambda event: event["id"] > number, reversed(self._events))

    def synced(self, summary: SyncSummary, at_s: float, endpoints: Sequence[Document] = (), more: int = 0) -> None:
        """Called when a sync has ended.

        ``endpoints`` are changes of endpoints by this sync, as ``endpoint_changes.describe`` returns them. ``more`` is the number
        of changed endpoints that are not in ``endpoints``.
        """
        report, names = summary.report, summary.changes.services
        self.syncs.appendleft(_sync(summary, at_s))
        if report.failed or not report.pending:
            self.failed = sum(report.failed.values())
        if summary.drifted:
            left = f"{counted(report.pending, 'object is', 'objects are')} still to be repaired"
            verdict = left if report.pending else "repaired"
            self._add("drift", at_s, f"{counted_kinds(summary.drifted)} changed by another program; {verdict}")
        failures = frozenset(map(_failure, report.errors))
        for text in sorted(failures - self._failing):
            self._add("failure", at_s, text)
        self._failing = failures if report.failed or report.pending else frozenset()
        about = {
            "services": tuple(map(str, itertools.islice(names, SERVICES_NAMED))),
            "serviceCount": len(names),
            "durationSeconds": summary.duration_s,
            "latencySeconds": summary.waited_s + summary.duration_s if names else None,
        }
        if report.done or report.failed:
            operations = {f"{verb} {kind}": count for (verb, kind), count in report.done.items()}
            text = _sentence(summary, endpoint_changes.sentence(endpoints, more))
            self._add("sync", at_s, text, **about, endpoints=endpoints, operations=operations)
        elif names:
            self._add_unchanged(about, at_s)

    def _add_unchanged(self, about: Mapping[str, Any], at_s: float) -> None:
        """Record a sync without changes as an event.

        If the previous event is also a sync without changes, the new event replaces the previous event.
        """
        last = self._events[-1] if self._events else _NO_SYNC
        syncs = last["unchangedSyncs"] + 1
        text = "nothing to change on this node" + (f", {syncs} times in a row" if syncs > 1 else "")
        self._add("sync", at_s, text, **about, unchangedSyncs=syncs)
        if syncs > 1:
            self._events[-1]["firstId"] = last["firstId"]
            del self._events[-2]

    def note(self, kind: str, subject: str, state: str, at_s: float) -> None:
        """Record the state of a subject, as text.

        A state that differs from the subject's previous state becomes an event. The first state of a subject does not become an
        event.
        """
        before = self._states.get((kind, subject))
        self._states[kind, subject] = state
        if before is not None and before != state:
            self._add(kind, at_s, f"{subject}: {state}")

    def _add(self, kind: str, at_s: float, text: str, **more: Any) -> None:
        """Add an event to the log.

        ``latencySeconds`` is the time from the arrival of the oldest change to the end of the sync.
        """
        number = self.last + 1
        head = {"id": number, "firstId": number, "at": at_s, "kind": kind, "text": text[:LONGEST_TEXT]}
        self._events.append({**head, **_NO_SYNC, **more})


_NO_SYNC: Mapping[str, Any] = {
    "services": (),
    "serviceCount": 0,
    "unchangedSyncs": 0,
    "endpoints": (),
    "operations": {},
    "durationSeconds": None,
    "latencySeconds": None,
}
"""The fields that describe a sync, with their default values. An event that is not a sync has these default values."""


def _failure(outcome: Outcome) -> str:
    """A text that names the failed operation and the reason.

    If the error message already names the operation, the operation is not named twice.
    """
    operation = str(outcome.operation)
    return outcome.error if outcome.error.startswith(operation) else f"{operation}: {outcome.error}"


def _sentence(summary: SyncSummary, endpoints: str) -> str:
    """The changes of a sync as text.

    ``endpoints`` is the part about changed endpoints; all other changed kernel objects are only counted.
    """
    report, names = summary.report, summary.changes.services
    parts = [endpoints] if endpoints else [f"{len(names):,} Services changed"] if len(names) > 1 else []
    is_told = endpoints and sum(number for (_, kind), number in report.done.items() if kind == "real_server") == len(
        report.weights
    )
    by_verb: dict[str, dict[str, int]] = {}
    for (verb, kind), number in sorted(report.done.items()):
        if kind != "real_server" or not is_told:
            by_verb.setdefault(verb, {})[kind] = number
    parts += [f"{_DONE[verb]} {counted_kinds(kinds)}" for verb, kinds in by_verb.items()]
    if report.failed:
        parts.append(f"{counted(sum(report.failed.values()), 'operation')} failed")
    if report.pending:
        parts.append(counted(report.pending, "object waits", "objects wait"))
    subject = f"{next(iter(names))}: " if len(names) == 1 and not endpoints else ""
    return subject + "; ".join(parts)


_DONE = {"add": "added", "set": "set", "remove": "removed"}
