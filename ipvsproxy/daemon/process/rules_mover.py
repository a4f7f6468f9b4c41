"""Moves rules and sets to another backend after a reload, once nothing that may hang stands in the way.

Rule 1: rules move while neither leftovers nor the other backend are examined or removed: both work on what a move exchanges.
Rule 2: an examination may wait for a program of iptables. Until it ends, the new configuration waits as a whole, beside the loop,
which goes on programming changes of Services by the backend in use.
Rule 3: while a move waits or runs, the latest configuration waits for its end. But one of the backend in use is in force at once
before a move has begun, whose place it takes, and once rules have moved, while programs of iptables are asked where leftovers may
be: they may hang. What the former backend holds can go meanwhile.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import structlog

from ipvsproxy.daemon.loop import leftovers
from ipvsproxy.daemon.loop.engine import Engine
from ipvsproxy.daemon.loop.leftovers import AnyPlace, Examine, Leftovers
from ipvsproxy.daemon.loop.other_backend import OtherBackend
from ipvsproxy.daemon.loop.rules_follower import RulesFollower
from ipvsproxy.daemon.wiring import Choices
from ipvsproxy.kernel.iptables.driver import Program
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.reconcile.operations import retry

TOLD_AFTER_S = 5.0
"""A move that waits for longer is logged, and so is one whose end does."""
WAITS_FOR_LEFTOVERS = "an examination or removal of leftover rules has not ended; until then, the one in use serves all changes"
SEARCH_WAITS = "rules have moved, but the programs of iptables do not say where leftovers may be; until then, no others move"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class _Asked(NamedTuple):
    """A configuration, the programs that write its rules, and what is called once the loop has it."""

    choices: Choices
    programs: Mapping[Family, Program]
    on_adopted: Callable[[], object]


class RulesMover:
    """Has the loop use another configuration, and move rules and sets if it names another backend."""

    def __init__(
        self,
        kernel: KernelThread[NodeKernel],
        engine: Engine,
        follower: RulesFollower,
        left: Leftovers,
        other_backend: OtherBackend,
        *,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        """``in_thread`` calls a function that may wait for a program in another thread."""
        self._kernel = kernel
        self._engine = engine
        self._follower = follower
        self._leftovers = left
        self._other_backend = other_backend
        self._in_thread = in_thread
        self._waiting: _Asked | None = None
        self._has_begun = False
        self._has_moved = False
        """Whether rules have moved, and nothing but the places of leftovers is missing."""
        self._telling: asyncio.TimerHandle | None = None
        self._is_asked = asyncio.Event()
        self._is_at_rest = asyncio.Event()
        self._is_at_rest.set()

    def reconfigure(self, choices: Choices, programs: Mapping[Family, Program], on_adopted: Callable[[], object]) -> None:
        """Use another configuration: from the next sync on, or once its backend can hold the rules, which must be prepared.

        ``programs`` write the rules then. ``on_adopted`` is called once the loop has the configuration, which may be at once; it
        is not called if a later one takes its place before.
        """
        if (self._has_moved or not self._has_begun) and not self._moves(choices):
            self._waiting = None
            if not self._has_begun:
                self._rest()
            self._engine.reconfigure(*choices)
            on_adopted()
            return
        self._waiting = _Asked(choices, programs, on_adopted)
        if self._is_at_rest.is_set():
            self._is_at_rest.clear()
            self._tell_later(WAITS_FOR_LEFTOVERS)
        self._is_asked.set()

    @property
    def waits(self) -> bool:
        """Whether rules wait to move, and no move has begun: a configuration of the backend in use can take its place."""
        return not self._is_at_rest.is_set() and not self._has_begun

    @property
    def why_busy(self) -> str:
        """What nothing else can be prepared before, while a move waits or runs."""
        if self._has_moved:
            in_use = self._engine.translation.backend
            return f"rules have moved to {in_use}, but the programs of iptables do not say where leftovers may be"
        return (
            f"rules still wait to move to {self._waiting.choices.translation.backend}" if self._waiting else "rules move just now"
        )

    async def at_rest(self) -> None:
        """Wait until no move waits or runs: until then, the backend that it needs must stay prepared."""
        await self._is_at_rest.wait()

    async def run(self) -> None:
        """Move rules for ever, whenever a configuration asks for it."""
        try:
            while True:
                await self._is_asked.wait()
                async with self._leftovers.at_rest():
                    while self._waiting is not None:
                        await self._take_waiting()
                    self._has_begun = False
                self._is_asked.clear()
                self._rest()
        finally:
            self._stop_telling()

    async def _take_waiting(self) -> None:
        """Have the loop use the waiting configuration. No leftover is examined meanwhile."""
        async with self._other_backend.at_rest():
            if self._waiting is None:  # a later one has taken its place, and is in force
                return
            self._has_begun = True
            asked, self._waiting = self._waiting, None
            moves = self._moves(asked.choices)
            if moves:
                await self._move(asked)
            else:
                self._engine.reconfigure(*asked.choices)
                asked.on_adopted()
        if moves:
            await self._search(asked.programs)

    def _rest(self) -> None:
        self._stop_telling()
        self._is_at_rest.set()

    def _tell_later(self, hint: str) -> None:
        """Log that configurations wait, if they still do after a while."""
        self._stop_telling()
        loop = asyncio.get_running_loop()
        self._telling = loop.call_later(TOLD_AFTER_S, lambda: log.warning("rules_move_waits", hint=hint))

    def _stop_telling(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    def _moves(self, choices: Choices) -> bool:
        return choices.translation.backend is not self._engine.translation.backend

    async def _move(self, asked: _Asked) -> None:
        """Let the prepared backend hold rules and sets. What the former one holds goes once they are in force."""
        self._engine.reconfigure(*asked.choices, move_rules=self._use_prepared_backend)
        await self._engine.moved()
        log.info("rules_moved", backend=asked.choices.translation.backend.value)
        asked.on_adopted()

    async def _search(self, programs: Mapping[Family, Program]) -> None:
        """Find the places of leftovers. Until then, none is examined."""
        self._has_moved = True
        self._tell_later(SEARCH_WAITS)
        self._leftovers.watch(await self._examinations(programs))
        self._has_moved = False

    async def _use_prepared_backend(self) -> None:
        self._leftovers.begin_again()
        self._other_backend.begin_again()
        self._follower.follow(None)
        await self._kernel.call(lambda node: node.use_prepared_backend())
        self._follower.follow(await self._kernel.call(lambda node: node.rules_changes))

    async def _examinations(self, programs: Mapping[Family, Program]) -> Mapping[AnyPlace, Examine]:
        """The examinations of all places where the backend in use may meet leftovers."""
        rules = await self._kernel.call(lambda node: node.leftover_rules)
        tables = await self._kernel.call(lambda node: node.leftover_tables)
        for failures in itertools.count(1):
            with contextlib.suppress(OSError):  # no thread can be started just now
                places = await self._in_thread(rules.places, programs)
                break
            await asyncio.sleep(retry.delay_s(failures))
        return leftovers.of_iptables(rules, places) | leftovers.of_nftables(tables)
