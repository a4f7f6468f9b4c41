"""The common part of the set drivers, which keeps operations in order and finds the sets that have changed."""

import abc
import errno
import itertools
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, NamedTuple, cast

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, outcomes
from ipvsproxy.model.sets import SET_CAPACITY, IpSet, SetCopy, SetEntries, SetEntry, SetType

MESSAGE_LIMIT = 60_000
"""The largest number of bytes that the entries in one message take; the kernel's limit is 65,535."""


class ObservedSet(NamedTuple):
    """An observed set.

    For a set of ports, ``family`` is None and ``capacity`` (``maxelem``) is 0. If a set ``differs_from`` our set with the same
    name, ``entries`` is empty.
    """

    type: str
    family: Family | None
    capacity: int
    entries: AbstractSet[SetEntry]

    def differs_from(self, ip_set: IpSet) -> str:
        """How the parameters of this set differ from the parameters of our set; empty if the parameters are equal."""
        ours = parameters(ip_set)
        # A larger capacity does not count as a difference, because the driver may have enlarged the set.
        theirs = (self.type, self.family, min(self.capacity, ours[2]))
        return "" if theirs == ours else f"it is {_describe(*theirs)}, not {_describe(*ours)}"


class EncodedEntry(NamedTuple):
    """An entry, and its bytes in a message."""

    entry: SetEntry
    encoded: bytes


Part = tuple[Verb, Sequence[EncodedEntry]]
"""Entries of the same set that share one message."""


class SetsDriver(abc.ABC):
    """Reads and writes sets in the network namespace of the thread that creates this object.

    Only the thread that creates this object may use it. The driver handles only the sets in ``IP_SETS``. Entries are sent as
    soon as ``most_at_once`` bytes of entries are encoded.
    """

    most_at_once: ClassVar[int]

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)
        self._digests: dict[str, bytes] = {}
        """The digest that each set had when ``observe_changed`` last returned the set. A write to a set deletes its digest."""
        self._reported: dict[Operation, Outcome] = {}

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self, names: Collection[str]) -> dict[str, ObservedSet]:
        """The named sets with their entries; sets that do not exist are left out.

        Raises:
            KernelError: a set could not be read.
        """
        self.forget()  # later calls of ``observe_changed`` must return every set
        return {name: observed for name in names if (observed := self._observe(name)) is not None}

    def forget(self) -> None:
        """After this call, the next ``observe_changed`` of each set returns the set even if the set has not changed."""
        self._digests.clear()

    def observe_changed(self, name: str) -> dict[str, ObservedSet | None]:
        """Reads a set, and returns a dictionary that maps the set's name to the set.

        The result is empty if the set has not changed since the last call. If the set does not exist, its value is None.

        A set counts as changed if this driver has written the set since the last call. Every set counts as changed after a call
        of ``observe`` or ``forget``, even if ``observe`` could not read the set.

        Raises:
            KernelError: the set could not be read.
        """
        parts = self._dump(name)
        digest = b"" if parts is None else netlink.digest(parts, message.NETFILTER_HEADER)
        if parts is not None and self._digests.get(name) == digest:
            return {}
        changed = {name: None if parts is None else self._read(name, parts)}
        self._digests[name] = digest
        return changed

    def has_copy(self) -> bool:
        """Whether a ``SetCopy`` exists. A process that is killed while it enlarges a set leaves a ``SetCopy`` behind.

        Raises:
            KernelError: the copy could not be read.
        """
        return False

    def written(self, operations: Iterable[Operation]) -> None:
        """Record that these operations are sent to the kernel, so that their sets count as changed."""
        for _, item in operations:
            self._digests.pop(item.set if isinstance(item, SetEntries) else item.name if isinstance(item, IpSet) else "", None)

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Create and destroy sets, destroy a ``SetCopy``, and add and remove entries, in the given order.

        Repeating an operation causes no error. Consecutive operations with the same set and verb share messages. If the kernel
        refuses an entry, all other entries are applied nevertheless. The outcomes have the same order as the operations. An
        operation on several entries has a single outcome if all entries succeeded; otherwise each entry has a separate outcome.
        """
        self.written(operations)
        results: list[Outcome] = []
        for is_set, run in of_sets_or_entries(operations):
            results += map(self._apply_set, run) if is_set else outcomes(run, self._apply_entries(run))
        return results

    def _apply_set(self, operation: Operation) -> Outcome:
        ip_set = operation.item
        assert isinstance(ip_set, IpSet | SetCopy)  # noqa: S101 - the caller has checked the type
        reason = ""
        try:
            if operation.verb is Verb.REMOVE or isinstance(ip_set, SetCopy):
                number, expected = self._destroy(ip_set.name), errno.ENOENT
            else:
                number, expected = self._create(ip_set), errno.EEXIST
                if number == expected:
                    reason = self._difference(ip_set)
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        set_type = ip_set.type if isinstance(ip_set, IpSet) else None
        return netlink.outcome(operation, number, () if reason else (expected,), reason or self._explain(number, set_type))

    def _difference(self, ip_set: IpSet) -> str:
        """How the existing set with the name of ``ip_set`` differs from ``ip_set``; empty if there is no difference."""
        observed = self._observe(ip_set.name, header_only=True)
        difference = observed.differs_from(ip_set) if observed else "it was created and removed meanwhile"
        return f"a set of this name exists, and {difference}" if difference else ""

    def _observe(self, name: str, *, header_only: bool = False) -> ObservedSet | None:
        parts = self._dump(name, header_only=header_only)
        return None if parts is None else self._read(name, parts)

    @abc.abstractmethod
    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        """The kernel's description of a set; None means that the set does not exist. Raises KernelError."""

    @abc.abstractmethod
    def _read(self, name: str, parts: Sequence[netlink.Reply]) -> ObservedSet | None:
        """The set that the messages of a dump describe. Raises KernelError."""

    @abc.abstractmethod
    def _create(self, ip_set: IpSet) -> int:
        """Create a set. Returns 0 or an error number, such as EEXIST if a set with the same name exists. Raises KernelError."""

    @abc.abstractmethod
    def _destroy(self, name: str) -> int:
        """Destroy a set. Returns 0 or an error number, such as ENOENT if the set does not exist. Raises KernelError."""

    @abc.abstractmethod
    def _explain(self, number: int, set_type: SetType | None) -> str:
        """A text that describes an error number."""

    def _apply_entries(self, operations: Iterable[Operation]) -> dict[Operation, Outcome]:
        """Add and remove entries.

        Returns the outcomes of entries that failed, or that were unexpectedly present or absent; each key is an operation on a
        single entry.
        """
        self._reported = {}
        pending: list[Part] = []
        size = 0
        for verb, entries in runs(operations):
            encoded: list[EncodedEntry] = []
            for entry in entries:
                try:
                    encoded.append(EncodedEntry(entry, self._encode(entry)))
                except (ValueError, struct.error) as error:
                    self._report(verb, entry, errno.EINVAL, reason=str(error))
            for part in in_messages(encoded):
                pending.append((verb, part))
                size += sum(len(one.encoded) for one in part)
                if size >= self.most_at_once or len(pending) >= self._channel.limit:
                    self._send(pending)
                    pending, size = [], 0
        self._send(pending)
        return self._reported

    def _report(self, verb: Verb, entry: SetEntry, number: int, expected: Collection[int] = (), reason: str = "") -> None:
        """Report the outcome of one entry; see ``netlink.outcome``."""
        operation = Operation(verb, SetEntries.of(entry))
        self._reported[operation] = netlink.outcome(operation, number, expected, reason)

    @abc.abstractmethod
    def _encode(self, entry: SetEntry) -> bytes:
        """The bytes of an entry in a message. Raises ValueError or struct.error if the entry cannot be encoded."""

    @abc.abstractmethod
    def _send(self, pending: Sequence[Part]) -> None:
        """Add and remove the entries in ``pending`` in the given order.

        Report each entry that failed, or that was unexpectedly present or absent.
        """


def in_messages(entries: Sequence[EncodedEntry]) -> Iterator[Sequence[EncodedEntry]]:
    """Entries of one set, divided into messages."""
    step = MESSAGE_LIMIT // max((len(one.encoded) for one in entries), default=MESSAGE_LIMIT)
    return (entries[first : first + step] for first in range(0, len(entries), step))


def of_sets_or_entries(operations: Iterable[Operation]) -> Iterator[tuple[bool, Sequence[Operation]]]:
    """The operations in their order, divided into groups of consecutive operations on sets (True) or on entries (False)."""
    for is_set, run in itertools.groupby(operations, lambda operation: isinstance(operation.item, IpSet | SetCopy)):
        yield is_set, list(run)


def runs(operations: Iterable[Operation]) -> Iterator[tuple[Verb, Sequence[SetEntry]]]:
    """The verb and the set entries of each group of consecutive operations with the same set and verb."""
    of_entries = ((verb, cast("SetEntries", item)) for verb, item in operations)
    for (verb, _), run in itertools.groupby(of_entries, lambda one: (one[0], one[1].set)):
        yield verb, [entry for _, item in run for entry in item.keys]


def parameters(ip_set: IpSet) -> tuple[str, Family | None, int]:
    """The type, the family and the capacity of one of our sets, in the form in which an ``ObservedSet`` has them."""
    if ip_set.type is SetType.PORT:
        return ip_set.type, None, 0
    return ip_set.type, ip_set.family, SET_CAPACITY


def _describe(kind: str, family: Family | None, capacity: int) -> str:
    return " ".join(part for part in (kind, family.label if family else "", f"maxelem {capacity}" if capacity else "") if part)
