"""Entries of sets as elements of nf_tables: their bytes, and their transactions.

A native set of our table takes the place of each ipset. An address, a protocol and a port are fields of one key. A mark is what a
key is mapped to.

Entries of one run share messages, and messages share transactions. If the kernel refuses one, it refuses its whole transaction;
then the transaction is repeated with what the kernel takes of the culprit.
"""

import errno
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.nft_message import Message, Shape
from ipvsproxy.model.net import Address, Family, Protocol
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, ForeignElement, IpSet, MarkedEntry, SetEntries, SetEntry, SetType

TRANSACTION_LIMIT = 1 << 20
"""The most bytes of elements in one transaction, which is one ``send``."""
REPAIRS = 5
"""How often a refused message is put right: another program may change the same set meanwhile, again and again."""
_ADDRESS_TYPES: Mapping[Family, int] = {Family.IPV4: 7, Family.IPV6: 8}
_PROTOCOL_TYPE, _PORT_TYPE, _MARK_TYPE = 12, 13, 19
_MASK = "mask "
_PROTOCOLS: Mapping[int, Protocol] = {int(protocol): protocol for protocol in Protocol}
_NUMBER = struct.Struct("=I")
"""A mark, and a prefix length, which is kept as one: ``nft`` can neither print nor read a key with a constant of another type."""


def shape(ip_set: IpSet) -> Shape:
    """The parameters of a set of ours. Each field of a key takes a multiple of four bytes."""
    address, size = _ADDRESS_TYPES[ip_set.family], ip_set.family.bits // 8
    fields: Mapping[SetType, tuple[tuple[int, int], ...]] = {
        SetType.ADDRESS: ((address, size),),
        SetType.PORT: ((_PORT_TYPE, 2),),
        SetType.ADDRESS_PORT: ((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4)),
        SetType.ADDRESS_PORT_ADDRESS: ((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4), (address, size)),
        # The last field is the prefix length.
        SetType.ADDRESS_PORT_NETWORK: (
            *((address, size), (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4)),
            *((address, size), (_MARK_TYPE, 4)),
        ),
    }
    kind = 0
    for number, _ in fields[ip_set.type]:
        kind = kind << 6 | number
    length = sum(length for _, length in fields[ip_set.type])
    return Shape(kind, length, _MARK_TYPE, _NUMBER.size) if ip_set.gives_marks else Shape(kind, length)


def encode(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry as an element; a ``ForeignElement`` only to remove it.

    Raises:
        ValueError: an address is missing or not of the set's family, or a number does not fit its field.
    """
    if isinstance(entry, ForeignElement):
        return nft.element(entry.raw) if entry.raw else nft.element_for_all_others()
    key = _key(ip_set, entry)
    if not isinstance(entry, MarkedEntry):
        return nft.element(key)
    # The rule that looks up the mark writes all of it. The mask only shows which bits the entry was made for.
    return nft.element(key, _NUMBER.pack(entry.mark), f"{_MASK}{entry.mask:#x}")


def bare(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry as an element without what it is mapped to.

    Raises:
        ValueError: as ``encode``.
    """
    return encode(ip_set, entry) if isinstance(entry, ForeignElement) else nft.element(_key(ip_set, entry))


def _key(ip_set: IpSet, entry: SetEntry) -> bytes:
    try:
        port = struct.pack(">H", entry.port)
        if ip_set.type is SetType.PORT:
            return port
        key = _address(ip_set, entry.address)
        if ip_set.type is SetType.ADDRESS:
            return key
        if entry.protocol is None:
            raise ValueError("the protocol is missing")
        key += bytes((entry.protocol, 0, 0, 0)) + port + bytes(2)
        if ip_set.type is SetType.ADDRESS_PORT:
            return key
        other = _address(ip_set, entry.other)
        if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
            return key + other
        if not 0 < entry.prefix_length <= ip_set.family.bits:
            raise ValueError("a set takes no /0 range; two /1 ranges are the same")
        return key + _network(other, entry.prefix_length) + _NUMBER.pack(entry.prefix_length)
    except struct.error as error:
        raise ValueError(str(error)) from error


def _address(ip_set: IpSet, address: Address | None) -> bytes:
    if address is None or len(address) * 8 != ip_set.family.bits:
        raise ValueError(f"the address is not of the set's family {ip_set.family.label}")
    return bytes(address)


def _network(address: bytes, prefix_length: int) -> bytes:
    """The first address of a range, which is what the kernel keeps of it."""
    shift = len(address) * 8 - prefix_length
    return (int.from_bytes(address, "big") >> shift << shift).to_bytes(len(address), "big")


def decode(ip_set: IpSet, key: bytes, data: bytes, comment: str) -> SetEntry:
    """The entry of an element: the one that ``encode`` makes this key of, or a ``ForeignElement`` if there is none."""
    if ip_set.type is SetType.PORT:
        return SetEntry(ip_set.name, port=int.from_bytes(key[:2], "big"))
    address = Address(key[: ip_set.family.bits // 8])
    if ip_set.type is SetType.ADDRESS:
        return SetEntry(ip_set.name, address)
    return _of_service(ip_set, address, key, data, comment) or ForeignElement(ip_set.name, raw=key)


def _of_service(ip_set: IpSet, address: Address, key: bytes, data: bytes, comment: str) -> SetEntry | None:
    """The entry with an address, a protocol and a port; None if none of ours has this key."""
    name, size = ip_set.name, len(address)
    protocol, port = _PROTOCOLS.get(key[size]), int.from_bytes(key[size + 4 : size + 6], "big")
    if protocol is None or any(key[size + 1 : size + 4]) or any(key[size + 6 : size + 8]):
        return None
    if ip_set.gives_marks:
        (mark,) = _NUMBER.unpack(data)
        written = re.fullmatch(f"{_MASK}(0x[0-9a-f]{{1,8}})", comment)
        return MarkedEntry(name, address, protocol, port, mark=mark, mask=int(written[1], 16) if written else 0)
    if ip_set.type is SetType.ADDRESS_PORT:
        return SetEntry(name, address, protocol, port)
    other = Address(key[size + 8 : 2 * size + 8])
    if ip_set.type is SetType.ADDRESS_PORT_ADDRESS:
        return SetEntry(name, address, protocol, port, other)
    (prefix_length,) = _NUMBER.unpack(key[-_NUMBER.size :])
    if not 0 < prefix_length <= ip_set.family.bits or _network(other, prefix_length) != other:
        return None
    return SetEntry(name, address, protocol, port, other, prefix_length)


class _Part(NamedTuple):
    """One message of a batch, with the entries in it. ``repairs``: how often it has taken the place of one that was refused."""

    verb: Verb
    entries: Sequence[SetEntry]
    messages: Sequence[Message]
    repairs: int = 0


class Batch:
    """Entries for one transaction, and their outcomes.

    ``reported`` has the outcomes of entries that failed, by the operation on that entry alone.
    """

    def __init__(self, channel: netlink.Channel) -> None:
        self.reported: dict[Operation, Outcome] = {}
        self._channel = channel
        self._pending: list[_Part] = []
        self._size = 0

    def add(self, verb: Verb, entries: Sequence[SetEntry]) -> None:
        """Add entries of one set to the batch."""
        ip_set = IP_SETS[entries[0].set]
        encoded: list[bytes] = []
        taken: list[SetEntry] = []
        for entry in entries:
            try:
                encoded.append(encode(ip_set, entry))
            except ValueError as error:
                self._fail(verb, entry, errno.EINVAL, str(error))
            else:
                taken.append(entry)
        for part, together in joined(encoded):
            self._pending.append(_Part(verb, taken[part], [message_of(ip_set, together, verb)]))
            self._size += len(together)
            if self._size >= TRANSACTION_LIMIT or len(self._pending) >= self._channel.limit:
                self.flush()

    def flush(self) -> None:
        """Send the batch to the kernel.

        A refused message is replaced in its place by one that the kernel takes, since those behind it may depend on it. Entries
        are not tried one by one: the kernel waits for all its processors before it answers a refused transaction, some 10 ms.
        """
        pending, self._pending, self._size = self._pending, [], 0
        while pending:
            failed = nft.run(self._channel, [request for part in pending for request in part.messages])
            if not failed:
                break
            numbers = dict(_by_part(pending, failed))
            if not numbers:  # the transaction as a whole: fewer entries would not do better
                numbers, pending = (
                    dict.fromkeys(range(len(pending)), failed[min(failed)]),
                    [part._replace(repairs=REPAIRS) for part in pending],
                )
            repaired = (self._repair(part, numbers[at]) if at in numbers else part for at, part in enumerate(pending))
            pending = [part for part in repaired if part is not None]

    def _repair(self, part: _Part, number: int) -> _Part | None:
        """What the kernel takes of a message that it has refused; None if nothing. All other entries are reported."""
        ip_set = IP_SETS[part.entries[0].set]
        is_unclear = number in ((errno.EEXIST, errno.ENOENT) if ip_set.gives_marks else (errno.ENOENT,))
        if part.repairs >= REPAIRS or not is_unclear or (part.verb is Verb.ADD and not ip_set.gives_marks):
            for entry in part.entries:
                self._fail(part.verb, entry, max(number, 0), nft.explain(number))
            return None
        present = self._present(ip_set, part.entries)
        if part.verb is Verb.REMOVE:
            return self._without_absent(ip_set, part, present)
        # The addition of marks, behind the removal of those that the set has for the same keys.
        removed = b"".join(bare(ip_set, entry) for entry in present)
        removal = [message_of(ip_set, removed, Verb.REMOVE)] if removed else []
        return _Part(part.verb, part.entries, [*removal, part.messages[-1]], part.repairs + 1)

    def _without_absent(self, ip_set: IpSet, part: _Part, present: Sequence[SetEntry]) -> _Part | None:
        for entry in set(part.entries).difference(present):
            operation = Operation(part.verb, SetEntries.of(entry))
            self.reported[operation] = Outcome(operation, surprise=True)
        encoded = b"".join(encode(ip_set, entry) for entry in present)
        return _Part(part.verb, present, [message_of(ip_set, encoded, part.verb)], part.repairs + 1) if present else None

    def _present(self, ip_set: IpSet, entries: Sequence[SetEntry]) -> list[SetEntry]:
        """The entries whose keys the set has, or may have, each by a question of its own: a dump may lack some."""
        present: list[SetEntry] = []
        for first in range(0, len(entries), self._channel.limit):
            asked = entries[first : first + self._channel.limit]
            numbers = self._channel.reserve(len(asked))
            questions = [
                nft.element_query(ip_set.name, bare(ip_set, entry), number) for entry, number in zip(asked, numbers, strict=True)
            ]
            failed = self._channel.run(questions)
            present += [entry for at, entry in enumerate(asked) if failed.get(at) != errno.ENOENT]
        return present

    def _fail(self, verb: Verb, entry: SetEntry, number: int, reason: str) -> None:
        operation = Operation(verb, SetEntries.of(entry))
        self.reported[operation] = Outcome(operation, f"{operation}: {reason}", number)


def _by_part(parts: Sequence[_Part], failed: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """The number of each part with a refused message, and the error number of its first one."""
    first = 0
    for at, part in enumerate(parts):
        numbers = [failed[index] for index in range(first, first + len(part.messages)) if index in failed]
        if numbers:
            yield at, numbers[0]
        first += len(part.messages)


def message_of(ip_set: IpSet, encoded: bytes, verb: Verb) -> Message:
    """One message. An entry that gives a mark is refused while its set has one of that key: its mask may be another one."""
    is_removal = verb is Verb.REMOVE
    return nft.elements(ip_set.name, encoded, is_removal=is_removal, is_exclusive=ip_set.gives_marks)


def joined(encoded: Sequence[bytes]) -> Iterator[tuple[slice, bytes]]:
    """Elements of one set for several messages: which of them each message has, and their bytes."""
    step = nft.ELEMENTS_LIMIT // max(map(len, encoded), default=nft.ELEMENTS_LIMIT)
    for first in range(0, len(encoded), step):
        part = slice(first, first + step)
        yield part, b"".join(encoded[part])
