"""Differences between desired and observed state in words, for people.

Rule 1: ``diff`` and ``table`` decide what a difference is, as for operations; this module only describes it.
Rule 2: tracked flows are no difference: they are cleaned on a change, and their absence proves nothing.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ipvsproxy.model import plan
from ipvsproxy.model.kernel import TIMEOUTS, FlowCleaning, Sysctl, Timeouts
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Verb
from ipvsproxy.model.real_servers import NO_THRESHOLDS, NOT_MASQUERADED, RealServerKey, Thresholds
from ipvsproxy.model.rules import ObservedRule, ObservedSkeleton, Skeleton
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import IpSet
from ipvsproxy.model.virtual_servers import (
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.tables.node import Tables
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.reconcile.virtual_servers import diff

MISSING = "missing"
STALE = "nothing"
"""The desired value of an observed object of ours that serves no Service."""

KINDS = tuple(dict.fromkeys(kind.name for object_class, kind in plan.KINDS.items() if object_class is not FlowCleaning))
"""The kinds of difference, as operations name them."""

_BY_VALUE = frozenset({Sysctl, Timeouts, IpSet, Skeleton})
"""The classes of objects that are compared by value, not by presence."""

STRANGE_SHOWN = 5
"""So many rules of other programs are shown of each chain."""

K = TypeVar("K")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One kernel object whose two sides differ. ``owner`` None: it is not desired."""

    kind: str
    name: str
    owner: Owner | None
    desired: str
    observed: str

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner and self.owner.service.namespace else ""
        return f"{self.kind} {self.name}{owner}: desired {self.desired}, observed {self.observed}"


DescribeRule = Callable[[ObservedRule, Family], str]
"""Writes a rule as the operator's tools print it."""


def compare(tables: Tables, may_remove: diff.MayRemove, describe_rule: DescribeRule) -> Iterator[Difference]:
    """Every difference between the desired and the observed state, in the order of the tables.

    ``may_remove`` says whether a draining real server may be removed.
    """
    for object_class, table in tables.foundation:
        yield from (
            _of_values(tables, object_class) if object_class in _BY_VALUE else _of_presence(plan.KINDS[object_class].name, table)
        )
    for set_name, table in tables.entries.items():
        yield from _presence("set_entry", table, set_name)
    for family in tables.skeletons.pending:
        yield from _rules(tables.skeletons.desired[family], tables.skeletons.observed.get(family), describe_rule)
    virtual_servers = tables.virtual_servers
    for key in (*virtual_servers.pending, *virtual_servers.surplus):
        yield from _virtual_server(tables, key, may_remove)
    for object_class, binding in tables.bindings.items():
        yield from _presence(plan.KINDS[object_class].name, binding)


def _of_values(tables: Tables, object_class: type) -> Iterator[Difference]:
    """The differences of a class in ``_BY_VALUE``; rules come after the sets that they name."""
    if object_class is Sysctl:
        for path in tables.sysctls.pending:
            observed = tables.sysctls.observed.get(path, "no such setting in this kernel")
            yield _of_node("sysctl", path, tables.sysctls.desired[path].value, observed)
    elif object_class is IpSet:
        for ip_set in tables.sets.pending:
            yield _of_node("set", str(ip_set), str(ip_set.type), f"{MISSING} or of another type")
    elif object_class is Timeouts and TIMEOUTS in tables.timeouts.pending:
        yield from _timeouts(tables.timeouts.desired[TIMEOUTS], tables.timeouts.observed.get(TIMEOUTS))


def _of_presence(kind: str, table: Table[Any, Any, Any]) -> Iterator[Difference]:
    for key in table.pending:
        yield _of_node(kind, str(key), "present", MISSING)
    for key in table.surplus:
        yield _of_node(kind, str(key), STALE, "present")


def _of_node(kind: str, name: str, desired: str, observed: str) -> Difference:
    return Difference(kind=kind, name=name, owner=None, desired=desired, observed=observed)


def _presence(kind: str, table: Table[K, Owner, bool], prefix: str = "") -> Iterator[Difference]:
    for key in table.pending:
        name = f"{prefix} {key}".strip()
        yield Difference(kind=kind, name=name, owner=table.desired[key], desired="present", observed=MISSING)
    for key in table.surplus:
        yield Difference(kind=kind, name=f"{prefix} {key}".strip(), owner=None, desired=STALE, observed="present")


def _timeouts(desired: Timeouts, observed: Timeouts | None) -> Iterator[Difference]:
    for name, desired_s, observed_s in zip(Timeouts._fields, desired, observed or Timeouts(0, 0, 0), strict=True):
        if desired_s != observed_s:
            yield _of_node("timeouts", name.removesuffix("_s"), f"{desired_s} s", f"{observed_s} s" if observed_s else "unknown")


def _virtual_server(tables: Tables, key: VirtualServerKey, may_remove: diff.MayRemove) -> Iterator[Difference]:
    table = tables.virtual_servers
    desired, observed = table.desired.get(key), table.observed.get(key)
    owner = desired.owner if desired else None
    for operation in diff.virtual_server_operations(key, desired, observed, may_remove):
        match operation.item:
            case VirtualServer():
                yield Difference(
                    kind="virtual_server",
                    name=str(key),
                    owner=owner,
                    desired=_describe(desired.settings, len(desired.real_servers)) if desired else STALE,
                    observed=_describe(observed.settings, len(observed.real_servers)) if observed else MISSING,
                )
            case RealServers(keys=(real_server,)) if observed:
                yield Difference(
                    kind="real_server",
                    name=f"{key} -> {real_server}",
                    owner=owner,
                    desired=_desired_weight(operation),
                    observed=_observed_weight(observed.real_servers.get(real_server), _thresholds_of(observed, real_server)),
                )
            case _:  # the line of a missing virtual server counts its real servers
                pass


def _thresholds_of(observed: ObservedVirtualServer, key: RealServerKey) -> Thresholds:
    return (observed.thresholds or {}).get(key, NO_THRESHOLDS)


def _observed_weight(weight: int | None, thresholds: Thresholds) -> str:
    if weight is None:
        return MISSING
    return "not masqueraded" if weight == NOT_MASQUERADED else _weight(weight, thresholds)


def _weight(weight: int, thresholds: Thresholds) -> str:
    return f"weight {weight}" + (f", {thresholds}" if thresholds != NO_THRESHOLDS else "")


def _desired_weight(operation: Operation) -> str:
    """The desired weight of an operation; an undesired TCP real server is drained first."""
    match operation:
        case Operation(verb=Verb.REMOVE):
            return STALE
        case Operation(item=RealServers() as item) if not item.drains:
            return _weight(item.weight, item.thresholds)
        case _:
            return "weight 0 (its endpoint is not used; its connections may end)"


def _describe(settings: VirtualServerSettings, real_servers: int) -> str:
    return f"{settings}, real servers: {real_servers}"


def _rules(desired: Skeleton, observed: ObservedSkeleton | None, describe_rule: DescribeRule) -> Iterator[Difference]:
    """One difference for each chain and jump; of a chain of ours, its first rule that differs."""
    label, desired_chains = desired.family.label, desired.in_force.chains
    if observed is None:
        observed = ObservedSkeleton(family=desired.family, chains={}, jumps=frozenset())
    for key, rules in desired_chains.items():
        observed_rules = observed.chains.get(key)
        if observed_rules is None:
            yield _of_node("rules", f"{label} chain {key}", f"{len(rules)} rule{'' if len(rules) == 1 else 's'}", MISSING)
        elif observed_rules != rules:
            number, *both = _first_difference(rules, observed_rules)
            descriptions = (describe_rule(rule, desired.family) if rule else "no rule" for rule in both)
            yield _of_node("rules", f"{label} chain {key} rule {number}", *descriptions)
    for jump in desired.jumps:
        if jump not in observed.jumps:
            why_idle = observed.idle_jumps.get(jump)
            yield _of_node("rules", f"{label} jump {jump}", "present", f"not in force: {why_idle}" if why_idle else MISSING)
    for key, strange in observed.strange_rules.items():
        described = "; ".join(describe_rule(rule, desired.family) for rule in strange[:STRANGE_SHOWN])
        more = f"; and {len(strange) - STRANGE_SHOWN} more" if len(strange) > STRANGE_SHOWN else ""
        removed = "which run removes" if len(strange) == 1 else "all of which run removes"
        yield _of_node("rules", f"{label} chain {key}", "only jumps of ours", f"{described}{more}, {removed}")
    for key in observed.chains.keys() - desired_chains.keys():
        yield _of_node("rules", f"{label} chain {key}", STALE, "present")


def _first_difference(
    desired: Sequence[ObservedRule], observed: Sequence[ObservedRule]
) -> tuple[int, ObservedRule | None, ObservedRule | None]:
    """The number of the first different rule, counted from 1, and both rules, of which one may be absent."""
    pairs = enumerate(itertools.zip_longest(desired, observed), 1)
    return next((number, one, other) for number, (one, other) in pairs if one != other)
