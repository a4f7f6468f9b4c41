"""What the loop says in the log: each thing once, and one line per sync that had something to do."""

from collections.abc import Collection, Iterable, Mapping

import structlog

from ipvsproxy.daemon.store import Complaint
from ipvsproxy.daemon.summary import SyncSummary
from ipvsproxy.model.kernel import Sysctl
from ipvsproxy.reconcile.table import Conflict

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Journal:
    """Remembers what was said."""

    def __init__(self) -> None:
        self._conflicts: frozenset[Conflict] = frozenset()
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
