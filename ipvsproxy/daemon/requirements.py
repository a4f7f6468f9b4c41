"""What must be there before anything is programmed: privileges, kernel features, iptables, a scheduler, nobody else at work.

What is missing ends the process with a sentence for each thing.
"""

import asyncio
import contextlib
import errno
import functools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from ipvsproxy.daemon.source import CannotStartError
from ipvsproxy.kernel import host, iptables_variant, scheduler
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.kernel.host import Missing
from ipvsproxy.kernel.instance import Instance
from ipvsproxy.kernel.iptables import Program
from ipvsproxy.kernel.node import NodeKernel
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Outcome
from ipvsproxy.translate import skeleton

FALLBACK_SCHEDULER = "rr"
"""For when the kernel has not the one that was asked for: served in another order is better than not served."""

RETRY_PAUSES_S: Sequence[float] = (0.1, 0.4, 1.5)
"""Before a step of the start is tried again that failed for want of something that the host may have a moment later."""
_PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

T = TypeVar("T")

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


def demand(missing: Collection[Missing]) -> None:
    """Go on only if nothing is missing.

    Raises:
        CannotStartError: something is.
    """
    if missing:
        raise CannotStartError(*missing)


def patiently(step: Callable[[], T]) -> T:
    """What comes of a step of the start; tried again after each of ``RETRY_PAUSES_S`` while the kernel has no room for it.

    It blocks meanwhile, for nothing is programmed yet.

    Raises:
        KernelError: it failed each time, or for a reason that does not pass.
    """
    for pause_s in RETRY_PAUSES_S:
        try:
            return step()
        except KernelError as error:
            if error.errno not in _PASSING:
                raise
            log.warning("start_step_failed", error=str(error), retry_after_s=pause_s)
            time.sleep(pause_s)
    return step()


@contextlib.asynccontextmanager
async def running_kernel(
    on_applied: Callable[[Sequence[Outcome], float], None] = lambda _outcomes, _duration_s: None,
) -> AsyncIterator[KernelThread[NodeKernel]]:
    """The kernel thread, once all that it needs is there.

    ``on_applied`` is as for ``NodeKernel``.

    Raises:
        CannotStartError: something is not there.
    """
    demand(host.missing_privileges())
    complaint = await asyncio.to_thread(host.load_modules)
    missing = host.missing_features()
    if missing:
        raise CannotStartError(*missing, *((f"modprobe says: {complaint}",) if complaint else ()))
    try:
        choice = await asyncio.to_thread(patiently, functools.partial(iptables_variant.choose, skeleton.CHAINS))
        make = functools.partial(NodeKernel, skeleton.CHAINS, skeleton.JUMPS, on_applied, commands=choice.commands)
        kernel = await KernelThread.start(functools.partial(patiently, make))
    except KernelError as error:
        raise CannotStartError(error) from error
    log.info("iptables variant chosen", variant=choice.variant.value, reason=choice.reason)
    if choice.left_behind:
        log.warning(
            "rules of ours stand in the other iptables variant too, and packets meet them as well",
            variant=choice.left_behind.value,
            remedy="stop ipvsproxy, run ipvsproxy cleanup, start it again; or restart the node",
        )
    try:
        yield kernel
    finally:
        kernel.stop()


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
                "the lock of this node is held by a stranger, who is not believed", lock="@ipvsproxy", held_by=instance.squatter
            )
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(instance.fileno(), instance.dismiss)
        try:
            yield
        finally:
            loop.remove_reader(instance.fileno())


def demand_usable_addresses(kernel: NodeKernel) -> None:
    """Go on only if addresses can be read, and the name of our device is not that of an interface of another kind.

    Raises:
        CannotStartError: so it is; nothing could be served before somebody renames it.
    """
    try:
        patiently(kernel.interface_addresses)
    except KernelError as error:
        raise CannotStartError(error.detail) from error


def usable_scheduler(kernel: NodeKernel, wanted: str) -> tuple[str, str]:
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


def usable_programs(kernel: NodeKernel) -> Mapping[Family, Program]:
    """The iptables program of each family that this host can serve; one family is enough.

    Raises:
        CannotStartError: there is none, or a set type is missing.
    """
    demand(host.missing_set_types())
    reasons = {family: kernel.iptables.try_writing(family) for family in Family}
    for family, reason in reasons.items():
        if reason:
            log.warning("family is not served", family=family.label, reason=reason)
    programs = {family: kernel.iptables.program(family) for family, reason in reasons.items() if not reason}
    if not programs:
        raise CannotStartError(*(f"{family.label} can not be served: {reason}" for family, reason in reasons.items()))
    return programs
