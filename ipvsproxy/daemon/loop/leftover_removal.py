"""Removes rules that another proxy or an earlier process of ipvsproxy has left behind.

The removal begins when the new rules have been programmed.

Leftover rules are in a variant of iptables, in a table of kube-proxy's nftables mode, or in the backend that this process does
not use.

Rule 1: the module examines an IP family when the rules and sets of the family have been programmed, and after each audit. An
external program is run only if a rule has changed since the last examination. A family is not examined while the old rules still
serve its traffic. This is the case while the kernel lacks most of the family's virtual servers, or a set entry that the family's
rules need.
Rule 2: a failed examination or removal is repeated after growing pauses. Rules that cannot be read count as present.
Rule 3: rules that a running proxy keeps writing again are removed less and less often (see ``reconcile/removal/leftovers.py``).
Rule 4: one log line says that the rules in a place cannot be removed, and another log line says later that no leftover rules
remain in the place.
Rule 5: the rules and sets of the other backend are removed last, and for all IP families at once, because rules of iptables use
these sets. The function that cleans the other backend also logs these removals.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import comes_within
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables.leftover_rules import LeftoverRules, RulesPlace
from ipvsproxy.kernel.nftables.nft_tables import LeftoverTables, TablePlace
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Removal
from ipvsproxy.reconcile.attempts import delay_s
from ipvsproxy.reconcile.removal import leftovers
from ipvsproxy.translate import skeleton

REMOVED, GONE = "leftover_rules_removed", "leftover_rules_gone"
RESISTS, COMES_BACK = "leftover_rules_not_removed", "leftover_rules_come_back"
FOUND = "leftover_table_found"
OTHER_BACKEND_RESISTS = "other_backend_not_removed"
USED_SETS_PATIENCE = 5
"""A removal that fails because a set is in use is logged only after this number of consecutive failures. By then, the rules that
use the set have usually been removed."""

AnyPlace = RulesPlace | TablePlace


class Examined(NamedTuple):
    """The result of examining a place, with the fingerprint of the place's rules before the examination.

    ``failure`` says why leftovers were not removed although the removal was allowed. ``hidden`` names the tables that cannot be
    listed. ``foreign`` names a table that has the name of a leftover table but belongs to another program, and gives the
    evidence.
    """

    fingerprint: object
    removal: Removal
    is_removed: bool = False
    failure: str = ""
    hidden: str = ""
    foreign: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Remains:
    """The rules that another proxy may have left in one place, and the functions that find and remove these rules.

    All calls block the calling thread. ``fingerprint`` changes when the content of the place changes. A fingerprint of None means
    that the place is examined each time. ``look`` and ``remove`` may raise KernelError.
    """

    fingerprint: Callable[[], object]
    look: Callable[[], Examined]
    remove: Callable[[Removal], None]

    def __call__(self, known: Examined | None = None, *, may_remove: bool) -> Examined:
        """Examine the place and, if ``may_remove`` is true, remove its leftovers.

        Returns ``known`` if the place has not changed since the examination ``known``.

        Raises:
            KernelError: the kernel could not be read at the moment.
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


def of_iptables(rules: LeftoverRules, places: Collection[RulesPlace]) -> dict[RulesPlace, Remains]:
    """For each of the given places of iptables: the leftover rules that may exist there."""

    def look(place: RulesPlace) -> Examined:
        scope = leftovers.scope(skeleton.CHAINS, skeleton.JUMPS, is_used=place.is_used)
        observed = rules.read(place, scope.concerns)
        removal, hidden = leftovers.removal(observed, scope), observed.hidden & leftovers.TABLES
        return Examined(None, removal, failure=removal.held_back, hidden=iptables.describe_hidden(hidden) if hidden else "")

    return {
        place: Remains(partial(rules.fingerprint, place), partial(look, place), partial(rules.remove, place)) for place in places
    }


def of_nftables(tables: LeftoverTables) -> dict[TablePlace, Remains]:
    """The leftover rules that may exist in kube-proxy's nftables tables of both IP families."""

    def look(place: TablePlace) -> Examined:
        table = tables.read(place)
        why_foreign = leftovers.why_foreign(table) if table else ""
        foreign = f"the table {place.table} is not kube-proxy's, since {why_foreign}" if why_foreign else ""
        return Examined(None, leftovers.removal_of_table(table), foreign=foreign)

    def remove(place: TablePlace, _removal: Removal) -> None:
        tables.remove(place, lambda found: not leftovers.why_foreign(found))

    places = [TablePlace(family, leftovers.TABLE_NAME) for family in Family]
    return {place: Remains(lambda: None, partial(look, place), partial(remove, place)) for place in places}


def announce(remains: Mapping[TablePlace, Remains]) -> None:
    """Log the tables of kube-proxy's nftables mode that exist at the start. Blocks."""
    for place, left in remains.items():
        with contextlib.suppress(KernelError):  # if the error persists, the examination after the first sync logs the error
            if left(may_remove=False).removal.is_needed:
                hint = f"the table {place.table} goes once most virtual servers are in force; until then, packets meet it"
                log.warning(FOUND, rules=str(place), hint=hint)


@dataclasses.dataclass(slots=True)
class _State:
    """The state of one place that may have leftover rules.

    ``known`` is the last examination that found nothing to remove. ``ongoing`` has the log events that still apply, and is empty
    if no leftover rules remain. ``reason`` is the reason in the last log event. ``due_s`` is the time of the next examination;
    infinity means that the next examination follows the next audit.
    """

    known: Examined | None = None
    ongoing: set[str] = dataclasses.field(default_factory=set)
    reason: str = ""
    failures: int = 0
    due_s: float = math.inf


@dataclasses.dataclass(eq=False)
class Leftovers:
    """Examines the places that may have leftover rules, and removes these rules, in parallel to the event loop.

    While an iptables program runs, the event loop continues with other work. ``in_thread`` is a function that examines a place in
    another thread.

    ``remove_other_backend`` removes the objects of ipvsproxy from the other backend, and returns the sets that rules still use.
    ``remove_other_backend`` may raise KernelError and OSError.
    """

    remains: Mapping[AnyPlace, Remains]
    remove_other_backend: Callable[[], Awaitable[Collection[str]]]
    clock: Callable[[], float] = time.monotonic
    in_thread: Callable[..., Awaitable[Examined]] = asyncio.to_thread

    def __post_init__(self) -> None:
        self._wake = asyncio.Event()
        self._in_force: frozenset[Family] = frozenset()
        self._states: dict[AnyPlace | None, _State] = {place: _State() for place in (*self.remains, None)}
        """The state of each place; the place None is the other backend."""
        self._returns = leftovers.Returns()

    @property
    def present(self) -> Mapping[AnyPlace, bool]:
        """Maps each place to True if the place has leftover rules, or if its rules cannot be read."""
        return {place: bool(state.ongoing) for place, state in self._states.items() if place}

    @property
    def other_backend_resists(self) -> bool:
        """Whether an object of ipvsproxy in the other backend could not be removed."""
        return bool(self._states[None].ongoing)

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for each place where leftover rules remain, or may remain because the rules cannot be read."""
        return tuple(
            f"{f'leftover rules stay ({place})' if place else 'our objects in the other backend stay'}: {state.reason}"
            for place, _, state in self._all()
            if state.ongoing
        )

    def synced(self, summary: SyncSummary) -> None:
        """Called when a sync has ended."""
        before, self._in_force = self._in_force, frozenset(Family) - summary.not_in_force
        for _, families, state in self._all():
            if families <= self._in_force and (summary.is_audit or not families <= before):
                state.due_s = -math.inf if state.due_s == math.inf else state.due_s
                self._wake.set()

    def _all(self) -> Iterator[tuple[AnyPlace | None, frozenset[Family], _State]]:
        """Each place with its state and with the IP families that must be programmed before the place is examined."""
        for place, state in self._states.items():
            yield place, frozenset({place.family} if place else Family), state

    async def run(self) -> None:
        """Examine each place whenever its examination is due, until this task is cancelled."""
        while True:
            await self._pause()
            await self._examine_where_due()

    async def _pause(self) -> None:
        due_s = min((state.due_s for _, families, state in self._all() if families <= self._in_force), default=math.inf)
        await comes_within(None if due_s == math.inf else max(0.0, due_s - self.clock()), self._wake.wait())
        self._wake.clear()

    async def _examine_where_due(self) -> None:
        for place, families, state in self._all():
            now = self.clock()
            if not families <= self._in_force or state.due_s > now:
                continue
            state.due_s = math.inf
            try:
                if place is None:
                    self._take_in_used(state, await self.remove_other_backend())
                else:
                    may_remove = self._returns.due_s(place) <= now
                    examined = await self.in_thread(self.remains[place], state.known, may_remove=may_remove)
                    self._take_in(place, state, examined)
            except (KernelError, OSError) as error:
                self._fail(place, state, str(error))

    def _fail(self, place: AnyPlace | None, state: _State, error: str, patience: int = 1) -> None:
        """Called when an examination or removal has failed. The failure is logged after ``patience`` failures in a row."""
        state.failures += 1
        state.due_s = self.clock() + delay_s(state.failures)
        if state.failures < patience:
            return
        hint = f"another attempt follows; packets meet {'these rules meanwhile' if place else 'its rules'}"
        self._log_once(place, state, RESISTS if place else OTHER_BACKEND_RESISTS, error=error, hint=hint)

    def _take_in_used(self, state: _State, used: Collection[str]) -> None:
        """Record a failure if rules still use sets of the other backend; otherwise, forget earlier failures."""
        if used:
            self._fail(None, state, f"a rule still uses {', '.join(used)}", USED_SETS_PATIENCE)
        else:
            state.failures = 0
            state.ongoing.clear()

    def _take_in(self, place: AnyPlace, state: _State, examined: Examined) -> None:
        if examined.failure:
            self._fail(place, state, examined.failure)
            return
        now, removal = self.clock(), examined.removal
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
            hint = "stop the kube-proxy that writes them: only then are they gone for good"
            self._log_once(place, state, COMES_BACK, hint=hint)
        elif examined.hidden:
            self._log_once(place, state, RESISTS, error=examined.hidden, hint="rules that iptables cannot show are not removed")
        elif examined.foreign:
            hint = "it is left alone; if no program needs it, remove it: it may decide about packets of Services"
            self._log_once(place, state, RESISTS, error=examined.foreign, hint=hint)
        else:
            if state.ongoing:
                log.info(GONE, rules=str(place))
            state.ongoing.clear()

    def _log_once(self, place: AnyPlace | None, state: _State, event: str, **keys: str) -> None:
        """Log an event, unless the same event has already been logged and still applies."""
        if event not in state.ongoing:
            log.warning(event, **({"rules": str(place)} if place else {}), **keys)
        state.ongoing.add(event)
        state.reason = keys.get("error", "a kube-proxy writes them again and again")
