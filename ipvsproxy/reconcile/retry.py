"""When a failed operation may be tried again."""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ipvsproxy.model.kernel import BoundAddresses, RealServers, SetEntries, VirtualServer, VirtualServerKey
from ipvsproxy.model.plan import Operation, Verb, kind_of
from ipvsproxy.model.real_servers import EvenWeights

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


def delay_s(attempts: int) -> float:
    """How long to wait after so many failures in a row, 1 at least."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts - 1, 16))


class _Failure(NamedTuple):
    desired: object
    attempts: int
    due_s: float


class Retries:
    """Failures by what failed. Each further one doubles the delay, up to ``LONGEST_DELAY_S``. Nothing is ever given up.

    A failure counts for what was wished then; where something else is wished now, the next try is a first one.
    """

    def __init__(self) -> None:
        self._failures: dict[object, _Failure] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, what: object, desired: object, now: float) -> None:
        """Book a failure."""
        last = self._failures.get(what)
        attempts = last.attempts + 1 if last and last.desired == desired else 1
        self._failures[what] = _Failure(desired, attempts, now + delay_s(attempts))

    def wait(self, what: object, desired: object, now: float) -> None:
        """Book an operation that is still under way: ``hasten`` says when it is over, and it counts as no further failure."""
        last = self._failures.get(what)
        attempts = last.attempts if last and last.desired == desired else 0
        self._failures[what] = _Failure(desired, attempts, now + LONGEST_DELAY_S)

    def hasten(self, kind: str) -> None:
        """Try everything of this kind of kernel object now."""
        for what, failure in self._failures.items():
            if isinstance(what, tuple) and what[0] == kind:
                self._failures[what] = failure._replace(due_s=-math.inf)

    def forget(self, what: object) -> None:
        """It succeeded."""
        self._failures.pop(what, None)

    def keep_only(self, planned: Collection[object]) -> None:
        """Forget whatever nobody wants to try again."""
        for what in self._failures.keys() - planned:
            del self._failures[what]

    def may_try(self, what: object, desired: object, now: float) -> bool:
        """Whether this did not fail, or its delay is over."""
        failure = self._failures.get(what)
        return failure is None or failure.desired != desired or failure.due_s <= now

    def next_s(self) -> float | None:
        """When the first of them may be tried again."""
        return min((failure.due_s for failure in self._failures.values()), default=None)

    def due(self, operations: Sequence[Operation], now: float) -> list[Operation]:
        """Leave out what failed a short while ago, and forget what is not among these operations.

        The real servers of a virtual server that is missing wait for it.
        """
        identities = [identity(operation) for operation in operations]
        self.keep_only(frozenset(identities))
        due: list[Operation] = []
        missing: set[VirtualServerKey] = set()
        for what, operation in zip(identities, operations, strict=True):
            item = operation.item
            if isinstance(item, RealServers) and item.virtual_server in missing:
                self.forget(what)  # or it would wake us at a time of its own, for nothing
            elif self.may_try(what, operation, now):
                due.append(operation)
            elif isinstance(item, VirtualServer) and operation.verb is Verb.ADD:
                missing.add(item.key)
        return due


def identity(operation: Operation) -> tuple[str, object]:
    """What a failure is remembered by: the objects, whatever is to be done about them and whatever their value."""
    item = operation.item
    match item:
        case RealServers(keys=EvenWeights()):
            return kind_of(item), item.virtual_server
        case RealServers():
            return kind_of(item), (item.virtual_server, item.keys)
        case SetEntries() | BoundAddresses():
            return kind_of(item), item.keys
        case _:
            return kind_of(item), item.key
