"""What of our table is ours, and what other programs have put into it. Chains and sets are ours by name."""

from collections.abc import Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.nft_message import Message
from ipvsproxy.kernel.nftables import listing as nft_listing
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family
from ipvsproxy.model.sets import IP_SETS

OUR_CHAINS = tuple(nft_rule.chain_name(family, "", "")[:-1] for family in Family)
"""The beginnings of the names of our chains."""

_ACTION = f"read the table inet {nft.TABLE}"


class Content(NamedTuple):
    """Our table: the names of the chains and sets that are ours, and whether other programs have any in it."""

    chains: Sequence[str]
    sets: Sequence[str]
    has_others: bool

    @property
    def has_ours(self) -> bool:
        """Whether anything of ours is left. A table without any content is ours."""
        return bool(self.chains or self.sets) or not self.has_others

    def removal(self) -> list[Message]:
        """The messages that remove what is ours: the table, unless other programs have a part in it."""
        if not self.has_others:
            return [nft.table_removal()]
        return [*self.emptying(), *map(nft.chain_removal, self.chains), *map(nft.set_removal, self.sets)]

    def emptying(self) -> list[Message]:
        """The messages that remove all rules of our chains."""
        return list(map(nft.flushing, self.chains))


def read(channel: netlink.Channel) -> Content | None:
    """The content of our table; None if there is none. It is complete only if the generation has not changed meanwhile.

    Raises:
        KernelError: it could not be read.
    """
    table = nft_listing.table(channel, nft.INET, nft.TABLE)
    if table is None:
        return None
    sets: list[str] = []
    for data, start, end in channel.dump(nft.sets_query(), _ACTION):
        with netlink.parsing(_ACTION):
            found = message.attributes(data, start + nft.HEADER_SIZE, end)
            if message.text(data, found[nft.NFTA_SET_TABLE]) == nft.TABLE:
                sets.append(message.text(data, found[nft.NFTA_SET_NAME]))
    chains = [name for name in table.chains if name.startswith(OUR_CHAINS)]
    ours = [name for name in sets if name in IP_SETS]
    return Content(chains, ours, has_others=len(chains) < len(table.chains) or len(ours) < len(sets))
