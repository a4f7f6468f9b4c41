"""Reads the kernel when a reading is due, and passes the result to a reconciler.

Also defines the kernel interface that the event loop uses.

Rule 1: everything is read at start-up, by the infrequent audits, and after an error or an unexpected outcome.
Rule 2: between audits, the kernel is polled, because a poll costs less than an audit. A poll runs after each notification from
the kernel about a change. Other polls run so rarely that they use only a small share of a processor. Most polls read only the
parts of the kernel that show most changes at little cost. Some polls read all virtual servers with their real servers. Polls of
all virtual servers run at the drift-check interval, after a notification, and after a poll that has found drift, because another
program is then writing.
Rule 3: an audit or poll reads the kernel in several parts. Between two parts, the event loop may write to the kernel, so a change
from the API waits for at most one part.
"""

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ipvsproxy.config.settings import Choices
from ipvsproxy.daemon.base.log import log
from ipvsproxy.daemon.base.timing import in_slices
from ipvsproxy.daemon.loop.journal import Journal
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.thread import KernelThread
from ipvsproxy.model.kernel import InterfaceAddress, Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Report
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import ConnectionCounts, VirtualServerKey
from ipvsproxy.reconcile.attempts import delay_s
from ipvsproxy.reconcile.reconciler import Reconciler

POLL_INTERVAL_S = 3.0
"""The shortest time between two polls, unless the drift-check interval is shorter."""
POLL_INTERVAL_AFTER_FAILURE_S = 10.0
"""The time in seconds between two polls while a part of the kernel's state cannot be read.

Each poll tries to read unreadable rules again, by starting an iptables program. The processor time of the iptables program is not
part of the cost of a reading. Audits, which read everything, are repeated after pauses that grow with each failure.
"""
POLL_SHARE, AUDIT_SHARE = 0.05, 0.1
"""The largest share of one processor that all polls of the same ``Depth`` may use, and the largest share that audits may use.

The more processor time a reading takes, the later the next reading of the same ``Depth`` begins. With 10,000 Services of 10
endpoints, a reading of everything takes 0.2 s on the test kernel, and any other reading takes 0.02 s.
"""
REST_FACTOR = 4
"""After a reading, the reader pauses for this multiple of the reading's processor time, but for at most ``POLL_INTERVAL_S``.

The pause also applies to readings after notifications. Without the pause, a program that changes the kernel all the time would
make ipvsproxy use a whole processor.
"""
SERVERS_AT_ONCE = 50
"""The number of virtual servers whose real servers are read in one part of a reading. A part takes about 5 ms, and an operation
may have to wait until the part has been read."""


class ReadableKernel(Protocol):
    """Reads the kernel. A command that changes nothing needs only the methods of this class."""

    def observe(self, sets: Collection[str], families: Collection[Family], sysctls: Iterable[str]) -> Observation:
        """Read the given sets, the rules of the given IP families, the given sysctls (by path), and all objects of other kinds.

        In the result, a part that cannot be read is None, and ``errors`` has a sentence about that part.
        """

    def interface_addresses(self) -> tuple[InterfaceAddress, ...]:
        """The addresses on all interfaces except the device of ipvsproxy.

        Raises:
            KernelError: the addresses could not be read.
        """

    def connections(
        self, keys: Collection[VirtualServerKey]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None]:
        """The connection counts of the given virtual servers; None if the counts of a virtual server could not be read."""

    def why_missing(self, scheduler: str) -> str:
        """The reason why the kernel lacks a scheduler; empty if the files of kernel modules show no reason."""

    def read_timeouts(self) -> Timeouts:
        """The IPVS connection timeouts.

        Raises:
            KernelError: the timeouts could not be read.
        """


class Kernel(ReadableKernel, Protocol):
    """Reads and programs the kernel.

    All methods block, and must be called only in the kernel's thread (``KernelThread.call``).
    """

    def poll(
        self, sets: Sequence[str], families: Collection[Family], sysctls: Iterable[str], *, thorough: bool, whole: bool
    ) -> Iterator[Observation]:
        """Returns an iterator over the parts of a reading; each part is read only when the caller requests the part.

        If ``thorough`` is false, only parts that may have changed are read.

        If ``whole`` is false, the reading may miss those changes of virtual servers whose detection is expensive.
        """

    def why_unusable(self, scheduler: str) -> str:
        """The reason why virtual servers cannot have a scheduler; empty if the scheduler works.

        To find out, the method tries the scheduler.

        Raises:
            KernelError: the kernel could not answer at the moment.
        """

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in the given order, and continue after a failed operation.

        No object may be in more than one operation. Returns the outcomes in the order of the operations. An operation on several
        objects has several outcomes if the results for its objects differ; each object is in exactly one outcome.
        """


class Depth(enum.IntEnum):
    """The depth of a reading; a deeper reading includes everything that a less deep reading includes.

    A ``POLL`` is cheap and finds most changes, a ``WHOLE_POLL`` also reads all virtual servers, and an ``AUDIT`` reads
    everything.
    """

    POLL = 0
    WHOLE_POLL = 1
    AUDIT = 2


@dataclasses.dataclass(slots=True)
class _Reading:
    """A reading of the kernel that is in progress.

    ``lacks_witnesses`` means that an unreadable part may contain witnesses: objects that show which virtual servers belong to
    ipvsproxy. Rules are never witnesses.
    """

    parts: Iterator[Observation]
    depth: Depth
    began_s: float
    cost_s: float = 0.0
    lacks_witnesses: bool = False
    errors: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class KernelReader:
    """Reads the kernel for a reconciler. All times except processor times are measured with ``clock``.

    ``choices`` has the IP families whose rules are read, and the intervals of audits and whole polls. A caller may replace
    ``choices``. Audits and polls run less often if they take much processor time.

    ``clock`` is a monotonic clock, and ``processor_clock`` measures the processor time of this process; both are in seconds.
    """

    choices: Choices
    reconciler: Reconciler
    kernel: KernelThread[Kernel]
    journal: Journal
    clock: Callable[[], float]
    processor_clock: Callable[[], float]

    def __post_init__(self) -> None:
        self._due_s = [0.0] * len(Depth)
        self._cost_s = [0.0] * len(Depth)
        self.addresses: tuple[InterfaceAddress, ...] = ()
        """The addresses of all interfaces except ipvsproxy's device, as last read."""
        self._has_drifted = False
        self.has_audited = False
        """Whether an audit has ended since the last call of ``synced``."""
        self._drifted: Counter[str] = Counter()
        self.unreadable: frozenset[str] = frozenset()
        """The reasons why parts of the kernel could not be read at the last attempt, with one sentence for each part."""
        self._reading: _Reading | None = None
        self._rest_ends_s = 0.0
        self._failures = 0

    @property
    def has_news(self) -> bool:
        """Whether an audit has ended or drift was observed; false while a reading is in progress.

        The parts of a reading depend on each other, and are useful only together.
        """
        return (self._has_drifted or self.has_audited) and self._reading is None

    def take_drifted(self) -> Mapping[str, int]:
        """For each kind of object: the number of drifted objects that were found since the last call of this method."""
        drifted, self._drifted = self._drifted, Counter()
        return drifted

    def request_poll(self, *, whole: bool = True) -> None:
        """Request a poll, which begins after the reading in progress, or after the pause that follows the last reading.

        ``whole`` means that the poll also reads all virtual servers.
        """
        self._due_s[Depth.POLL] = 0.0
        if whole:
            self._due_s[Depth.WHOLE_POLL] = 0.0

    def request_audit(self) -> None:
        """Request an audit, which begins after the reading in progress, or after the pause that follows the last reading."""
        self._due_s[Depth.AUDIT] = 0.0

    def syncing(self) -> None:
        """Called when a sync begins; the sync repairs the drift that has been observed so far."""
        self._has_drifted = False

    async def observe(self) -> None:
        """Read the whole kernel. The last observed state of a part is kept if the part cannot be read."""
        now = self.clock()
        # The times of the next readings are set before the reading begins. A change during the reading sets an earlier time,
        # which must not be overwritten.
        self._due_s = [now + interval_s for interval_s in self._intervals_s]
        self._reading = None
        sets, families, sysctls = self._subjects()
        observation = await self.kernel.call(lambda kernel: kernel.observe(sets, families, sysctls))
        await self._take_in(observation)
        self._note_errors(observation.errors, is_audit=True)

    @property
    def next_part_s(self) -> float:
        """The time when ``read_on`` has work to do: immediately if a reading is in progress, otherwise after a pause."""
        return 0.0 if self._reading else max(self._rest_ends_s, min(self._due_s))

    @property
    def _intervals_s(self) -> tuple[float, float, float]:
        """The minimum time in seconds between two readings of the same depth, for each ``Depth`` in ascending order."""
        settings = self.choices.settings
        return min(POLL_INTERVAL_S, settings.drift_check_interval_s), settings.drift_check_interval_s, settings.audit_interval_s

    async def read_on(self) -> None:
        """Read one part of an audit or a poll. Begins a reading if no reading is in progress."""
        now, used_s = self.clock(), self.processor_clock()
        if self._reading is None:
            depth = max((one for one in Depth if self._due_s[one] <= now), default=Depth.POLL)
            is_audit = depth is Depth.AUDIT
            if is_audit and not self.reconciler.observer.has_observed_all:
                # All witnesses must be read at one time, because only all witnesses together show which virtual servers belong to
                # ipvsproxy.
                await self.observe()
                self.has_audited = True
                return
            # The time of the next reading is set at the end of this reading, because the cost of this reading is known only then.
            # Until then, only a change makes a reading due.
            self._due_s[: depth + 1] = [math.inf] * (depth + 1)
            if is_audit:
                self.reconciler.observer.begin_audit()
            sets, families, sysctls = self._subjects()
            is_whole = depth >= Depth.WHOLE_POLL
            parts = await self.kernel.call(lambda kernel: kernel.poll(sets, families, sysctls, thorough=is_audit, whole=is_whole))
            self._reading = _Reading(parts, depth, now)
        reading = self._reading
        part = await self.kernel.call(lambda _: next(reading.parts, None))
        if part is not None:
            await self._take_in(part)
            self._reading.errors += part.errors
            self._reading.lacks_witnesses |= bool(part.errors) and not part.is_of_rules
        self._reading.cost_s += self.processor_clock() - used_s
        if part is None:
            done, self._reading = self._reading, None
            await self._finish(done)

    async def _finish(self, done: _Reading) -> None:
        now = self.clock()
        if not done.lacks_witnesses:
            self._has_drifted |= bool(self.reconciler.observer.newcomers)
            await in_slices(self.reconciler.observer.concluding(now), self.clock)
        # A poll never counts as more expensive than an audit. If audits are more frequent than whole polls, one expensive poll
        # would otherwise prevent all later polls.
        self._cost_s[: done.depth] = [min(cost_s, done.cost_s) for cost_s in self._cost_s[: done.depth]]
        self._cost_s[done.depth] = done.cost_s
        shares = (POLL_SHARE, POLL_SHARE, AUDIT_SHARE)
        for depth, interval_s in zip(range(done.depth + 1), self._intervals_s, strict=False):
            due_s = done.began_s + max(interval_s, self._cost_s[depth] / shares[depth])
            self._due_s[depth] = min(self._due_s[depth], due_s)
        if done.depth is Depth.POLL and self._has_drifted:
            # another program is writing, and may also have changed objects that this poll has not read
            self._due_s[Depth.WHOLE_POLL] = 0.0
        self._rest_ends_s = now + min(POLL_INTERVAL_S, REST_FACTOR * done.cost_s)
        self.has_audited |= done.depth is Depth.AUDIT
        self._note_errors(done.errors, is_audit=done.depth is Depth.AUDIT)

    def _subjects(self) -> tuple[list[str], Collection[Family], list[str]]:
        """The sets, IP families and sysctls that a reading must read now; the next reading may have to read others."""
        sets, sysctls = self.reconciler.survey.subjects()
        return sets, self.choices.translation.families, sysctls

    async def _take_in(self, part: Observation) -> None:
        now = self.clock()
        await in_slices(self.reconciler.observer.observing(part, now), self.clock)
        news = self.reconciler.take_drift_news()
        self.journal.log_drift(news)
        self._has_drifted |= bool(news.drifted)
        self._drifted.update(news.drifted)
        if part.interface_addresses is not None:
            self.addresses = part.interface_addresses

    def _note_errors(self, errors: Collection[str], *, is_audit: bool) -> None:
        new_errors = [error for error in dict.fromkeys(errors) if error not in self.unreadable]
        for error in new_errors:
            log.error("kernel_unreadable", error=error, hint="no object is removed from this part; the part is read again soon")
        if self.unreadable and not errors:
            log.info("kernel_readable")
        self.unreadable = frozenset(errors)
        if errors and self._due_s[Depth.POLL]:  # a notification sets the due time to 0; that poll is not postponed
            self._due_s[Depth.POLL] = self._due_s[Depth.WHOLE_POLL] = self.clock() + POLL_INTERVAL_AFTER_FAILURE_S
        if new_errors or (errors and is_audit):
            self._read_again_soon()

    async def read_addresses(self) -> bool:
        """Read ``addresses``.

        If the addresses cannot be read, the whole kernel is read soon. Returns whether the addresses could be read.
        """
        try:
            self.addresses = await self.kernel.call(lambda kernel: kernel.interface_addresses())
        except KernelError as error:
            self._read_again_soon()
            log.error("addresses_unreadable", error=str(error))
            return False
        return True

    def synced(self, report: Report) -> None:
        """If an operation failed or had an unexpected outcome, read everything soon.

        The delay of this reading grows with each failure until an audit succeeds.
        """
        if report.surprises or report.failed:
            self._read_again_soon()
        elif self.has_audited and not self.unreadable:
            self._failures = 0
        self.has_audited = False

    def _read_again_soon(self) -> None:
        self._failures += 1
        self._due_s[Depth.AUDIT] = min(self._due_s[Depth.AUDIT], self.clock() + delay_s(self._failures))
