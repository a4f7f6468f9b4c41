"""The kind of rules: one object for each family.

Writing the rules of a family also removes the rules that are no longer needed.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Verb
from ipvsproxy.model.rules import MARKING_TABLE, ObservedRule, ObservedSkeleton, Skeleton, Verdict
from ipvsproxy.model.service import NODE_OWNER
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.kind import MISSING, STALE, DescribeRule, Difference, ReconciledKind, Stage
from ipvsproxy.reconcile.tables.table import Table, always

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

STRANGE_SHOWN = 5
"""The most rules of other programs that are shown for each chain."""


class Rules(ReconciledKind):
    """The rules of each family."""

    classes: ClassVar[tuple[type, ...]] = (Skeleton,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.SET: Stage.RULES}

    def __init__(self, all_tables: "NodeTables") -> None:
        """Rules are never removed."""
        self.describe_rule: DescribeRule = lambda rule, _: str(rule)
        self.skeletons: Table[Family, Skeleton, ObservedSkeleton] = Table(
            lambda _: NODE_OWNER, lambda desired, observed: desired.in_force != observed, always, all_tables.unequal
        )
        super().__init__(all_tables, self.skeletons)

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in the rules of the families that were read."""
        for family, image in observed.skeletons.items():
            self.skeletons.notice(family, image)
        return iter(())

    def lacks(self, family: Family) -> bool:
        """Whether some desired rules of a family are not in the kernel.

        Rules that mark packets do not count, as a kernel may refuse them.
        """
        if family not in self.skeletons.pending:
            return False
        desired, observed = self.skeletons.desired[family].in_force, self.skeletons.observed.get(family)
        return observed is None or observed.without(MARKING_TABLE) != desired.without(MARKING_TABLE)

    @property
    def guard_tunnels(self) -> bool:
        """Whether the rules of all families are in the kernel and drop tunnels of strangers."""
        skeletons = self.skeletons.desired.values()
        return not self.skeletons.pending and bool(skeletons) and all(map(_guards_tunnels, skeletons))

    def differences(self) -> Iterator[Difference]:
        """Yields one difference for each chain and each jump.

        The difference of a chain of ours names the first rule that differs.
        """
        for family in self.skeletons.pending:
            observed = self.skeletons.observed.get(family)
            yield from self._of_family(
                self.skeletons.desired[family],
                observed or ObservedSkeleton(family=family, chains={}, jumps=frozenset()),
            )

    def _of_family(self, desired: Skeleton, observed: ObservedSkeleton) -> Iterator[Difference]:
        label, desired_chains = desired.family.label, desired.in_force.chains
        for key, rules in desired_chains.items():
            observed_rules = observed.chains.get(key)
            if observed_rules is None:
                yield self.difference(f"{label} chain {key}", counted(len(rules), "rule"), MISSING)
            elif observed_rules != rules:
                number, *both = _first_difference(rules, observed_rules)
                described, found = (self.describe_rule(rule, desired.family) if rule else "no rule" for rule in both)
                yield self.difference(f"{label} chain {key} rule {number}", described, found)
        for jump in desired.jumps:
            if jump not in observed.jumps:
                why_idle = observed.idle_jumps.get(jump)
                yield self.difference(f"{label} jump {jump}", "present", f"not in force: {why_idle}" if why_idle else MISSING)
        for key, strange in observed.strange_rules.items():
            described = "; ".join(self.describe_rule(rule, desired.family) for rule in strange[:STRANGE_SHOWN])
            more = f"; and {len(strange) - STRANGE_SHOWN} more" if len(strange) > STRANGE_SHOWN else ""
            removed = "which run removes" if len(strange) == 1 else "all of which run removes"
            yield self.difference(f"{label} chain {key}", "only jumps of ours", f"{described}{more}, {removed}")
        for key in observed.chains.keys() - desired_chains.keys():
            yield self.difference(f"{label} chain {key}", STALE, "present")


def _guards_tunnels(skeleton: Skeleton) -> bool:
    return any(rule.tunnel and rule.target is Verdict.DROP for rule in itertools.chain.from_iterable(skeleton.chains.values()))


def _first_difference(
    desired: Sequence[ObservedRule], observed: Sequence[ObservedRule]
) -> tuple[int, ObservedRule | None, ObservedRule | None]:
    """The number of the first rule that differs (from 1), with the desired and the observed rule.

    The desired or the observed rule may be absent.
    """
    pairs = enumerate(itertools.zip_longest(desired, observed), 1)
    return next((number, one, other) for number, (one, other) in pairs if one != other)
