"""The whole program, wired together: configuration in, exit status out."""

import asyncio
import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, assert_never

import structlog

from ipvsproxy.config.settings import Config
from ipvsproxy.daemon import log as logs
from ipvsproxy.daemon import measure, web, wiring
from ipvsproxy.daemon import source as sources
from ipvsproxy.daemon.engine import Engine
from ipvsproxy.daemon.metrics import Metrics
from ipvsproxy.daemon.serving import Serving
from ipvsproxy.daemon.source import CannotStartError, Source
from ipvsproxy.daemon.staleness import Staleness
from ipvsproxy.daemon.status import Notice, Status
from ipvsproxy.daemon.store import Store
from ipvsproxy.daemon.traffic import Traffic
from ipvsproxy.kernel import host, notify, scheduler
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.iptables import Program
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import DEVICE
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Outcome
from ipvsproxy.model.service import Event
from ipvsproxy.translate import skeleton

FAILED = 1
"""Exit status when an address can not be listened on and the configuration says that this is the end."""
CANNOT_START = 2
"""Exit status when something is missing that this process can not provide. Nothing was programmed."""
FALLBACK_SCHEDULER = "rr"
"""For when the kernel has not the one that was asked for: served in another order is better than not served."""
FIRST_LISTS_S = 20.0
"""How long the first lists may take before the process gives up, to be started again by whoever supervises it."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def run(config: Config) -> int:
    """Serve until a signal ends it; returns the exit status."""
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity)
    try:
        asyncio.run(_serve(config))
    except CannotStartError as error:
        for reason in error.reasons:
            sys.stderr.write(f"ipvsproxy: {reason}\n")
        sys.stderr.write("ipvsproxy: nothing was programmed\n")
        return CANNOT_START
    except web.BindError as error:
        sys.stderr.write(f"ipvsproxy: {error}\n")
        return FAILED
    return 0


async def _serve(config: Config) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    for notice in config.notices:
        log.warning("configuration", notice=str(notice))
    if config.without_effect:
        log.info("accepted without effect", settings=list(config.without_effect))
    metrics = Metrics()
    source = await sources.make(config, metrics)
    async with _running_kernel(metrics.applied) as kernel:
        programs = await kernel.call(_usable_programs, kernel.target)
        scheduler_name, why_not = await kernel.call(_usable_scheduler, kernel.target, config.ipvs.scheduler)
        store = Store(started_s=time.time())
        staleness = Staleness(lambda: source.statuses, limit_s=config.servers.stale_watch_s, clock=time.monotonic)
        status = Status(
            families=programs,
            sync_period_s=config.ipvs.sync_period_s,
            clock=time.monotonic,
            wall_clock=time.time,
            stale=staleness.stale,
            stale_turns_away=config.servers.stale_watch_unhealthy,
        )
        if why_not:
            status.notices.append(Notice("SchedulerMissing", f"{why_not}; {scheduler_name} is used instead"))
            log.error("scheduler is not used", reason=why_not, used=scheduler_name)
        serving = Serving(config, status, metrics)
        engine = Engine(
            settings=wiring.engine_settings(config, host.kernel_version(), host.processor_count()),
            translation=wiring.translation_settings(
                config, {family: one.random_fully for family, one in programs.items()}, scheduler_name
            ),
            policy=wiring.policy(config),
            store=store,
            kernel=kernel,
            watcher=serving,
        )
        figures = measure.Sources(
            reconciler=engine.reconciler,
            store=store,
            status=status,
            clock=time.monotonic,
            watches=lambda: source.statuses,
            stale=staleness.stale,
        )
        traffic = Traffic(
            kernel=kernel,
            reconciler=engine.reconciler,
            store=store,
            clock=time.monotonic,
            limit=config.traffic_metrics.limit,
            of_endpoints=config.traffic_metrics.of_endpoints,
        )
        metrics.show(programs, figures, traffic)
        _set_oom_score(config.oom_score_adj)
        log.info(
            "starting",
            node=config.node_name,
            scheduler=scheduler_name,
            families=[family.label for family in programs],
            iptables=sorted({program.variant for program in programs.values()}),
        )

        def deliver(events: Sequence[Event]) -> None:
            store.deliver(events, time.monotonic())
            status.node = store.node(config.node_name)
            engine.changed()

        # Interfaces are followed before they are read: nothing falls in between.
        following = _follow_interfaces(engine, kernel.target)
        work = (following, source.run(deliver), engine.run(), staleness.run(), _await_first_lists(store, source))
        await _until_stopped(stopping, status, work, serving.servers())
        log.info("stopped; the kernel stays as it is")


@contextlib.asynccontextmanager
async def _running_kernel(on_applied: Callable[[Sequence[Outcome], float], None]) -> AsyncIterator[KernelThread[NodeKernel]]:
    """The kernel thread, once all that it needs is there."""
    missing = host.missing_privileges()
    if missing:
        raise CannotStartError(*missing)
    complaint = await asyncio.to_thread(host.load_modules)
    missing = host.missing_features()
    if missing:
        raise CannotStartError(*missing, *((f"modprobe says: {complaint}",) if complaint else ()))
    try:
        kernel = await KernelThread.start(lambda: NodeKernel(skeleton.CHAINS, skeleton.JUMPS, on_applied))
    except KernelError as error:
        raise CannotStartError(error) from error
    try:
        yield kernel
    finally:
        kernel.stop()


def _usable_scheduler(kernel: NodeKernel, wanted: str) -> tuple[str, str]:
    """The scheduler to use: the wanted one, or the fall-back and why the wanted one cannot be had.

    Raises:
        CannotStartError: neither can be had.
    """
    reasons: list[str] = []
    for name in dict.fromkeys((wanted, FALLBACK_SCHEDULER)):
        try:
            reason = scheduler.why_unusable(kernel.ipvs, name)
        except KernelError as error:
            raise CannotStartError(error) from error
        if not reason:
            return name, "".join(reasons)
        reasons.append(reason)
    raise CannotStartError(*reasons)


def _usable_programs(kernel: NodeKernel) -> Mapping[Family, Program]:
    """The iptables program of each family that this host can serve; one family is enough.

    Raises:
        CannotStartError: there is none, or a set type is missing.
    """
    missing = host.missing_set_types()
    if missing:
        raise CannotStartError(*missing)
    reasons = {family: kernel.iptables.usable(family) or kernel.iptables.try_writing(family) for family in Family}
    for family, reason in reasons.items():
        if reason:
            log.warning("family is not served", family=family.label, reason=reason)
    programs = {family: kernel.iptables.program(family) for family, reason in reasons.items() if not reason}
    if not programs:
        raise CannotStartError(*(f"{family.label} can not be served: {reason}" for family, reason in reasons.items()))
    return programs


def _set_oom_score(score: int) -> None:
    """Tell the kernel how readily it may kill this process when memory is short (-1000..1000)."""
    try:
        pathlib.Path("/proc/self/oom_score_adj").write_text(str(score))
    except OSError as error:
        log.debug("OOM score was not set", error=str(error))


async def _follow_interfaces(engine: Engine, kernel: NodeKernel) -> None:
    """Have the engine look again when somebody else changes addresses or interfaces.

    Raises:
        KernelError: the kernel does not tell, or not any more.
    """
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = loop.create_future()

    with notify.ChangeListener(own_ports=kernel.ports) as listener:

        def read() -> None:
            try:
                changes = listener.read()
            except KernelError as error:
                loop.remove_reader(listener.fileno())  # it would be called again at once
                broken.set_exception(error)
            else:
                _tell(engine, changes)

        loop.add_reader(listener.fileno(), read)
        try:
            await broken
        finally:
            loop.remove_reader(listener.fileno())


def _tell(engine: Engine, changes: Iterable[notify.Change]) -> None:
    for change in changes:
        match change:
            case notify.AddressAppeared(address=item) | notify.AddressVanished(address=item):
                if item.interface == DEVICE:
                    engine.kernel_changed()
                else:
                    engine.interfaces_changed()
            case notify.DeviceVanished() | notify.Overrun():
                engine.kernel_changed()
            case never:
                assert_never(never)


async def _await_first_lists(store: Store, source: Source) -> None:
    """Give up when there is nothing to serve: a supervisor's restart is more visible than a process that waits for ever."""
    await asyncio.sleep(FIRST_LISTS_S)
    if not store.is_complete:
        missing = ", ".join(f"{kind}s" for kind in store.missing)
        raise CannotStartError(f"no complete list of {missing} within {FIRST_LISTS_S:.0f} s from {source.describe()}")


async def _until_stopped(
    stopping: asyncio.Event,
    status: Status,
    work: Iterable[Coroutine[None, None, None]],
    servers: Iterable[Coroutine[None, None, None]],
) -> None:
    """Run until asked to stop, or until one of them fails: what it raised is raised here. Servers stop last, and tell of it."""
    stopper = asyncio.create_task(stopping.wait())
    working, answering = [list(map(asyncio.create_task, coroutines)) for coroutines in (work, servers)]
    waiting: set[asyncio.Task[Any]] = {stopper, *working, *answering}
    try:
        while not stopper.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        status.stop()
        for group in ([stopper, *working], answering):
            for task in group:
                task.cancel()
            await asyncio.gather(*group, return_exceptions=True)
