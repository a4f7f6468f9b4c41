"""Decides when a failed operation may be tried again, and how many real servers may be removed at a time.

The kernel keeps a removed real server on a list for two to three minutes. Each addition of a real server walks the whole list.
The walk takes 0.05 to 0.1 µs for each entry, and packets wait meanwhile (``ip_vs_trash_get_dest`` and
``IP_VS_DEST_TRASH_PERIOD``, net/netfilter/ipvs/ip_vs_ctl.c). After one minute in which a thousand endpoints per second are
replaced, each addition takes 4 ms.

A limit on the number of removals helps in a short burst of changes. In a long burst, the limit soon has no effect, because no
more removals can be postponed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.virtual_servers import RealServers, VirtualServer, VirtualServerKey

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
"""The limits of the delay after a failed operation, in seconds. ``FIRST_DELAY_S`` follows the first failure, and
``LONGEST_DELAY_S`` follows many consecutive failures."""
KEPT_S = 180.0
"""The longest time, in seconds, that a removed real server without connections stays on a list in the kernel."""
ADDED_S = 10.0
"""The number of seconds over which additions of real servers are counted. The more additions within this time, the fewer removed
real servers may be on the kernel's list."""
WALKED = 2_000_000
"""The kernel may walk at most this many list entries in total, for all additions of real servers within ``ADDED_S``. Walking this
many entries in that time takes 1 to 2 % of a processor."""
MOST_KEPT = 10_000
"""The largest allowed number of removed real servers on the kernel's list, if there are few additions. With a list of this
length, an addition takes half a millisecond to one millisecond."""
FEWEST_KEPT = 1_000
"""The limit on removed real servers in the kernel's list never falls below this number, even if there are many additions. If
there are a thousand additions a second, walking these entries takes 5 to 10 % of a processor."""

PATIENT_SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sed", "nq", "fo", "ovf"})
"""Schedulers that skip a real server of weight 0. The schedulers sh, dh and mh refuse clients instead. The behaviour of all other
schedulers is unknown."""
FEW_WAITING = 2
"""In any virtual server, this many real servers without connections may wait for their removal.

If a virtual server has more than ``FEW_WAITING`` desired real servers, the limit is the number of its desired real servers. The
scheduler walks over waiting real servers for each connection.
"""


def delay_s(attempts: int) -> float:
    """The delay in seconds after a number of consecutive failures (1 or more)."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(attempts - 1, 16))


class _FailedOperation(NamedTuple):
    desired: object
    attempts: int
    due_s: float


class Retries:
    """Counts the failures of operations on each object, and decides when a failed operation may be tried again.

    Each further failure doubles the delay, up to ``LONGEST_DELAY_S``. There is no last attempt: an operation is retried until it
    succeeds. A failure counts only for the desired value that was tried; an operation with another desired value is a first
    attempt.
    """

    def __init__(self) -> None:
        self._failures: dict[object, _FailedOperation] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def fail(self, key: object, desired: object, now: float, *, is_running: bool = False) -> None:
        """Record a failure.

        If ``is_running`` is true, the operation has not ended yet, so no failed attempt is counted. The operation's outcome is
        known only when ``hasten`` is called.
        """
        last = self._failures.get(key)
        attempts = (last.attempts if last and last.desired == desired else 0) + (not is_running)
        self._failures[key] = _FailedOperation(desired, attempts, now + (LONGEST_DELAY_S if is_running else delay_s(attempts)))

    def hasten(self, kind: str) -> None:
        """End the delays of all operations on a kind of kernel object, so that these operations may be tried now."""
        for key, failure in self._failures.items():
            if isinstance(key, tuple) and key[0] == kind:
                self._failures[key] = failure._replace(due_s=-math.inf)

    def forget(self, key: object) -> None:
        """Forget the failures of an object, because an operation on the object has succeeded."""
        self._failures.pop(key, None)

    def may_try(self, key: object, desired: object, now: float) -> bool:
        """Whether an operation may be tried now.

        It may be tried if it has not failed with this desired value, or if the delay after its last failure is over.
        """
        failure = self._failures.get(key)
        return failure is None or failure.desired != desired or failure.due_s <= now

    def next_s(self) -> float | None:
        """The earliest time at which a failed operation may be tried again."""
        return min((failure.due_s for failure in self._failures.values()), default=None)

    def due(
        self, operations: Sequence[Operation], identity: Callable[[Operation], tuple[str, object]], now: float
    ) -> list[Operation]:
        """The given operations, except operations that must wait after a failure.

        The failures of an object are forgotten if none of the given operations is about the object. ``identity`` returns the key
        under which the failures of an operation are counted. The real servers of a missing virtual server wait until the virtual
        server has been added.
        """
        identities = [identity(operation) for operation in operations]
        for key in self._failures.keys() - identities:
            del self._failures[key]
        due: list[Operation] = []
        missing: set[VirtualServerKey] = set()
        for key, operation in zip(identities, operations, strict=True):
            item = operation.item
            if isinstance(item, RealServers) and item.virtual_server in missing:
                self.forget(key)  # real servers without a virtual server must not wake the loop
            elif self.may_try(key, operation, now):
                due.append(operation)
            elif isinstance(item, VirtualServer) and operation.verb is Verb.ADD:
                missing.add(item.key)
        return due


class _Window:
    """The sum of the counts that were added during the last ``length_s`` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._counts: Counter[float] = Counter()
        """The counts in the window; the key of a count is the time at which the count leaves the window. The times are in whole
        seconds, and the earliest time comes first."""

    def add(self, count: int, now: float) -> None:
        self._counts[int(now) + self._length_s] += count

    def total(self, now: float) -> int:
        for time_s in list(itertools.takewhile(lambda time_s: time_s <= now, self._counts)):
            del self._counts[time_s]
        return self._counts.total()

    @property
    def shrinks_s(self) -> float:
        return next(iter(self._counts), math.inf)


class Pace:
    """The recent additions and removals of real servers."""

    def __init__(self) -> None:
        self._added = _Window(ADDED_S)
        self._removed = _Window(KEPT_S)

    def note(self, *, added: int, removed: int, now: float) -> None:
        """Record how many real servers were added and removed, including those removed together with their virtual server."""
        if added:
            self._added.add(added, now)
        if removed:
            self._removed.add(removed, now)

    @property
    def changes_s(self) -> float:
        """The earliest time at which ``room`` may return a larger number.

        The time is infinite if the number does not grow with time.
        """
        return min(self._added.shrinks_s, self._removed.shrinks_s)

    def room(self, now: float) -> int:
        """The number of real servers that may be removed now; 0 or more."""
        most = WALKED // max(1, self._added.total(now))
        return max(0, min(MOST_KEPT, max(FEWEST_KEPT, most)) - self._removed.total(now))
