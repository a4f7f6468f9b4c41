"""Writes the log lines of the event loop: each fact is logged once, and each sync with operations has one line."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import assert_never

from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base import timing
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.kernel import BoundAddresses, LocalRoutes, Sysctl
from ipvsproxy.model.plan import Operation, Outcome, Verb, one_by_one
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import (
    ApiServersFound,
    Event,
    Gone,
    Listed,
    ListStarted,
    ObjectKind,
    Put,
    Rejected,
    ServiceName,
    Skipped,
)
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import each
from ipvsproxy.reconcile.observation import News
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.reconcile.tables.table import Conflict
from ipvsproxy.store.guard import CONFIRMED_AFTER_S, Doubt
from ipvsproxy.store.objects import Complaint

BURST, REFILL_S = 1000, 0.1
"""The rate limit of log lines about objects and failures: the number of lines that may be logged at once, and the seconds before
each further line."""
SUBJECT_BURST, SUBJECT_REFILL_S = 5, 60.0
"""The rate limit of complaints about one object, and of conflicts about one address and port."""
MOST_SUBJECTS = 1000
"""The largest number of objects whose rate limits are remembered."""
SYNCS_BURST, SYNCS_REFILL_S = 60, 1.0
"""The rate limit of log lines about syncs: ``SYNCS_BURST`` lines at once, then one line per ``SYNCS_REFILL_S`` seconds. If the
minimum interval is 0, there may be a hundred syncs a second."""
PARTS_SHOWN = 25
"""The largest number of invalid parts of one object that are logged at once."""
PLACES_SHOWN = 5
"""The largest number of places with returning drift that are logged at once."""


def log_received(events: Iterable[Event]) -> None:
    """Log the events from the source, at the verbosity for single operations."""
    if not logs.shows(logs.DEBUG_VERBOSITY):
        return
    for event in events:
        match event:
            case Put(kind, key):
                log.debug("received", change="put", kind=kind.value, name=str(key))
            case Gone(kind, key):
                log.debug("received", change="deleted", kind=kind.value, name=str(key))
            case ListStarted(kind):
                log.debug("received", change="listing", kind=kind.value)
            case Listed(kind, keys):
                log.debug("received", change="listed", kind=kind.value, objects=len(keys))
            case Rejected(kind, rejected):
                log.debug("received", change="rejected", kind=kind.value, name=str(rejected or ""), **_keys_of(event))
            case ApiServersFound(servers):
                log.debug("received", change="api_servers", name=", ".join(sorted(map(str, servers))))
            case never:
                assert_never(never)


def _keys_of(why: Skipped | Rejected) -> Mapping[str, str]:
    """The keys of a log line that says why an object, or a part of it, is not used."""
    return {**({"field": why.field} if why.field else {}), "reason": why.reason}


def log_desired(name: ServiceName, state: ServiceState | None) -> None:
    """Log the desired state of a Service, at the verbosity for single operations."""
    if not logs.shows(logs.DEBUG_VERBOSITY):
        return
    if state is None:
        log.debug("translated", service=str(name), wants="nothing")
        return
    desired = [f"{key}({len(server.real_servers)})" for key, server in state.virtual_servers.items()]
    log.debug("translated", service=str(name), virtual_servers=desired, entries=len(state.entries), skipped=state.rare.skipped)


def log_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Log the operations on the kernel that these outcomes describe.

    At ``CHANGES_VERBOSITY``, only operations on rules, and removals of addresses and local routes, are logged. Every operation is
    logged at a higher verbosity.
    """
    if logs.shows(logs.DEBUG_VERBOSITY):
        for outcome in outcomes:
            for operation in one_by_one([outcome.operation]):
                log.debug("operation", operation=str(operation), **({"error": outcome.error} if outcome.error else {}))
    elif logs.shows(logs.CHANGES_VERBOSITY):
        # Only the outcomes to log are split into single objects: after a start, most outcomes add many objects, and are not
        # logged.
        for verb, item in (outcome.operation for outcome in outcomes if not outcome.error):
            if isinstance(item, Skeleton) or (verb is Verb.REMOVE and isinstance(item, BoundAddresses | LocalRoutes)):
                for operation in one_by_one([Operation(verb, item)]):
                    log.info("operation", operation=str(operation))


def log_node(name: str, before: str, trouble: str) -> None:
    """Log why load balancers avoid this node even if all changes are applied; log again when this reason ends.

    ``before`` is the previous problem with this node's Node object, and ``trouble`` the current problem; an empty text means no
    problem.
    """
    if trouble and trouble != before:
        log.warning("load_balancers_turned_away", node=name, reason=trouble)
    elif before and not trouble:
        log.info("load_balancers_welcome", node=name)


@dataclasses.dataclass(slots=True)
class _Lines:
    """Writes log lines with a rate limit.

    Log lines above the limit are not written but counted, and the next allowed line shows their number.
    """

    limit: timing.Bucket
    clock: Callable[[], float]
    untold: int = 0

    def log(self, write: Callable[..., object], event: str, **keys: object) -> None:
        """Write a log line, or only count it if the rate limit is reached."""
        if not self.limit.take(self.clock()):
            self.untold += 1
            return
        untold, self.untold = self.untold, 0
        write(event, **keys, **({"untold": untold} if untold else {}))


class Journal:
    """Remembers what has been logged, and limits the rate of log lines.

    Each object has a rate limit for complaints, and there is a rate limit for all objects together. Log lines above a limit are
    not written but counted, and the next allowed line shows their number as ``untold``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = _Lines(timing.Bucket(BURST, REFILL_S, clock()), clock)
        self._syncs = _Lines(timing.Bucket(SYNCS_BURST, SYNCS_REFILL_S, clock()), clock)
        self._subjects: timing.RateLimits[object] = timing.RateLimits(SUBJECT_BURST, SUBJECT_REFILL_S, MOST_SUBJECTS)
        self._conflicts: set[Conflict] = set()
        self._doubted: frozenset[ObjectKind] = frozenset()
        self._settings: Mapping[str, str] = {}

    def log_complaints(self, complaints: Iterable[Complaint]) -> None:
        """Log each unused part of an object, with the reason why the part is not used.

        Parts that are valid but that ipvsproxy does not use are logged only at the verbosity for single operations.
        """
        for complaint in complaints:
            invalid = [skipped for skipped in complaint.skipped if skipped.invalid]
            about = {"kind": complaint.kind.value, "name": complaint.name}
            if complaint.where:
                about["where"] = complaint.where
            if invalid and self._is_allowed((complaint.kind, complaint.name, complaint.where), len(invalid)):
                for skipped in invalid[:PARTS_SHOWN]:
                    self._lines.log(log.warning, "part_not_used", **about, **_keys_of(skipped))
                self._lines.untold += len(invalid[PARTS_SHOWN:])
            for skipped in complaint.skipped:
                if not skipped.invalid:
                    log.debug("part_not_used", **about, **_keys_of(skipped))

    def logging_conflicts(self, conflicts: Iterable[Conflict]) -> Generator[None, None, Collection[Conflict]]:
        """Log the new conflicts; yields after each piece of work. Returns all current conflicts."""
        present: set[Conflict] = set()
        yield from each(present.add, conflicts)
        new = present - self._conflicts
        for conflict in new:
            if self._is_allowed(conflict.key):
                who = {"served": str(conflict.winner), "waiting": [str(owner) for owner in conflict.waiting]}
                self._lines.log(log.warning, "address_conflict", key=str(conflict.key), **who, why=conflict.reasons)
        self._conflicts = present
        return new

    def log_without_scope(self, ports: Iterable[MarkedPort]) -> None:
        """Log the Service ports that have begun to wait for a free mark."""
        hint = "all packet marks are in use, so the port is served as by kube-proxy; widen --ipvs-scope-mark-bits"
        for port in ports:
            if self._is_allowed(port):
                about = {"service": str(port.service), "port": port.port, "protocol": port.protocol.name}
                self._lines.log(log.warning, "scope_without_mark", **about, hint=hint)

    def log_doubts(self, doubts: Mapping[ObjectKind, Doubt]) -> None:
        """Log that a list is in doubt, and, when the doubt ends, that the list is no longer in doubt."""
        confirmed = f"before another list, {CONFIRMED_AFTER_S:.0f} s later or more, confirms it"
        for kind in doubts.keys() - self._doubted:
            doubt = doubts[kind]
            if doubt.is_first:
                known = "this Node" if kind is ObjectKind.NODE else "default/kubernetes"
                hint = f"an API server has {known} at least; nothing is removed from the kernel {confirmed}"
                log.error("first_list_not_believed", kind=kind.value, hint=hint)
            else:
                hint = f"nothing that the list lacks is removed {confirmed}"
                log.error("list_not_believed", kind=kind.value, missing=doubt.missing, known=doubt.known, hint=hint)
        for kind in self._doubted - doubts.keys():
            log.warning("list_believed_again", kind=kind.value)
        self._doubted = frozenset(doubts)

    def log_drift(self, news: News) -> None:
        """Log new drift, and drift that returns so often that its repair is delayed."""
        if news.drifted:
            log.warning("drift_found", **news.drifted)
        hint = "another program undoes the repair repeatedly, so repairs become rarer"
        for place, times in itertools.islice(news.left_alone.items(), PLACES_SHOWN):
            log.warning("drift_returns", kind=place.kind, name=str(place), times=times, hint=hint)

    def log_settings(self, given_up: Mapping[str, str]) -> None:
        """Log the paths of the sysctls that cannot be written, and the reasons.

        The failure is logged once, and again when another sysctl cannot be written. If an indispensable sysctl has a wrong value,
        no Service works in the IP families that need the sysctl. Therefore, the node's health also shows the sysctl.
        """
        new = [path for path in given_up if path not in self._settings]
        if new:
            log.warning("kernel_settings_not_writable", settings=new, error=given_up[new[0]])
        self._settings = given_up

    def log_sync(self, summary: SyncSummary, draining: int) -> None:
        """Log the result of a sync; ``draining`` is the number of draining real servers."""
        report, changes = summary.report, summary.changes
        for outcome in report.errors:
            if not isinstance(outcome.operation.item, Sysctl):
                failed = {"operation": str(outcome.operation), "error": outcome.error, "errno": outcome.errno}
                self._lines.log(log.error, "operation_failed", **failed)
        if changes.services or report.done or report.failed:
            self._syncs.log(
                log.info,
                "synced",
                services=len(changes.services),
                operations=sum(report.done.values()),
                failed=sum(report.failed.values()),
                pending=report.pending,
                draining=draining,
                duration_s=round(summary.duration_s, 4),
            )

    def _is_allowed(self, subject: object, lines: int = 1) -> bool:
        """Whether the rate limits allow a log line about a subject now; lines that are not allowed are counted."""
        if self._subjects.take(subject, self._clock()):
            return True
        self._lines.untold += lines
        return False
