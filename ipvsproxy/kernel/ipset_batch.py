"""Entries of sets that go to the kernel together, many in one message, and what it means when the kernel refuses one."""

import errno
import struct
from collections.abc import Iterator, Mapping, Sequence

from ipvsproxy.kernel import ipset_message, message, netlink
from ipvsproxy.model.kernel import IP_SETS, SET_CAPACITY, SetEntry, SetType
from ipvsproxy.model.plan import Operation, Outcome, Verb

SEND_LIMIT = 120_000
"""Most bytes of entries in one ``send``, so that a socket with the usual buffers takes it."""

_OWN_ERRORS, _TYPE_SPECIFIC = 4096, 4352

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


class Batch:
    """Entry messages that go to the kernel together, and the outcomes of the operations that they carry."""

    def __init__(self, channel: netlink.Channel, operations: Sequence[Operation], outcomes: list[Outcome]) -> None:
        self._channel = channel
        self._operations = operations
        self._outcomes = outcomes
        self._pending: list[tuple[Sequence[int], bytes]] = []
        self._size = 0

    def add(self, start: int, end: int) -> None:
        """Take a run of entries of one set and verb."""
        codec = self._codec(start)
        step = codec.entries_per_message
        for first in range(start, end, step):
            positions, encoded = self._encode(codec, range(first, min(first + step, end)))
            if positions:
                self._pending.append((positions, encoded))
                self._size += len(encoded)
            if self._size >= SEND_LIMIT - ipset_message.CONTAINER_LIMIT:
                self.flush()

    def _encode(self, codec: ipset_message.EntryCodec, positions: range) -> tuple[Sequence[int], bytes]:
        """Encode the entries at these positions; those that can not be have failed, and are left out."""
        try:
            operations = self._operations[positions.start : positions.stop]
            return positions, codec.encode([item for _, item in operations if isinstance(item, SetEntry)])
        except (ValueError, struct.error) as error:
            if len(positions) == 1:
                self._fail(positions[0], errno.EINVAL, str(error))
                return (), b""
        alone = [self._encode(codec, range(position, position + 1)) for position in positions]
        return [position for found, _ in alone for position in found], b"".join(encoded for _, encoded in alone)

    def flush(self) -> None:
        """Have the kernel do what was taken."""
        pending, self._pending, self._size = self._pending, [], 0
        limit = self._channel.limit if pending else 1
        for start in range(0, len(pending), limit):
            chunk = pending[start : start + limit]
            for index, number in self._run(chunk).items():
                positions, encoded = chunk[index]
                if len(positions) == 1 or number in (errno.ENOENT, netlink.UNANSWERED):
                    for position in positions:
                        self._settle(position, number)
                else:
                    self._repeat(positions, encoded, limit)

    def _repeat(self, positions: Sequence[int], encoded: bytes, limit: int) -> None:
        """One entry per message, so that each gets the outcome that is its own."""
        entries = message.cut(encoded, len(encoded) // len(positions))
        alone = [((position,), entry) for position, entry in zip(positions, entries, strict=True)]
        for start in range(0, len(alone), limit):
            for index, number in self._run(alone[start : start + limit]).items():
                self._settle(positions[start + index], number)

    def _run(self, chunk: Sequence[tuple[Sequence[int], bytes]]) -> dict[int, int]:
        sequences = self._channel.sequences(len(chunk))
        messages = []
        for (positions, encoded), sequence in zip(chunk, sequences, strict=True):
            verb = self._operations[positions[0]].verb
            messages.append(self._codec(positions[0]).request(verb, encoded, sequence))
        return self._channel.run(messages)

    def _codec(self, position: int) -> ipset_message.EntryCodec:
        return ipset_message.codec(self._entry(position).set)

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


def runs(operations: Sequence[Operation]) -> Iterator[tuple[int, int]]:
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


def explain(number: int, set_type: SetType | None = None) -> str:
    """What an error number of ipset means; those above 4096 are its own."""
    own = _BITMAP_MEANINGS if set_type is SetType.PORT else _HASH_MEANINGS
    meaning = own.get(number) or _MEANINGS.get(number)
    return meaning or (f"ipset error {number}" if number > _OWN_ERRORS else netlink.explain(number))
