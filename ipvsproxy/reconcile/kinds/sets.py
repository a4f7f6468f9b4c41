"""The kinds of sets: the sets that rules name, and the larger copy of a set that a killed process has left."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from ipvsproxy.model.plan import Verb
from ipvsproxy.model.rules import Rule, TakeMark
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import IP_SETS, SCOPE_KINDS, SET_COPY, IpSet, SetCopy
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.kind import MISSING, Circumstances, Difference, PresenceKind, Stage
from ipvsproxy.reconcile.tables.table import Table


class Sets(PresenceKind):
    """The sets. Sets that only scopes use are removed when they are empty and no rule names them."""

    classes: ClassVar[tuple[type, ...]] = (IpSet,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.SETS, Verb.REMOVE: Stage.SET_REMOVALS}

    def is_protected(self, key: IpSet) -> bool:
        """Whether the set must stay because kube-proxy has it, too."""
        return key.kind not in SCOPE_KINDS

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in which sets exist according to a reading."""
        (table,) = self.tables
        if observed.sets is not None:
            yield from table.observing({IP_SETS[name]: True for name in observed.sets})
        some = {IP_SETS[name]: None if entries is None else True for name, entries in observed.some_sets.items()}
        yield from table.observing_some(some)

    def may_be_removed(self, table: Table[Any, Owner, bool], circumstances: Circumstances) -> Iterable[IpSet]:
        """Surplus sets without entries that no rule names."""
        del circumstances
        return filter(self._is_unused, table.surplus)

    def _is_unused(self, ip_set: IpSet) -> bool:
        tables = self.all
        if tables.entries[ip_set.name].observed or ip_set.family in tables.skeletons.pending:
            return False
        desired = tables.skeletons.desired.get(ip_set.family)  # these rules are in force, since they are not pending
        rules = itertools.chain.from_iterable(desired.chains.values()) if desired else ()
        return not any(_names_set(rule, ip_set.name) for rule in rules)

    def differences(self) -> Iterator[Difference]:
        """Yields desired sets that are absent or of another type."""
        for ip_set in self.tables[0].pending:
            yield self.difference(str(ip_set), str(ip_set.type), f"{MISSING} or of another type")


class SetCopies(PresenceKind):
    """Copies of sets, which are never desired."""

    classes: ClassVar[tuple[type, ...]] = (SetCopy,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.REMOVE: Stage.ADDRESS_REMOVALS}

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Takes in whether the copy exists according to a reading."""
        if observed.set_copy is not None:
            yield from self.tables[0].observing({SET_COPY: True} if observed.set_copy else {})


def _names_set(rule: Rule, name: str) -> bool:
    target = rule.target
    return (rule.set is not None and rule.set.set == name) or (isinstance(target, TakeMark) and target.match.set == name)
