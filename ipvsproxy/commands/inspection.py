"""What the commands share that only look: configuration in; first lists, the kernel to read, exit status out.

Rule: nothing is asked to be loaded, tried or written. What only ``run`` can find out by trying is taken as given here.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import structlog

from ipvsproxy.commands.comparison import Comparison, UnknownStateError
from ipvsproxy.config.settings import Config
from ipvsproxy.daemon import wiring
from ipvsproxy.daemon.base import log as logs
from ipvsproxy.daemon.loop.engine import EngineSettings
from ipvsproxy.daemon.loop.kernel import ReadableKernel
from ipvsproxy.daemon.process.requirements import FALLBACK_SCHEDULER
from ipvsproxy.daemon.sources import first_lists
from ipvsproxy.daemon.sources import source as sources
from ipvsproxy.daemon.sources.reflector import Trouble
from ipvsproxy.daemon.sources.source import CannotStartError, Source
from ipvsproxy.kernel import facts, host, iptables_variant
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.facts import ModuleState
from ipvsproxy.kernel.iptables import Program, Refusal
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import Event, ObjectKind
from ipvsproxy.reconcile.reconciler import Policy
from ipvsproxy.store.objects import Store
from ipvsproxy.translate import skeleton
from ipvsproxy.translate import view as views

CANNOT_TELL = 2
"""Exit status when something is missing that the answer needs."""
JSON_VERSION = 1
"""Of every document; it grows when a field goes or changes its meaning, not when one comes."""

Document = Mapping[str, Any]

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Programs(Protocol):
    """The iptables programs of the kernel's families."""

    def usable(self, family: Family) -> Refusal | None:
        """Why a family cannot be served here; None if it can."""

    def program(self, family: Family) -> Program:
        """Version and variant of a family's program."""


class InspectedKernel(ReadableKernel, Protocol):
    """The kernel as commands need it."""

    @property
    def iptables(self) -> Programs:
        """Its iptables programs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """A node that can be looked at."""

    config: Config
    store: Store
    kernel: KernelThread[ReadableKernel]
    settings: EngineSettings
    translation: views.Settings
    policy: Policy

    def comparison(self) -> Comparison:
        """What it should hold, next to what it holds."""
        return Comparison(
            settings=self.settings, translation=self.translation, policy=self.policy, store=self.store, kernel=self.kernel
        )


def run(config: Config, look: Callable[[Inspected], Awaitable[int]]) -> int:
    """Have a command look at this node; returns the exit status."""
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity, quiet=True)
    try:
        return asyncio.run(_run(config, look))
    except (CannotStartError, UnknownStateError) as error:
        reasons: Iterable[str] = error.reasons
    except KernelError as error:
        reasons = (str(error),)
    for reason in reasons:
        sys.stderr.write(f"ipvsproxy: {reason}\n")
    sys.stderr.write("ipvsproxy: nothing can be said about this node, and nothing was changed\n")
    return CANNOT_TELL


async def _run(config: Config, look: Callable[[Inspected], Awaitable[int]]) -> int:
    source = await sources.make(config, Unheard())
    async with readable_kernel() as kernel:
        node = await inspect(config, kernel)
        async with following(source, node.store):
            return await look(node)


async def inspect(config: Config, kernel: KernelThread[InspectedKernel]) -> Inspected:
    """This node, with nothing in its store yet.

    Raises:
        CannotStartError: no family can be read.
    """
    programs = await kernel.call(readable_programs)
    choices = wiring.choices(config, programs, await asyncio.to_thread(expected_scheduler, config.ipvs.scheduler))
    return Inspected(
        config=config,
        store=Store(started_s=time.time(), guard=wiring.guard(config)),
        kernel=kernel,
        settings=choices.settings,
        translation=choices.translation,
        policy=choices.policy,
    )


def expected_scheduler(wanted: str) -> str:
    """The scheduler that ``run`` uses where this one is wanted, as far as that can be told without having a module loaded."""
    if facts.module_state(f"ip_vs_{wanted}") is not ModuleState.MISSING:
        return wanted
    log.warning("scheduler_not_found", wanted=wanted, used=FALLBACK_SCHEDULER, hint=f"this kernel has no module ip_vs_{wanted}")
    return FALLBACK_SCHEDULER


class Unheard:
    """Nobody counts the requests of a command."""

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
    """Fill the store; from its first lists on, the block runs while the store follows what changes.

    ``changed`` is called after each change; ``silent`` is what follows where nothing comes of the first lists.
    The block gets the task that follows; it only ever ends by an error.

    Raises:
        CannotStartError: the first lists did not come.
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
async def readable_kernel() -> AsyncIterator[KernelThread[NodeKernel]]:
    """The kernel thread, if there is something to read.

    Raises:
        CannotStartError: a privilege or the kernel's IPVS is missing.
    """
    missing = (*host.missing_privileges(), *host.missing_features())
    if missing:
        raise CannotStartError(*missing)
    try:
        choice = await asyncio.to_thread(iptables_variant.choose, skeleton.CHAINS)
        kernel = await KernelThread.start(lambda: NodeKernel(skeleton.CHAINS, skeleton.JUMPS, commands=choice.commands))
    except KernelError as error:
        raise CannotStartError(error) from error
    try:
        yield kernel
    finally:
        kernel.stop()


def readable_programs(kernel: InspectedKernel) -> Mapping[Family, Program]:
    """The iptables program of each family that can be read here.

    Raises:
        CannotStartError: there is none.
    """
    refusals = {family: kernel.iptables.usable(family) for family in Family}
    programs = {family: kernel.iptables.program(family) for family, refusal in refusals.items() if refusal is None}
    if not programs:
        reasons = [f"{family.label} cannot be read: {refusal.reason}" for family, refusal in refusals.items() if refusal]
        raise CannotStartError(*reasons)
    return programs


def say(document: Document, lines: Iterable[str], *, as_json: bool) -> None:
    """Print an answer to standard output."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    for line in lines:
        sys.stdout.write(f"{_printable(line)}\n")


def _printable(line: str) -> str:
    """Names come from others, and terminals act on control characters."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in line)
