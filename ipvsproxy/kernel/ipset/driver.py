"""The ipset driver: the sets by name, and their entries."""

import errno
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import structlog
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.ipset import batch as ipset_batch
from ipvsproxy.kernel.ipset import enlarge as ipset_enlarge
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.kernel.ipset import types as ipset_types
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, outcomes
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, SET_COPY, IpSet, SetCopy, SetEntries, SetEntry, SetType

HASH_FULL = 4352
"""The error IPSET_ERR_HASH_FULL. For a set of ports the same number has another meaning."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class ObservedSet(NamedTuple):
    """An observed set.

    ``family`` is None and ``capacity`` (``maxelem``) is 0 for a set of ports, which has neither. ``entries`` is empty if the set
    ``differs_from`` the set of ours with the same name.
    """

    type: str
    family: Family | None
    capacity: int
    entries: AbstractSet[SetEntry]

    def differs_from(self, ip_set: IpSet) -> str:
        """The difference between the parameters of this set and those of ours; empty if they are equal."""
        ours = _parameters(ip_set)
        # A set of ours that was enlarged is still ours.
        theirs = (self.type, self.family, min(self.capacity, ours[2]))
        return "" if theirs == ours else f"it is {_describe(*theirs)}, not {_describe(*ours)}"


class IpsetDriver:
    """Reads and writes sets in the network namespace of the thread that makes this object. Only that thread may use it.

    It only knows the sets in ``IP_SETS``.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)
        self._revisions: dict[tuple[SetType, Family, bool], int] = {}
        self._digests: dict[str, bytes] = {}
        """The digest of each set when ``observe_changed`` last returned it. A write to a set deletes its digest."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self, names: Collection[str]) -> dict[str, ObservedSet]:
        """The named sets that exist, with their entries.

        Raises:
            KernelError: a set could not be read.
        """
        self.forget()  # the next ``observe_changed`` must return every set
        return {name: observed for name in names if (observed := self._observe(name)) is not None}

    def forget(self) -> None:
        """Make the next ``observe_changed`` return every set."""
        self._digests.clear()

    def observe_changed(self, names: Collection[str]) -> dict[str, ObservedSet | None]:
        """The named sets that have changed since this last returned them; None for a set that does not exist.

        A set that was written meanwhile counts as changed. After ``observe`` or ``forget``, every set does.

        Raises:
            KernelError: a set could not be read. The next call then returns at least the same sets.
        """
        changed: dict[str, ObservedSet | None] = {}
        digests: dict[str, bytes] = {}
        for name in names:
            parts = self._dump(name)
            if parts is None:
                changed[name] = None
                continue
            digest = _digest(parts)
            if self._digests.get(name) != digest:
                changed[name] = _read(name, parts)
                digests[name] = digest
        self._digests |= digests
        return changed

    def has_copy(self) -> bool:
        """Whether a ``SetCopy`` exists: a process that was killed while it enlarged a set has left it.

        Raises:
            KernelError: the copy could not be read.
        """
        return self._dump(SET_COPY.name, header_only=True) is not None

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Create and destroy sets, destroy a ``SetCopy``, add and remove entries, in the given order. A repetition is no error.

        Entries of one run (same set, same verb) share messages. If the kernel refuses an entry, its message is repeated entry by
        entry, after the others. Outcomes have the order of the operations. An operation on several entries has one outcome if all
        were added, and one for each entry otherwise.
        """
        results: list[Outcome] = []
        for is_set, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, IpSet | SetCopy)):
            run = list(group)
            results += map(self._apply_set, run) if is_set else self._apply_entries(run)
        return results

    def _apply_entries(self, operations: Sequence[Operation]) -> list[Outcome]:
        batch = ipset_batch.Batch(self._channel)
        for verb, entries in ipset_batch.runs(operations):
            self._digests.pop(entries[0].set, None)
            batch.add(verb, entries)
        batch.flush()
        reported = batch.reported
        full = {
            one: one.item.set
            for one, outcome in reported.items()
            if outcome.errno == HASH_FULL and isinstance(one.item, SetEntries)
        }
        enlarged = self._enlarge_all(dict.fromkeys(full.values()))
        again = [operation for operation, name in full.items() if name in enlarged]
        if again:
            reported |= {outcome.operation: outcome for outcome in self._apply_entries(again)}
        return outcomes(operations, reported)

    def _enlarge_all(self, names: Iterable[str]) -> Collection[str]:
        """Enlarge these sets, which are full. Returns the names of those that were enlarged."""
        enlarged: list[str] = []
        for name in names:
            ip_set = IP_SETS[name]
            try:
                observed = self._observe(name)
                if ip_set.type is not SetType.PORT and observed is not None and not observed.differs_from(ip_set):
                    ipset_enlarge.enlarge(self._channel, ip_set, self._revision(ip_set), observed.entries, observed.capacity)
                    enlarged.append(name)
            except KernelError as error:
                log.error("set_not_enlarged", set=name, error=str(error))
        return enlarged

    def _apply_set(self, operation: Operation) -> Outcome:
        ip_set = operation.item
        assert isinstance(ip_set, IpSet | SetCopy)  # noqa: S101 - the caller has checked
        self._digests.pop(ip_set.name, None)
        try:
            is_creation = operation.verb is not Verb.REMOVE
            surprise = self._create(ip_set) if is_creation and isinstance(ip_set, IpSet) else self._destroy(ip_set)
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        return Outcome(operation, surprise=surprise)

    def _create(self, ip_set: IpSet) -> bool:
        """Returns whether the set existed already."""
        action = f"create {ip_set}"
        number = self._channel.do(ipset_message.creation(ip_set, self._revision(ip_set)))
        if number == 0:
            return False
        if number != errno.EEXIST:
            raise KernelError(action=action, errno=max(number, 0), detail=ipset_batch.explain(number, ip_set.type))
        observed = self._observe(ip_set.name, header_only=True)
        difference = observed.differs_from(ip_set) if observed else "it was created and destroyed meanwhile"
        if difference:
            raise KernelError(action=action, errno=number, detail=f"a set of this name exists, and {difference}")
        return True

    def _destroy(self, ip_set: IpSet | SetCopy) -> bool:
        """Returns whether the set was absent already."""
        number = self._channel.do(ipset_message.destruction(ip_set.name))
        if number not in (0, errno.ENOENT):
            raise KernelError(action=f"destroy {ip_set}", errno=max(number, 0), detail=ipset_batch.explain(number))
        return number == errno.ENOENT

    def _revision(self, ip_set: IpSet) -> int:
        """The lowest sufficient revision of the set's type, or the nearest one that this kernel has.

        Raises:
            KernelError: the kernel lacks the type, or a revision with marks if the set gives them.
        """
        kind = (ip_set.type, ip_set.family, ip_set.gives_marks)
        if kind not in self._revisions:
            self._revisions[kind] = self._choose_revision(ip_set)
        return self._revisions[kind]

    def _choose_revision(self, ip_set: IpSet) -> int:
        action = f"find {ip_set.type}"
        try:
            known = ipset_types.revisions(self._channel, ip_set.type, ip_set.family)
        except KernelError as error:
            if error.errno == 0:
                raise
            raise KernelError(action=action, errno=error.errno, detail=_no_type(ip_set)) from error
        if known is None:
            raise KernelError(action=action, errno=ipset_types.NO_SUCH_TYPE, detail=_no_type(ip_set))
        if ip_set.gives_marks and known.newest < ipset_message.MARK_REVISION:
            detail = (
                f"this kernel's {ip_set.type} carries no marks, as revision {ipset_message.MARK_REVISION} does: "
                "use a newer kernel, or --ipvs-traffic-scopes=kube-proxy, which needs none"
            )
            raise KernelError(action=action, errno=errno.EOPNOTSUPP, detail=detail)
        sufficient = ipset_message.MARK_REVISION if ip_set.gives_marks else ipset_message.SUFFICIENT_REVISIONS[ip_set.type]
        return min(max(sufficient, known.oldest), known.newest)

    def _observe(self, name: str, *, header_only: bool = False) -> ObservedSet | None:
        parts = self._dump(name, header_only=header_only)
        return None if parts is None else _read(name, parts)

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        """The kernel's description of a set; None if it does not exist."""
        try:
            return self._channel.dump(ipset_message.contents_query(name, header_only=header_only), f"list the set {name}")
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return None
            detail = ipset_batch.explain(error.errno) or error.detail
            raise KernelError(action=error.action, errno=error.errno, detail=detail) from error


def _no_type(ip_set: IpSet) -> str:
    return f"this kernel has no set type {ip_set.type}: its module is missing or cannot be loaded"


def _digest(parts: Iterable[netlink.Reply]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for data, start, end in parts:
        digest.update(memoryview(data)[start:end])
    return digest.digest()


def _read(name: str, parts: Iterable[netlink.Reply]) -> ObservedSet | None:
    observed: ObservedSet | None = None
    # Not a ``set``: it takes twice the memory, and while it grows, no other thread runs.
    entries: dict[SetEntry, None] = {}
    for data, start, end in parts:
        attributes = message.attributes(data, start + ipset_message.HEADER_SIZE, end)
        if ipset_message.TYPE_NAME in attributes:
            observed = observed or _header(data, attributes, entries.keys())
        if observed is not None and ipset_message.ENTRIES in attributes and not observed.differs_from(IP_SETS[name]):
            decode = ipset_message.codec(name).decode
            for _, first, last in message.walk(data, *attributes[ipset_message.ENTRIES]):
                entry = decode(data, first, last)
                if entry is not None:
                    entries[entry] = None
    return observed


def _header(data: bytes, attributes: Mapping[int, tuple[int, int]], entries: AbstractSet[SetEntry]) -> ObservedSet:
    kind = message.text(data, attributes[ipset_message.TYPE_NAME])
    number = message.unsigned(data, attributes[ipset_message.FAMILY]) if ipset_message.FAMILY in attributes else 0
    family = Family(number) if number in tuple(Family) and kind != SetType.PORT else None
    parameters = message.attributes(data, *attributes[ipset_message.DATA]) if ipset_message.DATA in attributes else {}
    capacity = message.unsigned(data, parameters[ipset_message.CAPACITY]) if ipset_message.CAPACITY in parameters else 0
    return ObservedSet(kind, family, capacity, entries)


def _parameters(ip_set: IpSet) -> tuple[str, Family | None, int]:
    if ip_set.type is SetType.PORT:
        return ip_set.type, None, 0
    return ip_set.type, ip_set.family, SET_CAPACITY


def _describe(kind: str, family: Family | None, capacity: int) -> str:
    return " ".join(part for part in (kind, family.label if family else "", f"maxelem {capacity}" if capacity else "") if part)
