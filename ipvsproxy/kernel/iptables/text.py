"""Rules as text: the output of ``iptables-save``, and the input of ``iptables-restore``.

``rule`` has the syntax of a single rule.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from ipvsproxy.kernel.iptables import rule as iptables_rule
from ipvsproxy.model.rules import ChainKey, Jump, LeftRules, Reference, Removal, Skeleton

_INCOMPATIBLE = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Our rules in one family, as ``iptables-save`` shows them.

    ``chains`` are our chains that exist, with the text of each rule. ``jumps`` is the number of copies of each jump: two are as
    wrong as none. ``foreign_jumps`` has, for a chain of ours, a rule of another program that leads to it. ``above`` and ``below``
    are the rules of other programs before and after each jump, in its chain. ``hidden`` are tables of ours that iptables does not
    show, because they hold rules that only nft understands; their content is unknown.
    """

    chains: Mapping[ChainKey, tuple[str, ...]]
    jumps: Mapping[Jump, int]
    foreign_jumps: Mapping[ChainKey, str]
    above: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    below: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


NOTHING_LISTED = Listing(chains={}, jumps={}, foreign_jumps={})


def parse_save(text: str, chains: Collection[ChainKey], jumps: Collection[Jump]) -> Listing:
    """Pick our rules out of the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete: a table does not end with COMMIT.
    """
    rules_of: dict[ChainKey, list[str]] = {}
    count: collections.Counter[Jump] = collections.Counter()
    foreign_jumps: dict[ChainKey, str] = {}
    known_jumps = {(ChainKey(jump.table, jump.source), iptables_rule.render_jump(jump)): jump for jump in jumps}
    above: dict[Jump, frozenset[str]] = {}
    others: dict[ChainKey, list[str]] = {key: [] for key, _ in known_jumps}
    for key, rule in _rules(text):
        if key in chains:
            content = rules_of.setdefault(key, [])
            if rule is not None:
                content.append(iptables_rule.normalise(rule))
        elif rule is None:
            continue
        elif (key, rule) in known_jumps:
            count[known_jumps[key, rule]] += 1
            above[known_jumps[key, rule]] = frozenset(others[key])
            continue
        elif (target := ChainKey(key.table, _target(rule))) in chains:
            foreign_jumps[target] = f"-A {key.chain} {rule}"
        if key in others and rule is not None:
            others[key].append(rule)
    below = {jump: frozenset(others[ChainKey(jump.table, jump.source)]) - rules_above for jump, rules_above in above.items()}
    whole = {key: tuple(rules) for key, rules in rules_of.items()}
    hidden = frozenset(_INCOMPATIBLE.findall(text)) & {key.table for key in chains}
    return Listing(chains=whole, jumps=count, foreign_jumps=foreign_jumps, above=above, below=below, hidden=hidden)


def _rules(text: str) -> Iterator[tuple[ChainKey, str | None]]:
    """Table by table, every chain with None, then every rule with its text."""
    table = ""
    for line in text.splitlines():
        if line.startswith("-A "):
            name, _, rule = line[3:].partition(" ")
            yield ChainKey(table, name), rule
        elif line.startswith(":"):
            yield ChainKey(table, line[1:].partition(" ")[0]), None
        elif line.startswith("*"):
            table = line[1:]
        elif line == "COMMIT":
            table = ""
    if table:
        raise ValueError(f"its output ends in the middle of table {table[:32]}")


def _target(rule: str) -> str:
    match = re.search(r"(?:^| )-[jg] (\S+)", rule)
    return match.group(1) if match else ""


def parse_left(text: str, concerns: Callable[[ChainKey], bool]) -> LeftRules:
    """Pick the chains for which ``concerns`` is true, and the rules that lead to them, out of the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete.
    """
    chains: collections.Counter[ChainKey] = collections.Counter()
    references: list[Reference] = []
    for key, rule in _rules(text):
        if concerns(key):
            chains[key] += rule is not None
        elif rule is not None:
            words = rule.rsplit(" ", 2)  # a jump to a chain has no options, and ends the rule
            if words[-2:-1] in (["-j"], ["-g"]) and concerns(target := ChainKey(key.table, words[-1])):
                references.append(Reference(key, rule, target))
    return LeftRules(chains=chains, references=tuple(references), hidden=frozenset(_INCOMPATIBLE.findall(text)))


def render_left_removal(removal: Removal) -> str:
    """The input of ``iptables-restore --noflush`` for a removal of leftover rules; empty if there is nothing to remove."""
    lines: list[str] = []
    for table in dict.fromkeys(key.table for key in (*(reference.source for reference in removal.references), *removal.emptied)):
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in removal.emptied if key.table == table]
        lines += [
            f"-D {reference.source.chain} {reference.text}" for reference in removal.references if reference.source.table == table
        ]
        lines += [f"-X {key.chain}" for key in removal.deleted if key.table == table]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def render_restore(skeleton: Skeleton, listing: Listing, moved: Collection[Jump] = ()) -> str:
    """The input of ``iptables-restore --noflush`` that puts a skeleton in force.

    It declares every chain, which empties it, and writes it anew. Listed chains and jumps that the skeleton lacks are removed. A
    chain that another program's rule leads to is only emptied. An absent jump is put first in its chain, in the skeleton's
    order, so that the last one ends up on top, as kube-proxy's do. A present jump stays in its place. Of duplicates the last one
    stays: each was put first, so it is the oldest. Jumps in ``moved`` are put first again.
    """
    lines: list[str] = []
    gone = [key for key in listing.chains if key not in skeleton.chains]
    ways = [jump for jump in listing.jumps if jump not in skeleton.jumps]
    for table in dict.fromkeys([*_tables(skeleton), *(key.table for key in gone), *(jump.table for jump in ways)]):
        keys = [key for key in skeleton.chains if key.table == table]
        going = [key for key in gone if key.table == table]
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in (*keys, *going)]
        for jump in ways:
            lines += [f"-D {jump.source} {iptables_rule.render_jump(jump)}"] * (listing.jumps[jump] if jump.table == table else 0)
        lines += [f"-X {key.chain}" for key in going if key not in listing.foreign_jumps]
        lines += [
            f"-A {key.chain} {iptables_rule.render(rule, skeleton.family)}" for key in keys for rule in skeleton.chains[key]
        ]
        for jump in skeleton.jumps:
            if jump.table == table:
                there = listing.jumps.get(jump, 0)
                stays = there > 0 and jump not in moved
                lines += [f"-D {jump.source} {iptables_rule.render_jump(jump)}"] * (there - stays)
                lines += [] if stays else [f"-I {jump.source} {iptables_rule.render_jump(jump)}"]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def render_removal(skeleton: Skeleton, listing: Listing) -> str:
    """The input of ``iptables-restore --noflush`` that removes the present part of a skeleton; empty if nothing is present.

    A chain that another program's rule leads to is only emptied: its deletion would make the kernel refuse the whole table.
    """
    lines: list[str] = []
    for table in _tables(skeleton):
        keys = [key for key in skeleton.chains if key.table == table and key in listing.chains]
        jumps = [jump for jump in skeleton.jumps if jump.table == table for _ in range(listing.jumps.get(jump, 0))]
        if not keys and not jumps:
            continue
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in keys]
        lines += [f"-D {jump.source} {iptables_rule.render_jump(jump)}" for jump in jumps]
        lines += [f"-X {key.chain}" for key in keys if key not in listing.foreign_jumps]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def _tables(skeleton: Skeleton) -> Iterator[str]:
    return iter(dict.fromkeys(key.table for key in skeleton.chains))
