"""The nftables driver of the sets: native sets of our table, with the names and entries of the ipsets whose place they take.

A set has no capacity: it never is full.
"""

import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ipvsproxy.kernel.base import message, netlink, sets
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.nft_message import Message, Shape
from ipvsproxy.kernel.base.sets import ObservedSet, SetsDriver
from ipvsproxy.kernel.nftables import elements
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.sets import IP_SETS, ForeignElement, IpSet, SetEntry, SetType

PAUSES_S: Sequence[float] = (0.0, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""The waits before each dump of a large set, until two of them agree."""


class NftSetsDriver(SetsDriver):
    """Reads and writes sets of our table, as ``SetsDriver``."""

    def __init__(
        self,
        connect: Callable[[int], netlink.Socket] = netlink.open_socket,
        sleep: Callable[[float], object] = time.sleep,
        *,
        changes: NftChanges | None = None,
    ) -> None:
        """``changes`` are those of our table by others. Without them, any change of nf_tables may be one."""
        super().__init__(connect)
        self._changes = changes
        self._sleep = sleep
        self._fingerprints: dict[str, object] = {}
        """The fingerprint at which ``observe_changed`` last read each set: it is not read again before there is another one."""

    def observe_changed(self, names: Collection[str]) -> dict[str, ObservedSet | None]:
        """As ``SetsDriver``. Without any change of nf_tables, this is one question to the kernel, or none if it notifies us."""
        fingerprint = self._fingerprint()
        read = [name for name in names if self._fingerprints.get(name) != fingerprint or name not in self._digests]
        changed = super().observe_changed(read)
        self._fingerprints |= dict.fromkeys(read, fingerprint)
        return changed

    def _fingerprint(self) -> object:
        """A fingerprint that is another one after a change of our table by others."""
        if self._changes is not None and self._changes.count is not None:
            return "changes", self._changes.count
        return "generation", nft.generation(self._channel)

    def messages(self, operations: Sequence[Operation]) -> list[Message] | None:
        """The messages of operations as one transaction, in their order.

        None if it would be too large, if an entry cannot be encoded, or if a set is removed: the table may have to go with it.
        Unlike ``apply``, this takes no repetition into account: the kernel refuses the creation of a set that exists, and the
        removal of an entry that does not.
        """
        messages: list[Message] = []
        size = 0
        for is_set, run in sets.of_sets_or_entries(operations):
            if is_set:
                for number, (verb, item) in enumerate(run, len(messages) + 1):
                    if not isinstance(item, IpSet) or verb is Verb.REMOVE:
                        return None
                    messages += [nft.table(), nft.new_set(item.name, elements.shape(item), number)]
                continue
            for verb, entries in sets.runs(run):
                ip_set = IP_SETS[entries[0].set]
                try:
                    encoded = [elements.encode(ip_set, entry) for entry in entries]
                except ValueError:
                    return None
                parts = [joined for _, joined in elements.joined(encoded)]
                messages += [elements.message_of(ip_set, joined, verb) for joined in parts]
                size += sum(map(len, parts))
        return messages if size <= elements.TRANSACTION_LIMIT else None

    def shaped_as_ours(self, ip_sets: Iterable[IpSet]) -> Mapping[IpSet, bool]:
        """Whether those of these sets that exist have our shape: another version or another program may have made one.

        Raises:
            KernelError: a set could not be read.
        """
        headers = ((ip_set, self._dump(ip_set.name, header_only=True)) for ip_set in ip_sets)
        return {ip_set: _shape(header[0]) == elements.shape(ip_set) for ip_set, header in headers if header is not None}

    def _create(self, ip_set: IpSet) -> int:
        return self._run([nft.table(), nft.new_set(ip_set.name, elements.shape(ip_set), 1)])

    def _destroy(self, name: str) -> int:
        """As ``SetsDriver``. The table goes with the last of its sets and chains."""
        number = self._run([nft.set_removal(name)])
        if number in (0, errno.ENOENT):
            remove_empty_table(self._channel)
        return number

    def _explain(self, number: int, _set_type: SetType | None) -> str:
        return "the set is in use by a rule" if number == errno.EBUSY else nft.explain(number)

    def _run(self, messages: Sequence[Message]) -> int:
        """0, or the error number of a transaction."""
        failed = nft.run(self._channel, messages)
        return failed[min(failed)] if failed else 0

    def _apply_entries(self, operations: Sequence[Operation]) -> dict[Operation, Outcome]:
        batch = elements.Batch(self._channel)
        for verb, entries in sets.runs(operations):
            batch.add(verb, entries)
        batch.flush()
        return batch.reported

    def _dump(self, name: str, *, header_only: bool = False) -> Sequence[netlink.Reply] | None:
        """The parameters of a set, then its elements."""
        action = f"list the set {name}"
        try:
            header = self._channel.ask(nft.set_query(name), action)
            return [header] if header_only else [header, *self._elements(name, action)]
        except KernelError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

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
            digest = netlink.digest(parts, nft.HEADER_SIZE)
            if len(parts) <= 1 or digest == before:
                return parts
            before = digest
        raise KernelError(action=action, errno=errno.EAGAIN, detail="its elements moved during each attempt")

    def _read(self, name: str, parts: Sequence[netlink.Reply]) -> ObservedSet:
        ip_set = IP_SETS[name]
        observed = _shape(parts[0])
        if observed != elements.shape(ip_set):
            what = f"other keys ({observed.key_length} bytes)" if observed.is_plain else "flags or a size of its own"
            return ObservedSet(f"a set of nf_tables with {what}", None, 0, frozenset())
        # Not a ``set``: it takes twice the memory, and while it grows, no other thread runs.
        entries: dict[SetEntry, None] = {}
        action = f"list the set {name}"
        for data, start, end in parts[1:]:
            found = message.attributes(data, start + nft.HEADER_SIZE, end)
            for _, first, last in (
                message.walk(data, *found[nft.NFTA_SET_ELEM_LIST_ELEMENTS]) if nft.NFTA_SET_ELEM_LIST_ELEMENTS in found else ()
            ):
                if nft.is_for_all_others(data, first, last):
                    entries[ForeignElement(name)] = None
                    continue
                with netlink.parsing(action):
                    entries[elements.decode(ip_set, *nft.read_element(data, first, last))] = None
        return ObservedSet(*sets.parameters(ip_set), entries.keys())


def _shape(header: netlink.Reply) -> Shape:
    """The parameters of a set."""
    data, start, end = header
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
    return Shape(*kinds, is_plain=not flags & ~nft.IS_MAP and nft.NFTA_SET_DESC_SIZE not in described)


def remove_empty_table(channel: netlink.Channel) -> None:
    """Remove our table if it has neither sets nor chains. A change meanwhile, by any program, makes the kernel refuse it.

    Raises:
        KernelError: the table could not be read.
    """
    action = "read the table inet ipvsproxy"
    generation = nft.generation(channel)
    try:
        channel.ask(nft.table_query(), action)
        present = channel.dump(nft.sets_query(), action)
    except KernelError as error:
        if error.errno == errno.ENOENT:
            return
        raise
    chains = channel.dump(nft.chains_query(), action) if not present else ()
    names = (
        message.text(data, message.attributes(data, start + nft.HEADER_SIZE, end)[nft.NFTA_CHAIN_TABLE])
        for data, start, end in chains
    )
    if not present and nft.TABLE not in names:
        nft.run(channel, [nft.table_removal()], generation)
