"""Reads tables of nf_tables that other programs have made. Starts no process, and loads no module."""

import errno
import pathlib
import socket
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.kernel.base import message, modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.model.nft_table import BaseChain, NftTable

_FAMILIES: Mapping[int, str] = {1: "inet", socket.AF_INET: "ip", 3: "arp", 5: "netdev", 7: "bridge", socket.AF_INET6: "ip6"}
"""The names of the kernel's families (NFPROTO_*)."""
_HOOKS = ("prerouting", "input", "forward", "output", "postrouting")
"""The hooks of ``inet``, ``ip`` and ``ip6`` by number (NF_INET_*)."""
_IP_FAMILIES = frozenset({"inet", "ip", "ip6"})
_ABSENT = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EAFNOSUPPORT})
"""Errors that mean: no such table, or no nf_tables."""


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
