"""Reads tables of nf_tables: those of other programs, and what of ours is ours. Starts no process, and loads no module."""

import errno
import pathlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ipvsproxy.kernel.base import message, modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.nft_message import Message
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import BaseChain, NftTable
from ipvsproxy.model.sets import IP_SETS

OUR_CHAINS = tuple(nft_rule.chain_name(family, "", "")[:-1] for family in Family)
"""The beginnings of the names of our chains."""

_FAMILIES: Mapping[int, str] = {1: "inet", socket.AF_INET: "ip", 3: "arp", 5: "netdev", 7: "bridge", socket.AF_INET6: "ip6"}
"""The names of the kernel's families (NFPROTO_*)."""
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""The hooks of ``inet``, ``ip`` and ``ip6`` by number (NF_INET_*)."""
_IP_FAMILIES = frozenset({"inet", "ip", "ip6"})
_ABSENT = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EAFNOSUPPORT})
"""Errors that mean: no such table, or no nf_tables."""


class Content(NamedTuple):
    """Our table: the names of the chains and sets that are ours, and whether other programs have any in it.

    Chains and sets are ours by name.
    """

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


class TableName(NamedTuple):
    """A table: its family by number, its name, and its comment."""

    family: int
    name: str
    comment: str = ""


def is_loaded(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Whether the kernel may have tables. A question to one that could only load nf_tables now would load it."""
    return modules.may_have_nf_tables(root)


def tables(channel: netlink.Channel) -> list[TableName]:
    """All tables of this network namespace.

    Raises:
        KernelError: they could not be read.
    """
    action = "read the tables of nf_tables"
    try:
        parts = channel.dump(nft.tables_query(), action)
    except KernelError as error:
        if error.errno in _ABSENT:
            return []
        raise
    with netlink.parsing(action):
        return [_table_name(part) for part in parts]


def table(channel: netlink.Channel, family: int, name: str) -> NftTable | None:
    """A table as this generation has it; None if there is none. It is complete only if the generation has not changed meanwhile.

    Raises:
        KernelError: it could not be read.
    """
    action = f"read the table {family_name(family)} {name}"
    try:
        answer = channel.ask(nft.table_query(name, family), action)
    except KernelError as error:
        if error.errno in _ABSENT:
            return None
        raise
    with netlink.parsing(action):
        comment = _table_name(answer).comment
        return NftTable(
            family=family_name(family),
            name=name,
            comment=comment,
            chains={
                chain: place
                for owner, chain, place in map(_chain, channel.dump(nft.chains_query(family), action))
                if owner == name
            },
            maps=frozenset(_maps(channel.dump(nft.sets_query(name, family), action), name)),
        )


def own_table(channel: netlink.Channel) -> Content | None:
    """The content of our table; None if there is none. It is complete only if the generation has not changed meanwhile.

    Raises:
        KernelError: it could not be read.
    """
    action = f"read the table inet {nft.TABLE}"
    listed = table(channel, nft.INET, nft.TABLE)
    if listed is None:
        return None
    sets: list[str] = []
    for data, start, end in channel.dump(nft.sets_query(), action):
        with netlink.parsing(action):
            found = message.attributes(data, start + nft.HEADER_SIZE, end)
            if message.text(data, found[nft.NFTA_SET_TABLE]) == nft.TABLE:
                sets.append(message.text(data, found[nft.NFTA_SET_NAME]))
    chains = [name for name in listed.chains if name.startswith(OUR_CHAINS)]
    ours = [name for name in sets if name in IP_SETS]
    return Content(chains, ours, has_others=len(chains) < len(listed.chains) or len(ours) < len(sets))


def family_name(family: int) -> str:
    """The name of a family in nft."""
    return _FAMILIES.get(family, str(family))


def _table_name(part: netlink.Reply) -> TableName:
    data, start, end = part
    found = message.attributes(data, start + nft.HEADER_SIZE, end)
    comment = nft.text_of(data, found[nft.NFTA_TABLE_USERDATA]) if nft.NFTA_TABLE_USERDATA in found else ""
    return TableName(message.unsigned(data, (start, start + 1)), message.text(data, found[nft.NFTA_TABLE_NAME]), comment)


def _chain(part: netlink.Reply) -> tuple[str, str, BaseChain | None]:
    """The table of a chain, its name, and its place."""
    data, start, end = part
    found = message.attributes(data, start + nft.HEADER_SIZE, end)
    place = None
    if nft.NFTA_CHAIN_HOOK in found:
        at = message.attributes(data, *found[nft.NFTA_CHAIN_HOOK])
        number = message.unsigned(data, at[nft.NFTA_HOOK_HOOKNUM])
        priority = message.unsigned(data, at[nft.NFTA_HOOK_PRIORITY])
        place = BaseChain(
            message.text(data, found[nft.NFTA_CHAIN_TYPE]),
            _HOOKS[number]
            if number < len(_HOOKS) and family_name(message.unsigned(data, (start, start + 1))) in _IP_FAMILIES
            else "",
            priority - ((priority & 1 << 31) << 1),
            drops=nft.NFTA_CHAIN_POLICY in found and message.unsigned(data, found[nft.NFTA_CHAIN_POLICY]) != nft.ACCEPT_POLICY,
        )
    return message.text(data, found[nft.NFTA_CHAIN_TABLE]), message.text(data, found[nft.NFTA_CHAIN_NAME]), place


def _maps(parts: list[netlink.Reply], table_name: str) -> Iterator[str]:
    for data, start, end in parts:
        found = message.attributes(data, start + nft.HEADER_SIZE, end)
        flags = message.unsigned(data, found[nft.NFTA_SET_FLAGS]) if nft.NFTA_SET_FLAGS in found else 0
        if flags & nft.IS_MAP and message.text(data, found[nft.NFTA_SET_TABLE]) == table_name:
            yield message.text(data, found[nft.NFTA_SET_NAME])
