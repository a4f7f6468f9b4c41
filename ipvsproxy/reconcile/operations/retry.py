"""Decides when a failed operation may be tried again."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer, VirtualServerKey

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0


def delay_s(attempts: int) -> float:
    """The delay in seconds after a number of failures in a row (1 or more)."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts - 1, 16))


class _FailedOperation(NamedTuple):
    desired: object
    attempts: int
    due_s: float


class Retries:
    """Failed operations by object. Each further failure doubles the delay, up to ``LONGEST_DELAY_S``. No operation is given up.

    A failure counts for one desired value. An operation with another desired value counts as a first attempt.
    """

    def __init__(self) -> None:
        self._failures: dict[object, _FailedOperation] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, key: object, desired: object, now: float, *, is_running: bool = False) -> None:
        """Record a failure. An operation that is still running does not count as failed: its outcome waits for ``hasten``."""
        last = self._failures.get(key)
        attempts = (last.attempts if last and last.desired == desired else 0) + (not is_running)
        self._failures[key] = _FailedOperation(desired, attempts, now + (LONGEST_DELAY_S if is_running else delay_s(attempts)))

    def hasten(self, kind: str) -> None:
        """Let every operation on this kind of kernel object be tried now."""
        for key, failure in self._failures.items():
            if isinstance(key, tuple) and key[0] == kind:
                self._failures[key] = failure._replace(due_s=-math.inf)

    def forget(self, key: object) -> None:
        """Forget the failures of an object: an operation on it has succeeded."""
        self._failures.pop(key, None)

    def may_try(self, key: object, desired: object, now: float) -> bool:
        """Whether no operation on an object has failed, or the delay is over."""
        failure = self._failures.get(key)
        return failure is None or failure.desired != desired or failure.due_s <= now

    def next_s(self) -> float | None:
        """The time at which the first failed operation may be tried again."""
        return min((failure.due_s for failure in self._failures.values()), default=None)

    def due(
        self, operations: Sequence[Operation], identity: Callable[[Operation], tuple[str, object]], now: float
    ) -> list[Operation]:
        """The operations except those that must wait after a failure. Failures of objects without an operation are forgotten.

        ``identity`` gives the key of a failure. The real servers of a missing virtual server wait for the virtual server.
        """
        identities = [identity(operation) for operation in operations]
        for key in self._failures.keys() - identities:
            del self._failures[key]
        due: list[Operation] = []
        missing: set[VirtualServerKey] = set()
        for key, operation in zip(identities, operations, strict=True):
            item = operation.item
            if isinstance(item, RealServers) and item.virtual_server in missing:
                self.forget(key)  # otherwise its own delay would wake the loop in vain
            elif self.may_try(key, operation, now):
                due.append(operation)
            elif isinstance(item, VirtualServer) and operation.verb is Verb.ADD:
                missing.add(item.key)
        return due
