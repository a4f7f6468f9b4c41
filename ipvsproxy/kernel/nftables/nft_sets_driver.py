"""The nftables driver for sets: each set in our table has the name and the entries of the ipset that it replaces.

A set of nftables has no maximum size, so the set is never full. The address, protocol and port of an entry are fields of one
key. A set that gives marks maps each key to a mark.

Consecutive entries of one set share a message, and several messages share a transaction. If the kernel refuses a message, it
refuses the whole transaction. The driver then repeats the transaction without the unacceptable entries of the message.
"""

import contextlib
import errno
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import message, netlink, sets_driver
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.kernel.base.nft_message import SetShape
from ipvsproxy.kernel.base.sets_driver import EncodedEntry, ObservedSet, Part, SetsDriver
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.model.net import PROTOCOL_BY_NUMBER, Address, Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.sets import IP_SETS, ForeignElement, IpSet, MarkedEntry, SetEntry, SetType

PAUSES_S: Sequence[float] = (0.0, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""The pause in seconds before each dump of a large set. The set is dumped until two successive dumps agree."""


REPAIRS = 5
"""The largest number of corrections of a refused message. The number is limited, because another program may change the same set
again and again."""
_ADDRESS_TYPES: Mapping[Family, int] = {Family.IPV4: 7, Family.IPV6: 8}
_PROTOCOL_TYPE, _PORT_TYPE, _MARK_TYPE = 12, 13, 19
_MASK = "mask "
_NUMBER = struct.Struct("=I")
"""The format of marks. Prefix lengths have the same format, because they are stored as marks.

``nft`` can print and read a constant in a key only if the constant has the type of a mark.
"""


class _Part(NamedTuple):
    """The messages for some entries of one set.

    ``repairs`` counts how often the driver has replaced refused messages for these entries by other messages.
    """

    verb: Verb
    entries: Sequence[SetEntry]
    messages: Sequence[bytes]
    repairs: int = 0


class NftSetsDriver(SetsDriver):
    """Reads and writes the sets of our table; a ``SetsDriver``."""

    most_at_once = 1 << 20  # the largest transaction in bytes; a single ``send`` sends all of it

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket] = netlink.open_socket,
        sleep: Callable[[float], object] = time.sleep,
        *,
        changes: NftChanges | None = None,
    ) -> None:
        """``changes`` reports changes that other programs make in our table.

        If ``changes`` is not given, any change of nf_tables may concern our table.
        """
        super().__init__(connect)
        self._changes = changes
        self._sleep = sleep
        self._fingerprints: dict[str, object] = {}
        """For each set, the fingerprint that our table had when ``observe_changed`` last read the set. A set is read again if our
        table has another fingerprint now."""

    def observe_changed(self, name: str) -> dict[str, ObservedSet | None]:
        """As in ``SetsDriver``.

        If nf_tables has not changed, the call sends one query to the kernel, or no query if the kernel sends notifications.
        """
        fingerprint = self._fingerprint()
        if self._fingerprints.get(name) == fingerprint and self._digests.get(name):
            return {}
        changed = super().observe_changed(name)
        self._fingerprints[name] = fingerprint
        return changed

    def _fingerprint(self) -> object:
        """A fingerprint that changes whenever another program changes our table."""
        if self._changes is not None and self._changes.count is not None:
            return "changes", self._changes.count
        return "generation", nft.generation(self._channel)

    def messages(self, operations: Sequence[Operation]) -> list[bytes] | None:
        """The messages that apply the operations in one transaction, in the order of the operations.

        None means that the transaction would be too large, that an entry cannot be encoded, or that a set is to be removed (the
        table may then have to be removed, too). Unlike in ``apply``, repeated operations fail: the kernel refuses to create a set
        that exists, and to remove an entry that does not exist.
        """
        messages: list[bytes] = []
        size = 0
        for is_set, run in sets_driver.of_sets_or_entries(operations):
            if is_set:
                for number, (verb, item) in enumerate(run, len(messages) + 1):
                    if not isinstance(item, IpSet) or verb is Verb.REMOVE:
                        return None
                    messages += [nft.table(), nft.new_set(item.name, shape(item), number)]
                continue
            for verb, entries in sets_driver.runs(run):
                try:
                    encoded = [EncodedEntry(entry, self._encode(entry)) for entry in entries]
                except ValueError:
                    return None
                messages += (message_of(verb, part) for part in sets_driver.in_messages(encoded))
                size += sum(len(one.encoded) for one in encoded)
        return messages if size <= self.most_at_once else None

    def shaped_as_ours(self, ip_sets: Iterable[IpSet]) -> Mapping[IpSet, bool]:
        """Whether each existing set has our parameters; another version of ipvsproxy or another program may have created the set.

        Raises:
            KernelError: a set could not be read.
        """
        headers = ((ip_set, self._dump(ip_set.name, header_only=True)) for ip_set in ip_sets)
        return {ip_set: _shape(header[0]) == shape(ip_set) for ip_set, header in headers if header is not None}

    def _create(self, ip_set: IpSet) -> int:
        return self._run([nft.table(), nft.new_set(ip_set.name, shape(ip_set), 1)])

    def _destroy(self, name: str) -> int:
        """As in ``SetsDriver``. Removes a set; our table is removed together with its last set or chain."""
        number = self._run([nft.set_removal(name)])
        if number in (0, errno.ENOENT):
            nft_tables.remove_empty(self._channel)
        return number

    def _explain(self, number: int, _set_type: SetType | None) -> str:
        return "the set is in use by a rule" if number == errno.EBUSY else nft.explain(number)

    def _run(self, messages: Sequence[bytes]) -> int:
        """Run a transaction. Returns 0, or the error number of the first message that failed."""
        failed = nft.run(self._channel, messages)
        return failed[min(failed)] if failed else 0

    def _encode(self, entry: SetEntry) -> bytes:
        return encode(IP_SETS[entry.set], entry)

    def _send(self, pending: Sequence[Part]) -> None:
        """As in ``SetsDriver``.

        Because later messages may depend on a refused message, the driver replaces the refused message by a message that the
        kernel accepts. Entries are not tried one by one, because the kernel takes about 10 ms to refuse a transaction.
        """
        parts = [_Part(verb, [one.entry for one in part], [message_of(verb, part)]) for verb, part in pending]
        while parts:
            failed = nft.run(self._channel, [request for part in parts for request in part.messages])
            if not failed:
                break
            numbers = dict(_by_part(parts, failed))
            if not numbers:  # no single message caused the error, so a transaction with fewer entries would fail, too
                numbers = dict.fromkeys(range(len(parts)), failed[min(failed)])
                parts = [part._replace(repairs=REPAIRS) for part in parts]
            repaired = (self._repair(part, numbers[at]) if at in numbers else part for at, part in enumerate(parts))
            parts = [part for part in repaired if part is not None]

    def _repair(self, part: _Part, number: int) -> _Part | None:
        """A part with the acceptable entries of a refused part; None means that no entry is acceptable.

        The unacceptable entries are reported as failed.
        """
        ip_set = IP_SETS[part.entries[0].set]
        is_unclear = number in ((errno.EEXIST, errno.ENOENT) if ip_set.gives_marks else (errno.ENOENT,))
        if part.repairs >= REPAIRS or not is_unclear or (part.verb is Verb.ADD and not ip_set.gives_marks):
            for entry in part.entries:
                self._report(part.verb, entry, number, reason=nft.explain(number))
            return None
        present = self._present(ip_set, part.entries)
        if part.verb is Verb.REMOVE:
            for entry in set(part.entries).difference(present):
                self._report(part.verb, entry, errno.ENOENT, expected=(errno.ENOENT,))
            there = [EncodedEntry(entry, encode(ip_set, entry)) for entry in present]
            return _Part(part.verb, present, [message_of(part.verb, there)], part.repairs + 1) if there else None
        # First remove the marks that the set already has for the same keys, then add the new marks.
        removed = [EncodedEntry(entry, bare(ip_set, entry)) for entry in present]
        removal = [message_of(Verb.REMOVE, removed)] if removed else []
        return _Part(part.verb, part.entries, [*removal, part.messages[-1]], part.repairs + 1)

    def _present(self, ip_set: IpSet, entries: Sequence[SetEntry]) -> list[SetEntry]:
        """The entries whose keys are present, or may be present, in the set.

        Each entry is queried separately, because a dump may miss entries.
        """
        present: list[SetEntry] = []
        for first in range(0, len(entries), self._channel.limit):
            asked = entries[first : first + self._channel.limit]
            failed = self._channel.run([nft.element_query(ip_set.name, bare(ip_set, entry)) for entry in asked])
            present += [entry for at, entry in enumerate(asked) if failed.get(at) != errno.ENOENT]
        return present

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        """The messages with the parameters of a set, then the messages with its elements."""
        action = f"list the set {name}"
        with Tolerated(errno.ENOENT):
            header = self._channel.ask(nft.set_query(name), action)
            return [header] if header_only else [header, *self._elements(name, action)]
        return None

    def _elements(self, name: str, action: str) -> Sequence[netlink.Reply]:
        """The elements of a set, as messages of a dump.

        To produce each message of a dump, the kernel counts elements from the beginning to find the next element
        (``nft_rhash_walk`` in net/netfilter/nft_set_hash.c). The kernel enlarges a set's hash table shortly after additions;
        meanwhile elements move within the table, and a dump misses some elements. If two successive dumps are equal, the kernel
        moved no element meanwhile, so neither dump missed an element.
        """
        before = b""
        for pause_s in PAUSES_S:
            if pause_s:
                self._sleep(pause_s)
            parts = self._channel.dump(nft.elements_query(name), action)
            digest = netlink.digest(parts, message.NETFILTER_HEADER)
            if len(parts) <= 1 or digest == before:
                return parts
            before = digest
        raise KernelError(action=action, errno=errno.EAGAIN, detail="its elements moved during each attempt")

    def _read(self, name: str, parts: Sequence[netlink.Reply]) -> ObservedSet:
        ip_set = IP_SETS[name]
        observed = _shape(parts[0])
        if observed != shape(ip_set):
            what = f"other keys ({observed.key_length} bytes)" if observed.is_plain else "flags or a size of its own"
            return ObservedSet(f"a set of nf_tables with {what}", None, 0, frozenset())
        # The entries are not kept in a Python ``set``, which takes twice the memory, and which blocks other threads while it
        # grows.
        entries: dict[SetEntry, None] = {}
        action = f"list the set {name}"
        for part in parts[1:]:
            for element in nft.read(part).parts(nft.NFTA_SET_ELEM_LIST_ELEMENTS):
                found = message.Attributes(*element)
                if nft.is_for_all_others(found):
                    entries[ForeignElement(name)] = None
                    continue
                with netlink.parsing(action):
                    entries[decode(ip_set, *nft.read_element(found))] = None
        return ObservedSet(*sets_driver.parameters(ip_set), entries.keys())


def _shape(header: netlink.Reply) -> SetShape:
    """The parameters of a set in nftables."""
    found = nft.read(header)
    flags = found.number(nft.NFTA_SET_FLAGS, 0)
    length = found.number(nft.NFTA_SET_DATA_LEN, 0) if flags & nft.IS_MAP else 0
    return SetShape(
        found.number(nft.NFTA_SET_KEY_TYPE, 0),
        found.number(nft.NFTA_SET_KEY_LEN, 0),
        found.number(nft.NFTA_SET_DATA_TYPE, 0) if length else 0,
        length,
        is_plain=not flags & ~nft.IS_MAP and nft.NFTA_SET_DESC_SIZE not in found.inside(nft.NFTA_SET_DESC),
    )


def _by_part(parts: Sequence[_Part], failed: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Maps the index of each part with a refused message to the error number of the part's first refused message."""
    first = 0
    for at, part in enumerate(parts):
        numbers = [failed[index] for index in range(first, first + len(part.messages)) if index in failed]
        if numbers:
            yield at, numbers[0]
        first += len(part.messages)


def message_of(verb: Verb, entries: Sequence[EncodedEntry]) -> bytes:
    """The message to nf_tables that adds or removes some entries of one set.

    For a set that gives marks, the message makes the kernel refuse an entry whose key is already in the set, because the old
    entry may have a different mask.
    """
    ip_set = IP_SETS[entries[0].entry.set]
    encoded = b"".join(one.encoded for one in entries)
    return nft.elements(ip_set.name, encoded, is_removal=verb is Verb.REMOVE, is_exclusive=ip_set.gives_marks)


def shape(ip_set: IpSet) -> SetShape:
    """The parameters of one of our sets. Each field of a key is padded to a multiple of four bytes."""
    address = (_ADDRESS_TYPES[ip_set.family], ip_set.family.bits // 8)
    address_port = (address, (_PROTOCOL_TYPE, 4), (_PORT_TYPE, 4))
    fields: Mapping[SetType, tuple[tuple[int, int], ...]] = {
        SetType.ADDRESS: (address,),
        SetType.PORT: ((_PORT_TYPE, 2),),
        SetType.ADDRESS_PORT: address_port,
        SetType.ADDRESS_PORT_ADDRESS: (*address_port, address),
        SetType.ADDRESS_PORT_NETWORK: (*address_port, address, (_MARK_TYPE, 4)),  # the last field of a key is the prefix length
    }
    kind = 0
    for number, _ in fields[ip_set.type]:
        kind = kind << 6 | number
    length = sum(length for _, length in fields[ip_set.type])
    return SetShape(kind, length, _MARK_TYPE, _NUMBER.size) if ip_set.gives_marks else SetShape(kind, length)


def encode(ip_set: IpSet, entry: SetEntry) -> bytes:
    """The netlink encoding of an entry as an element of an nf_tables set. A ``ForeignElement`` is encoded only for its removal.

    Raises:
        ValueError: an address is missing or not of the set's family, or a number is too large for its field.
    """
    if isinstance(entry, ForeignElement):
        return nft.element(entry.raw) if entry.raw else nft.element_for_all_others()
    key = _key(ip_set, entry)
    if not isinstance(entry, MarkedEntry):
        return nft.element(key)
    # The rule that looks up the mark ignores the mask and writes the whole mark. The mask is stored only to show for which bits
    # the entry was made.
    return nft.element(key, _NUMBER.pack(entry.mark), f"{_MASK}{entry.mask:#x}")


def bare(ip_set: IpSet, entry: SetEntry) -> bytes:
    """An entry, encoded as an element without its mapped value.

    Raises:
        ValueError: an address or a number cannot be encoded, as in ``encode``.
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
    """The first address of a range; an element contains this address and the prefix length of the range."""
    shift = len(address) * 8 - prefix_length
    return (int.from_bytes(address, "big") >> shift << shift).to_bytes(len(address), "big")


def decode(ip_set: IpSet, key: bytes, data: bytes, comment: str) -> SetEntry:
    """The entry that ``encode`` turns into the given key; a ``ForeignElement`` if no entry has this key."""
    if ip_set.type is SetType.PORT:
        return SetEntry(ip_set.name, port=int.from_bytes(key[:2], "big"))
    size = ip_set.family.bits // 8
    address, protocol = Address(key[:size]), PROTOCOL_BY_NUMBER.get(int.from_bytes(key[size : size + 1], "big"))
    port = int.from_bytes(key[size + 4 : size + 6], "big")
    other = Address(key[size + 8 : 2 * size + 8]) if len(key) > size + 8 else None
    prefix_length = int.from_bytes(key[2 * size + 8 :], sys.byteorder)
    entry = SetEntry(ip_set.name, address, protocol, port, other, prefix_length)
    with contextlib.suppress(ValueError):
        if _key(ip_set, entry) == key:
            if not ip_set.gives_marks:
                return entry
            (mark,) = _NUMBER.unpack(data)
            written = re.fullmatch(f"{_MASK}(0x[0-9a-f]{{1,8}})", comment)
            return MarkedEntry(ip_set.name, address, protocol, port, mark=mark, mask=int(written[1], 16) if written else 0)
    return ForeignElement(ip_set.name, raw=key)
