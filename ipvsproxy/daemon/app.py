"""The whole program, wired together: configuration in, exit status out."""

import asyncio
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, assert_never

import structlog

from ipvsproxy.config.settings import Config, LogFormat
from ipvsproxy.daemon import journal, measure, requirements, web, wiring
from ipvsproxy.daemon import log as logs
from ipvsproxy.daemon import source as sources
from ipvsproxy.daemon.announcer import Announcer
from ipvsproxy.daemon.engine import Engine
from ipvsproxy.daemon.events import Recorder
from ipvsproxy.daemon.mass_deletion import Guard
from ipvsproxy.daemon.metrics import Metrics
from ipvsproxy.daemon.reload import Reloader
from ipvsproxy.daemon.serving import Serving
from ipvsproxy.daemon.signals import Signals
from ipvsproxy.daemon.source import CannotStartError, Source
from ipvsproxy.daemon.staleness import Staleness
from ipvsproxy.daemon.status import Notice, Status
from ipvsproxy.daemon.store import Store
from ipvsproxy.daemon.traffic import Traffic
from ipvsproxy.kernel import host, notify
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import DEVICE
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.service import Event

FAILED = 1
"""Exit status when an address can not be listened on and the configuration says that this is the end, or --init-only failed."""
CANNOT_START = 2
"""Exit status when something is missing that this process can not provide. Nothing was programmed."""
LAST_ANSWERS_S = 0.5
"""For how long a process that was asked to stop still says so to those who ask after its health."""
SCHEDULER_MISSING = "SchedulerMissing"
FIRST_LISTS_S = 20.0
"""How long nothing may come of the first lists before the process gives up, to be started again by whoever supervises it."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def run(config: Config, read_again: Callable[[], Config]) -> int:
    """Serve until a signal ends it; returns the exit status. ``read_again`` does what made ``config``, and raises ConfigError."""
    signals = Signals()
    try:
        return _run(config, _serve(config, read_again, signals))
    finally:
        signals.close()


def set_up(config: Config) -> int:
    """``--init-only``: do what needs more than CAP_NET_ADMIN, and check the rest; returns the exit status."""
    return _run(config, _set_up(config))


def _run(config: Config, main: Coroutine[None, None, int]) -> int:
    logs.set_up(json=config.logging.format.value == "json", verbosity=config.logging.verbosity)
    try:
        return asyncio.run(main)
    except CannotStartError as error:
        for reason in error.reasons:
            sys.stderr.write(f"ipvsproxy: {reason}\n")
        sys.stderr.write("ipvsproxy: nothing was programmed\n")
        return CANNOT_START
    except web.BindError as error:
        sys.stderr.write(f"ipvsproxy: {error}\n")
        return FAILED


async def _serve(config: Config, read_again: Callable[[], Config], signals: Signals) -> int:
    signals.install(on_hangup=lambda: None)  # the file is read soon enough
    for notice in config.notices:
        log.warning("configuration", notice=str(notice))
    if config.without_effect:
        log.info("accepted without effect", settings=list(config.without_effect))
    metrics = Metrics()
    source = await sources.make(config, metrics)
    with requirements.only_instance():
        async with requirements.running_kernel(metrics.applied) as kernel:
            await _serve_on(kernel, config, source=source, metrics=metrics, read_again=read_again, signals=signals)
    log.info("stopped; the kernel stays as it is")
    return 0


async def _serve_on(
    kernel: KernelThread[NodeKernel],
    config: Config,
    *,
    source: Source,
    metrics: Metrics,
    read_again: Callable[[], Config],
    signals: Signals,
) -> None:
    requirements.demand(host.missing_settings())
    await kernel.call(requirements.demand_usable_addresses, kernel.target)
    programs = await kernel.call(requirements.usable_programs, kernel.target)
    store = Store(started_s=time.time(), guard=Guard(config.source.mass_deletion_percent))
    staleness = Staleness(lambda: source.statuses, limit_s=config.servers.stale_watch_s, clock=time.monotonic)
    status = Status(
        families=programs,
        sync_period_s=config.ipvs.sync_period_s,
        clock=time.monotonic,
        wall_clock=time.time,
        stale=staleness.stale,
        stale_turns_away=config.servers.stale_watch_unhealthy,
    )
    recorder = Recorder(node_name=config.node_name, post=source.post, on_outcome=metrics.announced)
    announcer = Announcer(node_name=config.node_name, recorder=recorder, store=store, status=status)
    serving = Serving(config, status, metrics, announcer)
    choices = wiring.choices(config, programs, await _usable_scheduler(kernel, status, config))
    engine = Engine(
        settings=choices.settings,
        translation=choices.translation,
        policy=choices.policy,
        store=store,
        kernel=kernel,
        watcher=serving,
    )

    async def reconfigure(new: Config) -> None:
        _set_up_process(new)
        serving.reconfigure(new)
        status.sync_period_s = new.ipvs.sync_period_s
        engine.reconfigure(*wiring.choices(new, programs, await _usable_scheduler(kernel, status, new)))

    reloader = Reloader(config, read_again, reconfigure)
    signals.install(reloader.ask)
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
    announcer.start()
    _set_oom_score(config.oom_score_adj)
    log.info(
        "starting",
        node=config.node_name,
        scheduler=choices.translation.scheduler,
        families=[family.label for family in programs],
        iptables=sorted({program.variant for program in programs.values()}),
    )

    def deliver(events: Sequence[Event]) -> None:
        journal.tell_received(events)
        store.deliver(events, time.monotonic())
        for kind, doubt in store.doubts.items():
            source.list_again(kind, doubt.due_s)
        status.node = store.node(config.node_name)
        engine.changed()

    # Interfaces are followed before they are read: nothing falls in between.
    following = _follow_interfaces(engine, kernel.target)
    first_lists = _await_first_lists(store, source)
    work = (following, source.run(deliver), engine.run(), staleness.run(), recorder.run(), first_lists, reloader.run())
    await _until_stopped(signals.stopping, status, work, serving.servers())


async def _usable_scheduler(kernel: KernelThread[NodeKernel], status: Status, config: Config) -> str:
    """The scheduler to use; ``status`` tells if it is not the one that was asked for."""
    name, why_not = await kernel.call(requirements.usable_scheduler, kernel.target, config.ipvs.scheduler)
    status.notices[:] = [notice for notice in status.notices if notice.reason != SCHEDULER_MISSING]
    if why_not:
        status.notices.append(Notice(SCHEDULER_MISSING, f"{why_not}; {name} is used instead"))
        log.error("scheduler is not used", reason=why_not, used=name)
    return name


async def _set_up(config: Config) -> int:
    """Load modules, see whether all is there, and write the kernel settings that are not as they should be."""
    async with requirements.running_kernel() as kernel:
        await kernel.call(requirements.demand_usable_addresses, kernel.target)
        programs = await kernel.call(requirements.usable_programs, kernel.target)
        name, _ = await kernel.call(requirements.usable_scheduler, kernel.target, config.ipvs.scheduler)
        wanted = wiring.choices(config, programs, name).settings.sysctls
        seen = await kernel.call(kernel.target.observe, (), (), [item.path for item in wanted])
        values = seen.sysctls or {}
        missing = [item for item in wanted if not item.is_met_by(values.get(item.path, ""))]
        outcomes = await kernel.call(kernel.target.apply, [Operation(Verb.SET, item) for item in missing])
    for item, outcome in zip(missing, outcomes, strict=True):
        if outcome.error:
            log.error("kernel setting could not be written", error=outcome.error)
        else:
            log.info("kernel setting written", path=item.path, value=item.value, before=values.get(item.path, ""))
    failed = sum(bool(outcome.error) for outcome in outcomes)
    log.info("set up", settings=len(wanted), written=len(outcomes) - failed, failed=failed)
    return FAILED if failed else 0


def _set_up_process(config: Config) -> None:
    """What of the configuration concerns this process alone."""
    logs.set_up(json=config.logging.format is LogFormat.JSON, verbosity=config.logging.verbosity)
    _set_oom_score(config.oom_score_adj)


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
    """Give up when there is nothing to serve: a supervisor's restart is more visible than a process that waits for ever.

    A list that is long, or slow, is waited for as long as its pages come: begun anew, it would only take longer.
    """
    loop = asyncio.get_running_loop()
    heard_s = loop.time()
    while True:
        await asyncio.sleep(heard_s + FIRST_LISTS_S - loop.time())
        if store.is_complete:
            return
        statuses = source.statuses
        last_s = max((statuses[kind].contact_s or 0 for kind in store.missing if kind in statuses), default=0)
        if last_s <= heard_s:
            missing = ", ".join(f"{kind}s" for kind in store.missing)
            raise CannotStartError(f"no complete list of {missing} within {FIRST_LISTS_S:.0f} s from {source.describe()}")
        heard_s = last_s


async def _until_stopped(
    stopping: asyncio.Event,
    status: Status,
    work: Iterable[Coroutine[None, None, None]],
    servers: Iterable[Coroutine[None, None, None]],
) -> None:
    """Run until asked to stop, or until one of them fails: what it raised is raised here.

    Servers stop last, and tell of it: those who are asked to stop answer for ``LAST_ANSWERS_S`` that this node is none to send
    traffic to. The kernel goes on serving it.
    """
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
        last_answers_s = LAST_ANSWERS_S if stopper.done() and answering else 0
        await _end([stopper, *working])
        await asyncio.sleep(last_answers_s)
        await _end(answering)


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
