"""What the loop says in the log: each thing once, and one line per sync that had something to do."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import assert_never

import structlog

from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base import rate_limit
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.model.kernel import BoundAddresses, Sysctl
from ipvsproxy.model.plan import Outcome, Verb, one_by_one
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import Event, Gone, Listed, Listing, ObjectKind, Put, Rejected, ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.drift import News
from ipvsproxy.reconcile.table import Conflict
from ipvsproxy.store.mass_deletion import CONFIRMED_AFTER_S, Doubt
from ipvsproxy.store.objects import Complaint

BURST, REFILL_S = 1000, 0.1
"""Allowance of lines about objects and failures: this many at once, then one per so many seconds."""
SUBJECT_BURST, SUBJECT_REFILL_S = 5, 60.0
"""Allowance of each object's complaints, and of conflicts about one address and port."""
MOST_SUBJECTS = 1000
"""Whose allowance is remembered."""
SYNCS_BURST, SYNCS_REFILL_S = 60, 1.0
"""Allowance of lines about syncs, of which there may be a hundred in a second where the minimum interval is 0."""
PARTS_SHOWN = 25
"""How many parts of one object are complained of at once."""
PLACES_SHOWN = 5
"""How many places that are fought over are named at once."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def tell_received(events: Iterable[Event]) -> None:
    """Say what came from the source, to those who ask for every step."""
    if not logs.tells(logs.DEBUG_VERBOSITY):
        return
    for event in events:
        match event:
            case Put(kind, key):
                log.debug("received", change="put", kind=kind.value, name=str(key))
            case Gone(kind, key):
                log.debug("received", change="deleted", kind=kind.value, name=str(key))
            case Listing(kind):
                log.debug("received", change="listing", kind=kind.value)
            case Listed(kind, keys):
                log.debug("received", change="listed", kind=kind.value, objects=len(keys))
            case Rejected(kind, rejected):
                log.debug("received", change="rejected", kind=kind.value, name=str(rejected or ""), reason=event.reason)
            case never:
                assert_never(never)


def tell_wanted(name: ServiceName, state: ServiceState | None) -> None:
    """Say what a Service wants of this node, to those who ask for every step."""
    if not logs.tells(logs.DEBUG_VERBOSITY):
        return
    if state is None:
        log.debug("translated", service=str(name), wants="nothing")
        return
    wanted = [f"{key}({len(server.real_servers)})" for key, server in state.virtual_servers.items()]
    log.debug("translated", service=str(name), virtual_servers=wanted, entries=len(state.entries), skipped=state.rare.skipped)


def tell_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Say what was done to the kernel: at first what goes and what is written as a whole, and then all of it."""
    if logs.tells(logs.DEBUG_VERBOSITY):
        for outcome in outcomes:
            for operation in one_by_one([outcome.operation]):
                log.debug("operation", operation=str(operation), **({"error": outcome.error} if outcome.error else {}))
    elif logs.tells(logs.CHANGES_VERBOSITY):
        for outcome in outcomes:
            verb, item = outcome.operation
            if not outcome.error and (isinstance(item, Skeleton) or (verb is Verb.REMOVE and isinstance(item, BoundAddresses))):
                for operation in one_by_one([outcome.operation]):
                    log.info("operation", operation=str(operation))


def tell_node(name: str, before: str, trouble: str) -> None:
    """Say why load balancers are turned away from a node although all is in force, and when that has ended.

    ``before`` and ``trouble`` are what was and what is the matter with its Node object, empty when nothing.
    """
    if trouble and trouble != before:
        log.warning("load_balancers_turned_away", node=name, reason=trouble)
    elif before and not trouble:
        log.info("load_balancers_welcome", node=name)


class Journal:
    """Remembers what was said, and does not let itself be made to say the same for ever.

    Each object has its allowance of complaints, and the whole has one. What was too much is counted, and told as ``untold`` with
    the next line that is allowed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines = rate_limit.Bucket(BURST, REFILL_S, clock())
        self._syncs = rate_limit.Bucket(SYNCS_BURST, SYNCS_REFILL_S, clock())
        self._subjects: rate_limit.RateLimits[object] = rate_limit.RateLimits(SUBJECT_BURST, SUBJECT_REFILL_S, MOST_SUBJECTS)
        self._untold = 0
        self._untold_syncs = 0
        self._conflicts: frozenset[Conflict] = frozenset()
        self._doubted: frozenset[ObjectKind] = frozenset()
        self._settings: Mapping[str, str] = {}

    def complain(self, complaints: Iterable[Complaint]) -> None:
        """Say which parts of objects are not used, and why; what merely is not for us only to those who ask for every step."""
        for complaint in complaints:
            invalid = [skipped for skipped in complaint.skipped if skipped.invalid]
            about = {"kind": complaint.kind.value, "name": complaint.name}
            if complaint.where:
                about["where"] = complaint.where
            if invalid and self._is_allowed((complaint.kind, complaint.name, complaint.where), len(invalid)):
                for skipped in invalid[:PARTS_SHOWN]:
                    self._tell(log.warning, "part_not_used", **about, field=skipped.field, reason=skipped.reason)
                self._untold += len(invalid[PARTS_SHOWN:])
            for skipped in complaint.skipped:
                if not skipped.invalid:
                    log.debug("part_not_used", **about, field=skipped.field, reason=skipped.reason)

    def tell_conflicts(self, conflicts: Iterable[Conflict]) -> Collection[Conflict]:
        """Say who wants what somebody else has; of all that there are now, the new ones, which are returned."""
        present = frozenset(conflicts)
        new = present - self._conflicts
        for conflict in new:
            if self._is_allowed(conflict.key):
                waiting = [str(owner) for owner in conflict.waiting]
                self._tell(
                    log.warning,
                    "address_conflict",
                    key=str(conflict.key),
                    served=str(conflict.winner),
                    waiting=waiting,
                    why=conflict.reasons,
                )
        self._conflicts = present
        return new

    def tell_doubts(self, doubts: Mapping[ObjectKind, Doubt]) -> None:
        """Say which lists are not believed, and when that has ended."""
        confirmed = f"before another list, {CONFIRMED_AFTER_S:.0f} s later or more, confirms it"
        for kind in doubts.keys() - self._doubted:
            doubt = doubts[kind]
            if doubt.is_first:
                hint = f"an API server has default/kubernetes at least; nothing is removed from the kernel {confirmed}"
                log.error("first_list_not_believed", kind=kind.value, hint=hint)
            else:
                log.error(
                    "list_not_believed",
                    kind=kind.value,
                    missing=doubt.missing,
                    known=doubt.known,
                    hint=f"nothing of it is removed {confirmed}",
                )
        for kind in self._doubted - doubts.keys():
            log.warning("list_believed_again", kind=kind.value)
        self._doubted = frozenset(doubts)

    def tell_drift(self, news: News) -> None:
        """Say what somebody else has changed, and what is left alone for now because it returns again and again."""
        if news.found:
            log.warning("drift_found", **news.found)
        for place, times in itertools.islice(news.left_alone.items(), PLACES_SHOWN):
            log.warning(
                "drift_returns",
                kind=place.kind,
                name=str(place.key),
                times=times,
                hint="somebody undoes it again and again: it is repaired ever more seldom",
            )

    def tell_settings(self, given_up: Mapping[str, str]) -> None:
        """Log which kernel settings, by path, cannot be written, and why: once until another one cannot be written.

        Without an indispensable one no Service of its families works; the health of the node shows those as well.
        """
        new = [path for path in given_up if path not in self._settings]
        if new:
            log.warning("kernel_settings_not_writable", settings=new, error=given_up[new[0]])
        self._settings = given_up

    def tell_sync(self, summary: SyncSummary, draining: int) -> None:
        """Say what a sync did; ``draining`` real servers are waiting for their connections to end."""
        report, changes = summary.report, summary.changes
        for outcome in report.errors:
            if not isinstance(outcome.operation.item, Sysctl):
                failed = {"operation": str(outcome.operation), "error": outcome.error, "errno": outcome.errno}
                self._tell(log.error, "operation_failed", **failed)
        if not (changes.services or report.done or report.failed):
            return
        if not self._syncs.take(self._clock()):
            self._untold_syncs += 1
            return
        untold, self._untold_syncs = self._untold_syncs, 0
        log.info(
            "synced",
            services=len(changes.services),
            operations=sum(report.done.values()),
            failed=sum(report.failed.values()),
            pending=report.pending,
            draining=draining,
            duration_s=round(summary.duration_s, 4),
            **_if_any(untold),
        )

    def _is_allowed(self, subject: object, lines: int = 1) -> bool:
        """Whether something may be said about this subject now; if not, its lines count as untold."""
        if self._subjects.take(subject, self._clock()):
            return True
        self._untold += lines
        return False

    def _tell(self, say: Callable[..., object], event: str, **keys: object) -> None:
        if not self._lines.take(self._clock()):
            self._untold += 1
            return
        untold, self._untold = self._untold, 0
        say(event, **keys, **_if_any(untold))


def _if_any(untold: int) -> Mapping[str, int]:
    return {"untold": untold} if untold else {}
