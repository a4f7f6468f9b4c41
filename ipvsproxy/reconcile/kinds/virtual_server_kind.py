"""Declares the kind of kernel object for virtual servers.

Each object of this kind is one virtual server with all its real servers.

Rule 1: a virtual server with source ranges is added only after the ranges are in the kernel.
Rule 2: an undesired entry may exempt the traffic of real servers from masquerading. These real servers are added only after the
entry has been removed (see ``set_kinds.py``).
Rule 3: a virtual server by firewall mark is added only when the kernel has the set entry that is its witness. A virtual server by
firewall mark gets its real servers in a later plan, after the kernel has added the virtual server. If another program adds a
virtual server with the same firewall mark in the meantime, ipvsproxy does not change that virtual server. An undesired set entry
may still give the mark to packets for another Service. Until this entry is gone, ipvsproxy does not change the virtual server of
the mark.
"""

import errno
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ipvsproxy.model.net import Protocol
from ipvsproxy.model.plan import Operation, Outcome, Verb, WeightChange
from ipvsproxy.model.real_servers import (
    NO_THRESHOLDS,
    NOT_MASQUERADED,
    PORT_SIZE,
    TUNNELLED,
    EvenWeights,
    RealServerKey,
    Thresholds,
    UnevenWeights,
    in_words,
    plain,
    without_method,
)
from ipvsproxy.model.service import Owner
from ipvsproxy.model.sets import SetEntry
from ipvsproxy.model.steps import each
from ipvsproxy.model.virtual_servers import (
    FirewallMark,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
    VirtualServerSettings,
)
from ipvsproxy.reconcile.kinds.declaration import MISSING, STALE, Circumstances, Difference, ReconciledKind, Stage
from ipvsproxy.reconcile.tables.table import Table
from ipvsproxy.reconcile.virtual_servers import ownership

if TYPE_CHECKING:
    from ipvsproxy.reconcile.kinds.node_tables import NodeTables

MayRemove = Callable[[VirtualServerKey, RealServerKey], bool | None]
"""Whether the drain of a real server is over; None if the drain has not begun."""


class VirtualServers(ReconciledKind[VirtualServerKey, VirtualServer, ObservedVirtualServer]):
    """Virtual servers and their real servers, in one table."""

    classes: ClassVar[tuple[type, ...]] = (VirtualServer, RealServers)
    stages: ClassVar[Mapping[Verb, Stage]] = {
        Verb.ADD: Stage.SERVERS,
        Verb.SET: Stage.SERVERS,
        Verb.REMOVE: Stage.VIRTUAL_SERVER_REMOVALS,
    }

    def __init__(self, all_tables: "NodeTables") -> None:
        super().__init__(all_tables)
        self._drains = all_tables.drains
        self.begin_settling(0)

    def make_table(self) -> Table[VirtualServerKey, VirtualServer, ObservedVirtualServer]:
        """A table that ranks the owners of a virtual server with ``ownership.rank``."""
        return Table(self.owner_of, self.differs, self.is_protected, self.all.unequal, ownership.rank)

    def owner_of(self, desired: VirtualServer) -> Owner:
        """The owner of a virtual server."""
        return desired.owner

    def differs(self, desired: VirtualServer, observed: ObservedVirtualServer) -> bool:
        """Whether a virtual server needs an operation now. A draining real server needs no operation."""
        return next(virtual_server_operations(desired.key, desired, observed, self._drains.may_remove), None) is not None

    def is_protected(self, key: VirtualServerKey) -> bool:
        """Whether a virtual server must stay, because it is excluded or because this node does not serve its family."""
        return not self.all.is_served(key.address.family) or self.all.is_excluded(key)

    def begin_settling(self, now: float) -> None:
        """Clears the records of the last plan before the outcomes of a new plan are recorded."""
        self._now = now
        self._added: set[VirtualServerKey] = set()
        self._changed: dict[VirtualServerKey, dict[RealServerKey, int] | None] = {}
        """The keys are the virtual servers that the plan has changed. When all outcomes are recorded, these virtual servers are
        compared with their desired state. The value is a separate copy of the observed weights if the plan has changed single
        weights; otherwise None."""
        self.gone_with = 0
        """The number of real servers that this plan has removed together with their virtual server."""

    def place(self, item: Any) -> tuple[Table[VirtualServerKey, VirtualServer, ObservedVirtualServer], VirtualServerKey]:
        """The table and the key of an operation's item; for real servers, the key of their virtual server."""
        return self.objects, item.virtual_server if isinstance(item, RealServers) else item.key

    def stage(self, operation: Operation) -> Stage:
        """The stage of an operation. A real server loses its traffic only after other real servers have got the traffic."""
        verb, item = operation
        if isinstance(item, RealServers) and (verb is Verb.REMOVE or (verb is Verb.SET and without_method(item.weight) == 0)):
            return Stage.REAL_SERVER_REMOVALS
        return self.stages[verb]

    def identity(self, item: Any) -> object:
        """Identifies real servers by virtual server and key.

        An item with ``EvenWeights`` contains all real servers of a new virtual server; the virtual server alone identifies this
        item.
        """
        if not isinstance(item, RealServers):
            return item.key
        return item.virtual_server if isinstance(item.keys, EvenWeights) else (item.virtual_server, item.keys)

    def additions(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Yields the operations that bring pending virtual servers, and their real servers, to their desired state."""
        held_back, not_masqueraded_yet = self._held_back(circumstances), self._not_masqueraded_yet()
        for key in self.objects.pending:
            if key in held_back or (
                isinstance(key, FirewallMark) and (key in circumstances.still_given or not self.all.scopes.is_witnessed(key))
            ):
                continue
            desired, observed = self.objects.desired[key], self.objects.observed.get(key)
            operations = virtual_server_operations(key, desired, observed, self._drains.may_remove)
            if observed is None and isinstance(key, FirewallMark):
                operations = itertools.islice(operations, 1)  # adds the virtual server without its real servers
            yield from itertools.filterfalse(_gives_traffic, operations) if key in not_masqueraded_yet else operations

    def _held_back(self, circumstances: Circumstances) -> Collection[VirtualServerKey]:
        """The desired virtual servers that are missing but may not be added yet (rule 1)."""
        by_set = self.all.entries
        if not any(by_set[name].desired for name in ownership.FIREWALL_SETS):
            return frozenset()

        def waits(firewall: SetEntry) -> bool:
            table = by_set[firewall.set]
            return firewall in table.desired and (firewall in table.pending or not circumstances.has_ranges(firewall))

        table = self.objects
        return {key for key in table.pending if key not in table.observed and waits(ownership.firewall_entry(key))}

    def _not_masqueraded_yet(self) -> Collection[VirtualServerKey]:
        """The virtual servers that wait for real servers, because an undesired set entry prevents masquerading (rule 2)."""
        going = set(map(ownership.named_by, self.all.of_entries.surplus(ownership.LOCAL_SETS)))
        if not going:
            return frozenset()
        return {key for key in self.objects.pending if key in going or ownership.node_port(key) in going}

    def removals(self, circumstances: Circumstances) -> Iterator[Operation]:
        """Yields the operations that remove the virtual servers of ipvsproxy that no Service desires."""
        for key in self.objects.surplus:
            if key not in circumstances.still_given:
                yield from virtual_server_operations(key, None, self.objects.observed[key], self._drains.may_remove)

    def settle(self, verb: Verb, item: Any) -> Iterable[None]:
        """Records a change.

        A virtual server is compared with its desired state only once, after the plan's last change to the virtual server.
        """
        if isinstance(item, RealServers):
            self._settle_real_servers(verb, item)
        elif verb is Verb.REMOVE:
            observed = self.objects.observed.get(item.key)
            self.gone_with += len(observed.real_servers) if observed else 0
            self._drains.keep_only(item.key)
            self.objects.confirm(item.key, None)
        else:
            if verb is Verb.ADD:
                self._added.add(item.key)
            observed = self.objects.observed.get(item.key)
            real_servers, thresholds = (observed.real_servers, observed.thresholds) if observed else ({}, None)
            self.objects.exchange(item.key, ObservedVirtualServer(item.settings, real_servers, thresholds=thresholds))
            self._changed.setdefault(item.key, None)
        return ()

    def weight_changes(self, verb: Verb, item: RealServers) -> Iterator[WeightChange]:
        """The changes of weights that ``settle`` will record for an operation."""
        observed = self.objects.observed.get(item.virtual_server)
        weights = observed.real_servers if observed else {}
        after = None if verb is Verb.REMOVE else without_method(item.weight)
        before = ((key, weights.get(key)) for key in item.keys)
        return (WeightChange(item.virtual_server, key, one and without_method(one), after) for key, one in before)

    def _settle_real_servers(self, verb: Verb, item: RealServers) -> None:
        """Records real servers.

        If the virtual server had no real servers, and the operation adds all desired real servers, the desired and the observed
        state share one ``weights`` object.
        """
        table, key, keys = self.objects, item.virtual_server, item.keys
        desired, observed = table.desired.get(key), table.observed.get(key)
        if observed is None:
            return
        if desired is not None and not observed.real_servers and keys == desired.weights:
            self._changed[key] = None
            table.exchange(key, observed.has(desired.weights))
            return
        weights = self._weights_to_change(key, observed)
        if item.thresholds != NO_THRESHOLDS or observed.thresholds:
            self._settle_thresholds(verb, item)
        if verb is Verb.REMOVE:
            for real_server in keys:
                weights.pop(real_server, None)
        else:
            weights.update(dict.fromkeys(keys, item.weight))
        if verb is Verb.SET and item.drains:
            for real_server in keys:
                self._drains.begin(key, real_server, self._now)
        elif self._drains:
            for real_server in keys:
                self._drains.end(key, real_server)

    def _settle_thresholds(self, verb: Verb, item: RealServers) -> None:
        """Records the thresholds that apply after an operation.

        The thresholds go into a new object, to which only the table refers.
        """
        observed = self.objects.observed[item.virtual_server]
        thresholds = {one: value for one, value in (observed.thresholds or {}).items() if one not in item.keys}
        if verb is not Verb.REMOVE and item.thresholds != NO_THRESHOLDS:
            thresholds |= dict.fromkeys(item.keys, item.thresholds)
        changed = ObservedVirtualServer(observed.settings, observed.real_servers, thresholds or None)
        self.objects.exchange(item.virtual_server, changed)

    def _weights_to_change(self, key: VirtualServerKey, observed: ObservedVirtualServer) -> dict[RealServerKey, int]:
        """A copy of the observed weights that may be changed: only the table and this object refer to the copy."""
        weights = self._changed.get(key)
        if weights is None:
            # The observed object must not change: the next reading may return it again.
            shared = observed.real_servers
            weights = shared.unpacked() if isinstance(shared, EvenWeights | UnevenWeights) else dict(shared)
            self._changed[key] = weights
            self.objects.exchange(key, observed.has(weights))
        return weights

    def settle_failure(self, outcome: Outcome) -> bool:
        """Records what a failure shows: a real server's virtual server no longer exists, or another program uses a mark."""
        item, table = outcome.operation.item, self.objects
        table.note_change(self.place(item)[1])
        # A virtual server that this plan has added is not recorded as missing, because the same sync would otherwise add it again
        # and again.
        if isinstance(item, RealServers) and outcome.errno == errno.ESRCH and item.virtual_server not in self._added:
            if item.virtual_server not in table.observed:
                return True  # the virtual server is retried together with all of its real servers
            self._drains.keep_only(item.virtual_server)
            table.confirm(item.virtual_server, None)
        elif isinstance(item, VirtualServer) and isinstance(item.key, FirewallMark) and outcome.errno == errno.EEXIST:
            self.all.scopes.refuse(item.key)
            return True
        return False

    def ending_settling(self) -> Iterator[None]:
        """Compares the virtual servers that the plan has changed; yields after each piece of work."""
        return each(self._compare, self._changed)

    def _compare(self, key: VirtualServerKey) -> None:
        """Compares a virtual server with its desired state; if the weights are equal, both then share one object."""
        desired, observed = self.objects.desired.get(key), self.objects.observed.get(key)
        if desired and observed and observed.real_servers is not desired.weights and observed.real_servers == desired.weights:
            observed = observed.has(desired.weights)
        self.objects.confirm(key, observed)

    def differences(self) -> Iterator[Difference]:
        """Yields the differences of virtual servers.

        There is one difference for each virtual server that is missing, undesired, or has other settings than desired. If a
        desired virtual server exists, there is also one difference for each of its real servers that differs.
        """
        table = self.objects
        for key in (*table.pending, *table.surplus):
            desired, observed = table.desired.get(key), table.observed.get(key)
            owner = desired.owner if desired else None
            for operation in virtual_server_operations(key, desired, observed, self._drains.may_remove):
                match operation.item:
                    case VirtualServer():
                        described = _describe(desired.settings, len(desired.real_servers)) if desired else STALE
                        found = _describe(observed.settings, len(observed.real_servers)) if observed else MISSING
                        yield self.difference(str(key), described, found, owner)
                    case RealServers(keys=(real_server,)) if observed:
                        thresholds = (observed.thresholds or {}).get(real_server)
                        found = _observed_weight(observed.real_servers.get(real_server), thresholds)
                        yield self.difference(
                            f"{key} -> {real_server}", _desired_weight(operation), found, owner, of="real_server"
                        )
                    case _:  # the line about a missing virtual server already contains the number of its real servers
                        pass


def _parting(
    desired: VirtualServer,
    key: RealServerKey,
    weight: int,
    may_remove: MayRemove,
) -> Verb | None:
    """The operation that an undesired real server needs now (weight 0 or removal); None if there is nothing to do yet."""
    if desired.protocol is not Protocol.TCP:
        return Verb.REMOVE
    if len(key) != len(desired.key.address) + PORT_SIZE:
        # The real server and the virtual server have different IP families, so packets reach the real server through a tunnel. An
        # edit to weight 0 would also set masquerading, and the kernel would refuse the edit.
        return Verb.REMOVE
    over = may_remove(desired.key, key)
    if without_method(weight) != 0 or over is None:
        return Verb.SET
    return Verb.REMOVE if over else None


def virtual_server_operations(
    key: VirtualServerKey,
    desired: VirtualServer | None,
    observed: ObservedVirtualServer | None,
    may_remove: MayRemove,
) -> Iterator[Operation]:
    """The operations for one virtual server.

    The virtual server is added before its real servers, and the real servers are added in their order. ``may_remove`` returns
    whether a draining real server may be removed, or None if the real server does not drain.
    """
    if desired is None:
        if observed is not None:
            yield Operation(Verb.REMOVE, VirtualServer(key, observed.settings))
        return
    if observed is None:
        yield Operation(Verb.ADD, desired)
        yield from _additions(desired)
        return
    if desired.settings != observed.settings:
        yield Operation(Verb.SET, desired)
    if (
        observed.real_servers == desired.weights
        and isinstance(desired.weights, EvenWeights)
        and desired.thresholds is NO_THRESHOLDS
        and not observed.thresholds
    ):  # nearly always
        return
    weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
    thresholds, observed_thresholds = desired.thresholds, observed.thresholds or {}
    has_equal_thresholds = thresholds == NO_THRESHOLDS and not observed_thresholds
    for packed, desired_weight in desired_weights.items():
        weight = weights.get(packed)
        if not (
            weight == desired_weight
            and (has_equal_thresholds or observed_thresholds.get(RealServerKey(packed), NO_THRESHOLDS) == thresholds)
            and (without_method(weight) or may_remove(key, RealServerKey(packed)) is None)
        ):
            stays = without_method(desired_weight) == 0
            item = RealServers(key, (RealServerKey(packed),), desired_weight, thresholds, stays=stays)
            yield Operation(Verb.ADD if weight is None else Verb.SET, item)
    for packed, weight in weights.items():
        if packed not in desired_weights:
            real_server = RealServerKey(packed)
            if parting := _parting(desired, real_server, weight, may_remove):
                by_tunnel = weight >= TUNNELLED and parting is Verb.SET
                yield Operation(parting, RealServers.of(key, real_server, TUNNELLED if by_tunnel else 0))


def _additions(desired: VirtualServer) -> Iterator[Operation]:
    """The additions of all real servers in their order; consecutive real servers with equal weights share one operation."""
    if isinstance(desired.weights, EvenWeights) and desired.thresholds is NO_THRESHOLDS:  # nearly always
        if desired.weights:
            yield Operation(Verb.ADD, RealServers(desired.key, desired.weights))
        return
    for weight, run in itertools.groupby(desired.weights.plain().items(), key=lambda item: item[1]):
        keys = tuple(RealServerKey(key) for key, _ in run)
        yield Operation(Verb.ADD, RealServers(desired.key, keys, weight, desired.thresholds, stays=without_method(weight) == 0))


def _gives_traffic(operation: Operation) -> bool:
    """Whether an operation adds or changes a real server, and gives it a weight with which it gets new connections."""
    item = operation.item
    return isinstance(item, RealServers) and operation.verb is not Verb.REMOVE and without_method(item.weight) > 0


def _describe(settings: VirtualServerSettings, real_servers: int) -> str:
    return f"{settings}, real servers: {real_servers}"


def _observed_weight(weight: int | None, thresholds: Thresholds | None) -> str:
    if weight is None:
        return MISSING
    return "not masqueraded" if weight == NOT_MASQUERADED else _weight(weight, thresholds or NO_THRESHOLDS)


def _weight(weight: int, thresholds: Thresholds) -> str:
    return in_words(weight) + (f", {thresholds}" if thresholds != NO_THRESHOLDS else "")


def _desired_weight(operation: Operation) -> str:
    """Describes the weight that an operation sets; an undesired TCP real server gets weight 0 until its connections end."""
    match operation:
        case Operation(verb=Verb.REMOVE):
            return STALE
        case Operation(item=RealServers() as item) if not item.drains:
            return _weight(item.weight, item.thresholds)
        case _:
            return "weight 0 (its endpoint is not used; its connections go on until they end)"
