"""The common part of all commands that only read: first lists, the kernel to read, the exit status.

Rule: these commands load no module and write nothing. Where ``run`` finds a fact out by a trial, they assume success.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from ipvsproxy.commands.comparison import Comparison, UnknownStateError
from ipvsproxy.config.settings import Config, EngineSettings
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.base.errors import CannotStartError
from ipvsproxy.daemon.loop.kernel import ReadableKernel
from ipvsproxy.daemon.process import requirements
from ipvsproxy.daemon.process.requirements import FALLBACK_SCHEDULER
from ipvsproxy.daemon.sources import first_lists
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.daemon.sources.reflector import Trouble
from ipvsproxy.daemon.sources.source import Source
from ipvsproxy.kernel import host, rules_backend
from ipvsproxy.kernel.backend_drivers import ChosenBackend
from ipvsproxy.kernel.base import modules
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.modules import ModuleState
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.driver import Program, Refusal
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.service import Event, ObjectKind
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.store.objects import Guard, Store
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.settings import Settings

CANNOT_TELL = 2
"""Exit status if desired or observed state is unknown."""
JSON_VERSION = 1
"""The version of every document. It grows if a field is removed or changes its meaning, not if one is added."""

Document = Mapping[str, Any]

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Programs(Protocol):
    """The iptables programs of both families."""

    def usable(self, family: Family) -> Refusal | None:
        """The reason why a family cannot be served here; None if it can."""

    def program(self, family: Family) -> Program:
        """Version and variant of a family's program."""


class InspectedKernel(ReadableKernel, Protocol):
    """The kernel as commands need it."""

    @property
    def rules(self) -> Programs:
        """The programs of its rules."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A node with all that a command needs to read it."""

    config: Config
    store: Store
    kernel: KernelThread[ReadableKernel]
    settings: EngineSettings
    translation: Settings
    policy: Policy

    def comparison(self) -> Comparison:
        """Its desired and its observed state."""
        return Comparison(
            settings=self.settings, translation=self.translation, policy=self.policy, store=self.store, kernel=self.kernel
        )


def run(config: Config, answer: Callable[[Inspected], Awaitable[int]]) -> int:
    """Let a command read this node, and answer; returns the exit status."""
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity, quiet=True)
    try:
        return asyncio.run(_run(config, answer))
    except (CannotStartError, UnknownStateError) as error:
        reasons: Iterable[str] = error.reasons
    except KernelError as error:
        reasons = (str(error),)
    for reason in reasons:
        sys.stderr.write(f"ipvsproxy: {reason}\n")
    sys.stderr.write("ipvsproxy: the state of this node is unknown; nothing was changed\n")
    return CANNOT_TELL


async def _run(config: Config, answer: Callable[[Inspected], Awaitable[int]]) -> int:
    source = await sources.make(config, NoListener())
    async with readable_kernel(config) as kernel:
        node = await inspect(config, kernel)
        async with following(source, node.store):
            return await answer(node)


async def inspect(config: Config, kernel: KernelThread[InspectedKernel]) -> Inspected:
    """This node, with an empty store.

    Raises:
        CannotStartError: no family can be read.
    """
    programs = await kernel.call(readable_programs)
    choices = requirements.choices(config, programs, await asyncio.to_thread(expected_scheduler, config.translation.scheduler))
    return Inspected(
        config=config,
        store=Store(started_s=time.time(), guard=Guard(config.guard_percent)),
        kernel=kernel,
        settings=choices.settings,
        translation=choices.translation,
        policy=choices.policy,
    )


def expected_scheduler(configured: str) -> str:
    """The scheduler that ``run`` would use for the configured one, as far as the files of the kernel's modules show it."""
    if modules.module_state(f"ip_vs_{configured}") is not ModuleState.MISSING:
        return configured
    hint = f"this kernel has no module ip_vs_{configured}"
    log.warning("scheduler_not_found", desired=configured, used=FALLBACK_SCHEDULER, hint=hint)
    return FALLBACK_SCHEDULER


class NoListener:
    """A ``source.Listener`` that counts nothing: a command has no metrics."""

    def watch_restarted(self, kind: ObjectKind, trouble: Trouble) -> None:
        """As ``source.Listener``."""

    def requested(self, host: str, code: str, duration_s: float, method: str) -> None:
        """As ``source.Listener``."""


@contextlib.asynccontextmanager
async def following(
    source: Source,
    store: Store,
    changed: Callable[[], object] = lambda: None,
    silent: Callable[[str], object] = first_lists.give_up,
) -> AsyncIterator[asyncio.Task[None]]:
    """Fill the store with the first lists, and keep it up to date while the block runs.

    ``changed`` is called after each change, ``silent`` if a first list does not arrive. The block gets the task that receives
    changes; the task ends only by an error.

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
    patience = asyncio.create_task(first_lists.wait(store, source, silent=silent, waiting=first_lists.show_progress))
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
        CannotStartError: a privilege or the kernel's IPVS is missing.
    """
    try:
        backend = (await asyncio.to_thread(rules_backend.choose, config.drivers.rules_backend)).backend
        runs_iptables = backend is Backend.IPTABLES
        if missing := (*host.missing_privileges(runs_iptables=runs_iptables), *host.missing_features()):
            raise CannotStartError(*missing)
        choice = await asyncio.to_thread(iptables_variant.choose, skeleton.CHAINS) if runs_iptables else None
        make = functools.partial(
            NodeKernel,
            skeleton.CHAINS,
            skeleton.JUMPS,
            chosen=ChosenBackend(backend, choice.commands) if choice else ChosenBackend(backend),
            route_protocol=config.drivers.route_protocol,
        )
        kernel = await KernelThread.start(make)
    except KernelError as error:
        raise CannotStartError(error) from error
    try:
        yield kernel
    finally:
        kernel.stop()


def readable_programs(kernel: InspectedKernel) -> Mapping[Family, Program]:
    """The iptables program of each readable family.

    Raises:
        CannotStartError: no family is readable.
    """
    refusals = {family: kernel.rules.usable(family) for family in Family}
    programs = {family: kernel.rules.program(family) for family, refusal in refusals.items() if refusal is None}
    if not programs:
        reasons = [f"{family.label} cannot be read: {refusal.reason}" for family, refusal in refusals.items() if refusal]
        raise CannotStartError(*reasons)
    return programs


def show(document: Document, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a document, or its lines, to standard output."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    for line in lines:
        sys.stdout.write(f"{printable(line)}\n")


def printable(line: str) -> str:
    """The line without control characters: names come from users, and a terminal obeys control characters."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
