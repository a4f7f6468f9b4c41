"""Covers a move of rules and sets to another backend beside the loop: what it waits for, and what goes on meanwhile.

Kernel, programs and time are pretended. ``test_reconfigure`` covers the move itself, ``tests/daemon/test_app.py`` a whole reload.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, MutableMapping
from typing import Any

import structlog

from ipvsproxy.daemon.loop import leftovers
from ipvsproxy.daemon.loop.leftovers import Leftovers
from ipvsproxy.daemon.loop.other_backend import OtherBackend
from ipvsproxy.daemon.loop.rules_follower import RulesFollower
from ipvsproxy.daemon.loop.summary import SyncSummary
from ipvsproxy.daemon.process.rules_mover import TOLD_AFTER_S, RulesMover
from ipvsproxy.daemon.wiring import Choices
from ipvsproxy.kernel.iptables.driver import Program
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.reconcile.reconciler import Policy
from tests.daemon.process.test_reconfigure import SERVICES, SLICES, settings
from tests.support import builders, memory_node
from tests.support.fake_kernel import FakeKernel
from tests.support.left_rules import LEFT, PLACES, USED, Tables
from tests.support.left_tables import MemoryTables
from tests.support.memory_node import MemoryNode
from tests.support.virtual_time import in_virtual_time

PROGRAMS = dict.fromkeys(Family, Program((6, 1), "nftables"))
HANG_S = 60.0
"""The time after which a program of iptables is killed."""
LATE = builders.service("late", cluster=["10.96.0.9"])


class Kernel(FakeKernel):
    """A kernel whose rules and sets are in one of two places, which ``use_prepared_backend`` exchanges."""

    def __init__(self) -> None:
        super().__init__()
        plain = memory_node.new_kernel()
        self.host_addresses, self.sysctls = plain.host_addresses, plain.sysctls
        self.backend = Backend.IPTABLES
        self.rules_changes = None
        self.leftover_rules, self.leftover_tables = Tables(), MemoryTables()
        self.removed_beside: list[Backend] = []
        self._other: tuple[Any, Any, Any] = ({}, {family: {} for family in Family}, {family: set() for family in Family})

    def use_prepared_backend(self) -> None:
        shown = (self.sets, self.chains, self.jumps)
        self.sets, self.chains, self.jumps = self._other
        self._other = shown
        self.backend = Backend.NFTABLES if self.backend is Backend.IPTABLES else Backend.IPTABLES

    def remove_other_backend(self) -> Collection[str]:
        assert all(self.chains.values()), "only once the rules are in force"
        if self.removed_beside[-1:] != [self.backend]:  # each audit has it called again
            self.removed_beside.append(self.backend)
        return ()


class Watcher(memory_node.Watcher):
    """The notifications of the loop, passed on as the program does."""

    def __init__(self) -> None:
        super().__init__()
        self.passed_on: list[Callable[[SyncSummary], None]] = []

    def synced(self, summary: SyncSummary) -> None:
        super().synced(summary)
        for pass_on in self.passed_on:
            pass_on(summary)


class Scene:
    """A running node with all that a move touches. ``may_end`` lets the programs of iptables end.

    ``adopted`` are the configurations of which the mover has told that they are in force.
    """

    def __init__(self, logs: list[MutableMapping[str, Any]]) -> None:
        self.kernel, self.watcher, self.logs = Kernel(), Watcher(), logs
        self.node = MemoryNode(self.kernel, watcher=self.watcher)
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.adopted: list[tuple[Backend, str]] = []
        self.examinations = 0
        self.failing_threads = 0
        rules = leftovers.of_iptables(self.kernel.leftover_rules, PLACES)
        self.left = Leftovers(rules, asyncio.get_running_loop().time, self._in_thread)
        self.other_backend = OtherBackend()
        self.watcher.passed_on += [self.left.synced, self.other_backend.synced]
        thread: Any = KernelThread(self.node.worker, self.kernel)
        self.thread = thread
        follower = RulesFollower(self.node.engine)
        self.mover = RulesMover(thread, self.node.engine, follower, self.left, self.other_backend, in_thread=self._in_thread)

    async def _in_thread(self, job: Callable[..., Any], *arguments: object, **options: bool) -> Any:
        if self.failing_threads:
            self.failing_threads -= 1
            raise OSError("no thread can be started")
        self.examinations += 1
        await self.may_end.wait()
        return job(*arguments, **options)

    def reload(self, backend: Backend, scheduler: str = "rr") -> None:
        translation = dataclasses.replace(self.node.settings, backend=backend, scheduler=scheduler)
        adopt = functools.partial(self.adopted.append, (backend, scheduler))
        self.mover.reconfigure(Choices(settings(), translation, Policy()), PROGRAMS, adopt)

    async def examine_for_long(self) -> None:
        """Let an examination of leftovers begin that does not end before ``may_end`` is set."""
        self.may_end.clear()
        self.kernel.leftover_rules.put(USED, LEFT)
        before = self.examinations
        await self.node.quiet(after_s=memory_node.AUDIT_INTERVAL_S)
        assert self.examinations > before

    def in_use(self) -> Backend:
        return self.kernel.backend

    @property
    def schedulers(self) -> set[str]:
        return {server.settings.scheduler for server in self.kernel.virtual_servers.values()}

    def logged(self, *events: str) -> list[str]:
        return [line["event"] for line in self.logs if line["event"] in events]


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """A node on which all is in force, and no leftover is left."""
    with structlog.testing.capture_logs() as logs:
        one = Scene(logs)
        removing = one.other_backend.run(lambda: one.thread.call(lambda node: node.remove_other_backend()))
        tasks = [asyncio.create_task(work) for work in (one.left.run(), removing, one.mover.run())]
        async with one.node.running():
            one.node.begin_with(*SERVICES, *SLICES, builders.node())
            await one.node.quiet()
            assert one.kernel.removed_beside == [Backend.IPTABLES]
            one.kernel.forget()
            yield one
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in ended] == [asyncio.CancelledError] * 3


def desired(one: Scene, backend: Backend, scheduler: str = "rr") -> Mapping[str, object]:
    """What a node from scratch has."""
    chosen = dataclasses.replace(one.node.settings, backend=backend, scheduler=scheduler)
    return dataclasses.asdict(memory_node.from_scratch(one.node.store, chosen, one.kernel))


def observed(one: Scene) -> Mapping[str, object]:
    return dataclasses.asdict(memory_node.contents(one.kernel))


@in_virtual_time
async def test_while_a_program_of_iptables_hangs_a_move_waits_and_service_changes_are_programmed() -> None:
    async with scene() as one:
        await one.examine_for_long()
        one.reload(Backend.NFTABLES, scheduler="wrr")
        one.node.put(LATE)
        await one.node.quiet()
        assert builders.frontend("10.96.0.9", 80) in one.kernel.virtual_servers, "the loop goes on"
        assert one.in_use() is Backend.IPTABLES
        assert observed(one) == desired(one, Backend.IPTABLES), "nothing of the new configuration is in force"
        assert one.adopted == []
        await asyncio.sleep(HANG_S)
        assert one.node.watcher.summaries[-1].report.pending == 0
        one.may_end.set()
        await one.node.quiet()
        assert one.in_use() is Backend.NFTABLES
        assert observed(one) == desired(one, Backend.NFTABLES, "wrr")
        assert one.adopted == [(Backend.NFTABLES, "wrr")]
        assert one.kernel.removed_beside == [Backend.IPTABLES, Backend.NFTABLES]
        assert one.logged("rules_move_waits", "rules_moved") == ["rules_move_waits", "rules_moved"]


@in_virtual_time
async def test_a_move_that_nothing_hinders_takes_place_with_the_next_sync_and_leftovers_are_looked_for_then() -> None:
    async with scene() as one:
        one.kernel.leftover_rules.reads.clear()
        one.reload(Backend.NFTABLES)
        await one.node.quiet()
        assert one.in_use() is Backend.NFTABLES
        await one.mover.at_rest()
        await one.node.quiet(after_s=memory_node.AUDIT_INTERVAL_S)
        assert one.kernel.leftover_rules.reads == list(PLACES)
        assert one.kernel.removed_beside == [Backend.IPTABLES, Backend.NFTABLES]
        assert one.logged("rules_move_waits", "rules_moved") == ["rules_moved"]


@in_virtual_time
async def test_a_configuration_of_the_same_backend_comes_into_force_at_once_though_a_program_hangs() -> None:
    async with scene() as one:
        await one.examine_for_long()
        one.reload(Backend.IPTABLES, scheduler="wrr")
        assert one.adopted == [(Backend.IPTABLES, "wrr")]
        await one.node.quiet()
        assert one.schedulers == {"wrr"}


@in_virtual_time
async def test_of_several_configurations_the_latest_one_waits() -> None:
    async with scene() as one:
        await one.examine_for_long()
        one.reload(Backend.NFTABLES, scheduler="lc")
        await one.node.quiet(after_s=1)
        one.reload(Backend.NFTABLES, scheduler="wrr")
        await one.node.quiet()
        assert one.schedulers == {"rr"}
        one.may_end.set()
        await one.node.quiet()
        assert observed(one) == desired(one, Backend.NFTABLES, "wrr")
        assert one.adopted == [(Backend.NFTABLES, "wrr")]
        assert one.logged("rules_moved") == ["rules_moved"]


@in_virtual_time
async def test_a_configuration_that_takes_a_waiting_move_back_is_in_force_at_once() -> None:
    async with scene() as one:
        await one.examine_for_long()
        one.reload(Backend.NFTABLES)
        await asyncio.sleep(TOLD_AFTER_S / 2)
        waited = [one.mover.waits]
        one.reload(Backend.IPTABLES, scheduler="wrr")
        waited.append(one.mover.waits)
        assert waited == [True, False]
        await one.mover.at_rest()
        assert one.adopted == [(Backend.IPTABLES, "wrr")]
        await one.node.quiet(after_s=2 * TOLD_AFTER_S)
        assert observed(one) == desired(one, Backend.IPTABLES, "wrr")
        one.may_end.set()
        await one.node.quiet()
        assert one.in_use() is Backend.IPTABLES
        assert observed(one) == desired(one, Backend.IPTABLES, "wrr")
        assert not one.logged("rules_move_waits", "rules_moved")


@in_virtual_time
async def test_a_move_that_was_taken_back_can_be_asked_for_again() -> None:
    async with scene() as one:
        await one.examine_for_long()
        for backend in (Backend.NFTABLES, Backend.IPTABLES, Backend.NFTABLES):
            one.reload(backend)
            await one.node.quiet()
        assert one.in_use() is Backend.IPTABLES
        one.may_end.set()
        await one.mover.at_rest()
        assert one.in_use() is Backend.NFTABLES
        assert one.adopted == [(Backend.IPTABLES, "rr"), (Backend.NFTABLES, "rr")]


@in_virtual_time
async def test_a_waiting_move_is_waited_for_and_one_that_runs_as_well() -> None:
    async with scene() as one:
        await one.mover.at_rest()
        await one.examine_for_long()
        one.reload(Backend.NFTABLES)
        waiting = asyncio.create_task(one.mover.at_rest())
        await asyncio.sleep(HANG_S)
        assert not waiting.done(), "what it needs must stay prepared"
        one.may_end.set()
        await waiting
        assert one.in_use() is Backend.NFTABLES


@in_virtual_time
async def test_once_rules_have_moved_a_configuration_is_in_force_at_once_and_the_former_ones_go_though_a_program_hangs() -> None:
    async with scene() as one:
        one.may_end.clear()
        one.reload(Backend.NFTABLES)
        await one.node.quiet()
        assert one.in_use() is Backend.NFTABLES, "only the places of leftovers are not known yet"
        assert one.mover.why_busy.startswith("rules have moved to nftables, but the programs of iptables")
        one.node.put(LATE)
        one.reload(Backend.NFTABLES, scheduler="wrr")
        await one.node.quiet(after_s=HANG_S)
        assert builders.frontend("10.96.0.9", 80) in one.kernel.virtual_servers
        assert one.schedulers == {"wrr"}
        assert one.adopted == [(Backend.NFTABLES, "rr"), (Backend.NFTABLES, "wrr")]
        assert one.kernel.removed_beside == [Backend.IPTABLES, Backend.NFTABLES], "before its end as well"
        rested = asyncio.create_task(one.mover.at_rest())
        await asyncio.sleep(1)
        assert not rested.done(), "what holds rules now must stay as it is prepared"
        one.may_end.set()
        await rested
        assert observed(one) == desired(one, Backend.NFTABLES, "wrr")
        assert one.logged("rules_moved") == ["rules_moved"]


@in_virtual_time
async def test_a_move_that_is_asked_for_while_a_program_hangs_after_another_one_waits_or_is_taken_back() -> None:
    async with scene() as one:
        one.may_end.clear()
        for backend in (Backend.NFTABLES, Backend.IPTABLES, Backend.NFTABLES, Backend.IPTABLES):
            one.reload(backend)
            await one.node.quiet(after_s=1)
            assert one.in_use() is Backend.NFTABLES
        assert one.adopted == [(Backend.NFTABLES, "rr")] * 2
        one.may_end.set()
        await one.mover.at_rest()
        assert one.in_use() is Backend.IPTABLES
        assert one.adopted == [*[(Backend.NFTABLES, "rr")] * 2, (Backend.IPTABLES, "rr")]


@in_virtual_time
async def test_a_program_that_hangs_after_the_move_is_told_and_leftovers_are_looked_for_once_it_ends() -> None:
    async with scene() as one:
        one.kernel.leftover_rules.reads.clear()
        one.may_end.clear()
        one.reload(Backend.NFTABLES)
        await one.node.quiet(after_s=2 * TOLD_AFTER_S)
        assert one.in_use() is Backend.NFTABLES
        assert one.logged("rules_move_waits", "rules_moved") == ["rules_moved", "rules_move_waits"]
        one.may_end.set()
        await one.mover.at_rest()
        await asyncio.sleep(1)
        assert one.kernel.leftover_rules.reads == list(PLACES), "before another audit"


@in_virtual_time
async def test_a_stop_while_a_move_waits_ends_all_and_leaves_the_former_backend_in_use() -> None:
    async with scene() as one:
        await one.examine_for_long()
        one.reload(Backend.NFTABLES)
        await one.node.quiet(after_s=2 * TOLD_AFTER_S)
        assert one.logged("rules_move_waits") == ["rules_move_waits"]
        assert one.mover.why_busy == "rules still wait to move to nftables"
    assert one.in_use() is Backend.IPTABLES


@in_virtual_time
async def test_where_no_thread_can_be_started_leftovers_are_looked_for_later() -> None:
    async with scene() as one:
        one.failing_threads = 3
        one.reload(Backend.NFTABLES)
        await one.node.quiet()
        assert one.in_use() is Backend.NFTABLES
        await asyncio.sleep(HANG_S)
        await one.mover.at_rest()
