"""The code that all read-only commands share: it gets the first lists, reads the state of this node, and chooses the exit status.

Rule 1: a read-only command loads no kernel module and writes nothing. ``run`` learns some facts about the kernel by trying an
operation; a read-only command assumes that the operation would succeed.
Rule 2: as in ``run``, the ``Translator`` makes the desired state, and the reconciler's tables find the differences. A read-only
command applies no operation.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import operator
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.config.settings import Choices, Config
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.cannot_start import CannotStartError, complain
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.reader import ReadableKernel
from ipvsproxy.daemon.loop.translator import Translator
from ipvsproxy.daemon.process import requirements
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import InterfaceAddress
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import Event
from ipvsproxy.model.steps import at_once
from ipvsproxy.reconcile.kinds.declaration import Difference
from ipvsproxy.reconcile.reconciler import Reconciler
from ipvsproxy.store.guard import Guard
from ipvsproxy.store.objects import Changes, Store
from ipvsproxy.translate import skeleton
from ipvsproxy.translate import view as views
from ipvsproxy.translate.api.targets import Targets
from ipvsproxy.translate.translation_settings import Settings

WELL, NOT_WELL, CANNOT_TELL = 0, 1, 2
"""The exit statuses of commands. ``NOT_WELL`` means that the answer is a difference, a failed check or an unknown subject."""
JSON_VERSION = 1
"""The value of the field ``version`` in the JSON documents of commands. The version is increased if a field is removed or gets
another meaning, but not if a field is added."""

Document = Mapping[str, Any]


class UnknownStateError(CannotStartError):
    """The desired or observed state is unknown; ``reasons`` has a sentence for each unknown part."""


class Comparison:
    """The desired and observed state of this node at the time of the last ``read``.

    ``view`` is available only after the first ``read``.
    """

    view: views.NodeView

    def __init__(self, node: "Inspected", clock: Callable[[], float] = time.monotonic) -> None:
        self.store = node.store
        self.kernel = node.kernel
        self._reconciler = Reconciler(node.choices.policy)
        self.survey = self._reconciler.survey
        self._clock = clock
        self._translator = Translator(choices=node.choices, store=node.store, reconciler=self._reconciler)
        self._translator.put_node()
        self.carried: frozenset[Address] = frozenset()
        """The addresses of this node's interfaces, and the destinations of ipvsproxy's local routes."""
        self.interface_addresses: Sequence[InterfaceAddress] = ()

    @property
    def translation(self) -> Settings:
        """The configured policy for Services, and the schedulers that this kernel lacks."""
        return self._translator.settings

    async def read(self) -> Changes:
        """Read the kernel, and take the pending changes out of the store; returns the pending changes.

        Raises:
            UnknownStateError: a part of the kernel could not be read, or an empty first list of API objects is not yet confirmed.
            KernelError: the kernel did not answer a query.
        """
        if self.store.may_lack_all:
            raise UnknownStateError("a first list of the API server is empty; it does not count before a second list confirms it")
        sets, sysctls = self._reconciler.survey.subjects()
        observed = await self.kernel.call(lambda kernel: kernel.observe(sets, self.translation.families, sysctls))
        if observed.errors:
            raise UnknownStateError(*observed.errors)
        timeouts = await self.kernel.call(lambda kernel: kernel.read_timeouts())
        now = self._clock()
        self.interface_addresses = tuple(observed.interface_addresses or ())
        self.carried = observed.local.union(one.address for one in observed.interface_addresses or ())
        self.view = at_once(self._translator.updating_view(observed.interface_addresses or (), now))
        for name in sorted(self._translator.unknown_schedulers):
            reason = await self.kernel.call(operator.methodcaller("why_missing", name))
            self._translator.note_scheduler(name, reason, now)
        changes = self.store.take()
        await in_slices(self._translator.putting(changes.services), self._clock)
        at_once(self._reconciler.observer.observing(observed, self._clock()))
        self._reconciler.tend(self._clock())
        self._translator.put_skeletons(settled=True)
        self._reconciler.note_timeouts(timeouts)
        return self._translator.with_refusals(changes)

    def differences(self) -> list[Difference]:
        """The differences between desired and observed state at the time of the last ``read``."""
        return list(self.survey.differences())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A node, with everything that a command needs to read the node's state."""

    config: Config
    store: Store
    kernel: KernelThread[ReadableKernel]
    choices: Choices
    source: sources.Source

    async def targets(self) -> tuple[Targets, Sequence[str]]:
        """The pods behind endpoints.

        If the names of the pods cannot be read, the mapping is empty, and the sequence has the reason.
        """
        try:
            return await self.source.targets(), ()
        except sources.ApiError as error:
            return {}, [f"the names of pods cannot be read: {error}"]


def reasons_of(error: CannotStartError | KernelError) -> Sequence[str]:
    """The reasons why a node cannot be read, as sentences."""
    return error.reasons if isinstance(error, CannotStartError) else (str(error),)


class CommandAnswer(NamedTuple):
    """The answer and the exit status of a command, and sentences about data that is missing from the answer."""

    document: Document
    status: int = WELL
    problems: Sequence[str] = ()


Render = Callable[[Document], Iterable[str]]
"""A function that renders a document as lines of text for people."""


def run(config: Config, answer: Callable[[Inspected], Awaitable[CommandAnswer]], render: Render) -> int:
    """Run a command that reads this node, and print the command's answer; returns the exit status."""
    return execute(config, _run(config, answer), render, "the state of this node is unknown; nothing was changed")


def execute(
    config: Config, work: Coroutine[None, None, CommandAnswer], render: Render, conclusion: str, *, failed: int = CANNOT_TELL
) -> int:
    """Run a command, and print its answer; returns the exit status.

    If the command fails, the exit status is ``failed``; the reasons for the failure are printed first, and ``conclusion`` is
    printed last.
    """
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity, quiet=True)
    try:
        answer = asyncio.run(work)
    except (CannotStartError, KernelError) as error:
        complain(*reasons_of(error), conclusion)
        return failed
    show(answer.document, render(answer.document), as_json=config.as_json)
    complain(*answer.problems)
    return answer.status


async def _run(config: Config, answer: Callable[[Inspected], Awaitable[CommandAnswer]]) -> CommandAnswer:
    source = await sources.make(config)
    async with readable_kernel(config) as kernel:
        node = await inspect(config, kernel, source)
        async with following(source, node.store):
            return await answer(node)


async def inspect(config: Config, kernel: KernelThread[NodeKernel], source: sources.Source) -> Inspected:
    """This node, with an empty store.

    Raises:
        CannotStartError: there is no IP family whose rules can be read.
    """
    programs = await kernel.call(readable_programs)
    choices = requirements.choices(config, programs, await asyncio.to_thread(expected_scheduler, config.translation.scheduler))
    guard = Guard(config.guard_percent, all_nodes=config.takes_direct_return)
    store = Store(started_s=time.time(), guard=guard, here=config.node_name)
    return Inspected(config=config, store=store, kernel=kernel, choices=choices, source=source)


def expected_scheduler(configured: str) -> str:
    """The scheduler that ``run`` would use: ``configured``, or the fallback if the kernel has no module file for it."""
    if modules.module_state(f"ip_vs_{configured}") is not modules.ModuleState.MISSING:
        return configured
    hint = f"this kernel has no module ip_vs_{configured}"
    log.warning("scheduler_not_found", desired=configured, used=requirements.FALLBACK_SCHEDULER, hint=hint)
    return requirements.FALLBACK_SCHEDULER


@contextlib.asynccontextmanager
async def following(
    source: sources.Source,
    store: Store,
    changed: Callable[[], object] = lambda: None,
    silent: Callable[[str], object] = sources.give_up,
) -> AsyncIterator[asyncio.Task[None]]:
    """Fill the store with the first lists, and keep the store up to date while the ``with`` block runs.

    ``changed`` is called after each change; ``silent`` is called if the first list of a kind of API objects does not arrive. The
    ``with`` statement yields the task that receives changes; the task ends only if it fails.

    Raises:
        CannotStartError: the first lists did not arrive.
    """
    listed = asyncio.Event()

    def deliver(events: Sequence[Event]) -> None:
        store.deliver(events, time.monotonic())
        for kind, doubt in store.doubts.items():
            source.list_again(kind, doubt.due_s)
        if store.is_complete:
            listed.set()
        changed()

    task = asyncio.create_task(source.run(deliver))
    waiting = asyncio.create_task(listed.wait())
    patience = asyncio.create_task(sources.wait_for_lists(store, source, silent=silent, waiting=complain))
    try:
        done, _ = await asyncio.wait({task, waiting, patience}, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        yield task
    finally:
        for each in (task, waiting, patience):
            each.cancel()
        await asyncio.gather(task, waiting, patience, return_exceptions=True)


@contextlib.asynccontextmanager
async def readable_kernel(config: Config) -> AsyncIterator[KernelThread[NodeKernel]]:
    """The kernel's thread.

    Raises:
        CannotStartError: the process lacks a privilege, or the kernel has no IPVS.
    """
    try:
        backend = (await asyncio.to_thread(backends.choose, config.drivers.rules_backend)).backend
        runs_iptables = backend is Backend.IPTABLES
        requirements.demand((*host.missing_privileges(runs_iptables=runs_iptables), *host.missing_features()))
        choice = await asyncio.to_thread(iptables_variant.choose, skeleton.CHAINS) if runs_iptables else None
        make = functools.partial(
            NodeKernel,
            skeleton.CHAINS,
            skeleton.JUMPS,
            chosen=backends.ChosenBackend(backend, choice.commands) if choice else backends.ChosenBackend(backend),
            route_protocol=config.drivers.route_protocol,
        )
        kernel = await KernelThread.start(make)
    except KernelError as error:
        raise CannotStartError(error) from error
    try:
        yield kernel
    finally:
        kernel.stop()


def readable_programs(kernel: NodeKernel) -> Mapping[Family, Program]:
    """The iptables program of each IP family whose rules can be read.

    Raises:
        CannotStartError: there is no IP family whose rules can be read.
    """
    refusals = {family: kernel.rules.usable(family) for family in Family}
    programs = {family: kernel.rules.program(family) for family, refusal in refusals.items() if refusal is None}
    if not programs:
        reasons = [f"{family.label} cannot be read: {refusal.reason}" for family, refusal in refusals.items() if refusal]
        raise CannotStartError(*reasons)
    return programs


def head(command: str, node_name: str) -> Document:
    """The fields at the beginning of every JSON document."""
    return {"version": JSON_VERSION, "command": command, "node": node_name}


def show(document: Document, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a JSON document, or its text lines, to standard output."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    for line in lines:
        sys.stdout.write(f"{logs.printable(line)}\n")  # users choose the names, and a terminal obeys control characters
