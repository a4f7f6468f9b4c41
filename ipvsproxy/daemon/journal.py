"""What the loop says in the log: each thing once, and one line per sync that had something to do."""

import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import assert_never

import structlog

from ipvsproxy.daemon import log as logs
from ipvsproxy.daemon.mass_deletion import CONFIRMED_AFTER_S, Doubt
from ipvsproxy.daemon.store import Complaint
from ipvsproxy.daemon.summary import SyncSummary
from ipvsproxy.model.kernel import BoundAddress, Skeleton, Sysctl
from ipvsproxy.model.plan import Outcome, Verb
from ipvsproxy.model.service import Event, Gone, Listed, ObjectKind, Put, Rejected, ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile.drift import News
from ipvsproxy.reconcile.table import Conflict

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
    log.debug("translated", service=str(name), virtual_servers=wanted, entries=len(state.entries), skipped=state.skipped)


def tell_outcomes(outcomes: Iterable[Outcome]) -> None:
    """Say what was done to the kernel: at first what goes and what is written as a whole, and then all of it."""
    if logs.tells(logs.DEBUG_VERBOSITY):
        for outcome in outcomes:
            log.debug("operation", operation=str(outcome.operation), **({"error": outcome.error} if outcome.error else {}))
    elif logs.tells(logs.CHANGES_VERBOSITY):
        for outcome in outcomes:
            verb, item = outcome.operation
            if not outcome.error and (isinstance(item, Skeleton) or (verb is Verb.REMOVE and isinstance(item, BoundAddress))):
                log.info("operation", operation=str(outcome.operation))


class Journal:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._conflicts: frozenset[Conflict] = frozenset()
        self._doubted: frozenset[ObjectKind] = frozenset()
        self._settings: Mapping[str, str] = {}

    def complain(self, complaints: Iterable[Complaint]) -> None:
        """Say which parts of objects are not used, and why; what merely is not for us only to those who ask for every step."""
        for complaint in complaints:
            where = {"where": complaint.where} if complaint.where else {}
            for skipped in complaint.skipped:
                say = log.warning if skipped.invalid else log.debug
                say(
                    "not used",
                    kind=complaint.kind.value,
                    name=complaint.name,
                    **where,
                    field=skipped.field,
                    reason=skipped.reason,
                )

    def tell_conflicts(self, conflicts: Iterable[Conflict]) -> Collection[Conflict]:
        """Say who wants what somebody else has; of all that there are now, the new ones, which are returned."""
        present = frozenset(conflicts)
        new = present - self._conflicts
        for conflict in new:
            waiting = [str(owner) for owner in conflict.waiting]
            log.warning(
                "several Services want one address and port", key=str(conflict.key), served=str(conflict.winner), waiting=waiting
            )
        self._conflicts = present
        return new

    def tell_doubts(self, doubts: Mapping[ObjectKind, Doubt]) -> None:
        """Say which lists are not believed, and when that has ended."""
        for kind in doubts.keys() - self._doubted:
            log.error(
                "a list lacks too much to be believed",
                kind=kind.value,
                missing=doubts[kind].missing,
                known=doubts[kind].known,
                hint=f"nothing of it is removed before another list, {CONFIRMED_AFTER_S:.0f} s later or more, confirms it",
            )
        for kind in self._doubted - doubts.keys():
            log.warning("the list is believed again", kind=kind.value)
        self._doubted = frozenset(doubts)

    def tell_drift(self, news: News) -> None:
        """Say what somebody else has changed, and what is left alone for now because it returns again and again."""
        if news.found:
            log.warning("changed by others", **news.found)
        for place, times in itertools.islice(news.left_alone.items(), PLACES_SHOWN):
            log.warning("fought over, healed ever more seldom", kind=place.kind, name=str(place.key), times=times)

    def tell_settings(self, given_up: Mapping[str, str]) -> None:
        """Say which kernel settings, by path, cannot be written and why. Traffic flows without them, if not as it should."""
        new = [path for path in given_up if path not in self._settings]
        if new:
            log.warning("kernel settings can not be written", settings=new, error=given_up[new[0]])
        self._settings = given_up

    def tell_sync(self, summary: SyncSummary, draining: int) -> None:
        """Say what a sync did; ``draining`` real servers are waiting for their connections to end."""
        report, changes = summary.report, summary.changes
        for outcome in report.errors:
            if not isinstance(outcome.operation.item, Sysctl):
                log.error("operation failed", operation=str(outcome.operation), error=outcome.error, errno=outcome.errno)
        if changes.services or report.done or report.failed:
            log.info(
                "synced",
                services=len(changes.services),
                operations=sum(report.done.values()),
                failed=sum(report.failed.values()),
                pending=report.pending,
                draining=draining,
                duration_s=round(summary.duration_s, 4),
            )
