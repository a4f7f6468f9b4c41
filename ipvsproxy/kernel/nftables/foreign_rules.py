"""Which chains of other programs refuse packets of Services that no rule of theirs accepts, for ``doctor``.

nf_tables is read by netlink, which shows the rules of iptables-nft as well. The tables of iptables-legacy are read from what its
program prints. Whether packets reach a chain is not followed.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.nftables import listing as nft_listing
from ipvsproxy.kernel.nftables.listing import TableName
from ipvsproxy.model.rules import BaseChain, NftTable

_OURS = f"inet {nft.TABLE}"

Expression = tuple[str, Mapping[tuple[int, ...], bytes]]

_UNCONDITIONAL = frozenset({"counter", "log"})
"""Expressions that every packet passes."""
_VERDICT_CODE, _VALUE = (2, 2, 1), (2, 1)
_NAME = (1,)  # of a target of iptables

_LEGACY_CHAIN = re.compile(r":(\S+) (ACCEPT|DROP) ")
_LEGACY_REFUSAL = re.compile(r"-A (\S+)(?: -m comment --comment \S+)? -j (?:DROP|REJECT)\b")


def read_tables() -> tuple[NftTable, ...]:
    """All tables of nf_tables, with what their rules mean. Of ours, only chains of other programs, if it has any.

    Raises:
        KernelError: they could not be read.
    """
    if not nft_listing.is_loaded():
        return ()
    with contextlib.closing(netlink.Channel(NETLINK_NETFILTER)) as channel:
        found = [read(channel, name) for name in nft_listing.tables(channel)]
    foreign = (_without_our_chains(table) if str(table) == _OURS else table for table in found if table)
    return tuple(table for table in foreign if table.chains or str(table) != _OURS)


def _without_our_chains(table: NftTable) -> NftTable:
    return dataclasses.replace(
        table,
        chains={name: place for name, place in table.chains.items() if not name.startswith(nft_listing.OUR_CHAINS)},
        closed=tuple(name for name in table.closed if not name.startswith(nft_listing.OUR_CHAINS)),
    )


def read(channel: netlink.Channel, name: TableName) -> NftTable | None:
    """A table with what its rules mean; None if it has gone.

    Raises:
        KernelError: it could not be read.
    """
    table = nft_listing.table(channel, name.family, name.name)
    if table is None:
        return None
    last: dict[str, Sequence[Expression]] = {}
    action = f"read the rules of the table {table}"
    with netlink.parsing(action):
        for found in map(nft.read, channel.dump(nft.rules_query(name.name, name.family), action)):
            last[found.text(nft.NFTA_RULE_CHAIN)] = nft.expressions(found.payload(nft.NFTA_RULE_EXPRESSIONS, b""))
        return dataclasses.replace(
            table,
            closed=tuple(chain for chain, place in table.chains.items() if _is_closed(place, last.get(chain, ()))),
        )


def _is_closed(place: BaseChain | None, last_rule: Sequence[Expression]) -> bool:
    """Whether a base chain of type ``filter`` refuses every packet that no rule accepts before."""
    return place is not None and place.kind == "filter" and (place.drops or _refuses_all(last_rule))


def _refuses_all(rule: Sequence[Expression]) -> bool:
    """Whether no packet passes a rule."""
    deciding = [one for one in rule if one[0] not in _UNCONDITIONAL]
    if len(deciding) != 1:
        return False
    ((name, values),) = deciding
    if name == "immediate":
        return _VERDICT_CODE not in values and _VALUE not in values  # NF_DROP is 0, which is left out
    return name == "reject" or (name == "target" and _text(values) in ("DROP", "REJECT"))


def _text(values: Mapping[tuple[int, ...], bytes]) -> str:
    return values.get(_NAME, b"").split(b"\0", 1)[0].decode(errors="replace")


def legacy_filters(program: str, saved: str) -> Iterator[NftTable]:
    """The table ``filter`` in what ``<program>-save`` of iptables-legacy has printed, as if it were a table of nf_tables."""
    lines = saved.partition("*filter\n")[2].partition("COMMIT")[0].splitlines()
    places = {
        found[1]: BaseChain("filter", found[1].lower(), 0, drops=found[2] == "DROP")
        for found in map(_LEGACY_CHAIN.match, lines)
        if found
    }
    last = {line.split(" ", 2)[1]: line for line in lines if line.startswith("-A ")}
    closed = [chain for chain, place in places.items() if place.drops or _LEGACY_REFUSAL.match(last.get(chain, ""))]
    if places:
        yield NftTable(family=program, name="filter", chains=places, closed=tuple(closed))
