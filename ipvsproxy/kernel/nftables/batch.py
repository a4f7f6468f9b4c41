"""Entries of sets in transactions of nf_tables, and their outcomes.

Entries of one run share messages, and messages share transactions. If the kernel refuses one, it refuses its whole transaction;
then the transaction is repeated with what the kernel takes of the culprit.
"""

import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.nft_message import Message
from ipvsproxy.kernel.nftables import element
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, IpSet, SetEntries, SetEntry

TRANSACTION_LIMIT = 1 << 20
"""The most bytes of elements in one transaction, which is one ``send``."""
REPAIRS = 5
"""How often a refused message is put right: another program may change the same set meanwhile, again and again."""


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
                encoded.append(element.encode(ip_set, entry))
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
        removed = b"".join(element.bare(ip_set, entry) for entry in present)
        removal = [message_of(ip_set, removed, Verb.REMOVE)] if removed else []
        return _Part(part.verb, part.entries, [*removal, part.messages[-1]], part.repairs + 1)

    def _without_absent(self, ip_set: IpSet, part: _Part, present: Sequence[SetEntry]) -> _Part | None:
        for entry in set(part.entries).difference(present):
            operation = Operation(part.verb, SetEntries.of(entry))
            self.reported[operation] = Outcome(operation, surprise=True)
        encoded = b"".join(element.encode(ip_set, entry) for entry in present)
        return _Part(part.verb, present, [message_of(ip_set, encoded, part.verb)], part.repairs + 1) if present else None

    def _present(self, ip_set: IpSet, entries: Sequence[SetEntry]) -> list[SetEntry]:
        """The entries whose keys the set has, or may have, each by a question of its own: a dump may lack some."""
        present: list[SetEntry] = []
        for first in range(0, len(entries), self._channel.limit):
            asked = entries[first : first + self._channel.limit]
            numbers = self._channel.reserve(len(asked))
            questions = [
                nft.element_query(ip_set.name, element.bare(ip_set, entry), number)
                for entry, number in zip(asked, numbers, strict=True)
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
