"""What must be there before anything is programmed: privileges, kernel features, iptables, a scheduler, nobody else at work.

What is missing ends the process with a sentence for each thing.
"""

import asyncio
import contextlib
import errno
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from ipvsproxy.daemon.base.rate_limit import Bucket
from ipvsproxy.daemon.sources.source import CannotStartError
from ipvsproxy.kernel import host, iptables_variant, scheduler
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.host import Missing
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import Program, Refusal
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import SLOW_S, KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Outcome
from ipvsproxy.translate import skeleton

FALLBACK_SCHEDULER = "rr"
"""For when the kernel has not the one that was asked for: served in another order is better than not served."""

DELAYS_S: Sequence[float] = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5)
"""Between two tries of a step of the start that failed for a moment."""

RULES_PATIENCE_S = 2.0
"""How long anything else waits for a program of iptables. It takes some tens of milliseconds where nobody holds its lock."""

SLOW_LOG_S = 60.0
"""Between two log lines about a kernel that answers slowly."""

T = TypeVar("T")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def demand(missing: Collection[Missing]) -> None:
    """Go on only if nothing is missing.

    Raises:
        CannotStartError: something is.
    """
    if missing:
        raise CannotStartError(*missing)


@contextlib.asynccontextmanager
async def running_kernel(
    on_applied: Callable[[Sequence[Outcome], float], None] = lambda _outcomes, _duration_s: None,
    on_late_rules: Callable[[], None] = lambda: None,
) -> AsyncIterator[KernelThread[NodeKernel]]:
    """The kernel thread, once all that it needs is there.

    ``on_applied`` and ``on_late_rules`` are as for ``NodeKernel``; the latter is called in the loop.

    Raises:
        CannotStartError: something is not there.
    """
    demand(host.missing_privileges())
    complaint = await telling_of_wait("load_modules", asyncio.to_thread(host.load_modules))
    missing = host.missing_features()
    if missing:
        raise CannotStartError(*missing, *((f"modprobe says: {complaint}",) if complaint else ()))
    choice = await until_answered(
        lambda: telling_of_wait("choose_iptables_variant", asyncio.to_thread(iptables_variant.choose, skeleton.CHAINS))
    )
    make = functools.partial(
        NodeKernel,
        skeleton.CHAINS,
        skeleton.JUMPS,
        on_applied,
        commands=choice.commands,
        rules_patience_s=RULES_PATIENCE_S,
        on_late_rules=functools.partial(_call_in, asyncio.get_running_loop(), on_late_rules),
    )
    slow = Bucket(1, SLOW_LOG_S, time.monotonic())
    kernel = await until_answered(
        lambda: telling_of_wait("open_kernel_sockets", KernelThread.start(make, lambda: _log_slow(slow)))
    )
    log.info("iptables_variant_chosen", variant=choice.variant.value, reason=choice.reason)
    if choice.left_behind:
        hint = "packets meet them as well; they are removed once those of the variant that is used are in force"
        log.warning("rules_left_in_other_variant", variant=choice.left_behind.value, hint=hint)
    try:
        yield kernel
    finally:
        kernel.stop()


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it
        loop.call_soon_threadsafe(callback)


@contextlib.contextmanager
def only_instance() -> Iterator[None]:
    """The right to program this network namespace.

    Raises:
        CannotStartError: another ipvsproxy has it.
    """
    try:
        instance = Instance()
    except KernelError as error:
        raise CannotStartError(error.detail) from error
    with contextlib.closing(instance):
        if instance.squatter:
            log.warning(
                "lock_held_by_other_process",
                lock="@ipvsproxy",
                held_by=instance.squatter,
                hint="it is no ipvsproxy, and any process can take a name: it is passed by",
            )
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
        log.warning("kernel_slow", after_s=SLOW_S, hint="an answer was lost, or the node is overloaded; the question is repeated")


async def telling_of_wait(step: str, work: Awaitable[T]) -> T:
    """What this step of the start gives. It is logged, once, when the step takes longer than ``SLOW_S``.

    Later steps are calls of the kernel's thread, which tells of them itself.
    """
    waits = asyncio.get_running_loop().call_later(SLOW_S, _log_wait, step)
    try:
        return await work
    finally:
        waits.cancel()


def _log_wait(step: str) -> None:
    log.warning("start_step_waits", step=step, after_s=SLOW_S, hint="nothing is changed before it ends")


async def until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer to a question that the start depends on. The kernel that could not answer just now is asked again.

    Raises:
        CannotStartError: it could not within some ``sum(DELAYS_S)`` seconds.
    """
    for delay_s in DELAYS_S:
        try:
            return await ask()
        except KernelError as error:
            log.warning("start_step_failed", error=str(error), retry_in_s=delay_s, hint="nothing is changed before it succeeds")
            await asyncio.sleep(delay_s)
    try:
        return await ask()
    except KernelError as error:
        raise CannotStartError(error) from error


async def demand_usable_node(kernel: KernelThread[NodeKernel]) -> Mapping[Family, Program]:
    """Go on only if addresses can be read, no interface of another kind has the name of our device, and a family can be served.

    Returns the iptables program of each family that can be served.

    Raises:
        CannotStartError: it is not so, and will not be before somebody changes something.
    """
    await until_answered(functools.partial(_demand_usable_addresses, kernel))
    return await until_answered(lambda: kernel.call(usable_programs))


async def _demand_usable_addresses(kernel: KernelThread[NodeKernel]) -> None:
    try:
        await kernel.call(lambda node: node.interface_addresses())
    except KernelError as error:
        if error.errno == errno.EEXIST:  # an interface of another kind has the name of our device
            raise CannotStartError(error.detail) from error
        raise


def usable_scheduler(kernel: NodeKernel, wanted: str) -> tuple[str, str]:
    """The scheduler to use: the wanted one, or the fall-back and why the wanted one cannot be had.

    Raises:
        CannotStartError: neither can be had.
        KernelError: the kernel could not be asked just now.
    """
    reasons: list[str] = []
    for name in dict.fromkeys((wanted, FALLBACK_SCHEDULER)):
        reason = scheduler.why_unusable(kernel.ipvs, name)
        if not reason:
            return name, "".join(reasons)
        reasons.append(reason)
    raise CannotStartError(*reasons)


def usable_programs(kernel: NodeKernel) -> Mapping[Family, Program]:
    """The iptables program of each family that this host can serve; one family is enough.

    A family is given up only where the kernel or the host says for certain that it takes no rules. Where it could not say so just
    now, as while somebody holds the lock of iptables, the family is served, and its rules are written when that can be done.

    Raises:
        CannotStartError: there is none, or a set type is missing.
        KernelError: the kernel or a program could not be asked just now.
    """
    demand(host.missing_set_types())
    programs: dict[Family, Program] = {}
    given_up: dict[Family, str] = {}
    for family in Family:
        refusal = kernel.iptables.try_writing(family)
        if refusal is None or not refusal.is_certain:
            try:
                programs[family] = kernel.iptables.program(family)
            except KernelError as error:
                if error.errno:  # it could not be started just now, or hangs
                    raise
                refusal = Refusal(error.detail, is_certain=True)
        if refusal and refusal.is_certain:
            given_up[family] = refusal.reason
            log.warning("family_not_served", family=family.label, reason=refusal.reason, hint="what is there of it stays")
        elif refusal:
            log.warning("rules_not_writable_yet", family=family.label, reason=refusal.reason, hint="the family is served")
    if not programs:
        raise CannotStartError(*(f"{family.label} cannot be served: {reason}" for family, reason in given_up.items()))
    return programs
