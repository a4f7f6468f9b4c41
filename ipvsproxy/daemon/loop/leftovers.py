"""Removes rules that another proxy, or a former process of ours, has left behind, once ours are in force.

They are in a variant of iptables, in a table of kube-proxy's nftables mode, or in the other backend of ours (``OtherBackend``).

Rule 1: a family is examined when its rules and sets come into force, and after each audit; a program runs only if a rule has
changed since. While most virtual servers of a family or an entry of a set are missing, none is examined: the rules that were left
are what serves it.
Rule 2: a failed examination or removal is repeated with growing pauses. Unreadable rules count as present.
Rule 3: rules that a running proxy writes again and again are removed less and less often (see ``leftovers`` of ``reconcile``).
Rule 4: one log line when the rules of a place resist, and one when none are left.
"""

import abc
import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

import structlog

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import driver as iptables
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules, RulesPlace
from ipvsproxy.kernel.nftables.leftover_tables import LeftoverTables, TablePlace
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Removal
from ipvsproxy.reconcile.operations import retry
from ipvsproxy.reconcile.removal import leftover_tables, leftovers
from ipvsproxy.translate import skeleton

REMOVED, GONE = "leftover_rules_removed", "leftover_rules_gone"
RESISTS, COMES_BACK = "leftover_rules_not_removed", "leftover_rules_come_back"
FOUND = "leftover_table_found"

AnyPlace = RulesPlace | TablePlace

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Examined(NamedTuple):
    """The result of examining a place, with the fingerprint of its rules before.

    ``failure`` says why a permitted removal did not happen. ``hidden`` names tables that cannot be listed, ``foreign`` one that
    has the name of a leftover, and why it is none.
    """

    fingerprint: object
    removal: Removal
    is_removed: bool = False
    failure: str = ""
    hidden: str = ""
    foreign: str = ""


class Remains(abc.ABC):
    """What another proxy may have left in one place, and how it is found and removed. All calls block."""

    def __call__(self, known: Examined | None = None, *, may_remove: bool) -> Examined:
        """Look and, with ``may_remove``, remove what was found; returns ``known`` if nothing has changed since.

        Raises:
            KernelError: the kernel could not be read just now.
        """
        fingerprint = self.fingerprint()
        if known is not None and known.fingerprint is not None and fingerprint == known.fingerprint:
            return known
        examined = self.look()._replace(fingerprint=fingerprint)
        if not (examined.removal.is_needed and may_remove) or examined.failure:
            return examined
        try:
            self.remove(examined.removal)
        except KernelError as error:
            return examined._replace(failure=str(error))
        return examined._replace(is_removed=True)

    @abc.abstractmethod
    def fingerprint(self) -> object:
        """A fingerprint that changes with what is in the place; None if the kernel shows none."""

    @abc.abstractmethod
    def look(self) -> Examined:
        """Find what is left there.

        Raises:
            KernelError: it could not be read just now.
        """

    @abc.abstractmethod
    def remove(self, removal: Removal) -> None:
        """Remove what was found.

        Raises:
            KernelError: some of it stays.
        """


class _RulesLeft(Remains):
    """Rules in a variant of iptables."""

    def __init__(self, rules: LeftoverRules, place: RulesPlace) -> None:
        self._rules, self._place = rules, place
        self._scope = leftovers.scope(skeleton.CHAINS, skeleton.JUMPS, is_used=place.is_used)

    def fingerprint(self) -> object:
        return self._rules.fingerprint(self._place)

    def look(self) -> Examined:
        observed = self._rules.read(self._place, self._scope.concerns)
        removal, hidden = leftovers.removal(observed, self._scope), observed.hidden & leftovers.TABLES
        return Examined(None, removal, failure=removal.held_back, hidden=iptables.describe_hidden(hidden) if hidden else "")

    def remove(self, removal: Removal) -> None:
        self._rules.remove(self._place, removal)


class _TableLeft(Remains):
    """A table of kube-proxy's nftables mode."""

    def __init__(self, tables: LeftoverTables, place: TablePlace) -> None:
        self._tables, self._place = tables, place

    def fingerprint(self) -> object:
        return self._tables.fingerprint(self._place)

    def look(self) -> Examined:
        table = self._tables.read(self._place)
        why_foreign = leftover_tables.why_foreign(table) if table else ""
        foreign = f"the table {self._place.table} is not kube-proxy's, since {why_foreign}" if why_foreign else ""
        return Examined(None, leftover_tables.removal(table), foreign=foreign)

    def remove(self, removal: Removal) -> None:
        del removal
        self._tables.remove(self._place, lambda found: not leftover_tables.why_foreign(found))


def of_iptables(rules: LeftoverRules, places: Collection[RulesPlace]) -> dict[AnyPlace, Remains]:
    """What may be left in places of iptables."""
    return {place: _RulesLeft(rules, place) for place in places}


def of_nftables(tables: LeftoverTables) -> dict[AnyPlace, Remains]:
    """What may be left in kube-proxy's tables of both families."""
    places = [TablePlace(family, leftover_tables.NAME) for family in Family]
    return {place: _TableLeft(tables, place) for place in places}


def announce(remains: Mapping[AnyPlace, Remains]) -> None:
    """Log the tables of kube-proxy's nftables mode that a start meets. Blocks."""
    for place, left in remains.items():
        if not isinstance(place, TablePlace):
            continue
        with contextlib.suppress(KernelError):  # the examination after the first sync meets with the same error
            if left(may_remove=False).removal.is_needed:
                hint = f"the table {place.table} goes once most virtual servers are in force; until then, packets meet it"
                log.warning(FOUND, rules=str(place), hint=hint)


@dataclasses.dataclass(slots=True)
class _State:
    """The state of a place.

    ``known`` is the last examination with nothing to remove. ``ongoing`` are the log events that are not over: empty if no rules
    are left; ``reason`` is that of the last one. ``due_s`` is the time of the next examination; infinite: after the next audit.
    """

    known: Examined | None = None
    ongoing: set[str] = dataclasses.field(default_factory=set)
    reason: str = ""
    failures: int = 0
    due_s: float = math.inf


class Leftovers:
    """Examines places and removes rules beside the loop, so that a waiting program of iptables delays nothing else."""

    def __init__(
        self,
        remains: Mapping[AnyPlace, Remains],
        clock: Callable[[], float],
        in_thread: Callable[..., Awaitable[Examined]] = asyncio.to_thread,
    ) -> None:
        """``in_thread`` examines a place in another thread."""
        self._clock = clock
        self._in_thread = in_thread
        self._wake = asyncio.Event()
        self._in_force: frozenset[Family] = frozenset()
        self._remains = remains
        self._states = {place: _State() for place in remains}
        self._returns = leftovers.Returns()

    @property
    def present(self) -> Mapping[AnyPlace, bool]:
        """For each place, whether rules resist removal there, or may do so because they cannot be read."""
        return {place: bool(state.ongoing) for place, state in self._states.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each place whose rules resist removal, or may do so because they cannot be read."""
        return tuple(f"leftover rules stay ({place}): {state.reason}" for place, state in self._states.items() if state.ongoing)

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        before, self._in_force = self._in_force, frozenset(Family) - summary.not_in_force
        self._make_due(self._in_force if summary.is_audit else self._in_force - before)

    def _make_due(self, families: Collection[Family]) -> None:
        for place, state in self._states.items():
            if place.family in families and state.due_s == math.inf:
                state.due_s = -math.inf
        if families:
            self._wake.set()

    async def run(self) -> None:
        """Examine for ever."""
        while True:
            await self._pause()
            await self._examine_where_due()

    async def _pause(self) -> None:
        due_s = min((state.due_s for place, state in self._states.items() if place.family in self._in_force), default=math.inf)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due_s == math.inf else max(0.0, due_s - self._clock())):
                await self._wake.wait()
        self._wake.clear()

    async def _examine_where_due(self) -> None:
        for place, state in self._states.items():
            now = self._clock()
            if place.family not in self._in_force or state.due_s > now:
                continue
            state.due_s = math.inf
            may_remove = self._returns.due_s(place) <= now
            try:
                examined = await self._in_thread(self._remains[place], state.known, may_remove=may_remove)
            except (KernelError, OSError) as error:
                self._fail(place, state, str(error))
            else:
                self._take_in(place, state, examined)

    def _fail(self, place: AnyPlace, state: _State, error: str) -> None:
        state.failures += 1
        state.due_s = self._clock() + retry.delay_s(state.failures)
        self._log_once(place, state, RESISTS, error=error, hint="it is tried again; packets meet these rules meanwhile")

    def _take_in(self, place: AnyPlace, state: _State, examined: Examined) -> None:
        if examined.failure:
            self._fail(place, state, examined.failure)
            return
        now, removal = self._clock(), examined.removal
        comes_back = self._returns.comes_back(place, now)
        state.failures = 0
        state.known = None if removal.is_needed else examined
        if examined.is_removed:
            self._returns.remove(place, now)
            if not comes_back:
                log.info(REMOVED, rules=str(place), jumps=len(removal.references), chains=len(removal.deleted))
        elif removal.is_needed:
            state.due_s = self._returns.due_s(place)
        if comes_back and (removal.is_needed or COMES_BACK in state.ongoing):
            hint = "stop the kube-proxy that writes them: only then they are gone for good"
            self._log_once(place, state, COMES_BACK, hint=hint)
        elif examined.hidden:
            self._log_once(place, state, RESISTS, error=examined.hidden, hint="what iptables cannot show is not removed")
        elif examined.foreign:
            hint = "it is left alone; if no program needs it, remove it: it may decide about packets of Services"
            self._log_once(place, state, RESISTS, error=examined.foreign, hint=hint)
        else:
            if state.ongoing:
                log.info(GONE, rules=str(place))
            state.ongoing.clear()

    def _log_once(self, place: AnyPlace, state: _State, event: str, **keys: str) -> None:
        """Log an event, unless it was logged and is not over."""
        if event not in state.ongoing:
            log.warning(event, rules=str(place), **keys)
        state.ongoing.add(event)
        state.reason = keys.get("error", "a kube-proxy writes them again and again")


SETS_SHOWN = 3
USED_SETS_PATIENCE = 5
"""So many removals may meet sets in use without a word: the rules that use them go at the same time."""


class OtherBackend:
    """Removes what the other backend of the rules holds of ours, once the rules and sets of all served families are in force.

    It looks again after each audit: another program may bring back what was removed, as by loading a saved ruleset.
    """

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._is_in_force = False
        self._is_done = False
        self._failures = 0
        """The failures of the present removal in a row."""
        self._reason = ""
        """Why the present removal fails, once that is told; empty if it does not."""

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        self._is_in_force = not summary.not_in_force
        if summary.is_audit:
            self._is_done = False
        if self._is_in_force and not self._is_done and not self._failures:
            self._wake.set()

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence that says why something stays; empty while nothing resists removal."""
        return (f"what the other backend holds of ours stays: {self._reason}",) if self._reason else ()

    async def run(self, remove: Callable[[], Awaitable[Collection[str]]]) -> None:
        """Remove until nothing is left. ``remove`` returns the sets that rules still use.

        A failed removal is repeated with growing pauses.
        """
        while True:
            await self._pause()
            if not self._is_in_force:
                continue
            try:
                used = await remove()
            except (KernelError, OSError) as error:
                self._fail(str(error), patience=1)
                continue
            self._is_done = not used
            if used:
                self._fail(f"a rule still uses {_listed(used)}", patience=USED_SETS_PATIENCE)
            else:
                self._failures = 0
                self._reason = ""

    async def _pause(self) -> None:
        """Wait for a sync after which something may be left or, after a failure, until the next attempt is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(retry.delay_s(self._failures) if self._failures else None):
                await self._wake.wait()
        self._wake.clear()

    def _fail(self, reason: str, patience: int) -> None:
        """A removal has failed. That is told once so many have failed in a row."""
        self._wake.clear()  # a sync during the removal does not shorten the pause
        self._failures += 1
        if self._failures >= patience:
            if not self._reason:
                log.warning("other_backend_not_removed", error=reason, hint="it is tried again; packets meet its rules")
            self._reason = reason


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(list(names)[:SETS_SHOWN])
    return f"{shown} and {len(names) - SETS_SHOWN} other sets" if len(names) > SETS_SHOWN else shown
