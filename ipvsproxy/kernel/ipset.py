"""The ipset driver: the sets by name, and their entries."""

import errno
import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import structlog
from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel import ipset_enlarge, ipset_message, message, netlink
from ipvsproxy.kernel.errors import KernelError
from ipvsproxy.model.kernel import IP_SETS, SET_CAPACITY, IpSet, SetEntry, SetType
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb

SEND_LIMIT = 120_000
"""Most bytes of entries in one ``send``, so that a socket with the usual buffers takes it."""

HASH_FULL = 4352
"""IPSET_ERR_HASH_FULL; for a set of ports the number has another meaning."""

_OWN_ERRORS, _TYPE_SPECIFIC = 4096, 4352
log: structlog.typing.FilteringBoundLogger = structlog.get_logger()

_MEANINGS: Mapping[int, str] = {
    errno.ENOENT: "the set does not exist",
    4097: "the kernel does not understand the message (another family, or an older ipset protocol)",
    4098: "the kernel does not know this type of set: its module is not there or cannot be loaded",
    4099: "there is no room for another set in the kernel",
    4100: "the set is in use by a rule",
    4103: "the entry exists, or does not",
    4104: "the kernel refuses this prefix length (a set holds no /0 range; two /1 ranges say the same)",
    4106: "the kernel refuses this family",
    4109: "an IPv4 address is missing",
    4110: "an IPv6 address is missing",
}
_HASH_MEANINGS: Mapping[int, str] = {
    4352: f"the set is full: it holds at most {SET_CAPACITY} entries",
    4353: "the kernel refuses this entry in this type of set",
    4354: "the kernel refuses this protocol",
    4355: "the protocol is missing",
}
_BITMAP_MEANINGS: Mapping[int, str] = {_TYPE_SPECIFIC: "the port lies outside the set's range"}


class ObservedSet(NamedTuple):
    """A set as the kernel holds it.

    ``family`` is None for a set of ports, which has none; ``capacity`` (``maxelem``) is 0 for it. ``entries`` is empty where
    ``differs_from`` the set of ours that has this name.
    """

    type: str
    family: Family | None
    capacity: int
    entries: set[SetEntry]

    def differs_from(self, ip_set: IpSet) -> str:
        """In what this set is not as ours are made; empty when it is."""
        wanted = _parameters(ip_set)
        # One that was enlarged is ours as well.
        found = (self.type, self.family, min(self.capacity, wanted[2]))
        return "" if found == wanted else f"it is {_describe(*found)}, not {_describe(*wanted)}"


class IpsetDriver:
    """Reads and writes the sets of the network namespace of the thread that made it, and belongs to that thread.

    Only sets of ``IP_SETS`` are known to it.
    """

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)
        self._revisions: dict[tuple[SetType, Family], int] = {}
        self._digests: dict[str, bytes] = {}
        """Of what the kernel said of a set when ``observe_changed`` read it last, unless it was written since."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self, names: Collection[str]) -> dict[str, ObservedSet]:
        """Those of the named sets that exist, with their entries.

        Raises:
            KernelError: one could not be read.
        """
        self._digests.clear()  # what is told now may be otherwise than what was told then
        return {name: observed for name in names if (observed := self._observe(name)) is not None}

    def observe_changed(self, names: Collection[str]) -> tuple[dict[str, ObservedSet], frozenset[str]]:
        """As ``observe``, but without those that are as they were when this was called last, of which it tells the names.

        A set that was written since is not among those, whatever it holds; and none is, if ``observe`` was called since.

        Raises:
            KernelError: one could not be read.
        """
        known, self._digests = self._digests, {}  # if one can not be read, nothing is told of any
        digests: dict[str, bytes] = {}
        found: dict[str, ObservedSet] = {}
        unchanged: set[str] = set()
        for name in names:
            parts = self._dump(name)
            digest = digests[name] = _digest(parts) if parts is not None else b""
            if digest and known.get(name) == digest:
                unchanged.add(name)
                continue
            observed = _read(name, parts) if parts is not None else None
            if observed is not None:
                found[name] = observed
        self._digests = digests
        return found, frozenset(unchanged)

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Create and destroy sets, add and remove entries, in the order given. Doing it twice is no error.

        Entries of one run (one set, one verb) share messages. Where the kernel refuses one of them, that message is repeated
        entry by entry, after the others. Outcomes come in the operations' order.
        """
        outcomes = list(map(Outcome, operations))
        batch = _Batch(self._channel, operations, outcomes)
        for start, end in _runs(operations):
            operation = operations[start]
            match operation.item:
                case SetEntry(set=name):
                    self._digests.pop(name, None)
                    batch.add(start, end)
                case IpSet():
                    self._digests.pop(operation.item.name, None)
                    batch.flush()
                    outcomes[start] = self._apply_set(operation, operation.item)
                case _:
                    raise TypeError(f"not a set or an entry: {operation.item}")
        batch.flush()
        full = {position: outcome for position, outcome in enumerate(outcomes) if outcome.errno == HASH_FULL}
        if full and self._enlarge_all(operations, full):
            again = sorted(full)
            for position, outcome in zip(again, self.apply([operations[position] for position in again]), strict=True):
                outcomes[position] = outcome
        return outcomes

    def _enlarge_all(self, operations: Sequence[Operation], full: dict[int, Outcome]) -> bool:
        """Enlarge the sets that these entries did not fit into; drops from ``full`` what could not be. Whether any could."""
        names = {item.set: None for position in full if isinstance(item := operations[position].item, SetEntry)}
        for name in names:
            ip_set = IP_SETS[name]
            try:
                observed = self._observe(name)
                if ip_set.type is not SetType.PORT and observed is not None and not observed.differs_from(ip_set):
                    ipset_enlarge.enlarge(self._channel, ip_set, self._revision(ip_set), observed.entries, observed.capacity)
                    continue
            except KernelError as error:
                log.error("set could not be enlarged", set=name, error=str(error))
            for position in [position for position in full if getattr(operations[position].item, "set", "") == name]:
                del full[position]
        return bool(full)

    def _apply_set(self, operation: Operation, ip_set: IpSet) -> Outcome:
        try:
            surprise = self._destroy(ip_set) if operation.verb is Verb.REMOVE else self._create(ip_set)
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        return Outcome(operation, surprise=surprise)

    def _create(self, ip_set: IpSet) -> bool:
        """True when it was there already."""
        action = f"create {ip_set}"
        number = self._channel.do(ipset_message.creation(ip_set, self._revision(ip_set)))
        if number == 0:
            return False
        if number != errno.EEXIST:
            raise KernelError(action=action, errno=max(number, 0), detail=explain(number, ip_set.type))
        observed = self._observe(ip_set.name, header_only=True)
        difference = observed.differs_from(ip_set) if observed else "it came and went meanwhile"
        if difference:
            raise KernelError(action=action, errno=number, detail=f"a set of this name exists, and {difference}")
        return True

    def _destroy(self, ip_set: IpSet) -> bool:
        """True when there was none."""
        number = self._channel.do(ipset_message.destruction(ip_set.name))
        if number not in (0, errno.ENOENT):
            raise KernelError(action=f"destroy {ip_set}", errno=max(number, 0), detail=explain(number, ip_set.type))
        return number == errno.ENOENT

    def _revision(self, ip_set: IpSet) -> int:
        """The newest revision of the set's type that the kernel knows; every one takes what we ask for."""
        kind = (ip_set.type, ip_set.family)
        if kind not in self._revisions:
            try:
                data, start, end = self._channel.ask(ipset_message.type_query(*kind), f"look for {ip_set.type}")
            except KernelError as error:
                if error.errno == 0:
                    raise
                detail = f"the kernel does not know {ip_set.type}: its module is not there or cannot be loaded"
                raise KernelError(action=error.action, errno=error.errno, detail=detail) from error
            with netlink.understanding(f"look for {ip_set.type}"):
                first, last = message.attributes(data, start + ipset_message.HEADER_SIZE, end)[ipset_message.REVISION]
                (self._revisions[kind],) = data[first:last]  # one byte
        return self._revisions[kind]

    def _observe(self, name: str, *, header_only: bool = False) -> ObservedSet | None:
        parts = self._dump(name, header_only=header_only)
        return None if parts is None else _read(name, parts)

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Found] | None:
        """What the kernel says of a set; None where there is none."""
        try:
            return self._channel.dump(ipset_message.contents_query(name, header_only=header_only), f"list the set {name}")
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return None
            raise KernelError(action=error.action, errno=error.errno, detail=explain(error.errno) or error.detail) from error


def _digest(parts: Iterable[netlink.Found]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for data, start, end in parts:
        found.update(memoryview(data)[start:end])
    return found.digest()


def _read(name: str, parts: Iterable[netlink.Found]) -> ObservedSet | None:
    observed: ObservedSet | None = None
    for data, start, end in parts:
        found = message.attributes(data, start + ipset_message.HEADER_SIZE, end)
        if ipset_message.TYPE_NAME in found:
            observed = _header(data, found, observed)
        if observed is not None and ipset_message.ENTRIES in found and not observed.differs_from(IP_SETS[name]):
            decode = ipset_message.codec(name).decode
            for _, first, last in message.walk(data, *found[ipset_message.ENTRIES]):
                entry = decode(data, first, last)
                if entry is not None:
                    observed.entries.add(entry)
    return observed


class _Batch:
    """Entry messages that go to the kernel together, and the outcomes of the operations that they carry."""

    def __init__(self, channel: netlink.Channel, operations: Sequence[Operation], outcomes: list[Outcome]) -> None:
        self._channel = channel
        self._operations = operations
        self._outcomes = outcomes
        self._pending: list[tuple[list[int], list[bytes]]] = []
        self._size = 0

    def add(self, start: int, end: int) -> None:
        """Take a run of entries of one set and verb."""
        codec = ipset_message.codec(self._entry(start).set)
        step = codec.entries_per_message
        for first in range(start, end, step):
            positions: list[int] = []
            elements: list[bytes] = []
            for position in range(first, min(first + step, end)):
                try:
                    elements.append(codec.encode(self._entry(position)))
                    positions.append(position)
                except (ValueError, struct.error) as error:
                    self._fail(position, errno.EINVAL, str(error))
            if positions:
                self._pending.append((positions, elements))
                self._size += sum(map(len, elements))
            if self._size >= SEND_LIMIT - ipset_message.CONTAINER_LIMIT:
                self.flush()

    def flush(self) -> None:
        """Have the kernel do what was taken."""
        pending, self._pending, self._size = self._pending, [], 0
        limit = self._channel.limit if pending else 1
        for start in range(0, len(pending), limit):
            chunk = pending[start : start + limit]
            for index, number in self._run(chunk).items():
                positions, elements = chunk[index]
                if len(positions) == 1 or number in (errno.ENOENT, netlink.UNANSWERED):
                    for position in positions:
                        self._settle(position, number)
                else:
                    self._repeat(positions, elements, limit)

    def _repeat(self, positions: Sequence[int], elements: Sequence[bytes], limit: int) -> None:
        """One entry per message, so that each gets the outcome that is its own."""
        alone = [([position], [element]) for position, element in zip(positions, elements, strict=True)]
        for start in range(0, len(alone), limit):
            for index, number in self._run(alone[start : start + limit]).items():
                self._settle(positions[start + index], number)

    def _run(self, chunk: Sequence[tuple[list[int], list[bytes]]]) -> dict[int, int]:
        sequences = self._channel.sequences(len(chunk))
        messages = []
        for (positions, elements), sequence in zip(chunk, sequences, strict=True):
            verb = self._operations[positions[0]].verb
            messages.append(ipset_message.codec(self._entry(positions[0]).set).request(verb, elements, sequence))
        return self._channel.run(messages)

    def _settle(self, position: int, number: int) -> None:
        operation = self._operations[position]
        if operation.verb is Verb.REMOVE and number == errno.ENOENT:
            self._outcomes[position] = Outcome(operation, surprise=True)
        else:
            self._fail(position, max(number, 0), explain(number, IP_SETS[self._entry(position).set].type))

    def _fail(self, position: int, number: int, reason: str) -> None:
        operation = self._operations[position]
        self._outcomes[position] = Outcome(operation, f"{operation}: {reason}", number)

    def _entry(self, position: int) -> SetEntry:
        item = self._operations[position].item
        assert isinstance(item, SetEntry)  # noqa: S101 - a run holds nothing else
        return item


def explain(number: int, set_type: SetType | None = None) -> str:
    """What an error number of ipset means; those above 4096 are its own."""
    own = _BITMAP_MEANINGS if set_type is SetType.PORT else _HASH_MEANINGS
    meaning = own.get(number) or _MEANINGS.get(number)
    return meaning or (f"ipset error {number}" if number > _OWN_ERRORS else netlink.explain(number))


def _runs(operations: Sequence[Operation]) -> Iterator[tuple[int, int]]:
    """First position and the one behind the last of each run of entries of one set and verb; anything else is alone."""
    start = 0
    current: tuple[Verb, str] | None = None
    for position, (verb, item) in enumerate(operations):
        kind = (verb, item.set) if type(item) is SetEntry else None
        if position and (kind is None or kind != current):
            yield start, position
            start = position
        current = kind
    if operations:
        yield start, len(operations)


def _header(data: bytes, found: Mapping[int, tuple[int, int]], before: ObservedSet | None) -> ObservedSet:
    if before is not None:
        return before
    kind = message.text(data, found[ipset_message.TYPE_NAME])
    number = message.unsigned(data, found[ipset_message.FAMILY]) if ipset_message.FAMILY in found else 0
    family = Family(number) if number in tuple(Family) and kind != SetType.PORT else None
    parameters = message.attributes(data, *found[ipset_message.DATA]) if ipset_message.DATA in found else {}
    capacity = message.unsigned(data, parameters[ipset_message.CAPACITY]) if ipset_message.CAPACITY in parameters else 0
    return ObservedSet(kind, family, capacity, set())


def _parameters(ip_set: IpSet) -> tuple[str, Family | None, int]:
    if ip_set.type is SetType.PORT:
        return ip_set.type, None, 0
    return ip_set.type, ip_set.family, SET_CAPACITY


def _describe(kind: str, family: Family | None, capacity: int) -> str:
    return " ".join(part for part in (kind, family.label if family else "", f"maxelem {capacity}" if capacity else "") if part)
