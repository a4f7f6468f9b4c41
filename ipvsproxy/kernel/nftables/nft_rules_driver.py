"""The nftables driver for rules: one transaction programs all rules of an IP family. The driver starts no process.

Our table has the rules of both IP families. Each chain's name contains the family and the iptables table, as in
``IPv4-nat-KUBE-SERVICES``. For each family and each built-in chain of iptables that has one of our jumps, our table has a
separate base chain. Every rule carries the text that iptables would print for the rule. ``nft list table inet ipvsproxy`` shows
this text as the rule's comment if the text is short enough.
"""

import errno
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyroute2.netlink import NETLINK_NETFILTER

from ipvsproxy.kernel.base import netlink
from ipvsproxy.kernel.base import nft_message as nft
from ipvsproxy.kernel.base.errors import KernelError, Tolerated
from ipvsproxy.kernel.base.nft_message import SetShape
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables.iptables_driver import Program, Refusal
from ipvsproxy.kernel.nftables import nft_tables
from ipvsproxy.kernel.nftables import rule as nft_rule
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import BaseChain, ChainKey, Jump, ObservedSkeleton, Rule, Skeleton, Verdict, render

_READ = "read the table inet ipvsproxy"
_IN_DORMANT_TABLE = "the table inet ipvsproxy is dormant"
_ELSEWHERE = "its base chain has another type, hook, priority or policy"

HOOKS: Mapping[tuple[str, str], BaseChain] = {
    ("mangle", "PREROUTING"): BaseChain("filter", "prerouting", -150),
    ("mangle", "OUTPUT"): BaseChain("filter", "output", -150),
    ("mangle", "POSTROUTING"): BaseChain("filter", "postrouting", -150),
    ("nat", "PREROUTING"): BaseChain("nat", "prerouting", -105),
    ("nat", "OUTPUT"): BaseChain("nat", "output", -105),
    ("nat", "POSTROUTING"): BaseChain("nat", "postrouting", 95),
    ("filter", "INPUT"): BaseChain("filter", "input", -5),
    ("filter", "FORWARD"): BaseChain("filter", "forward", -5),
    ("filter", "OUTPUT"): BaseChain("filter", "output", -5),
}
"""The base chain for each table and built-in chain of iptables. Base chains for ``nat`` and ``filter`` have a priority slightly
lower than usual, so they run before most chains of other programs.

IPVS takes arriving packets at ``INPUT`` with priority 99, and this host's own packets at ``OUTPUT`` with priority -98. IPVS sends
all these packets on through ``OUTPUT``, with the address of an endpoint as their destination. The filter chain of ``OUTPUT`` gets
packets to Services only after IPVS has sent them on. If this chain got a packet before IPVS and dropped it, the sender would get
an error. With iptables, the sender of a dropped packet gets no error and no answer.
"""


_Expressions = list[tuple[str, Mapping[tuple[int, ...], bytes]]]
"""The expressions of one rule as the kernel prints them."""


class _Printed(NamedTuple):
    """One rule as read from the kernel: its text, its expressions, and its number in the table.

    ``fingerprint`` is the fingerprint of the expressions that were written with the text. ``raw`` is the attribute with the
    expressions, and ``user_data`` is the attribute with text and fingerprint.
    """

    text: str
    expressions: _Expressions
    handle: int
    fingerprint: bytes
    raw: bytes
    user_data: bytes


class TableListing(NamedTuple):
    """Our table as read from the kernel.

    ``hooks`` maps the name of each base chain to the place where the chain is attached, and the name of each other chain to None.

    ``generation`` is None if other programs kept changing tables; the listing may then be a mixture of several generations.
    """

    generation: int | None
    is_dormant: bool
    hooks: Mapping[str, BaseChain | None]
    rules: Mapping[str, Sequence[_Printed]]


class NftRulesDriver:
    """Reads and writes the rules of both IP families, in the network namespace of the thread that creates this object.

    Only the chains in ``chains`` and the jumps in ``jumps`` belong to ipvsproxy. ``proc`` is the mount point of the proc file
    system. Only one thread may use the driver.
    """

    def __init__(
        self,
        *,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        connect: Callable[[int], netlink.Socket] = netlink.open_socket,
        proc: pathlib.Path = pathlib.Path("/proc"),
    ) -> None:
        self._channel = netlink.Channel(NETLINK_NETFILTER, connect)
        self._chains = tuple(chains)
        self._jumps = tuple(jumps)
        self._proc = proc
        version = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:3] if part.isdigit())
        self._program = Program(version, nft_tables.VARIANT)

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()

    def known_program(self, _family: Family) -> Program:
        """A ``Program`` that represents the kernel and has the kernel's version."""
        return self._program

    program = known_program

    def usable(self, family: Family) -> Refusal | None:
        """The reason why the kernel cannot have rules of the given IP family; None if no reason is found.

        This method only reads, so it does not find every reason.
        """
        if reason := iptables.absent_family(family, self._proc):
            return Refusal(reason, is_certain=True)
        try:
            nft.generation(self._channel)
        except KernelError as error:
            is_absent = error.errno in (errno.EINVAL, errno.EOPNOTSUPP)
            return Refusal("this kernel has no nf_tables" if is_absent else str(error), is_certain=is_absent)
        return None

    def try_writing(self, family: Family) -> Refusal | None:
        """The reason why the kernel accepts no rules of the given IP family; None if the kernel accepts rules.

        The driver tries a transaction that contains every kind of expression in our rules. The kernel refuses the transaction at
        its end, so nothing of the transaction remains.
        """
        if refusal := self.usable(family):
            return refusal
        trial = _trial(family)
        messages = [*(request for request, _ in trial), nft.chain_removal("ipvsproxy-absent")]
        failed = nft.run(self._channel, messages)
        last = len(messages) - 1
        index, number = min(failed.items()) if failed else (last, 0)
        if failed == {last: errno.ENOENT}:
            return None
        is_certain = number in (errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL)
        if is_certain and index in range(last):  # later messages fail only because this message failed
            return Refusal(f"the nf_tables of this kernel has no {trial[index][1]}: {_HOLD_ELSEWHERE}", is_certain=True)
        return Refusal(f"the kernel refuses rules of nf_tables: {nft.explain(number)}", is_certain=is_certain)

    def rules_with(self, text: str, families: Collection[Family]) -> list[str]:
        """The rules of our table that contain the given text."""
        try:
            listing = self.listing()
        except KernelError:
            return []
        prefixes = tuple(nft_rule.chain_name(family, "", "")[:-1] for family in families)
        return [
            f"{chain} {rule.text}"
            for chain, rules in listing.rules.items()
            for rule in rules
            if text in rule.text and chain.startswith(prefixes)
        ]

    def observe(self, family: Family) -> ObservedSkeleton:
        """The observed rules of an IP family.

        Raises:
            KernelError: the rules could not be read.
        """
        return self.observed(family, self.listing())

    def observed(self, family: Family, listing: TableListing) -> ObservedSkeleton:
        """The rules of an IP family, taken from ``listing``."""
        names = {key: nft_rule.chain_name(family, *key) for key in self._chains}
        chains = {key: tuple(_texts(listing.rules.get(name, ()), name)) for key, name in names.items() if name in listing.hooks}
        jumps: list[Jump] = []
        idle_jumps: dict[Jump, str] = {}
        strange_rules: dict[ChainKey, tuple[str, ...]] = {}
        for base in self._bases():
            present, others = self._split(base, family, listing)
            if self._meets_packets(base, family, listing):
                jumps += present
            else:
                idle_jumps |= dict.fromkeys(present, _IN_DORMANT_TABLE if listing.is_dormant else _ELSEWHERE)
            if others:
                strange_rules[base] = tuple(others)
        return ObservedSkeleton(
            family=family, chains=chains, jumps=frozenset(jumps), strange_rules=strange_rules, idle_jumps=idle_jumps
        )

    def _meets_packets(self, base: ChainKey, family: Family, listing: TableListing) -> bool:
        return not listing.is_dormant and listing.hooks.get(nft_rule.chain_name(family, *base)) == HOOKS[base]

    def _split(self, base: ChainKey, family: Family, listing: TableListing) -> tuple[list[Jump], list[str]]:
        """Our jumps in a base chain, and all other rules in the chain, including second copies of our jumps."""
        absent = {jump: _as_printed(nft_rule.jump(jump, family)) for jump in self._jumps if (jump.table, jump.source) == base}
        present: list[Jump] = []
        others: list[str] = []
        name = nft_rule.chain_name(family, *base)
        for printed in listing.rules.get(name, ()):
            jump = next((one for one, expressions in absent.items() if expressions == printed.expressions), None)
            if jump is None:
                others.append(_describe(printed, name))
            else:
                present.append(jump)
                del absent[jump]
        return present, others

    def _bases(self) -> list[ChainKey]:
        """The built-in chains of iptables that our base chains replace."""
        return list(dict.fromkeys(ChainKey(jump.table, jump.source) for jump in self._jumps))

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Program or remove skeletons; each skeleton is programmed or removed either completely or not at all.

        Repeating an operation causes no error.
        """
        return [self._apply(operation) for operation in operations]

    def messages(self, operation: Operation, listing: TableListing) -> list[bytes]:
        """The messages that carry out an operation on a skeleton; ``listing`` describes the present table.

        The removal of an absent skeleton needs no messages.

        Raises:
            ValueError: a rule has no equivalent in nf_tables.
        """
        skeleton = operation.item
        assert isinstance(skeleton, Skeleton)  # noqa: S101 - the caller has checked the type
        if operation.verb is not Verb.REMOVE:
            return self._put(skeleton, listing)
        present = [name for name in self._names(skeleton.family) if name in listing.hooks]
        return [*map(nft.flushing, present), *map(nft.chain_removal, present)]

    def rewriting(self, family: Family, listing: TableListing) -> list[bytes]:
        """The messages that refill the emptied chains of an IP family with the rules that the chains have in ``listing``.

        Raises:
            ValueError: another program has added or changed a rule, or has changed a base chain. Rules rewritten without this
                change might accept packets that are to be dropped.
        """
        observed = self.observed(family, listing)
        ours = (listing.rules.get(nft_rule.chain_name(family, *key), ()) for key in self._chains)
        are_known = all(is_as_written for printed in ours for _, is_as_written in _runs(printed))
        if not are_known or observed.strange_rules or observed.idle_jumps:
            raise ValueError(f"an unknown rule among the {family.label} rules, or a chain in another place")
        return [
            nft.rule_again(name, nft_rule.sent_again(one.raw), one.user_data)
            for name in self._names(family)
            for one in listing.rules.get(name, ())
        ]

    def flushing(self, families: Collection[Family], listing: TableListing) -> list[bytes]:
        """The messages that remove all rules from the existing chains of the given IP families."""
        return [nft.flushing(name) for family in families for name in self._names(family) if name in listing.hooks]

    def _apply(self, operation: Operation) -> Outcome:
        try:
            failed = nft.run_while_stale(self._channel, lambda: self._transaction(operation), insists=True)
        except (KernelError, ValueError) as error:
            return Outcome(operation, error=str(error), errno=error.errno if isinstance(error, KernelError) else errno.EINVAL)
        if failed:
            number = failed[min(failed)]
            return Outcome(operation, error=f"{operation}: {nft.explain(number)}", errno=max(number, 0))
        return Outcome(operation)

    def _transaction(self, operation: Operation) -> tuple[Sequence[bytes], int | None]:
        listing = self._read_often()
        return self.messages(operation, listing), listing.generation

    def _put(self, skeleton: Skeleton, listing: TableListing) -> list[bytes]:
        family = skeleton.family
        bases = dict.fromkeys((jump.table, jump.source) for jump in skeleton.jumps)
        hooks = {nft_rule.chain_name(family, *base): HOOKS[base] for base in bases}
        chains = {nft_rule.chain_name(family, *key): (key, rules) for key, rules in skeleton.chains.items()}
        removed = [name for name in self._names(family) if name in listing.hooks and name not in hooks and name not in chains]
        moved = [name for name, hook in hooks.items() if name in listing.hooks and listing.hooks[name] != hook]
        emptied = [name for name in (*hooks, *chains, *removed) if name in listing.hooks]
        return [
            nft.table(),
            *map(nft.flushing, emptied),
            *map(nft.chain_removal, (*moved, *removed)),
            *(nft.chain(name) for name in chains),
            *(nft.chain(name, hook) for name, hook in hooks.items()),
            *(
                one
                for name, (key, rules) in chains.items()
                for rule in rules
                for one in _encode(rule, name, nft_rule.expand(rule, family, key.table), family)
            ),
            *(
                nft.rule(
                    nft_rule.chain_name(family, jump.table, jump.source),
                    nft_rule.jump(jump, family),
                    f"-j {jump.target}",
                )
                for jump in skeleton.jumps
            ),
        ]

    def _names(self, family: Family) -> list[str]:
        """The names of all our chains; the base chains come first."""
        return [nft_rule.chain_name(family, *key) for key in (*self._bases(), *self._chains)]

    def listing(self) -> TableListing:
        """The content of our table; the generation of nf_tables did not change while the table was read.

        Raises:
            KernelError: our table could not be read, or tables changed during each attempt.
        """
        listing = self._read_often()
        if listing.generation is None:
            raise KernelError(action=_READ, errno=errno.EAGAIN, detail="other programs keep changing the rules of nf_tables")
        return listing

    def _read_often(self) -> TableListing:
        listing, generation = nft_tables.settled(self._channel, self._read)
        return listing._replace(generation=generation)

    def _read(self) -> TableListing:
        answer: netlink.Reply | None = None
        with Tolerated(errno.ENOENT):
            answer = self._channel.ask(nft.table_query(), _READ)
        if answer is None:
            return TableListing(None, is_dormant=False, hooks={}, rules={})
        rules: dict[str, list[_Printed]] = {}
        with netlink.parsing(_READ):
            flags = nft.read(answer).number(nft.NFTA_TABLE_FLAGS, 0)
            chains = map(nft_tables.chain_of, self._channel.dump(nft.chains_query(), _READ))
            hooks = {one.name: one.place for one in chains if one.table == nft.TABLE}
            for found in map(nft.read, self._channel.dump(nft.rules_query(), _READ)):
                if found.text(nft.NFTA_RULE_TABLE) == nft.TABLE:
                    expressions = found.payload(nft.NFTA_RULE_EXPRESSIONS, b"")
                    user_data = found.payload(nft.NFTA_RULE_USERDATA, b"")
                    printed = _Printed(
                        nft.text_of(user_data),
                        nft_rule.expressions(expressions),
                        found.number(nft.NFTA_RULE_HANDLE),
                        nft.fingerprint_of(user_data),
                        expressions,
                        user_data,
                    )
                    rules.setdefault(found.text(nft.NFTA_RULE_CHAIN), []).append(printed)
        return TableListing(None, bool(flags & nft.IS_DORMANT), hooks, rules)


def _describe(printed: _Printed, chain: str) -> str:
    """A readable description of a rule: its expressions, its comment, and the rule's name in ``nft``."""
    parts = ", ".join(nft_rule.decision(*one) for one in printed.expressions) or "no expression"
    # quoted, because the comment may come from another program
    comment = f", with the comment {printed.text!r}" if printed.text else ""
    return f"{parts}{comment} (inet {nft.TABLE} {chain} handle {printed.handle})"


def _as_printed(expressions: nft_rule.Expressions) -> _Expressions:
    return nft_rule.expressions(b"".join(expressions))


def _fingerprint(rules: Iterable[_Expressions]) -> bytes:
    """A hash of the expressions of all nf_tables rules that together replace one rule."""
    described = [[(name, sorted(values.items())) for name, values in expressions] for expressions in rules]
    return hashlib.blake2b(repr((nft_rule.ENCODING, described)).encode(), digest_size=nft.FINGERPRINT_SIZE).digest()


def _encode(rule: Rule, name: str, expanded: Sequence[nft_rule.Expressions], family: Family) -> Iterator[bytes]:
    """The messages that append a ``Rule`` to a chain, as one or more nf_tables rules."""
    fingerprint = _fingerprint(map(_as_printed, expanded))
    return (nft.rule(name, expressions, render(rule, family), fingerprint) for expressions in expanded)


def _runs(printed: Sequence[_Printed]) -> Iterator[tuple[list[_Printed], bool]]:
    """Yields the nf_tables rules of one of our chains, grouped by ``Rule``, and whether each group is unchanged.

    One ``Rule`` may be written as several nf_tables rules, which all have the same text and fingerprint. If one of the nf_tables
    rules is missing or changed, the whole group counts as changed.
    """
    for (_, fingerprint), run in itertools.groupby(printed, lambda one: (one.text, one.fingerprint)):
        alike = list(run)
        yield alike, bool(fingerprint) and fingerprint == _fingerprint(one.expressions for one in alike)


def _texts(printed: Sequence[_Printed], chain: str) -> Iterator[str]:
    """The texts of the rules of one of our chains; if another program added or changed a rule, the rule's text says so."""
    for run, is_as_written in _runs(printed):
        if is_as_written:
            yield run[0].text
        elif run[0].text:
            yield from [f"{run[0].text} (changed)"] * len(run)
        else:
            yield from (f"a rule without a text of ours: {_describe(one, chain)}" for one in run)


_TRIED = Rule(target=Verdict.ACCEPT)
_TRIED_SET = "ipvsproxy-trial"
_HOLD_ELSEWHERE = "load the module that has it, use a newer kernel, or hold rules in iptables (--rules-backend=iptables)"
_NAT = "chains of the type nat in a table of the family inet, which came with Linux 5.2"


def _trial(family: Family) -> list[tuple[bytes, str]]:
    """Pairs of a message and the kernel feature that the message needs.

    The messages create a set, and base chains with all kinds of rules.
    """
    nat, postrouting, filtering = (nft_rule.chain_name(family, "trial", name) for name in ("nat", "postrouting", "filter"))
    local = nft_rule.address_type(is_source=True)
    address = nft_rule.expand(_TRIED, family, "nat")[0]
    looked_up = [
        nft_rule.meta(nft_rule.Meta.MARK),
        nft_rule.meta(nft_rule.Meta.PROTOCOL, 1),
        nft_rule.payload(nft_rule.Base.TRANSPORT, 2, 2, 2),
        nft_rule.lookup(_TRIED_SET),
    ]
    masquerading = [nft_rule.original_destination(family), local, nft_rule.masquerade(fully_random=True)]
    return [
        (nft.table(), "tables of the family inet"),
        (nft.new_set(_TRIED_SET, SetShape(0, 12), 1), "sets with keys of several fields"),
        (nft.chain(nat, HOOKS["nat", "PREROUTING"]), _NAT),
        (nft.chain(postrouting, HOOKS["nat", "POSTROUTING"]), _NAT),
        (nft.chain(filtering, HOOKS["filter", "INPUT"]), "chains of the type filter"),
        (nft.rule(nat, address, "trial"), "expression nat for the family inet"),
        (nft.rule(postrouting, masquerading, "trial"), "expressions ct, fib and masq for the family inet"),
        (nft.rule(filtering, looked_up, "trial"), "expressions meta, payload and lookup"),
        (nft.rule(filtering, [nft_rule.connection_state(), nft_rule.reject()], "trial"), "expression reject for the family inet"),
    ]
