"""What the kernel itself says about the tables of iptables, in both variants: answers that spare a program.

Rule: only a plain answer counts. Where the kernel refuses a question, or its answer leaves a doubt, the program is asked.
"""

import contextlib
import errno
import pathlib
from collections.abc import Callable

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables import legacy_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import ChainKey

PROC = pathlib.Path("/proc")

_LEGACY = "legacy"
_TRIED_TABLE = "nat"
"""The table in which every program writes rules."""


def hold_nothing(family: Family, variant: str, proc: pathlib.Path = PROC) -> bool:
    """Whether the tables of a family certainly have no rules, and no chains but built-in ones. Makes no table.

    ``variant`` is that of a ``Program``. In nf_tables, the chains that iptables-nft makes by itself leave a doubt.
    """
    try:
        if variant == _LEGACY:
            return all(legacy_tables.is_bare(family, table) for table in legacy_tables.names(family, proc))
        return not has_chain(family, lambda _: True)
    except KernelError:
        return False


def take_rules(family: Family, variant: str) -> bool:
    """Whether the kernel certainly takes rules of a family in this variant, as far as a program's trial goes.

    Of the trial nothing remains but the legacy table nat, which the kernel makes if it is absent.
    """
    try:
        if variant == _LEGACY:
            legacy_tables.is_bare(family, _TRIED_TABLE)
            return True
        with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
            messages = nft.trial(family, _TRIED_TABLE)
            return nft.run(channel, messages) == {len(messages) - 1: errno.ENOENT}
    except KernelError:
        return False


def has_chain(family: Family, concerns: Callable[[ChainKey], bool]) -> bool:
    """Whether nf_tables has a chain of this family for which ``concerns`` is true.

    Raises:
        KernelError: the chains could not be read.
    """
    action = f"read the chains of {family.label}"
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        parts = channel.dump(nft.chains_query(family), action)
    with netlink.parsing(action):
        return any(
            concerns(ChainKey(message.text(data, found[nft.NFTA_CHAIN_TABLE]), message.text(data, found[nft.NFTA_CHAIN_NAME])))
            for data, start, end in parts
            for found in (message.attributes(data, start + nft.HEADER_SIZE, end),)
        )
