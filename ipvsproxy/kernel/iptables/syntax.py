"""Parses the output of ``iptables-save``, and writes the input of ``iptables-restore``; see also ``model.rules.render``."""

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping

from ipvsproxy.model.rules import ChainKey, Jump, LeftRules, Reference, Removal, Skeleton, render, render_jump

_BARE_COMMENT = re.compile(r'--comment ([^"\s]\S*)')


def normalise(text: str) -> str:
    """The text of a rule in the form that ``render`` writes, independent of the version of iptables that printed the rule.

    Some versions of iptables print a one-word comment without quotes, or the number of a protocol instead of its name. Some
    releases of libxt_ipvs print ``--vproto`` as ``--proto``, although these releases cannot read ``--proto``.
    """
    text = _BARE_COMMENT.sub(r'--comment "\1"', text).replace("-m ipvs --proto ", "-m ipvs --vproto ")
    return text.replace("-p 4 ", "-p ipencap ").replace("-p 41 ", "-p ipv6 ")


_INCOMPATIBLE = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Our rules in one IP family, taken from the output of ``iptables-save``.

    ``chains`` are our existing chains, with the text of each rule. ``jumps`` has the number of copies of each jump; exactly one
    copy is right. ``foreign_jumps`` maps each of our chains to one rule of another program that jumps to the chain, if there is
    one. For each jump, ``above`` and ``below`` have the rules of other programs that stand before and after the jump in its
    chain. ``hidden`` are tables that iptables does not show because they have rules that only nft understands; our chains may be
    in hidden tables. The content of hidden tables is unknown.
    """

    chains: Mapping[ChainKey, tuple[str, ...]]
    jumps: Mapping[Jump, int]
    foreign_jumps: Mapping[ChainKey, str]
    above: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    below: Mapping[Jump, frozenset[str]] = dataclasses.field(default_factory=dict)
    hidden: frozenset[str] = frozenset()


NOTHING_LISTED = Listing(chains={}, jumps={}, foreign_jumps={})


def parse_save(text: str, chains: Collection[ChainKey], jumps: Collection[Jump]) -> Listing:
    """Extract our rules from the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete: a table does not end with COMMIT.
    """
    rules_of: dict[ChainKey, list[str]] = {}
    count: collections.Counter[Jump] = collections.Counter()
    foreign_jumps: dict[ChainKey, str] = {}
    known_jumps = {(ChainKey(jump.table, jump.source), render_jump(jump)): jump for jump in jumps}
    above: dict[Jump, frozenset[str]] = {}
    others: dict[ChainKey, list[str]] = {key: [] for key, _ in known_jumps}
    for key, rule in rules(text):
        if key in chains:
            content = rules_of.setdefault(key, [])
            if rule is not None:
                content.append(normalise(rule))
        elif rule is None:
            continue
        elif (key, rule) in known_jumps:
            count[known_jumps[key, rule]] += 1
            above[known_jumps[key, rule]] = frozenset(others[key])
            continue
        elif (target := ChainKey(key.table, _target_chain(rule))) in chains:
            foreign_jumps[target] = f"-A {key.chain} {rule}"
        if key in others and rule is not None:
            others[key].append(rule)
    below = {jump: frozenset(others[ChainKey(jump.table, jump.source)]) - rules_above for jump, rules_above in above.items()}
    whole = {key: tuple(rules) for key, rules in rules_of.items()}
    hidden = frozenset(_INCOMPATIBLE.findall(text)) & {key.table for key in chains}
    return Listing(chains=whole, jumps=count, foreign_jumps=foreign_jumps, above=above, below=below, hidden=hidden)


def rules(text: str, *, may_be_cut: bool = False) -> Iterator[tuple[ChainKey, str | None]]:
    """Parses the output of ``iptables-save``.

    For each chain, yields the chain's key and None. For each rule, yields the key of the rule's chain and the rule's text.

    Raises:
        ValueError: the output is incomplete, although ``may_be_cut`` is false.
    """
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
    if table and not may_be_cut:
        raise ValueError(f"its output ends in the middle of table {table[:32]}")


def _target_chain(rule: str) -> str:
    match = re.search(r"(?:^| )-[jg] (\S+)", rule)
    return match.group(1) if match else ""


def parse_left(text: str, concerns: Callable[[ChainKey], bool]) -> LeftRules:
    """The chains for which ``concerns`` is true, and the rules that jump to these chains, in the output of ``iptables-save``.

    Raises:
        ValueError: the output is incomplete.
    """
    chains: collections.Counter[ChainKey] = collections.Counter()
    references: list[Reference] = []
    for key, rule in rules(text):
        if concerns(key):
            chains[key] += rule is not None
        elif rule is not None:
            words = rule.rsplit(" ", 2)  # a jump to a chain has no options, so the jump ends the rule
            if words[-2:-1] in (["-j"], ["-g"]) and concerns(target := ChainKey(key.table, words[-1])):
                references.append(Reference(key, rule, target))
    return LeftRules(chains=chains, references=tuple(references), hidden=frozenset(_INCOMPATIBLE.findall(text)))


def render_left_removal(removal: Removal) -> str:
    """The input of ``iptables-restore --noflush`` that removes leftover rules; empty if there are no leftover rules."""
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
    """The input of ``iptables-restore --noflush`` that programs a skeleton.

    The input declares every chain, and then appends all rules of the chain; the declaration empties the chain. Chains and jumps
    in ``listing`` that are not in the skeleton are removed. If a rule of another program jumps to such a chain, the chain is
    emptied instead of removed. Absent jumps are inserted one after the other at the top of their chain, so the skeleton's last
    jump is on top, as in kube-proxy. A jump that is present keeps its position. If a jump exists more than once, only the last
    copy is kept, which is the oldest copy. A jump in ``moved`` is removed, and then inserted at the top of its chain.
    """
    lines: list[str] = []
    gone = [key for key in listing.chains if key not in skeleton.chains]
    ways = [jump for jump in listing.jumps if jump not in skeleton.jumps]
    for table in dict.fromkeys([*(key.table for key in (*skeleton.chains, *gone)), *(jump.table for jump in ways)]):
        keys = [key for key in skeleton.chains if key.table == table]
        going = [key for key in gone if key.table == table]
        lines.append(f"*{table}")
        lines += [f":{key.chain} - [0:0]" for key in (*keys, *going)]
        for jump in ways:
            lines += [f"-D {jump.source} {render_jump(jump)}"] * (listing.jumps[jump] if jump.table == table else 0)
        lines += [f"-X {key.chain}" for key in going if key not in listing.foreign_jumps]
        lines += [f"-A {key.chain} {render(rule, skeleton.family)}" for key in keys for rule in skeleton.chains[key]]
        for jump in skeleton.jumps:
            if jump.table == table:
                there = listing.jumps.get(jump, 0)
                stays = there > 0 and jump not in moved
                lines += [f"-D {jump.source} {render_jump(jump)}"] * (there - stays)
                lines += [] if stays else [f"-I {jump.source} {render_jump(jump)}"]
        lines.append("COMMIT")
    return "".join(f"{line}\n" for line in lines)


def render_removal(skeleton: Skeleton, listing: Listing) -> str:
    """The input of ``iptables-restore --noflush`` that removes the present parts of a skeleton; empty if no part is present.

    A chain to which another program's rule jumps is only emptied, because the kernel would refuse the whole table if the chain
    were deleted.
    """
    chains = {key: texts for key, texts in listing.chains.items() if key in skeleton.chains}
    jumps = {jump: count for jump, count in listing.jumps.items() if jump in skeleton.jumps}
    nothing = dataclasses.replace(skeleton, chains={}, jumps=())
    return render_restore(nothing, dataclasses.replace(listing, chains=chains, jumps=jumps))
