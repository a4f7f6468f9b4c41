"""What rules of other programs do to packets of Services, for ``doctor``: refuse them, or send them elsewhere.

nf_tables is read by netlink, which shows the rules of iptables-nft as well. The tables of iptables-legacy are read from what its
program prints. Whether packets reach a chain is not followed.
"""

import contextlib
import dataclasses
import itertools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import message, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.nftables import listing as nft_listing
from ipvsproxy.kernel.nftables.listing import TableName
from ipvsproxy.kernel.nftables.own_table import OUR_CHAINS
from ipvsproxy.model.nft_table import BaseChain, NftTable, Redirect

_OURS = f"inet {nft.TABLE}"

Expression = tuple[str, Mapping[tuple[int, ...], bytes]]

_UNCONDITIONAL = frozenset({"counter", "log"})
"""Expressions that every packet passes."""
_VERDICT_CODE, _VALUE = (2, 2, 1), (2, 1)
_NAT_TYPE, _DESTINATION = (1,), struct.pack(">I", 1)  # NFTA_NAT_TYPE, NFT_NAT_DNAT
_NAME, _INFO = (1,), (3,)  # of a match or target of iptables
_PROTOCOL, _PORT = (2,), struct.pack(">III", nft.Base.TRANSPORT, 2, 2)
_PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}

_LEGACY_CHAIN = re.compile(r":(\S+) (ACCEPT|DROP) ")
_LEGACY_REDIRECT = re.compile(r"-A (\S+) (.*)-j (?:DNAT|REDIRECT)\b")
_LEGACY_REFUSAL = re.compile(r"-A (\S+)(?: -m comment --comment \S+)? -j (?:DROP|REJECT)\b")
_LEGACY_PROTOCOL, _LEGACY_PORT = re.compile(r"-p (tcp|udp|sctp)\b"), re.compile(r"--dport (\d+)(?!\S)")


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
        chains={name: place for name, place in table.chains.items() if not name.startswith(OUR_CHAINS)},
        closed=tuple(name for name in table.closed if not name.startswith(OUR_CHAINS)),
        redirects=tuple(one for one in table.redirects if not one.chain.startswith(OUR_CHAINS)),
    )


def read(channel: netlink.Channel, name: TableName) -> NftTable | None:
    """A table with what its rules mean; None if it has gone.

    Raises:
        KernelError: it could not be read.
    """
    table = nft_listing.table(channel, name.family, name.name)
    if table is None:
        return None
    rules: dict[str, list[Sequence[Expression]]] = {}
    action = f"read the rules of the table {table}"
    for data, start, end in channel.dump(nft.rules_query(name.name, name.family), action):
        with netlink.parsing(action):
            found = message.attributes(data, start + nft.HEADER_SIZE, end)
            expressions = nft.expressions(data, *found[nft.NFTA_RULE_EXPRESSIONS]) if nft.NFTA_RULE_EXPRESSIONS in found else []
            rules.setdefault(message.text(data, found[nft.NFTA_RULE_CHAIN]), []).append(expressions)
    with netlink.parsing(action):
        return dataclasses.replace(
            table,
            closed=tuple(chain for chain, place in table.chains.items() if _is_closed(place, rules.get(chain, ()))),
            redirects=tuple(
                _redirect(chain, rule) for chain, of_chain in rules.items() for rule in of_chain if _gives_destination(rule)
            ),
        )


def _is_closed(place: BaseChain | None, rules: Sequence[Sequence[Expression]]) -> bool:
    """Whether a base chain of type ``filter`` refuses every packet that no rule accepts before."""
    return place is not None and place.kind == "filter" and (place.drops or (bool(rules) and _refuses_all(rules[-1])))


def _refuses_all(rule: Sequence[Expression]) -> bool:
    """Whether no packet passes a rule."""
    deciding = [one for one in rule if one[0] not in _UNCONDITIONAL]
    if len(deciding) != 1:
        return False
    ((name, values),) = deciding
    if name == "immediate":
        return _VERDICT_CODE not in values and _VALUE not in values  # NF_DROP is 0, which is left out
    return name == "reject" or (name == "target" and _text(values) in ("DROP", "REJECT"))


def _gives_destination(rule: Sequence[Expression]) -> bool:
    return any(
        name == "redir"
        or (name == "nat" and values.get(_NAT_TYPE) == _DESTINATION)
        or (name == "target" and _text(values) in ("DNAT", "REDIRECT"))
        for name, values in rule
    )


def _text(values: Mapping[tuple[int, ...], bytes]) -> str:
    return values.get(_NAME, b"").split(b"\0", 1)[0].decode(errors="replace")


def _redirect(chain: str, rule: Sequence[Expression]) -> Redirect:
    """The port is that which a comparison with a part of the transport header asks for, or a match of iptables."""
    protocol = port = 0
    for (loaded, place), (name, values) in itertools.pairwise(rule):
        compared = values.get((3, 1), b"") if name == "cmp" and (2,) not in values else b""
        if loaded == "meta" and place.get(_PROTOCOL) == struct.pack(">I", nft.Meta.PROTOCOL):
            protocol = compared[0] if len(compared) == 1 else protocol
        if loaded == "payload" and b"".join(place.get((number,), b"") for number in (2, 3, 4)) == _PORT:
            port = int.from_bytes(compared, "big") if len(compared) == 2 else port  # noqa: PLR2004 - the bytes of a port
    for name, values in rule:
        if name == "match" and _text(values) in _PROTOCOLS:
            protocol = _PROTOCOLS[_text(values)]
            first, last = struct.unpack_from("=HH", values.get(_INFO, bytes(8)), 4)  # dpts of xt_tcp and xt_udp
            port = first if first == last else port
    return Redirect(chain, protocol, port)


def legacy_tables(program: str, saved: str) -> Iterator[NftTable]:
    """The tables in what ``<program>-save`` of iptables-legacy has printed, as if they were tables of nf_tables."""
    for name, lines in _by_table(saved):
        chains: dict[str, BaseChain | None] = {}
        closed: dict[str, bool] = {}
        for line in lines:
            if found := _LEGACY_CHAIN.match(line):
                chains[found[1]] = BaseChain(name, found[1].lower(), 0, drops=found[2] == "DROP")
            elif line.startswith("-A "):
                refusal = _LEGACY_REFUSAL.match(line)
                closed[line.split(" ", 2)[1]] = bool(refusal)
        redirects = (_LEGACY_REDIRECT.match(line) for line in lines)
        yield NftTable(
            family=program,
            name=name,
            chains=chains,
            closed=tuple(
                chain for chain, place in chains.items() if name == "filter" and place and (place.drops or closed.get(chain))
            ),
            redirects=tuple(_legacy_redirect(found[1], found[2]) for found in redirects if found),
        )


def _by_table(saved: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in saved.splitlines():
        if line.startswith("*"):
            name, lines = line[1:], []
        elif line == "COMMIT":
            yield name, lines
        else:
            lines.append(line)


def _legacy_redirect(chain: str, matches: str) -> Redirect:
    protocol, port = _LEGACY_PROTOCOL.search(matches), _LEGACY_PORT.search(matches)
    return Redirect(chain, _PROTOCOLS[protocol[1]] if protocol else 0, int(port[1]) if port else 0)
