"""Reads the tables of nf_tables, including tables of other programs, and removes tables that kube-proxy has left behind.

Starts no process.

For ``doctor``, this module also finds chains of other programs that refuse packets of Services by default. Tables of nf_tables
are read by netlink, which shows the rules of iptables-nft as well. The tables of iptables-legacy are read from the output of
``iptables-legacy-save``. A chain that would refuse packets is found even if packets never reach the chain.

Rule 1: a table that cannot be read is an error, and never counts as absent.
Rule 2: a table is removed only in the same generation of nf_tables in which the table was recognised as a leftover. If the
generation has changed, the table is read again.
Rule 3: reading tables should not make the kernel load nf_tables. If the files of the kernel's modules are visible, they show
whether a query would make the kernel load nf_tables. If a query would load nf_tables, no query is sent. If the files are not
visible, a query may load nf_tables. If the kernel could not load nf_tables, no further query is sent to the kernel until the
module appears.
"""

import contextlib
import dataclasses
import errno
import pathlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family
from ipvsproxy.model.rules import BaseChain, NftTable
from ipvsproxy.model.sets import IP_SETS

T = TypeVar("T")

VARIANT = "nftables"
"""The value of the metric label ``variant`` for nftables; for rules of iptables, the label names iptables' variant."""
OUR_CHAINS = tuple(nft_rule.chain_name(family, "", "")[:-1] for family in Family)
"""The prefixes of the names of our chains."""

_FAMILIES: Mapping[int, str] = {1: "inet", socket.AF_INET: "ip", 3: "arp", 5: "netdev", 7: "bridge", socket.AF_INET6: "ip6"}
"""The names of the kernel's families (NFPROTO_*)."""
_IP_FAMILIES = frozenset({"inet", "ip", "ip6"})
ABSENT = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EAFNOSUPPORT})
"""Errors that mean that the table, or nf_tables as a whole, does not exist."""


class TableContent(NamedTuple):
    """The content of our table: the names of our chains and sets, and whether the table has chains or sets of other programs.

    The names of chains and sets show which chains and sets belong to ipvsproxy.
    """

    chains: Sequence[str]
    sets: Sequence[str]
    has_others: bool

    @property
    def has_ours(self) -> bool:
        """Whether the table has one of our chains or sets, or is empty."""
        return bool(self.chains or self.sets) or not self.has_others

    def removal(self) -> list[bytes]:
        """The messages that remove the table or, if other programs use the table, only our chains and sets."""
        if not self.has_others:
            return [nft.table_removal()]
        return [*self.emptying(), *map(nft.chain_removal, self.chains), *map(nft.set_removal, self.sets)]

    def emptying(self) -> list[bytes]:
        """The messages that remove all rules from our chains."""
        return list(map(nft.flushing, self.chains))


class TableName(NamedTuple):
    """A table: its family as a number, its name, and its comment."""

    family: int
    name: str
    comment: str = ""


def names(channel: netlink.Channel) -> list[TableName]:
    """All tables of this network namespace.

    Raises:
        KernelError: the tables could not be read.
    """
    action = "read the tables of nf_tables"
    with Tolerated(*ABSENT), netlink.parsing(action):
        return [_table_name(part) for part in channel.dump(nft.tables_query(), action)]
    return []


def settled(channel: netlink.Channel, read: Callable[[], T]) -> tuple[T, int | None]:
    """The result of ``read``, and the generation in which ``read`` ran; the generation is None if tables changed in each attempt.

    Raises:
        KernelError: the generation could not be read.
    """
    for _ in range(nft.ATTEMPTS):
        generation = nft.generation(channel)
        found = read()
        if nft.generation(channel) == generation:
            return found, generation
    return found, None


def table(channel: netlink.Channel, family: int, name: str) -> NftTable | None:
    """The present content of a table; None means that the table does not exist.

    The content is complete only if the generation has not changed during the read.

    Raises:
        KernelError: the table could not be read.
    """
    action = f"read the table {family_name(family)} {name}"
    if (answer := _answer(channel, family, name)) is None:
        return None
    with netlink.parsing(action):
        comment = _table_name(answer).comment
        return NftTable(
            family=family_name(family),
            name=name,
            comment=comment,
            chains={
                chain.name: chain.place
                for chain in map(chain_of, channel.dump(nft.chains_query(family), action))
                if chain.table == name
            },
            maps=frozenset(_maps(channel.dump(nft.sets_query(name, family), action), name)),
        )


def _answer(channel: netlink.Channel, family: int, name: str) -> netlink.Reply | None:
    with Tolerated(*ABSENT):
        return channel.ask(nft.table_query(name, family), f"read the table {family_name(family)} {name}")
    return None


def has_own_table() -> bool:
    """Whether the table ``inet ipvsproxy`` exists.

    Raises:
        KernelError: the kernel did not answer whether the table exists.
    """
    with _channel() as channel:
        return _answer(channel, nft.INET, nft.TABLE) is not None


def own_table(channel: netlink.Channel) -> TableContent | None:
    """The content of our table; None means that the table does not exist.

    The content is complete only if the generation has not changed during the read.

    Raises:
        KernelError: the table could not be read.
    """
    action = f"read the table inet {nft.TABLE}"
    with Tolerated(*ABSENT), netlink.parsing(action):  # another program may remove the table during the read
        if listed := table(channel, nft.INET, nft.TABLE):
            found = [nft.read(part) for part in channel.dump(nft.sets_query(), action)]
            sets = [one.text(nft.NFTA_SET_NAME) for one in found if one.text(nft.NFTA_SET_TABLE) == nft.TABLE]
            chains = [name for name in listed.chains if name.startswith(OUR_CHAINS)]
            ours = [name for name in sets if name in IP_SETS]
            return TableContent(chains, ours, has_others=len(chains) < len(listed.chains) or len(ours) < len(sets))
    return None


def remove_empty(channel: netlink.Channel) -> None:
    """Remove our table if the table contains neither sets nor chains.

    The kernel refuses the removal if any program changes tables during the call.

    Raises:
        KernelError: the table could not be read.
    """
    generation = nft.generation(channel)
    if own_table(channel) == TableContent([], [], has_others=False):
        nft.run(channel, [nft.table_removal()], generation)


def family_name(family: int) -> str:
    """The name of an IP family in nft."""
    return _FAMILIES.get(family, str(family))


class Chain(NamedTuple):
    """A chain in a table of nf_tables; ``place`` is None if the chain is not a base chain."""

    table: str
    name: str
    place: BaseChain | None


def chain_of(part: netlink.Reply) -> Chain:
    """The chain that a message describes.

    Raises:
        KeyError: the message lacks an attribute.
    """
    found, place = nft.read(part), None
    if nft.NFTA_CHAIN_HOOK in found:
        at = found.inside(nft.NFTA_CHAIN_HOOK)
        number, priority = at.number(nft.NFTA_HOOK_HOOKNUM), at.number(nft.NFTA_HOOK_PRIORITY)
        is_of_ip = number < len(nft.HOOKS) and family_name(part.data[part.start]) in _IP_FAMILIES
        place = BaseChain(
            found.text(nft.NFTA_CHAIN_TYPE),
            nft.HOOKS[number] if is_of_ip else "",
            priority - ((priority & 1 << 31) << 1),
            drops=found.number(nft.NFTA_CHAIN_POLICY, nft.ACCEPT_POLICY) != nft.ACCEPT_POLICY,
        )
    return Chain(found.text(nft.NFTA_CHAIN_TABLE), found.text(nft.NFTA_CHAIN_NAME), place)


def _table_name(part: netlink.Reply) -> TableName:
    found, (data, start, _) = nft.read(part), part
    return TableName(data[start], found.text(nft.NFTA_TABLE_NAME), nft.text_of(found.payload(nft.NFTA_TABLE_USERDATA, b"")))


def _maps(parts: list[netlink.Reply], table_name: str) -> Iterator[str]:
    for found in map(nft.read, parts):
        if found.number(nft.NFTA_SET_FLAGS, 0) & nft.IS_MAP and found.text(nft.NFTA_SET_TABLE) == table_name:
            yield found.text(nft.NFTA_SET_NAME)


_OURS = f"inet {nft.TABLE}"

Expression = tuple[str, Mapping[tuple[int, ...], bytes]]

_UNCONDITIONAL = frozenset({"counter", "log"})
"""Expressions that let every packet pass on to the next expression."""
_VERDICT_CODE, _VALUE = (2, 2, 1), (2, 1)
_NAME = (1,)  # this attribute contains the name of an iptables target

_LEGACY_CHAIN = re.compile(r":(\S+) (ACCEPT|DROP) ")
_LEGACY_REFUSAL = re.compile(r"-A (\S+)(?: -m comment --comment \S+)? -j (?:DROP|REJECT)\b")


def read_tables() -> tuple[NftTable, ...]:
    """All tables of nf_tables, with the effect of their rules on packets of Services.

    If our table has chains of other programs, the table is included with only these chains; otherwise the table is left out.

    Raises:
        KernelError: the tables could not be read.
    """
    if not modules.may_have_nf_tables():
        return ()
    with _channel() as channel:
        found = [read(channel, name) for name in names(channel)]
    foreign = (_without_our_chains(table) if str(table) == _OURS else table for table in found if table)
    return tuple(table for table in foreign if table.chains or str(table) != _OURS)


def _without_our_chains(table: NftTable) -> NftTable:
    return dataclasses.replace(
        table,
        chains={name: place for name, place in table.chains.items() if not name.startswith(OUR_CHAINS)},
        closed=tuple(name for name in table.closed if not name.startswith(OUR_CHAINS)),
    )


def read(channel: netlink.Channel, name: TableName) -> NftTable | None:
    """A table with the effect of its rules on packets of Services; None means that the table no longer exists.

    Raises:
        KernelError: the table could not be read.
    """
    listed = table(channel, name.family, name.name)
    if listed is None:
        return None
    last = dict(_rules_of(channel, name))
    closed = (chain for chain, place in listed.chains.items() if _is_closed(place, last.get(chain, ())))
    return dataclasses.replace(listed, closed=tuple(closed))


def _rules_of(channel: netlink.Channel, name: TableName) -> Iterator[tuple[str, Sequence[Expression]]]:
    """The rules of a table in their order, each with the name of its chain."""
    action = f"read the rules of the table {family_name(name.family)} {name.name}"
    with netlink.parsing(action):
        for found in map(nft.read, channel.dump(nft.rules_query(name.name, name.family), action)):
            yield found.text(nft.NFTA_RULE_CHAIN), nft_rule.expressions(found.payload(nft.NFTA_RULE_EXPRESSIONS, b""))


def _is_closed(place: BaseChain | None, last_rule: Sequence[Expression]) -> bool:
    """Whether a base chain of type ``filter`` refuses every packet that none of its rules accepts."""
    return place is not None and place.kind == "filter" and (place.drops or _refuses_all(last_rule))


def _refuses_all(rule: Sequence[Expression]) -> bool:
    """Whether a rule refuses every packet."""
    deciding = [one for one in rule if one[0] not in _UNCONDITIONAL]
    if len(deciding) != 1:
        return False
    ((name, values),) = deciding
    if name == "immediate":
        return _VERDICT_CODE not in values and _VALUE not in values  # NF_DROP is 0, and the kernel omits attributes that are 0
    return name == "reject" or (name == "target" and _text(values) in ("DROP", "REJECT"))


def _text(values: Mapping[tuple[int, ...], bytes]) -> str:
    return values.get(_NAME, b"").split(b"\0", 1)[0].decode(errors="replace")


def rules() -> list[tuple[str, Sequence[Expression]]]:
    """The rules of all tables of nf_tables except our own, each with a text that names its table and chain.

    Raises:
        KernelError: the rules could not be read.
    """
    found: list[tuple[str, Sequence[Expression]]] = []
    if not modules.may_have_nf_tables():
        return found
    with _channel() as channel:
        for one in names(channel):
            place = f"{family_name(one.family)} {one.name}"
            with Tolerated(*ABSENT):
                rules_of = _rules_of(channel, one) if place != _OURS else ()
                found += ((f"table {place} chain {chain}", expressions) for chain, expressions in rules_of)
    return found


def legacy_filters(program: str, saved: str) -> Iterator[NftTable]:
    """The table ``filter`` of iptables-legacy, as an ``NftTable``. ``saved`` is the output of ``<program>-save``."""
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


class TablePlace(NamedTuple):
    """kube-proxy's table for one IP family: ``ip kube-proxy`` or ``ip6 kube-proxy``."""

    family: Family
    name: str

    @property
    def variant(self) -> str:
        """The value of the metric label ``variant`` for nftables."""
        return VARIANT

    @property
    def where(self) -> str:
        """The readable name of the table, without the IP family."""
        return f"the table {self.table}"

    @property
    def table(self) -> str:
        """The family and the name of the table, in the form that the program ``nft`` expects."""
        return f"{family_name(self.family)} {self.name}"

    def __str__(self) -> str:
        return f"{VARIANT} {self.family.label}"


class LeftoverTables:
    """Reads and removes tables in the network namespace of the calling thread. Any thread may call the methods."""

    def __init__(self, root: pathlib.Path = pathlib.Path("/")) -> None:
        self._root = root

    def read(self, place: TablePlace) -> NftTable | None:
        """The content of the table; None means that the table does not exist.

        Raises:
            KernelError: the table could not be read this time.
        """
        if not modules.may_have_nf_tables(self._root):
            return None
        with _channel() as channel:
            try:
                nft.generation(channel)
            except KernelError as error:
                if error.errno != errno.EINVAL:
                    raise
                modules.note_no_nf_tables()
                return None
            return _read(channel, place)[1]

    def remove(self, place: TablePlace, is_left: Callable[[NftTable], bool]) -> None:
        """Remove the table and its contents if ``is_left`` still returns true for the table.

        Raises:
            KernelError: the table exists, and could not be removed.
        """
        with _channel() as channel:

            def removal() -> tuple[Sequence[bytes], int | None]:
                generation, found = _read(channel, place)
                is_due = found is not None and is_left(found)
                return [nft.table_removal(place.name, place.family)] if is_due else [], generation

            failed = nft.run_while_stale(channel, removal)
        if failed:
            number = failed[min(failed)]
            raise KernelError(action=f"remove the table {place.table}", errno=max(number, 0), detail=nft.explain(number))


def _channel() -> "contextlib.closing[netlink.Channel]":
    return contextlib.closing(netlink.Channel(NETLINK_NETFILTER))


def _read(channel: netlink.Channel, place: TablePlace) -> tuple[int, NftTable | None]:
    """A table, and the generation in which it was read.

    Raises:
        KernelError: the table could not be read, or tables changed during each attempt.
    """
    found, generation = settled(channel, lambda: table(channel, place.family, place.name))
    if generation is None:
        raise KernelError(action=f"read the table {place.table}", errno=errno.EAGAIN, detail=nft.explain(nft.STALE))
    return generation, found
