"""The nftables driver of the sets: native sets of our table, with the names and entries of the ipsets whose place they take.

A set has no capacity: it never is full.
"""

import errno
import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.nft_message import Message, Shape
from ipvsproxy.kernel.ipset import batch as ipset_batch
from ipvsproxy.kernel.ipset.driver import ObservedSet
from ipvsproxy.kernel.nftables import batch, element
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.model.plan import Operation, Outcome, Verb, outcomes
from ipvsproxy.model.sets import IP_SETS, SET_CAPACITY, ForeignElement, IpSet, SetCopy, SetEntries, SetEntry, SetType

PAUSES_S: Sequence[float] = (0.0, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""The waits before each dump of a large set, until two of them agree."""


class NftSetsDriver:
    """Reads and writes sets in the network namespace of the thread that makes this object. Only that thread may use it.

    It only knows the sets in ``IP_SETS``.
    """

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket] = netlink.open_socket,
        sleep: Callable[[float], object] = time.sleep,
        *,
        changes: NftChanges | None = None,
    ) -> None:
        """``changes`` are those of our table by others. Without them, any change of nf_tables may be one."""
        self._changes = changes
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)
        self._sleep = sleep
        self._digests: dict[str, bytes] = {}
        """The digest of each set when ``observe_changed`` last returned it. A write to a set deletes its digest."""
        self._fingerprints: dict[str, object] = {}
        """The fingerprint at which ``observe_changed`` last read each set: it is not read again before there is another one."""

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def observe(self, names: Collection[str]) -> dict[str, ObservedSet]:
        """The named sets that exist, with their entries.

        Raises:
            KernelError: a set could not be read.
        """
        self.forget()  # the next ``observe_changed`` must return every set
        return {name: _read(name, *dumped) for name in names if (dumped := self._dump(name)) is not None}

    def forget(self) -> None:
        """Make the next ``observe_changed`` return every set."""
        self._digests.clear()
        self._fingerprints.clear()

    def observe_changed(self, names: Collection[str]) -> dict[str, ObservedSet | None]:
        """The named sets that have changed since this last returned them; None for a set that does not exist.

        A set that was written meanwhile counts as changed. After ``observe`` or ``forget``, every set does. Without any change of
        nf_tables, this is one question to the kernel, or none where it sends notifications.

        Raises:
            KernelError: a set could not be read. The next call then returns at least the same sets.
        """
        changed: dict[str, ObservedSet | None] = {}
        digests: dict[str, bytes] = {}
        fingerprint = self._fingerprint()
        read = [name for name in names if self._fingerprints.get(name) != fingerprint or name not in self._digests]
        for name in read:
            dumped = self._dump(name)
            if dumped is None:
                changed[name] = None
                continue
            digest = _digest(*dumped)
            if self._digests.get(name) != digest:
                changed[name] = _read(name, *dumped)
                digests[name] = digest
        self._digests |= digests
        self._fingerprints |= dict.fromkeys(read, fingerprint)
        return changed

    def _fingerprint(self) -> object:
        """A fingerprint that is another one after a change of our table by others."""
        if self._changes is not None and self._changes.count is not None:
            return "changes", self._changes.count
        return "generation", nft.generation(self._channel)

    def has_copy(self) -> bool:
        """Whether a ``SetCopy`` exists: never, since these sets need not be enlarged."""
        return False

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Create and destroy sets, add and remove entries, in the given order. A repetition is no error.

        Outcomes have the order of the operations. An operation on several entries has one outcome if all were added, and one for
        each entry otherwise.
        """
        results: list[Outcome] = []
        for is_set, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, IpSet | SetCopy)):
            run = list(group)
            results += map(self._apply_set, run) if is_set else self._apply_entries(run)
        return results

    def messages(self, operations: Sequence[Operation]) -> list[Message] | None:
        """The messages of operations as one transaction, in their order.

        None if it would be too large, if an entry cannot be encoded, or if a set is removed: the table may have to go with it.
        Unlike ``apply``, this takes no repetition into account: the kernel refuses the creation of a set that exists, and the
        removal of an entry that does not.
        """
        messages: list[Message] = []
        size = 0
        for is_set, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, IpSet | SetCopy)):
            run = list(group)
            if is_set:
                for number, (verb, item) in enumerate(run, len(messages) + 1):
                    if not isinstance(item, IpSet) or verb is Verb.REMOVE:
                        return None
                    messages += [nft.table(), nft.new_set(item.name, element.shape(item), number)]
                continue
            for verb, entries in ipset_batch.runs(run):
                ip_set = IP_SETS[entries[0].set]
                try:
                    encoded = [element.encode(ip_set, entry) for entry in entries]
                except ValueError:
                    return None
                parts = [joined for _, joined in batch.joined(encoded)]
                messages += [batch.message_of(ip_set, joined, verb) for joined in parts]
                size += sum(map(len, parts))
        return messages if size <= batch.TRANSACTION_LIMIT else None

    def shaped_as_ours(self, ip_sets: Iterable[IpSet]) -> Mapping[IpSet, bool]:
        """Whether those of these sets that exist have our shape: another version or another program may have made one.

        Raises:
            KernelError: a set could not be read.
        """
        headers = ((ip_set, self._dump(ip_set.name, header_only=True)) for ip_set in ip_sets)
        return {ip_set: header[0] == element.shape(ip_set) for ip_set, header in headers if header is not None}

    def written(self, operations: Iterable[Operation]) -> None:
        """Note that these operations were sent to the kernel: their sets count as changed."""
        for _, item in operations:
            self._digests.pop(item.set if isinstance(item, SetEntries) else item.name if isinstance(item, IpSet) else "", None)

    def _apply_set(self, operation: Operation) -> Outcome:
        ip_set = operation.item
        if isinstance(ip_set, SetCopy):
            return Outcome(operation, surprise=True)
        assert isinstance(ip_set, IpSet)  # noqa: S101 - the caller has checked
        self._digests.pop(ip_set.name, None)
        try:
            surprise = self._create(ip_set) if operation.verb is not Verb.REMOVE else self._destroy(ip_set)
        except KernelError as error:
            return Outcome(operation, f"{operation}: {error.detail}", error.errno)
        return Outcome(operation, surprise=surprise)

    def _create(self, ip_set: IpSet) -> bool:
        """Returns whether the set existed already."""
        number = self._run([nft.table(), nft.new_set(ip_set.name, element.shape(ip_set), 1)])
        if number == errno.EEXIST:
            observed = self._dump(ip_set.name, header_only=True)
            difference = _read(ip_set.name, *observed).differs_from(ip_set) if observed else "it was removed meanwhile"
            if not difference:
                return True
            raise KernelError(action="", errno=number, detail=f"a set of this name exists, and {difference}")
        if number:
            raise KernelError(action="", errno=max(number, 0), detail=nft.explain(number))
        return False

    def _destroy(self, ip_set: IpSet) -> bool:
        """Returns whether the set was absent already. The table goes with the last of its sets and chains."""
        number = self._run([nft.set_removal(ip_set.name)])
        if number not in (0, errno.ENOENT):
            detail = "the set is in use by a rule" if number == errno.EBUSY else nft.explain(number)
            raise KernelError(action="", errno=max(number, 0), detail=detail)
        remove_empty_table(self._channel)
        return number == errno.ENOENT

    def _run(self, messages: Sequence[Message]) -> int:
        """0, or the error number of a transaction."""
        failed = nft.run(self._channel, messages)
        return failed[min(failed)] if failed else 0

    def _apply_entries(self, operations: Sequence[Operation]) -> list[Outcome]:
        together = batch.Batch(self._channel)
        for verb, entries in ipset_batch.runs(operations):
            self._digests.pop(entries[0].set, None)
            together.add(verb, entries)
        together.flush()
        return outcomes(operations, together.reported)

    def _dump(self, name: str, *, header_only: bool = False) -> tuple[Shape, Sequence[netlink.Reply]] | None:
        """The kernel's description of a set; None if it does not exist."""
        action = f"list the set {name}"
        try:
            data, start, end = self._channel.ask(nft.set_query(name), action)
            parts = [] if header_only else self._elements(name, action)
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        found = message.attributes(data, start + nft.HEADER_SIZE, end)

        def number(of: int) -> int:
            return message.unsigned(data, found[of]) if of in found else 0

        flags = number(nft.NFTA_SET_FLAGS)
        length = number(nft.NFTA_SET_DATA_LEN) if flags & nft.IS_MAP else 0
        kinds = (
            number(nft.NFTA_SET_KEY_TYPE),
            number(nft.NFTA_SET_KEY_LEN),
            number(nft.NFTA_SET_DATA_TYPE) if length else 0,
            length,
        )
        described = message.attributes(data, *found[nft.NFTA_SET_DESC]) if nft.NFTA_SET_DESC in found else {}
        return Shape(*kinds, is_plain=not flags & ~nft.IS_MAP and nft.NFTA_SET_DESC_SIZE not in described), parts

    def _elements(self, name: str, action: str) -> Sequence[netlink.Reply]:
        """The elements of a set, in messages.

        Behind each message of a dump the kernel counts its way to the next element anew (``nft_rhash_walk`` in
        net/netfilter/nft_set_hash.c). While it enlarges the table of a set, which it does a moment after additions, elements
        change their places, and a dump lacks some. Two dumps in one order show that nothing has moved.
        """
        before = b""
        for pause_s in PAUSES_S:
            if pause_s:
                self._sleep(pause_s)
            parts = self._channel.dump(nft.elements_query(name), action)
            digest = _digest(None, parts)
            if len(parts) <= 1 or digest == before:
                return parts
            before = digest
        raise KernelError(action=action, errno=errno.EAGAIN, detail="its elements moved during each attempt")


def remove_empty_table(channel: netlink.Channel) -> None:
    """Remove our table if it has neither sets nor chains. A change meanwhile, by any program, makes the kernel refuse it.

    Raises:
        KernelError: the table could not be read.
    """
    action = "read the table inet ipvsproxy"
    generation = nft.generation(channel)
    try:
        channel.ask(nft.table_query(), action)
        sets = channel.dump(nft.sets_query(), action)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return
        raise
    chains = channel.dump(nft.chains_query(), action) if not sets else ()
    names = (
        message.text(data, message.attributes(data, start + nft.HEADER_SIZE, end)[nft.NFTA_CHAIN_TABLE])
        for data, start, end in chains
    )
    if not sets and nft.TABLE not in names:
        nft.run(channel, [nft.table_removal()], generation)


def _read(name: str, observed: Shape, parts: Iterable[netlink.Reply]) -> ObservedSet:
    """A set as it was dumped.

    Raises:
        KernelError: an element cannot be parsed.
    """
    ip_set = IP_SETS[name]
    if observed != element.shape(ip_set):
        what = f"other keys ({observed.key_length} bytes)" if observed.is_plain else "flags or a size of its own"
        return ObservedSet(f"a set of nf_tables with {what}", None, 0, frozenset())
    # Not a ``set``: it takes twice the memory, and while it grows, no other thread runs.
    entries: dict[SetEntry, None] = {}
    action = f"list the set {name}"
    for data, start, end in parts:
        found = message.attributes(data, start + nft.HEADER_SIZE, end)
        for _, first, last in (
            message.walk(data, *found[nft.NFTA_SET_ELEM_LIST_ELEMENTS]) if nft.NFTA_SET_ELEM_LIST_ELEMENTS in found else ()
        ):
            if nft.is_for_all_others(data, first, last):
                entries[ForeignElement(name)] = None
                continue
            with netlink.parsing(action):
                entries[element.decode(ip_set, *nft.read_element(data, first, last))] = None
    family, capacity = (None, 0) if ip_set.type is SetType.PORT else (ip_set.family, SET_CAPACITY)
    return ObservedSet(ip_set.type, family, capacity, entries.keys())


def _digest(observed: Shape | None, parts: Iterable[netlink.Reply]) -> bytes:
    """A digest of parameters and elements; ``struct nfgenmsg`` is left out, since it has the generation."""
    digest = hashlib.blake2b(repr(observed).encode(), digest_size=16)
    for data, start, end in parts:
        digest.update(memoryview(data)[start + nft.HEADER_SIZE : end])
    return digest.digest()
