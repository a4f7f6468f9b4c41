"""Runs the iptables driver of each family in a separate thread: an iptables program that hangs or waits blocks no other work.

Rule 1: a call waits at most ``patience_s`` for an iptables program. If the call that started the family's last program stopped
waiting for it, the limit is ``SHORT_PATIENCE_S``. The first call that reads rules always waits up to ``patience_s``. To read
rules, iptables needs no lock. If the first call that reads rules stopped waiting too early, the next attempt to write would
discard the late answer. The rules would then stay unknown for as long as writes fail.
Rule 2: if a call stops waiting before its program has ended, the program continues to run. The operation of the call counts as
failed (EINPROGRESS) until the program ends. The next attempt at the same operation returns the outcome of the earlier program.
Rule 3: only one program of each IP family runs at a time. The programs of different IP families do not wait for each other.
"""

import concurrent.futures
import contextlib
import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables.iptables_driver import IptablesDriver, Program, Refusal
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import ChainKey, Jump, ObservedSkeleton, Skeleton

SHORT_PATIENCE_S = 0.1
_READING = "observe"

T = TypeVar("T")


class _UnderWay(NamedTuple):
    """A call in an iptables thread; the call may continue after its caller has stopped waiting.

    ``question`` identifies the call.
    """

    question: object
    future: concurrent.futures.Future[Any]


class RulesDriver:
    """Reads and writes the rules of both IP families, in the network namespace of the thread that creates this object.

    The methods are the same as in ``IptablesDriver``; only one thread may call the methods. ``patience_s`` is the longest time
    that a call waits for a program; None means no limit.
    """

    def __init__(
        self,
        *,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        commands: Mapping[Family, str] = iptables.COMMANDS,
        patience_s: float | None = None,
        on_late_end: Callable[[], None] = lambda: None,
    ) -> None:
        """If a method stops waiting for a program, ``on_late_end`` is called in another thread when this program ends."""
        self._on_late_end = on_late_end
        self._patience_s = patience_s
        self._drivers = {family: IptablesDriver(chains=chains, jumps=jumps, commands=commands) for family in Family}
        # Each executor starts its thread at the first call, so this thread runs in the network namespace of the calling thread.
        self._threads = {family: concurrent.futures.ThreadPoolExecutor(1, f"iptables {family.label}") for family in Family}
        self._under_way: dict[Family, _UnderWay] = {}
        self._slow: set[Family] = set()

    def close(self) -> None:
        """End the threads, without waiting for a running program."""
        for thread in self._threads.values():
            thread.shutdown(wait=False)

    def known_program(self, family: Family) -> Program | None:
        """The iptables program for a family, if the program's version is already known. Starts no program."""
        return self._drivers[family].known_program(family)

    def program(self, family: Family) -> Program:
        """As in ``IptablesDriver``.

        Raises:
            KernelError: the method of the same name in ``IptablesDriver`` failed, or iptables took too long.
        """
        return self.known_program(family) or self._ask(family, "program", self._drivers[family].program, family)

    def usable(self, family: Family) -> Refusal | None:
        """As in ``IptablesDriver``. If the program takes too long, returns a refusal that is not certain."""
        return self._try(family, self._drivers[family].usable)

    def try_writing(self, family: Family) -> Refusal | None:
        """As in ``IptablesDriver``. If the program takes too long, returns a refusal that is not certain."""
        return self._try(family, self._drivers[family].try_writing)

    def _try(self, family: Family, method: Callable[[Family], Refusal | None]) -> Refusal | None:
        try:
            return self._ask(family, method.__name__, method, family)
        except KernelError as error:
            return Refusal(error.detail, is_certain=False)

    def rules_with(self, text: str, families: Collection[Family]) -> list[str]:
        """As in ``IptablesDriver``."""
        rules: list[str] = []
        for family in families:
            with contextlib.suppress(KernelError):
                rules += self._ask(family, ("rules", text), self._drivers[family].rules_with, text, (family,))
        return rules

    def observe(self, family: Family) -> ObservedSkeleton:
        """As in ``IptablesDriver``.

        Raises:
            KernelError: the method of the same name in ``IptablesDriver`` failed, or iptables took too long.
        """
        return self._ask(family, _READING, self._drivers[family].observe, family)

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """As in ``IptablesDriver``.

        An operation that takes too long fails with EINPROGRESS, while the operation's program continues to run.
        """
        begun: list[tuple[Operation, Family, _UnderWay | KernelError]] = []
        for operation in operations:
            if isinstance(operation.item, Skeleton):
                family = operation.item.family
                try:
                    under_way = self._begin(family, operation, self._drivers[family].apply, [operation])
                except KernelError as error:
                    begun.append((operation, family, error))
                else:
                    begun.append((operation, family, under_way))
        outcomes: list[Outcome] = []
        for operation, family, started in begun:  # from here on, the programs of all families are running
            try:
                if isinstance(started, KernelError):
                    raise started
                outcomes += self._wait(family, started)
            except KernelError as error:
                outcomes.append(Outcome(operation, error=str(error), errno=error.errno))
        return outcomes

    def _ask(self, family: Family, question: object, method: Callable[..., T], *arguments: object) -> T:
        answer: T = self._wait(family, self._begin(family, question, method, *arguments))
        return answer

    def _begin(self, family: Family, question: object, method: Callable[..., T], *arguments: object) -> _UnderWay:
        """Raises KernelError if an earlier program of the same family is still running, or if no thread can be started."""
        before = self._under_way.get(family)
        if before is not None:
            if before.question == question:
                return before
            if not before.future.done():
                raise _in_progress(family)
            del self._under_way[family]
        try:
            return _UnderWay(question, self._threads[family].submit(method, *arguments))
        except RuntimeError as error:
            raise KernelError(action="start a thread for iptables", errno=errno.EAGAIN, detail=str(error)) from error

    def _wait(self, family: Family, under_way: _UnderWay) -> Any:
        patience_s = self._patience_s
        is_reading = under_way.question == _READING
        if patience_s is not None and family in self._slow and not (is_reading and family not in self._under_way):
            patience_s = min(patience_s, SHORT_PATIENCE_S)
        try:
            answer = under_way.future.result(patience_s)
        except concurrent.futures.TimeoutError:
            if family not in self._under_way:
                self._under_way[family] = under_way
                self._slow.add(family)
                under_way.future.add_done_callback(lambda _: self._on_late_end())
            raise _in_progress(family) from None
        except BaseException:
            self._settle(family, is_reading=is_reading)
            raise
        self._settle(family, is_reading=is_reading)
        return answer

    def _settle(self, family: Family, *, is_reading: bool) -> None:
        if self._under_way.pop(family, None) is None and not is_reading:
            self._slow.discard(family)


def _in_progress(family: Family) -> KernelError:
    detail = (
        f"a program of {family.label} is still running: it waits for the lock of iptables, or hangs; nothing else waits for it"
    )
    return KernelError(action="iptables", errno=errno.EINPROGRESS, detail=detail)
