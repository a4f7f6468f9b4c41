"""The nftables driver of rules and sets: operations that stand side by side in a plan are one transaction.

So no packet meets a rule without its sets, or a set that only half of a change has reached. IPVS is no part of nf_tables, and its
changes stand between additions and removals: a sync that has both takes two transactions.
"""

import functools
import itertools
import pathlib
import socket
from collections.abc import Callable, Collection, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.nft_message import Message
from ipvsproxy.kernel.nftables import rules as nft_rules
from ipvsproxy.kernel.nftables.changes import NftChanges
from ipvsproxy.kernel.nftables.rules import NftRulesDriver
from ipvsproxy.kernel.nftables.sets import NftSetsDriver
from ipvsproxy.model.plan import Operation, Outcome
from ipvsproxy.model.rules import ChainKey, Jump, Skeleton


class NftDriver:
    """Writes rules and sets of both families; ``rules`` and ``sets`` read them, each with a socket of its own.

    The arguments are those of ``NftRulesDriver``. With ``listen``, ``changes`` are the changes of our table by others, and sets
    are read again after these alone. Only the thread that makes this object may use it, except for ``changes``.
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
        noted = functools.partial(self._open_noted, connect)
        self.rules = NftRulesDriver(chains=chains, jumps=jumps, connect=noted, proc=proc)
        self.sets = NftSetsDriver(noted, changes=self.changes)
        self._channel = netlink.Channel(NETLINK_NETFILTER, noted)

    def _open_noted(self, connect: Callable[[int], socket.socket], protocol: int) -> socket.socket:
        """Open a socket and note its port id: its changes are our own."""
        opened = connect(protocol)
        self._ports.add(opened.getsockname()[0])
        return opened

    def close(self) -> None:
        """Close all sockets."""
        for one in (self.rules, self.sets, self._channel, *((self.changes,) if self.changes else ())):
            one.close()

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply all operations, or those that the kernel takes, with one outcome for each. A repetition is no error.

        If the kernel refuses the transaction, rules and sets are applied in parts, in their order, so that each object has an
        outcome of its own.
        """
        if len(operations) > 1 and self._apply_as_one(operations):
            return list(map(Outcome, operations))
        outcomes: list[Outcome] = []
        for is_of_rules, group in itertools.groupby(operations, lambda operation: isinstance(operation.item, Skeleton)):
            outcomes += (self.rules if is_of_rules else self.sets).apply(list(group))
        return outcomes

    def _apply_as_one(self, operations: Sequence[Operation]) -> bool:
        """Returns whether all operations are in force, by one transaction."""
        of_sets = [operation for operation in operations if not isinstance(operation.item, Skeleton)]
        of_rules = [operation for operation in operations if isinstance(operation.item, Skeleton)]
        encoded = self.sets.messages(of_sets)
        if encoded is None:
            return False
        try:
            for _ in range(nft_rules.ATTEMPTS):
                messages, generation = self._with_rules(encoded, of_rules)
                if len(messages) > self._channel.limit:
                    return False
                failed = nft.run(self._channel, messages, generation)
                if nft.STALE not in failed.values():
                    break
        except (KernelError, ValueError):  # the parts meet with the same error, and report it
            return False
        self.sets.written(of_sets)
        return not failed

    def _with_rules(self, of_sets: Sequence[Message], of_rules: Sequence[Operation]) -> tuple[Sequence[Message], int | None]:
        """The transaction, and the generation that it depends on; None if it depends on none, as without rules."""
        if not of_rules:
            return of_sets, None
        listing = self.rules.listing()
        written = [message for operation in of_rules for message in self.rules.messages(operation, listing)]
        # Sets exist before a rule names them, and no rule names those that are removed.
        return [*of_sets, *written], listing.generation
