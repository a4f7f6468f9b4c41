"""The requirements for programming the kernel.

The requirements are privileges, kernel features, iptables, a scheduler, and no second ipvsproxy process. If requirements are
missing, the process ends with a sentence for each missing requirement. With ``--init-only``, the process changes the node so that
as many requirements as possible are met, and then ends.
"""

import asyncio
import contextlib
import errno
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from ipvsproxy.config.settings import Choices, Config, Drivers
from ipvsproxy.daemon.base.cannot_start import CannotStartError
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import Bucket
from ipvsproxy.daemon.loop.reader import Kernel
from ipvsproxy.daemon.process import lifecycle
from ipvsproxy.daemon.process.lifecycle import Signals
from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.backends import ChosenBackend
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.host import Missing
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import variant as iptables_variant
from ipvsproxy.kernel.iptables.iptables_driver import Program
from ipvsproxy.kernel.node_kernel import NodeKernel
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.kernel.thread import SLOW_S, KernelThread
from ipvsproxy.model.kernel import TUNNEL_RECORD, parse_record
from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Backend
from ipvsproxy.model.sets import IP_SETS
from ipvsproxy.reconcile.removal import own_objects
from ipvsproxy.translate import skeleton
from ipvsproxy.translate.translation_settings import LocalMode, device_flags
from ipvsproxy.translate.view import are_tunnels_down, shared_tunnel, without_direct_return

FALLBACK_SCHEDULER = "rr"
"""The scheduler that is used if the kernel lacks the configured scheduler, because any scheduler is better than none."""

DELAYS_S: Sequence[float] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5)
"""The pauses between the attempts at one step of the start."""

RULES_PATIENCE_S = 2.0
"""The longest time for which a program of iptables may delay other work; the program takes some tens of milliseconds if the lock
of iptables is free."""

SLOW_LOG_S = 60.0
"""The minimum time between two log lines about a slow kernel, in seconds."""

T = TypeVar("T")


def give_up(kernel: NodeKernel, *, api_servers: Collection[RealServerKey], allowed: Collection[Network]) -> list[str]:
    """Remove objects of ipvsproxy that hide the given API servers from this node.

    Returns one sentence for each removal and each failed removal. If a virtual server could not be removed, its witnesses (the
    objects which show that it belongs to ipvsproxy) are kept.

    Raises:
        KernelError: the sets of the other backend could not be read.
    """
    former = kernel.former_entries({one.address.family for one in api_servers})
    observed = kernel.observe(tuple(IP_SETS), {one.address.family for one in api_servers}, ())
    todo = own_objects.give_up(observed, former, api_servers, allowed)
    outcomes = kernel.apply(todo.virtual_servers)
    if not any(outcome.error for outcome in outcomes):
        outcomes += kernel.apply(todo.witnesses)
    return [outcome.error or str(outcome.operation) for outcome in outcomes]


def end_direct_return(kernel: Kernel) -> bool:
    """Restore what an earlier process has changed for direct return.

    If the record of these changes cannot be read, nothing is restored, and the start continues. Returns false if a tunnel device
    may be up; rules must then guard the device.
    """
    try:
        if not parse_record(SysctlDriver().observe([TUNNEL_RECORD]).get(TUNNEL_RECORD, "")):
            return True
    except KernelError as error:
        log.error("kernel_setting_not_restored", path=TUNNEL_RECORD, error=str(error))
        return False
    observed = kernel.observe((), (), [TUNNEL_RECORD])
    if not (todo := without_direct_return(observed)):
        reason = "; ".join(observed.errors) or "another program has an address on a tunnel device"
        log.error("kernel_setting_not_restored", path=TUNNEL_RECORD, error=reason)
    outcomes = kernel.apply(todo)
    for outcome in outcomes:
        path = outcome.operation.item.key
        if outcome.error:
            log.error("kernel_setting_not_restored", path=path, error=outcome.error)
        else:
            log.info("kernel_setting_restored", path=path, hint="this node has no direct return any more")
    return bool(outcomes) and are_tunnels_down(outcomes)


def choices(config: Config, programs: Mapping[Family, Program], scheduler: str) -> Choices:
    """The settings of the event loop, made from the configuration and the facts about this host.

    ``scheduler`` is the configured scheduler, or a replacement if the kernel does not have the configured scheduler.
    """
    return config.on_host(
        {family: program.random_fully for family, program in programs.items()},
        scheduler,
        next((program.backend for program in programs.values()), Backend.IPTABLES),
        config.sysctls(host.kernel_version(), host.processor_count()),
    )


def demand(missing: Collection[Missing]) -> None:
    """Continue only if all requirements are met.

    Raises:
        CannotStartError: a requirement is missing.
    """
    if missing:
        raise CannotStartError(*missing)


@contextlib.asynccontextmanager
async def running_kernel(
    chosen: Drivers,
    on_applied: Callable[[Sequence[Outcome], float], None] = lambda _outcomes, _duration_s: None,
    on_late_rules: Callable[[], None] = lambda: None,
    *,
    listen: bool = False,
) -> AsyncIterator[KernelThread[NodeKernel]]:
    """Check the requirements, then run the kernel thread until the ``async with`` block ends.

    ``chosen`` names the drivers to use. All other arguments are passed to ``NodeKernel``; ``on_late_rules`` is called in the
    event loop.

    Raises:
        CannotStartError: a requirement is missing.
    """
    backend = await choose_backend(chosen.rules_backend, chosen.modules)
    make = functools.partial(
        NodeKernel,
        skeleton.CHAINS,
        skeleton.JUMPS,
        on_applied,
        chosen=backend,
        rules_patience_s=RULES_PATIENCE_S,
        route_protocol=chosen.route_protocol,
        on_late_rules=functools.partial(_call_in, asyncio.get_running_loop(), on_late_rules),
        listen=listen,
    )
    slow = Bucket(1, SLOW_LOG_S, time.monotonic())
    kernel = await until_answered(lambda: logging_wait("open_kernel_sockets", KernelThread.start(make, lambda: _log_slow(slow))))
    try:
        yield kernel
    finally:
        kernel.stop()


async def choose_backend(asked: Backend, also: Sequence[str] = ()) -> ChosenBackend:
    """Choose the backend of rules and sets, check its requirements, and log the choice.

    ``also`` are kernel modules that are loaded together with the backend's modules.

    Raises:
        CannotStartError: a requirement is missing.
    """
    choice = await until_answered(lambda: asyncio.to_thread(backends.choose, asked))
    runs_iptables = choice.backend is Backend.IPTABLES
    demand(host.missing_privileges(runs_iptables=runs_iptables))
    older = host.modules_of_older_kernels(host.kernel_version())
    complaint = await logging_wait(
        "load_modules", asyncio.to_thread(host.load_modules, (*backends.MODULES[choice.backend], *older, *also))
    )
    if missing := host.missing_features():
        raise CannotStartError(*missing, *filter(None, [complaint]))
    if asked is not Backend.IPTABLES:
        log.info("rules_backend_chosen", backend=choice.backend.value, reason=choice.reason)
    if not runs_iptables:
        return ChosenBackend(choice.backend)
    variant = await until_answered(
        lambda: logging_wait("choose_iptables_variant", asyncio.to_thread(iptables_variant.choose, skeleton.CHAINS))
    )
    log.info("iptables_variant_chosen", variant=variant.variant.value, reason=variant.reason)
    if variant.left_behind:
        hint = "packets meet them, too; they are removed once the rules of the used variant are in force"
        log.warning("rules_left_in_other_variant", variant=variant.left_behind.value, hint=hint)
    return ChosenBackend(choice.backend, variant.commands)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed, so no task waits for the call
        loop.call_soon_threadsafe(callback)


@contextlib.contextmanager
def only_instance() -> Iterator[None]:
    """Hold the exclusive right to program the network namespace of this process.

    Raises:
        CannotStartError: another ipvsproxy process holds the exclusive right.
    """
    try:
        instance = Instance()
    except KernelError as error:
        raise CannotStartError(error.detail) from error
    with contextlib.closing(instance):
        if instance.squatter:
            hint = "this process is not ipvsproxy, and any process can take the name of the lock: the start goes on"
            log.warning("lock_held_by_other_process", lock="@ipvsproxy", held_by=instance.squatter, hint=hint)
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(instance.fileno(), instance.dismiss)
        try:
            yield
        finally:
            loop.remove_reader(instance.fileno())


def _log_slow(bucket: Bucket) -> None:
    if bucket.take(time.monotonic()):
        log.warning("kernel_slow", after_s=SLOW_S, hint="an answer was lost, or the node is overloaded; the request is repeated")


async def logging_wait(step: str, work: Awaitable[T]) -> T:
    """Await one step of the start; returns the result of the step.

    If the step takes longer than ``SLOW_S``, one line is logged. After the start, the kernel's thread reports slow calls itself.
    """
    hint = "the start changes nothing before this step ends"
    tell = functools.partial(log.warning, "start_step_waits", step=step, after_s=SLOW_S, hint=hint)
    waits = asyncio.get_running_loop().call_later(SLOW_S, tell)
    try:
        return await work
    finally:
        waits.cancel()


async def until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """The kernel's answer to a query on which the start depends. If the kernel does not answer, the query is repeated.

    Raises:
        CannotStartError: the kernel has not answered within about ``sum(DELAYS_S)`` seconds.
    """
    for delay_s in (*DELAYS_S, None):
        try:
            return await ask()
        except KernelError as error:
            if delay_s is None:
                raise CannotStartError(error) from error
            hint = "the start changes nothing before this step succeeds"
            log.warning("start_step_failed", error=str(error), retry_in_s=delay_s, hint=hint)
            await asyncio.sleep(delay_s)
    raise AssertionError("the last attempt has returned or raised")


async def demand_usable_node(kernel: KernelThread[NodeKernel], local_mode: LocalMode) -> Mapping[Family, Program]:
    """Check that addresses can be read, the name ``kube-ipvs0`` is available, and at least one IP family can be served.

    The name is not available if an interface of another kind has the name. Returns the iptables program of each IP family that
    can be served. Logs which features the kernel lacks; ``local_mode`` decides which features are needed to recognise this node's
    pods.

    Raises:
        CannotStartError: a condition for the start is not met, and waiting would not help.
    """

    async def demand_usable_addresses() -> None:
        try:
            await kernel.call(lambda node: node.interface_addresses())
        except KernelError as error:
            if error.errno == errno.EEXIST:  # an interface of another kind has the name of ipvsproxy's device
                raise CannotStartError(error.detail) from error
            raise

    await until_answered(demand_usable_addresses)
    if lacking := await until_answered(lambda: kernel.call(lambda node: node.lacking(by_interface=local_mode.is_by_interface))):
        names = [one.name for one in lacking]
        log.info("kernel_lacks", features=names, hint="docs/compatibility.md, section Kernels, describes the consequences")
    return await until_answered(lambda: kernel.call(usable_programs))


def usable_scheduler(kernel: NodeKernel, configured: str) -> tuple[str, str]:
    """The usable scheduler: the configured scheduler, or the fallback with the reason why the configured scheduler is unusable.

    Raises:
        CannotStartError: the configured scheduler and the fallback are both unusable.
        KernelError: the kernel could not answer at the moment.
    """
    reasons: list[str] = []
    for name in dict.fromkeys((configured, FALLBACK_SCHEDULER)):
        reason = kernel.ipvs.why_unusable(name)
        if not reason:
            return name, "".join(reasons)
        reasons.append(reason)
    raise CannotStartError(*reasons)


def usable_programs(kernel: NodeKernel) -> Mapping[Family, Program]:
    """The programs that write the rules, for each IP family that this host can serve.

    Some hosts can serve only one of the two families. A family is left out only if it is certain that its rules cannot be
    written, or that IPVS does not support the family. In case of doubt, for example while another process holds the iptables
    lock, the family is served.

    Raises:
        CannotStartError: no IP family can be served, or a set type is missing.
        KernelError: the kernel or a program could not answer at the moment.
    """
    if kernel.backend is Backend.IPTABLES:
        demand(host.missing_set_types())
    programs: dict[Family, Program] = {}
    given_up: dict[Family, str] = {}
    for family in Family:
        refusal = kernel.rules.try_writing(family)
        if refusal and refusal.is_certain:
            given_up[family] = refusal.reason
        elif family is Family.IPV6 and not kernel.ipvs.has_ipv6():
            given_up[family] = "IPVS in this kernel has no IPv6: use a kernel with CONFIG_IP_VS_IPV6"
        else:
            try:
                programs[family] = kernel.rules.program(family)
            except KernelError as error:
                if error.errno:  # the program that writes rules could not be started, or hangs
                    raise
                given_up[family] = error.detail
        if reason := given_up.get(family):
            hint = "the family's kernel objects stay as they are"
            log.warning("family_not_served", family=family.label, reason=reason, hint=hint)
        elif refusal:
            log.warning("rules_not_writable_yet", family=family.label, reason=refusal.reason, hint="the family is served")
    if not programs:
        raise CannotStartError(*(f"{family.label} cannot be served: {reason}" for family, reason in given_up.items()))
    return programs


def init_only(config: Config) -> int:
    """Prepare this node for ipvsproxy; returns the exit status.

    If the process is stopped before the end, the exit status is a failure, because the node is not prepared.
    """
    return lifecycle.run(config, functools.partial(_prepare_until_stopped, config), end=lambda _: os._exit(lifecycle.FAILED))


async def _prepare_until_stopped(config: Config, signals: Signals) -> int:
    preparing, stopping = asyncio.create_task(_prepare(config)), asyncio.create_task(signals.stopping.wait())
    await asyncio.wait((preparing, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if preparing.done():
        return preparing.result()
    preparing.cancel()
    log.error("stopped", hint="the node is not fully prepared")
    return lifecycle.FAILED


async def _prepare(config: Config) -> int:
    """Load kernel modules, check all requirements, and write the sysctls that differ from their desired values."""
    async with running_kernel(config.drivers) as kernel:
        await demand_usable_node(kernel, config.translation.detect_local)
        await until_answered(lambda: kernel.call(lambda node: usable_scheduler(node, config.translation.scheduler)))
        if not config.takes_direct_return:
            await kernel.call(end_direct_return)
        desired = list(config.sysctls(host.kernel_version(), host.processor_count()))
        observation = await kernel.call(lambda node: node.observe((), (), [item.path for item in desired]))
        values = observation.sysctls or {}
        # This command does not bring up the tunnel devices. Only ``run`` brings them up, after it has written the rules.
        shared = shared_tunnel(observation.interface_addresses or ())
        devices = [device_flags(family) for family in Family]
        desired = [one for one in desired if not (one.for_tunnels and (shared or one.path in devices))]
        pending = [item for item in desired if not item.is_met_by(values.get(item.path, ""))]
        outcomes = await kernel.call(lambda node: node.apply([Operation(Verb.SET, item) for item in pending]))
    for item, outcome in zip(pending, outcomes, strict=True):
        if outcome.error:
            log.error("kernel_setting_not_written", error=outcome.error)
        else:
            log.info("kernel_setting_written", path=item.path, value=item.value, before=values.get(item.path, ""))
    failed = sum(bool(outcome.error) for outcome in outcomes)
    log.info("node_prepared", settings=len(desired), written=len(outcomes) - failed, failed=failed)
    return lifecycle.FAILED if failed else 0
