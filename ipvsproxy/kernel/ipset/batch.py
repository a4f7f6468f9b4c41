"""Batches of set entries: many entries in one message, and the outcomes when the kernel refuses some."""

import errno
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.ipset import message as ipset_message
from ipvsproxy.model import packed
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, SetEntries, SetEntry, SetType

SEND_LIMIT = 120_000
"""The most bytes of entries in one ``send``, so that a socket with buffers of the usual size takes them."""

_OWN_ERRORS, _TYPE_SPECIFIC = 4096, 4352
IN_USE = 4100
"""The error of the removal of a set that a rule uses (IPSET_ERR_BUSY)."""

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


class Batch:
    """Set entries for one ``send``, and their outcomes.

    ``reported`` has the outcomes of entries that failed or were a surprise, by the operation on that entry alone.
    """

    def __init__(self, channel: netlink.Channel) -> None:
        self.reported: dict[Operation, Outcome] = {}
        self._channel = channel
        self._pending: list[_Entries] = []
        self._size = 0

    def add(self, verb: Verb, entries: Sequence[SetEntry]) -> None:
        """Add entries of one set to the batch."""
        codec = ipset_message.codec(entries[0].set)
        step = codec.entries_per_message
        for first in range(0, len(entries), step):
            part = self._encode(codec, verb, entries[first : first + step])
            if part.entries:
                self._pending.append(part)
                self._size += len(part.encoded)
            if self._size >= SEND_LIMIT - ipset_message.CONTAINER_LIMIT:
                self.flush()

    def _encode(self, codec: ipset_message.EntryCodec, verb: Verb, entries: Sequence[SetEntry]) -> "_Entries":
        """Encode entries. An entry that cannot be encoded fails, and is left out."""
        try:
            return _Entries(verb, entries, codec.encode(entries))
        except (ValueError, struct.error) as error:
            if len(entries) == 1:
                self._fail(Operation(verb, SetEntries.of(*entries)), errno.EINVAL, str(error))
                return _Entries(verb, (), b"")
        alone = [self._encode(codec, verb, (entry,)) for entry in entries]
        return _Entries(verb, [entry for one in alone for entry in one.entries], b"".join(one.encoded for one in alone))

    def flush(self) -> None:
        """Send the batch to the kernel."""
        pending, self._pending, self._size = self._pending, [], 0
        limit = self._channel.limit if pending else 1
        for start in range(0, len(pending), limit):
            chunk = pending[start : start + limit]
            for index, number in self._run(chunk).items():
                one = chunk[index]
                if len(one.entries) == 1 or number in (errno.ENOENT, netlink.UNANSWERED):
                    for entry in one.entries:
                        self._report(one.verb, entry, number)
                else:
                    self._repeat(one, limit)

    def _repeat(self, several: "_Entries", limit: int) -> None:
        """Send each entry in a message of its own, for an outcome of its own."""
        verb, entries, encoded = several
        parts = packed.pieces(encoded, len(encoded) // len(entries))
        alone = [_Entries(verb, (entry,), part) for entry, part in zip(entries, parts, strict=True)]
        for start in range(0, len(alone), limit):
            for index, number in self._run(alone[start : start + limit]).items():
                self._report(verb, entries[start + index], number)

    def _run(self, chunk: Sequence["_Entries"]) -> dict[int, int]:
        sequences = self._channel.sequences(len(chunk))
        return self._channel.run(
            [
                ipset_message.codec(entries[0].set).request(verb, encoded, sequence)
                for (verb, entries, encoded), sequence in zip(chunk, sequences, strict=True)
            ]
        )

    def _report(self, verb: Verb, entry: SetEntry, number: int) -> None:
        operation = Operation(verb, SetEntries.of(entry))
        if verb is Verb.REMOVE and number == errno.ENOENT:
            self.reported[operation] = Outcome(operation, surprise=True)
        else:
            self._fail(operation, max(number, 0), explain(number, IP_SETS[entry.set].type))

    def _fail(self, operation: Operation, number: int, reason: str) -> None:
        self.reported[operation] = Outcome(operation, f"{operation}: {reason}", number)


class _Entries(NamedTuple):
    """Entries of one set in one message."""

    verb: Verb
    entries: Sequence[SetEntry]
    encoded: bytes


def runs(operations: Iterable[Operation]) -> Iterator[tuple[Verb, Sequence[SetEntry]]]:
    """The entries of each run of one set and one verb.

    Raises:
        TypeError: an operation is on an object of another kind.
    """
    entries: list[SetEntry] = []
    of: tuple[Verb, str] | None = None
    for verb, item in operations:
        if not isinstance(item, SetEntries):
            raise TypeError(f"not a set or an entry: {item}")
        if of is not None and of != (verb, item.set):
            yield of[0], entries
            entries = []
        of = verb, item.set
        entries += item.entries
    if of is not None:
        yield of[0], entries


def explain(number: int, set_type: SetType | None = None) -> str:
    """The meaning of an ipset error number; numbers above 4096 are ipset's own."""
    own = _BITMAP_MEANINGS if set_type is SetType.PORT else _HASH_MEANINGS
    meaning = own.get(number) or _MEANINGS.get(number)
    return meaning or (f"ipset error {number}" if number > _OWN_ERRORS else netlink.explain(number))
