"""Removes rules that another proxy, or a former process of ours, has left behind, once ours are in force.

Rule 1: a family is examined when its rules come into force, and after each audit; a program is started only where somebody has
changed a rule since.
Rule 2: what failed is tried again with growing pauses. What could not be read counts as being there.
Rule 3: what somebody who runs writes again and again is removed ever more seldom (see ``reconcile.leftovers``).
Rule 4: one log line when a place begins to resist, and one when nothing is left there.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple, Protocol

import structlog

from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.kernel import iptables
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.leftover_rules import Place
from ipvsproxy.model.leftovers import LeftRules, Removal
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey
from ipvsproxy.reconcile import leftovers, retry
from ipvsproxy.translate import skeleton

REMOVED, GONE = "leftover_rules_removed", "leftover_rules_gone"
RESISTS, COMES_BACK = "leftover_rules_not_removed", "leftover_rules_come_back"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Rules(Protocol):
    """What is needed of ``LeftoverRules``."""

    def mark(self, place: Place) -> object:
        """A mark of the rules of a place; None where the kernel does not tell."""

    def read(self, place: Place, concerns: Callable[[ChainKey], bool]) -> LeftRules:
        """The chains that ``concerns`` is true of, and what leads to them."""

    def remove(self, place: Place, removal: Removal) -> None:
        """Remove it."""


class Examined(NamedTuple):
    """What was found in a place, with the mark of the rules before that, and what became of it.

    ``failure`` says why it was not removed although it might be. ``hidden`` says what could not be seen.
    """

    mark: object
    removal: Removal
    is_removed: bool = False
    failure: str = ""
    hidden: str = ""


def examine(rules: Rules, place: Place, known: Examined | None = None, *, may_remove: bool) -> Examined:
    """Look for rules that were left and, with ``may_remove``, remove them; returns ``known`` if no rule has changed since.

    Raises:
        KernelError: they could not be read just now.
    """
    mark = rules.mark(place)
    if known is not None and known.mark is not None and mark == known.mark:
        return known
    wanted = leftovers.scope(skeleton.CHAINS, skeleton.JUMPS, is_used=place.is_used)
    found = rules.read(place, wanted.concerns)
    removal = leftovers.removal(found, wanted)
    hidden = found.hidden & leftovers.TABLES
    seen = Examined(mark, removal, failure=removal.held_back, hidden=iptables.describe_hidden(hidden) if hidden else "")
    if not (removal.is_needed and may_remove) or removal.held_back:
        return seen
    try:
        rules.remove(place, removal)
    except KernelError as error:
        return seen._replace(failure=str(error))
    return seen._replace(is_removed=True)


@dataclasses.dataclass(slots=True)
class _State:
    """What is known of a place.

    ``known`` is the last examination that left nothing to remove. ``told`` are the events that say why something is left, or may
    be, empty where nothing is. ``due_s`` is when the place is to be examined; infinite: after the next audit.
    """

    known: Examined | None = None
    told: set[str] = dataclasses.field(default_factory=set)
    failures: int = 0
    due_s: float = math.inf


class Leftovers:
    """Examines and removes, beside the loop: a program of iptables that waits or hangs holds up nothing else."""

    def __init__(
        self,
        rules: Rules,
        places: Collection[Place],
        clock: Callable[[], float],
        in_thread: Callable[..., Awaitable[Examined]] = asyncio.to_thread,
    ) -> None:
        """``in_thread`` calls ``examine`` where it holds up nothing."""
        self._rules = rules
        self._clock = clock
        self._in_thread = in_thread
        self._states = {place: _State() for place in places}
        self._in_force: frozenset[Family] = frozenset()
        self._returns = leftovers.Returns()
        self._wake = asyncio.Event()

    @property
    def present(self) -> Mapping[Place, bool]:
        """Whether rules are left in a place that resist, or may be because they cannot be read."""
        return {place: bool(state.told) for place, state in self._states.items()}

    def synced(self, summary: SyncSummary) -> None:
        """A sync is over."""
        before, self._in_force = self._in_force, frozenset(place.family for place in self._states) - frozenset(summary.lacking)
        due = self._in_force if summary.is_audit else self._in_force - before
        for place, state in self._states.items():
            if place.family in due and state.due_s == math.inf:
                state.due_s = -math.inf
        if due:
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
            if place.family in self._in_force and state.due_s <= now:
                state.due_s = math.inf
                may_remove = self._returns.due_s(place) <= now
                try:
                    seen = await self._in_thread(examine, self._rules, place, state.known, may_remove=may_remove)
                except KernelError as error:
                    self._fail(place, state, str(error))
                else:
                    self._take_in(place, state, seen)

    def _fail(self, place: Place, state: _State, error: str) -> None:
        state.failures += 1
        state.due_s = self._clock() + retry.delay_s(state.failures)
        self._tell(place, state, RESISTS, error=error, hint="it is tried again; packets meet these rules meanwhile")

    def _take_in(self, place: Place, state: _State, seen: Examined) -> None:
        if seen.failure:
            self._fail(place, state, seen.failure)
            return
        now, removal = self._clock(), seen.removal
        comes_back = self._returns.comes_back(place, now)
        state.failures = 0
        state.known = None if removal.is_needed else seen
        if seen.is_removed:
            self._returns.remove(place, now)
            if not comes_back:
                log.info(REMOVED, rules=str(place), jumps=len(removal.ways), chains=len(removal.deleted))
        elif removal.is_needed:
            state.due_s = self._returns.due_s(place)
        if comes_back and (removal.is_needed or COMES_BACK in state.told):
            self._tell(place, state, COMES_BACK, hint="stop the kube-proxy that writes them: only then they are gone for good")
        elif seen.hidden:
            self._tell(place, state, RESISTS, error=seen.hidden, hint="what iptables cannot show is not removed")
        else:
            if state.told:
                log.info(GONE, rules=str(place))
            state.told.clear()

    def _tell(self, place: Place, state: _State, event: str, **keys: str) -> None:
        """Say it, unless it was said and has not ended."""
        if event not in state.told:
            log.warning(event, rules=str(place), **keys)
        state.told.add(event)
