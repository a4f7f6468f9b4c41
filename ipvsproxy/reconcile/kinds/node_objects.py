"""The kinds of objects that a node needs independently of its Services: kernel settings, IPVS timeouts, the device, rules."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ipvsproxy.model.kernel import DEVICE, TIMEOUTS, Device, Sysctl, Timeouts
from ipvsproxy.model.kind import counted
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb
from ipvsproxy.model.rules import MARKING_TABLE, ObservedSkeleton, Skeleton, Verdict
from ipvsproxy.model.state import Observation
from ipvsproxy.reconcile.kinds.declaration import MISSING, STALE, Circumstances, Difference, PresenceKind, ReconciledKind, Stage

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

STRANGE_SHOWN = 5
"""The largest number of other programs' rules that are shown for one chain."""


class Sysctls(ReconciledKind[str, Sysctl, str]):
    """Kernel settings. After a failed write, a setting is not written again until its desired or observed value changes.

    A setting that lets in tunnel packets is written only while the kernel has rules that drop tunnel packets from unknown
    senders.
    """

    classes: ClassVar[tuple[type, ...]] = (Sysctl,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.SET: Stage.SETTINGS}

    def __init__(self, all_tables: "NodeTables") -> None:
        super().__init__(all_tables)
        self._given_up: dict[str, tuple[Sysctl, Sequence[str | None], str]] = {}

    def differs(self, desired: Sysctl, observed: str) -> bool:
        """Whether the observed value of a kernel setting must be replaced by the desired value."""
        return not desired.is_met_by(observed)

    @property
    def given_up(self) -> Mapping[str, str]:
        """The settings that could not be written, each with the reason.

        A setting is left out as soon as its desired or observed value changes, because the setting is then tried again. A setting
        for tunnels is also tried again when another setting for tunnels has changed, because one record holds the former values
        of all settings for tunnels.
        """
        table = self.objects
        return {
            path: reason
            for path, (desired, observed, reason) in self._given_up.items()
            if path in table.pending and (desired, observed) == (table.desired[path], self._observed(desired))
        }

    def _observed(self, setting: Sysctl) -> Sequence[str | None]:
        """The observed value of a setting.

        If the setting is for tunnels, the result also has the observed values of all desired settings for tunnels.
        """
        desired, observed = self.objects.desired, self.objects.observed
        others = [path for path, one in desired.items() if one.for_tunnels] if setting.for_tunnels else []
        return [observed.get(path) for path in (setting.path, *others)]

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records the settings that a reading has found."""
        if observed.sysctls is not None:
            yield from self.objects.observing(observed.sysctls)

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Yields an operation for each pending setting, except for settings that could not be written."""
        given_up = self.given_up
        for operation in super().additions(circumstances):
            setting: Any = operation.item
            if setting.path not in given_up and (not setting.for_tunnels or self.all.of_rules.guard_tunnels):
                yield operation

    def settle_failure(self, outcome: Outcome) -> bool:
        """Prevents further attempts to write a setting that could not be written."""
        item: Any = outcome.operation.item
        self._given_up[item.path] = (item, self._observed(item), outcome.error)
        return True

    def differences(self) -> Iterator[Difference]:
        """Yields the settings whose desired and observed values differ."""
        for path in self.objects.pending:
            observed = self.objects.observed.get(path, "no such setting in this kernel")
            yield self.difference(path, self.objects.desired[path].value, observed)


class IpvsTimeouts(ReconciledKind[str, Timeouts, Timeouts]):
    """The IPVS timeouts.

    No ``Observation`` contains the timeouts; ``Reconciler.note_timeouts`` passes the observed timeouts to this kind.
    """

    classes: ClassVar[tuple[type, ...]] = (Timeouts,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.SET: Stage.TIMEOUTS}

    def note(self, observed: Timeouts) -> None:
        """Records the timeouts that a reading has found. A timeout whose desired value is 0 counts as equal to any value."""
        desired = self.objects.desired.get(TIMEOUTS)
        if desired:
            compared = (value_s if desired_s else 0 for desired_s, value_s in zip(desired, observed, strict=True))
            self.objects.confirm(TIMEOUTS, Timeouts(*compared))

    def differences(self) -> Iterator[Difference]:
        """Yields each timeout whose desired and observed values differ."""
        for key in self.objects.pending:
            desired, observed = self.objects.desired[key], self.objects.observed.get(key) or Timeouts(0, 0, 0)
            for name, desired_s, observed_s in zip(Timeouts._fields, desired, observed, strict=True):
                if desired_s != observed_s:
                    found = f"{observed_s} s" if observed_s else "unknown"
                    yield self.difference(name.removesuffix("_s"), f"{desired_s} s", found)


class Devices(PresenceKind[Device]):
    """The dummy device, which the reconciler never removes."""

    classes: ClassVar[tuple[type, ...]] = (Device,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.ADD: Stage.DEVICE}

    def is_protected(self, _key: Device) -> bool:
        """Always."""
        return True

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records whether a reading has found the device."""
        if observed.device is not None:
            yield from self.objects.observing({Device(DEVICE): True} if observed.device else {})


class Rules(ReconciledKind[Family, Skeleton, ObservedSkeleton]):
    """The rules of ipvsproxy; all rules of one IP family together are one object.

    Writing the rules of a family also removes the rules that are no longer needed.
    """

    classes: ClassVar[tuple[type, ...]] = (Skeleton,)
    stages: ClassVar[Mapping[Verb, Stage]] = {Verb.SET: Stage.RULES}

    def differs(self, desired: Skeleton, observed: ObservedSkeleton) -> bool:
        """Whether the rules of a family have to be written."""
        return desired.in_force != observed

    def take_in(self, observed: Observation) -> Iterator[None]:
        """Records the observed rules of each family whose rules were read."""
        for family, image in observed.skeletons.items():
            self.objects.notice(family, image)
        return iter(())

    def lacks(self, family: Family) -> bool:
        """Whether the kernel lacks desired rules of a family.

        Missing rules that mark packets do not count, because a kernel may refuse rules of this kind.
        """
        if family not in self.objects.pending:
            return False
        desired, observed = self.objects.desired[family].in_force, self.objects.observed.get(family)
        return observed is None or observed.without(MARKING_TABLE) != desired.without(MARKING_TABLE)

    @property
    def guard_tunnels(self) -> bool:
        """Whether the rules of all families are in the kernel and drop packets from tunnels of unknown senders."""
        skeletons = self.objects.desired.values()
        return not self.objects.pending and bool(skeletons) and all(map(_guards_tunnels, skeletons))

    def differences(self) -> Iterator[Difference]:
        """Yields one difference for each chain that differs, and for each jump that differs.

        If a chain of ipvsproxy has other rules than desired, the difference names the first rule that differs.
        """
        for family, desired in ((one, self.objects.desired[one]) for one in self.objects.pending):
            observed = self.objects.observed.get(family) or ObservedSkeleton(family=family, chains={}, jumps=frozenset())
            label, desired_chains = family.label, desired.in_force.chains
            for key, rules in desired_chains.items():
                observed_rules = observed.chains.get(key)
                if observed_rules is None:
                    yield self.difference(f"{label} chain {key}", counted(len(rules), "rule"), MISSING)
                elif observed_rules != rules:
                    pairs = enumerate(itertools.zip_longest(rules, observed_rules, fillvalue="no rule"), 1)
                    number, both = next((number, both) for number, both in pairs if both[0] != both[1])
                    yield self.difference(f"{label} chain {key} rule {number}", *both)
            for jump in desired.jumps:
                if jump not in observed.jumps:
                    why_idle = observed.idle_jumps.get(jump)
                    yield self.difference(f"{label} jump {jump}", "present", f"not in force: {why_idle}" if why_idle else MISSING)
            for key, strange in observed.strange_rules.items():
                described = "; ".join(strange[:STRANGE_SHOWN])
                more = f"; and {len(strange) - STRANGE_SHOWN} more" if len(strange) > STRANGE_SHOWN else ""
                removed = "which run removes" if len(strange) == 1 else "all of which run removes"
                yield self.difference(f"{label} chain {key}", "only jumps of ours", f"{described}{more}, {removed}")
            for key in observed.chains.keys() - desired_chains.keys():
                yield self.difference(f"{label} chain {key}", STALE, "present")


def _guards_tunnels(skeleton: Skeleton) -> bool:
    return any(rule.tunnel and rule.target is Verdict.DROP for rule in itertools.chain.from_iterable(skeleton.chains.values()))
