"""The nftables driver for rules and sets: consecutive operations of a plan become one transaction.

Because a transaction takes effect as a whole, no packet meets a half-changed set, or a rule whose sets are missing. Operations on
IPVS cannot be part of a transaction. Because operations on IPVS are applied between the additions and the removals, a sync with
both additions and removals takes two transactions. A Service with source ranges or a ``ClusterScope`` takes one or two additional
transactions, because its virtual server is added between its set entries.
"""

import itertools
import pathlib
import socket
from collections.abc import Callable, Collection, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.nft_rules_driver import NftRulesDriver
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import ChainKey, Jump, Skeleton
from ipvsproxy.model.sets import IpSet, SetEntries


class NftDriver:
    """Writes rules and sets of both IP families; ``rules`` and ``sets`` read rules and sets through separate sockets.

    The arguments are the same as for ``NftRulesDriver``. With ``listen``, ``changes`` reports changes that other programs make in
    our table, and sets are read again only after a reported change. Only the thread that creates the driver may use it; any
    thread may use ``changes``.
    """

    def __init__(
        self,
        *,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        connect: Callable[[int], socket.socket] = netlink.open_socket,
        proc: pathlib.Path = pathlib.Path("/proc"),
        listen: bool = False,
    ) -> None:
        self._ports: set[int] = set()
        self.changes = NftChanges(self._ports) if listen else None
        noted = netlink.noting(self._ports, connect)
        self.rules = NftRulesDriver(chains=chains, jumps=jumps, connect=noted, proc=proc)
        self.sets = NftSetsDriver(noted, changes=self.changes)
        self._channel = netlink.Channel(NETLINK_NETFILTER, noted)

    def close(self) -> None:
        """Close all sockets."""
        for one in (self.rules, self.sets, self._channel, *((self.changes,) if self.changes else ())):
            one.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply all operations that the kernel accepts, and return one outcome for each operation.

        Repeating an operation causes no error.

        If the kernel refuses the transaction, rules and sets are applied in parts, in their order, so that each object gets a
        separate outcome.
        """
        self._replace_unlike(operations)
        if len(operations) > 1 and self._apply_as_one(operations):
            return list(map(Outcome, operations))
        outcomes: list[Outcome] = []
        for is_of_rules, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, Skeleton)):
            outcomes += (self.rules if is_of_rules else self.sets).apply(list(group))
        return outcomes

    def _replace_unlike(self, operations: Sequence[Operation]) -> None:
        """If a set that must be created already exists with other parameters, replace the existing set.

        The existing set was created by another version of ipvsproxy, or by a file that nft loaded. A set cannot be removed while
        a rule uses the set, so the transaction that replaces a set also writes the rules of the set's family. The transaction
        writes the desired rules if the operations contain rules, and otherwise the present rules. If the transaction fails, the
        later attempt to create the set reports the reason.
        """
        created = [item for verb, item in operations if isinstance(item, IpSet) and verb is not Verb.REMOVE]
        if not created:
            return
        try:
            present = self.sets.shaped_as_ours(created)
            unlike = [ip_set for ip_set, is_ours in present.items() if not is_ours]
            new = [Operation(Verb.ADD, ip_set) for ip_set in created if not present.get(ip_set, False)]
            if unlike:
                nft.run_while_stale(self._channel, lambda: self._replacement(unlike, new, operations))
        except (KernelError, ValueError):
            return  # the later attempt to create the set reports the same error
        self.sets.written(new)

    def _replacement(
        self, unlike: Sequence[IpSet], new: Sequence[Operation], operations: Sequence[Operation]
    ) -> tuple[Sequence[bytes], int | None]:
        """The messages that replace the given sets, and the generation for which the messages are made.

        ``new`` are the operations that create each desired set that is absent, or whose parameters in the kernel differ. The
        messages create all of these sets, because the rules may use any of them.
        """
        listing = self.rules.listing()
        names = {ip_set.name for ip_set in unlike}
        entries = [one for one in operations if isinstance(one.item, SetEntries) and one.item.set in names]
        with_entries = self.sets.messages([*new, *(one for one in entries if one.verb is not Verb.REMOVE)])
        created = self.sets.messages(new) if with_entries is None else with_entries
        written: list[bytes] = []
        for family in {ip_set.family for ip_set in unlike}:
            asked = [one for one in operations if isinstance(one.item, Skeleton) and one.item.family is family]
            for rules in asked:
                written += self.rules.messages(rules, listing)
            if not asked:
                written += self.rules.rewriting(family, listing)
        flushed = self.rules.flushing({ip_set.family for ip_set in unlike}, listing)
        return [*flushed, *(nft.set_removal(name) for name in names), *(created or ()), *written], listing.generation

    def _apply_as_one(self, operations: Sequence[Operation]) -> bool:
        """Apply all operations in one transaction, and return whether the transaction has been applied."""
        of_sets = [operation for operation in operations if not isinstance(operation.item, Skeleton)]
        of_rules = [operation for operation in operations if isinstance(operation.item, Skeleton)]
        encoded = self.sets.messages(of_sets)
        if encoded is None:
            return False
        try:
            failed = nft.run_while_stale(self._channel, lambda: self._with_rules(encoded, of_rules))
        except (KernelError, ValueError):  # the caller then applies the operations in parts, and a part reports this error
            return False
        self.sets.written(of_sets)
        return not failed

    def _with_rules(self, of_sets: Sequence[bytes], of_rules: Sequence[Operation]) -> tuple[Sequence[bytes], int | None]:
        """The messages of a transaction, and the generation for which they are valid; None means every generation.

        Raises:
            ValueError: the transaction would be too large, or a rule has no equivalent in nf_tables.
        """
        messages, generation = list(of_sets), None
        if of_rules:
            listing = self.rules.listing()
            generation = listing.generation
            # The messages for sets come first, because rules may use the created sets, and no rule uses a removed set.
            messages += (one for operation in of_rules for one in self.rules.messages(operation, listing))
        if len(messages) > self._channel.limit:
            raise ValueError(f"{len(messages)} messages are too many for one transaction")
        return messages, generation
