"""The event loop of the daemon: it translates changes, plans operations, applies the operations and records their outcomes.

Rule 1: programming begins only after the first list of every kind is complete and the kernel has been read.
Rule 2: the kernel is read at start-up, after an error or an unexpected outcome, and by polls and audits. The kernel is never read
in order to program a change (see ``reader``).
Rule 3: only one sync runs at a time; changes that arrive during a sync belong to the next sync.
"""

import asyncio
import dataclasses
import math
import operator
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from typing import TypeVar

from ipvsproxy.config.settings import Choices
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import comes_within, in_slices
from ipvsproxy.daemon.loop import garbage, journal
from ipvsproxy.daemon.loop.reader import Kernel, KernelReader
from ipvsproxy.daemon.loop.summary import NOTHING_DONE, SyncSummary, Watcher
from ipvsproxy.daemon.loop.translator import Translator
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import WEIGHTS_SHOWN, Operation, Outcome, Report, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.service import ObjectKind, ServiceName
from ipvsproxy.model.virtual_servers import ConnectionCounts, RealServers, VirtualServerKey
from ipvsproxy.reconcile.reconciler import Reconciler
from ipvsproxy.reconcile.survey import Survey
from ipvsproxy.reconcile.virtual_servers import drain
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import view
from ipvsproxy.translate.translation_settings import Settings

FIRST_SERVICES = (ServiceName("default", "kubernetes"), ServiceName("kube-system", "kube-dns"))
"""The Services that are programmed before all others, so that a new node is usable early."""
SERVICES_AT_ONCE = 250
"""The number of Services in a batch. Each batch is translated, planned, applied and settled as a whole."""
REST_FACTOR = 4
"""The pause after a sync, as a multiple of the sync's duration. Changes during the pause share the fixed cost of one sync."""
LONGEST_REST_S = 0.05
ERRORS_SHOWN = 5
"""The largest number of failures of one sync that are logged in full."""
_Connections = Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None]

T = TypeVar("T")


@dataclasses.dataclass(eq=False, kw_only=True)
class Engine:
    """Keeps the kernel equal to the desired state that follows from the store.

    ``clock`` is a monotonic clock, and ``processor_clock`` measures the processor time of this process; both are in seconds.

    ``prepare`` is called once, after the first lists are complete and before the kernel is read for the first time. ``prepare``
    never fails.
    """

    choices: Choices
    store: Store
    kernel: KernelThread[Kernel]
    watcher: Watcher
    prepare: Callable[[], Awaitable[None]] | None = None
    clock: Callable[[], float] = time.monotonic
    processor_clock: Callable[[], float] = time.process_time

    def __post_init__(self) -> None:
        self._reconciler = Reconciler(self.choices.policy)
        self._wake = asyncio.Event()
        self._is_sync_due = False
        self._new_choices: Choices | None = None
        self._journal = journal.Journal(self.clock)
        self._reader = KernelReader(self.choices, self._reconciler, self.kernel, self._journal, self.clock, self.processor_clock)
        self._addresses_changed = False
        self._sync_took_s = 0.0
        self._translator = Translator(choices=self.choices, store=self.store, reconciler=self._reconciler)

    # Code outside of the event loop calls the following methods.

    def changed(self, now: float) -> None:
        """Called when the store has changed.

        ``now`` is the current time of ``clock``. The caller passes ``now``, because reading a clock costs a system call.
        """
        self.watcher.queued(now)
        self._is_sync_due = True
        self._wake.set()

    def interfaces_changed(self) -> None:
        """Called when addresses have been added to interfaces or removed from interfaces."""
        self._addresses_changed = self._is_sync_due = True
        self._wake.set()

    def kernel_changed(self) -> None:
        """Called when another program has changed a kernel object of ipvsproxy."""
        self._reader.request_poll()
        self._wake.set()

    def rules_changed(self) -> None:
        """Called when another program has changed rules or sets of ipvsproxy.

        A change of rules or sets does not cause virtual servers to be read.
        """
        self._reader.request_poll(whole=False)
        self._wake.set()

    def rules_ended(self) -> None:
        """Called after the end of an iptables program for which the event loop no longer waited."""
        self._reconciler.rules_ended()
        self._reader.request_poll()
        self._is_sync_due = True
        self._wake.set()

    @property
    def survey(self) -> Survey:
        """The object that answers queries about the desired and observed state."""
        return self._reconciler.survey

    @property
    def translation(self) -> Settings:
        """The current settings for translating Services."""
        return self._translator.settings

    @property
    def unreadable(self) -> Collection[str]:
        """The reasons why parts of the kernel could not be read at the last attempt, one sentence per part."""
        return self._reader.unreadable

    def reconfigure(self, choices: Choices) -> None:
        """Use another configuration, beginning with the next sync. The Node, the IP families and the backend stay the same."""
        self._new_choices = choices
        self.changed(self.clock())

    # The loop.

    async def run(self) -> None:
        """Run syncs until this task is cancelled."""
        with garbage.in_short_rounds(self.clock) as thaw_if_due:
            await self.start()
            while True:
                await self._sync(await self._pause())
                thaw_if_due()

    async def _wait_for_lists(self) -> None:
        logged: Collection[ObjectKind] = ()
        while not self.store.is_complete:
            self._wake.clear()
            if self.store.missing != logged:
                logged = self.store.missing
                log.info("waiting_for_first_lists", missing=[kind.value for kind in logged])
            await self._wake.wait()

    async def start(self) -> None:
        """Wait for the first lists, read the kernel, program ``FIRST_SERVICES``, and then make the first sync."""
        await self._wait_for_lists()
        began = self.clock()
        await self._adopt_choices()
        self._demand_primary_family()
        self._translator.put_node()
        if self.prepare is not None:
            await self.prepare()
        # Unreadable parts of the kernel are also programmed, but no object is removed from an unreadable part. All unreadable
        # parts are read again soon.
        await self._reader.observe()
        await self._update_view(self.clock())
        await self._learn_schedulers(self.clock())
        report = NOTHING_DONE
        names = [name for name in FIRST_SERVICES if name in self.store.services]
        if names:
            await self._in_slices(self._translator.putting(names))
            report = await self._add(report)
            report = await self._add(report)  # the second call binds addresses, whose virtual servers now exist
            log.info("first_services_programmed", duration_s=round(self.clock() - began, 3))
        await self._sync(self.clock(), report)

    def _demand_primary_family(self) -> None:
        """Check that the IP family of the node's primary address is served.

        The file cmd/kube-proxy/app/server.go in kubernetes/kubernetes has the same rule.

        Raises:
            CannotStartError: the family of the primary address is not served.
        """
        translation = self._translator.settings
        node = self.store.node(self.choices.settings.node_name)
        primary = view.primary_family(translation, node)
        if primary is not None and primary not in translation.families:
            raise CannotStartError(
                f"{primary.label}, the family of this node's primary address, cannot be served on this host: "
                "give the kernel its tables of iptables, or the node another primary address"
            )

    async def _pause(self) -> float:
        """Wait until there is work and the minimum sync interval (or a short pause) has passed since the last sync.

        Readings of the kernel that are due continue during the wait. At least one part of a due reading is read in each pause,
        even if changes arrive continuously. Returns the current time.
        """
        rest_s = min(LONGEST_REST_S, REST_FACTOR * self._sync_took_s)
        may_begin_s = self.clock() + max(self.choices.settings.min_interval_s, rest_s)
        while (now := await self._idle()) is None:
            pass
        while now < may_begin_s and self._reader.next_part_s <= now:
            await self._reader.read_on()
            now = self.clock()
        if now < may_begin_s:
            await asyncio.sleep(may_begin_s - now)
            now = self.clock()
        return now

    async def _idle(self) -> float | None:
        """Wait until work is due or arrives; returns the current time.

        Returns None instead of the time if no sync is due. In this case, the call may have read a part of the kernel, but it
        found no change.
        """
        times_s = (self._reconciler.next_s(), self._translator.lingering.next_s)
        due_s = min((time_s for time_s in times_s if time_s is not None), default=math.inf)
        await comes_within(min(due_s, self._reader.next_part_s) - self.clock(), self._wake.wait())
        self._wake.clear()
        now = self.clock()
        if self._is_sync_due or due_s <= now:
            return now
        if self._reader.next_part_s > now:
            return None
        before = self._reader.addresses
        await self._reader.read_on()
        # An audit counts as a sync even if the audit finds no difference, because monitoring relies on the time of the last sync.
        return self.clock() if self._reader.has_news or self._reader.addresses != before else None

    async def _sync(self, began: float, done_before: Report = NOTHING_DONE) -> None:
        """Apply all changes.

        The report of this sync includes ``done_before``, the report of operations that were applied before the sync.
        """
        self._is_sync_due = False
        observed = began
        self.watcher.syncing(began)
        await self._adopt_choices()
        if self._addresses_changed or self._translator.lingering.is_due(began):
            self._addresses_changed = False
            is_read = await self._reader.read_addresses()
            observed = self.clock()
            if not is_read:
                # no address counts as lost, because the addresses could not be read
                self._translator.lingering = self._translator.lingering.postponed(observed)
        self._reader.syncing()
        node_view = await self._update_view(observed)
        await self._learn_schedulers(observed)
        changes = self.store.take()
        translated = observed
        waiting = 0
        changed = list(changes.services)
        for begin in range(0, len(changed), SERVICES_AT_ONCE):
            names = changed[begin : begin + SERVICES_AT_ONCE]
            # If there are many changes at once, as at the start, each batch of Services is applied before the next batch begins.
            # Removals wait until every Service has been translated.
            await self._in_slices(self._translator.putting(names))
            # Some changes must wait for the removals, and each plan goes through all of these changes again. The more changes
            # wait, the less often a plan is made.
            if len(names) == SERVICES_AT_ONCE and self._reconciler.unequal > 2 * waiting:
                done_before = await self._add(done_before)
                waiting = self._reconciler.unequal
            translated = self.clock()
        changes = self._translator.with_refusals(changes)
        self._journal.log_complaints(changes.complaints)
        self._journal.log_doubts(self.store.doubts)
        survey = self._reconciler.survey
        conflicts = await self._in_slices(self._journal.logging_conflicts(survey.conflicts()))
        report = await self._program(translated, done_before)
        without_scope = self._reconciler.take_without_scope()
        self._journal.log_without_scope(without_scope)
        self._journal.log_settings(survey.settings_given_up)
        lacking = survey.lacking(self._translator.settings.families)
        is_audit = self._reader.has_audited
        self._reader.synced(report)
        summary = SyncSummary(
            is_audit=is_audit,
            report=report,
            changes=changes,
            lacking=lacking,
            unmet_settings=survey.unmet_settings(),
            not_in_force=lacking | self._unserved(),
            states=survey.states,
            health_checks=survey.health_checks,
            view=node_view,
            waited_s=max(0.0, began - min(changes.services.values(), default=began)),
            observed_s=observed - began,
            translated_s=translated - observed,
            applied_s=(ended := self.clock()) - translated,
            conflicts=conflicts,
            without_scope=without_scope,
            drifted=self._reader.take_drifted(),
        )
        self._sync_took_s = ended - began
        self._journal.log_sync(summary, survey.draining)
        self.watcher.synced(summary)

    async def _learn_schedulers(self, now: float) -> None:
        """Ask the kernel about each scheduler that an annotation names and about which the kernel has not answered yet.

        If the kernel does not answer, the query is repeated later.
        """
        for name in sorted(self._translator.unknown_schedulers):
            try:
                why_missing = await self.kernel.call(operator.methodcaller("why_unusable", name))
            except KernelError as error:
                self._translator.note_scheduler(name, f"the scheduler {name} is not known yet: {error}", now, for_now=True)
            else:
                self._translator.note_scheduler(name, why_missing, now)

    def _unserved(self) -> frozenset[Family]:
        """The IP families that lack most of their virtual servers, or a set entry without which the rules have no effect."""
        families, survey = frozenset(self._translator.settings.families), self._reconciler.survey
        return families if self.store.may_lack_all else survey.unserved(families) | survey.lacking_entries(families)

    async def _add(self, total: Report) -> Report:
        """Apply the additions that are possible now; all other operations wait until the additions are done.

        Returns ``total`` combined with the report of the additions.
        """
        self._translator.put_skeletons()
        now = self.clock()
        operations = await self._in_slices(self._reconciler.planning(now, only_additions=True))
        return _sum(total, await self._apply(operations, now))

    async def _program(self, now: float, total: Report) -> Report:
        """Plan and apply operations, and record their outcomes, until no more operations are possible.

        Returns ``total`` combined with the report of the operations.
        """
        while True:
            self._translator.put_skeletons()
            # Additions come first; while the first list of a kind is in doubt, all other operations wait.
            planning = self._reconciler.planning(now, only_additions=self.store.may_lack_all)
            if operations := await self._in_slices(planning):
                total = _sum(total, await self._apply(operations, now))
            elif due := self._reconciler.drains_due(now):
                connections = await self.kernel.call(operator.methodcaller("connections", due))
                await self._in_slices(self._reconciler.noting_connections(connections, self.clock()))
            else:
                return dataclasses.replace(total, pending=self._reconciler.pending)
            now = self.clock()

    def _in_slices(self, steps: Generator[None, None, T]) -> Awaitable[T]:
        return in_slices(steps, self.clock)

    async def _apply(self, operations: Sequence[Operation], now: float) -> Report:
        """Apply planned operations.

        A real server that begins to drain because of the given operations is removed in the same call if it has no connections.
        """
        room = self._reconciler.room(now)
        outcomes, connections, removed = await self.kernel.call(lambda kernel: _apply(kernel, operations, room))
        now = self.clock()
        report = NOTHING_DONE
        for some in filter(None, (outcomes, removed)):
            journal.log_outcomes(some)
            report = _sum(report, await self._in_slices(self._reconciler.settling(some, now)))
        await self._in_slices(self._reconciler.noting_connections(connections, now))
        return report

    async def _update_view(self, now: float) -> view.NodeView:
        return await self._in_slices(self._translator.updating_view(self._reader.addresses, now))

    async def _adopt_choices(self) -> None:
        """Begin to use the configuration that ``reconfigure`` has received; any Service and any rule may change."""
        if self._new_choices is None:
            return
        new, self._new_choices = self._new_choices, None
        self.choices = self._reader.choices = new
        self._reconciler.adopt(new.policy)
        self._translator.adopt(new)
        self._translator.put_node()
        self._reader.request_audit()


def _apply(
    kernel: Kernel, operations: Sequence[Operation], room: int
) -> tuple[Sequence[Outcome], _Connections, Sequence[Outcome]]:
    """Apply operations, and remove real servers that begin to drain and are idle.

    Returns the outcomes of the operations, the connections of the draining real servers, and the outcomes of the removals.
    """
    outcomes = kernel.apply(operations)
    begun = (item for verb, item in operations if isinstance(item, RealServers) and item.drains and verb is Verb.SET)
    draining = {item.virtual_server for item in begun}
    if not draining:
        return outcomes, {}, ()
    counts = kernel.connections(draining)
    removals = drain.removals_at_once(outcomes, counts, room)
    return outcomes, counts, kernel.apply(removals) if removals else ()


def _sum(total: Report, report: Report) -> Report:
    """The sum of two reports; the number of pending operations is taken from the later report."""
    return Report(
        done=Counter(total.done) + Counter(report.done),
        failed=Counter(total.failed) + Counter(report.failed),
        errors=(*total.errors, *report.errors)[:ERRORS_SHOWN],
        pending=report.pending,
        surprises=total.surprises + report.surprises,
        weights=(*total.weights, *report.weights)[:WEIGHTS_SHOWN],
    )
