"""Reading and removing the tables that kube-proxy's nftables mode has left behind. All calls block, and start no process.

Rule 1: an unreadable table is an error, never an absent one.
Rule 2: a table is removed only in the generation in which it was recognised. Otherwise it is read again.
Rule 3: nf_tables is not loaded for a reading, unless the files of this host's modules are not visible. A kernel that could not
load it is not asked again before the module shows.
"""

import contextlib
import errno
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.leftover_rules import NO_SUBSYSTEM
from ipvsproxy.kernel.nftables import tables as nft_tables
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import NftTable

VARIANT = "nftables"
"""What stands for the variant of iptables in metrics."""
ATTEMPTS = 5


class TablePlace(NamedTuple):
    """The table of a family: ``ip kube-proxy`` or ``ip6 kube-proxy``."""

    family: Family
    name: str

    @property
    def variant(self) -> str:
        """What stands for the variant of iptables in metrics."""
        return VARIANT

    @property
    def where(self) -> str:
        """The place for people, without the family."""
        return f"the table {self.table}"

    @property
    def table(self) -> str:
        """Family and name, as the program ``nft`` takes them."""
        return f"{nft_tables.family_name(self.family)} {self.name}"

    def __str__(self) -> str:
        return f"{VARIANT} {self.family.label}"


class LeftoverTables:
    """Reads and removes tables in the network namespace of the calling thread. Calls may come from different threads."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/")) -> None:
        self._root = root

    def fingerprint(self, _place: TablePlace) -> object:
        """A fingerprint that changes with any table; None if the kernel does not show one."""
        if not nft_tables.is_loaded(self._root):
            return NO_SUBSYSTEM
        try:
            with _channel() as channel:
                return nft.generation(channel)
        except KernelError as error:
            if error.errno != errno.EINVAL:
                return None
            modules.note_no_nf_tables()
            return NO_SUBSYSTEM

    def read(self, place: TablePlace) -> NftTable | None:
        """The table; None if there is none.

        Raises:
            KernelError: it could not be read just now.
        """
        if self.fingerprint(place) == NO_SUBSYSTEM:
            return None
        with _channel() as channel:
            return _read(channel, place)[1]

    def remove(self, place: TablePlace, is_left: Callable[[NftTable], bool]) -> None:
        """Remove the table with all that it holds, if ``is_left`` is still true of it.

        Raises:
            KernelError: it is there, and was not removed.
        """
        action = f"remove the table {place.table}"
        with _channel() as channel:
            for _ in range(ATTEMPTS):
                generation, table = _read(channel, place)
                if table is None or not is_left(table):
                    return
                failed = nft.run(channel, [nft.table_removal(place.name, place.family)], generation)
                if not failed:
                    return
                number = failed[min(failed)]
                if number != nft.STALE:
                    raise KernelError(action=action, errno=max(number, 0), detail=nft.explain(number))
        raise KernelError(action=action, errno=nft.STALE, detail=nft.explain(nft.STALE))


def _channel() -> "contextlib.closing[netlink.Channel]":
    return contextlib.closing(netlink.Channel(NETLINK_NETFILTER))


def _read(channel: netlink.Channel, place: TablePlace) -> tuple[int, NftTable | None]:
    """The table, and the generation that has it.

    Raises:
        KernelError: it could not be read, or other tables changed during each attempt.
    """
    for _ in range(ATTEMPTS):
        generation = nft.generation(channel)
        table = nft_tables.table(channel, place.family, place.name)
        if nft.generation(channel) == generation:
            return generation, table
    raise KernelError(action=f"read the table {place.table}", errno=errno.EAGAIN, detail=nft.explain(nft.STALE))
