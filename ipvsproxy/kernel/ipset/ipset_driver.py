"""The ipset driver: reads and writes sets and their entries, with many entries in one message.

When a set is full, the driver fills a larger copy of the set, then swaps the copy with the set, so that packets are never matched
against an incomplete set. The copy is necessary because the kernel cannot change the ``maxelem`` of a set. After the swap, rules
that use the set's name match against the copy (include/uapi/linux/netfilter/ipset/ip_set.h, ``IPSET_CMD_SWAP``).
"""

import errno
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import structlog

from ipvsproxy.kernel.base import message, netlink, sets_driver
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets_driver import EncodedEntry, ObservedSet, Part, SetsDriver
from ipvsproxy.kernel.ipset import ipset_message
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, SET_COPY, IpSet, SetEntries, SetEntry, SetType

HASH_FULL = 4352
"""The error IPSET_ERR_HASH_FULL. For a set of ports, the same error number has another meaning."""
LARGEST = 1 << 24
"""The largest capacity that a set may have, in entries."""

_OWN_ERRORS, _TYPE_SPECIFIC = 4096, 4352
IN_USE = 4100
"""The kernel's error number if a set cannot be removed because a rule uses it (IPSET_ERR_BUSY)."""

_MEANINGS: Mapping[int, str] = {
    errno.ENOENT: "the set does not exist",
    4097: "the kernel does not understand the message (another family, or an older ipset protocol)",
    4098: "this kernel does not have this set type: its module is missing or cannot be loaded",
    4099: "the kernel has no room for another set",
    IN_USE: "the set is in use by a rule",
    4103: "the entry already exists, or is already gone",
    4104: "the kernel refuses this prefix length (a set takes no /0 range; two /1 ranges are the same)",
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

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class IpsetDriver(SetsDriver):
    """Reads and writes ipsets.

    If the kernel refuses a message with several entries, the driver first sends all other messages. Then it sends each entry of
    the refused message in a message of its own.
    """

    # in bytes; a ``send`` may exceed this size by one message, and then still fits into the usual socket buffer
    most_at_once = 60_000

    def __init__(self, connect: Callable[[int], netlink.Socket] = netlink.open_socket) -> None:
        super().__init__(connect)
        self._revisions: dict[tuple[SetType, Family, bool], int] = {}

    def has_copy(self) -> bool:
        """As ``SetsDriver``."""
        return self._dump(SET_COPY.name, header_only=True) is not None

    def _apply_entries(self, operations: Iterable[Operation]) -> dict[Operation, Outcome]:
        """As in ``SetsDriver``. Add and remove entries; a full set is enlarged."""
        reported = super()._apply_entries(operations)
        full = {
            one: one.item.set
            for one, outcome in reported.items()
            if outcome.errno == HASH_FULL and isinstance(one.item, SetEntries)
        }
        enlarged = self._enlarge_all(dict.fromkeys(full.values()))
        again = [operation for operation, name in full.items() if name in enlarged]
        if not again:
            return reported
        return {one: outcome for one, outcome in reported.items() if full.get(one) not in enlarged} | self._apply_entries(again)

    def _encode(self, entry: SetEntry) -> bytes:
        return ipset_message.codec(entry.set).encode(entry)

    def _send(self, pending: Sequence[Part]) -> None:
        for index, number in self._run(pending).items():
            verb, entries = pending[index]
            if len(entries) == 1 or number in (errno.ENOENT, netlink.UNANSWERED):
                failed = dict.fromkeys(range(len(entries)), number)
            else:
                failed = self._run([(verb, (one,)) for one in entries])  # one message for each entry shows which entry failed
            for place, reason in failed.items():
                entry = entries[place].entry
                expected = (errno.ENOENT,) if verb is Verb.REMOVE else ()
                self._report(verb, entry, reason, expected, explain(reason, IP_SETS[entry.set].type))

    def _run(self, parts: Iterable[Part]) -> dict[int, int]:
        return self._channel.run_all([ipset_message.codec(part[0].entry.set).request(verb, part) for verb, part in parts])

    def _enlarge_all(self, names: Iterable[str]) -> Collection[str]:
        """Enlarge the given full sets, and return the names of the sets that were enlarged."""
        enlarged: list[str] = []
        for name in names:
            ip_set = IP_SETS[name]
            try:
                observed = self._observe(name)
                if ip_set.type is not SetType.PORT and observed is not None and not observed.differs_from(ip_set):
                    _enlarge(self._channel, ip_set, self._revision(ip_set), observed.entries, observed.capacity)
                    enlarged.append(name)
            except KernelError as error:
                log.error("set_not_enlarged", set=name, error=str(error))
        return enlarged

    def _create(self, ip_set: IpSet) -> int:
        return self._channel.do(ipset_message.creation(ip_set, self._revision(ip_set)))

    def _destroy(self, name: str) -> int:
        return self._channel.do(ipset_message.destruction(name))

    def empty(self, name: str) -> None:
        """Removes all entries of a set."""
        self._channel.do(ipset_message.flush(name))

    def _explain(self, number: int, set_type: SetType | None) -> str:
        return explain(number, set_type)

    def _revision(self, ip_set: IpSet) -> int:
        """The lowest sufficient revision of our set's type, or the nearest revision if the kernel lacks that one.

        Raises:
            KernelError: the kernel lacks the set type or, for a set that assigns marks, a revision of the set type that supports
                marks.
        """
        kind = (ip_set.type, ip_set.family, ip_set.gives_marks)
        if kind not in self._revisions:
            self._revisions[kind] = self._choose_revision(ip_set)
        return self._revisions[kind]

    def _choose_revision(self, ip_set: IpSet) -> int:
        action = f"find {ip_set.type}"
        try:
            known = ipset_message.revisions(self._channel, ip_set.type, ip_set.family)
        except KernelError as error:
            if error.errno == 0:
                raise
            raise KernelError(action=action, errno=error.errno, detail=_no_type(ip_set)) from error
        if known is None:
            raise KernelError(action=action, errno=ipset_message.NO_SUCH_TYPE, detail=_no_type(ip_set))
        if ip_set.gives_marks and known.newest < ipset_message.MARK_REVISION:
            detail = (
                f"this kernel's {ip_set.type} carries no marks, as revision {ipset_message.MARK_REVISION} does: "
                "use a newer kernel, or --ipvs-traffic-scopes=kube-proxy, which needs none"
            )
            raise KernelError(action=action, errno=errno.EOPNOTSUPP, detail=detail)
        has_protocol = "protocol" in ipset_message.FIELDS[ip_set.type]
        sufficient = ipset_message.MARK_REVISION if ip_set.gives_marks else ipset_message.PROTOCOL_REVISION * has_protocol
        return min(max(sufficient, known.oldest), known.newest)

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        try:
            return self._channel.dump(ipset_message.contents_query(name, header_only=header_only), f"list the set {name}")
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return None
            detail = explain(error.errno) or error.detail
            raise KernelError(action=error.action, errno=error.errno, detail=detail) from error

    def _read(self, name: str, parts: Sequence[netlink.Reply]) -> ObservedSet | None:
        observed: ObservedSet | None = None
        # The entries are not kept in a Python ``set``, which takes twice the memory, and which blocks other threads while it
        # grows.
        entries: dict[SetEntry, None] = {}
        for data, start, end in parts:
            found = message.Attributes(data, start + message.NETFILTER_HEADER, end)
            if ipset_message.TYPE_NAME in found:
                observed = observed or _header(found, entries.keys())
            if observed is not None and not observed.differs_from(IP_SETS[name]):
                decode = ipset_message.codec(name).decode
                for part in found.parts(ipset_message.ENTRIES):
                    entry = decode(*part)
                    if entry is not None:
                        entries[entry] = None
        return observed


def explain(number: int, set_type: SetType | None = None) -> str:
    """A text that describes an error number of ipset; numbers above 4096 are specific to ipset."""
    own = _BITMAP_MEANINGS if set_type is SetType.PORT else _HASH_MEANINGS
    meaning = own.get(number) or _MEANINGS.get(number)
    return meaning or (f"ipset error {number}" if number > _OWN_ERRORS else netlink.explain(number))


def _no_type(ip_set: IpSet) -> str:
    return f"this kernel has no set type {ip_set.type}: its module is missing or cannot be loaded"


def _header(found: message.Attributes, entries: AbstractSet[SetEntry]) -> ObservedSet:
    kind, number = found.text(ipset_message.TYPE_NAME), found.number(ipset_message.FAMILY, 0)
    family = Family(number) if number in tuple(Family) and kind != SetType.PORT else None
    return ObservedSet(kind, family, found.inside(ipset_message.DATA).number(ipset_message.CAPACITY, 0), entries)


def _enlarge(channel: netlink.Channel, ip_set: IpSet, revision: int, entries: Collection[SetEntry], capacity: int) -> None:
    """Replace a set with a set of twice the capacity.

    ``entries`` are the set's present entries, and ``capacity`` is its present capacity.

    Raises:
        KernelError: the set could not be enlarged, and has not been changed.
    """
    action = f"enlarge {ip_set}"
    codec = ipset_message.EntryCodec(ip_set, SET_COPY.name)
    encoded = [EncodedEntry(entry, codec.encode(entry)) for entry in entries]
    if capacity * 2 > LARGEST:
        raise KernelError(action=action, detail=f"its capacity is already {capacity} entries")
    channel.do(ipset_message.destruction(SET_COPY.name))  # a process that was killed at this point may have left a copy
    _do(channel, ipset_message.creation(ip_set, revision, name=SET_COPY.name, capacity=capacity * 2), action)
    try:
        for part in sets_driver.in_messages(encoded):
            _do(channel, codec.request(Verb.ADD, part), action)
        _do(channel, ipset_message.swap(SET_COPY.name, ip_set.name), action)
    finally:
        channel.do(ipset_message.destruction(SET_COPY.name))
    log.warning("set_enlarged", set=ip_set.name, entries=len(entries), capacity=capacity * 2)


def _do(channel: netlink.Channel, request: bytes, action: str) -> None:
    number = channel.do(request)
    if number:
        raise KernelError(action=action, errno=max(number, 0), detail=netlink.explain(number))
