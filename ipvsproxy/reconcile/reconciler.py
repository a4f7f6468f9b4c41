"""The reconciler: holds desired and observed state, and plans the operations that make them equal.

The reconciler does no I/O and reads no clock; callers pass the time as ``now``, in seconds of a monotonic clock.

Rule 1: a key whose desired and observed values differ stays pending until its desired value is observed or confirmed. A failure
only delays the next attempt.
Rule 2: an operation that needs another object waits until the other object exists in the kernel (see ``kinds/declaration.py``).
Rule 3: a kernel setting that cannot be written is not tried again, and does not count as pending, until its desired or observed
value changes.
"""

import dataclasses
import errno
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

from ipvsproxy.model.kernel import Sysctl, Timeouts
from ipvsproxy.model.net import Address, Family, Network
from ipvsproxy.model.plan import (
    WEIGHTS_SHOWN,
    Operation,
    Outcome,
    Report,
    Verb,
    WeightChange,
    as_tried_again,
    count_objects,
    kind_of,
)
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.model.steps import ITEMS_AT_ONCE, at_once, each
from ipvsproxy.model.virtual_servers import PERSISTENT, ConnectionCounts, RealServers, VirtualServerKey
from ipvsproxy.reconcile import survey
from ipvsproxy.reconcile.attempts import FEW_WAITING, PATIENT_SCHEDULERS, Pace, Retries
from ipvsproxy.reconcile.kinds.declaration import Circumstances, Stage
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.observation import Drifts, News, Observer, healed_place
from ipvsproxy.reconcile.tables.scopes import MarkedPort
from ipvsproxy.reconcile.virtual_servers import drain, ownership

_REAL_SERVER_ADDED = (Verb.ADD, "real_server")
_REAL_SERVER_REMOVED = (Verb.REMOVE, "real_server")
_ERRORS_SHOWN = 5
"""The largest number of failures that a report describes in full."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices about which operations are done, and when.

    A ``drain_deadline_s`` of 0 means that there is no deadline. ``excluded`` has the address ranges whose virtual servers are
    never removed. ``families`` are the families that this node serves. Objects of any other family are never removed, because an
    earlier process may have programmed the objects for traffic that continues. ``scope_bits`` are the bits from which ipvsproxy
    makes the firewall marks of its virtual servers (see ``tables/scopes.py``).
    """

    drain_deadline_s: float = 0
    excluded: tuple[Network, ...] = ()
    families: frozenset[Family] = frozenset(Family)
    scope_bits: int = 0x3FFF


class Reconciler:
    """The desired and observed state of the whole node, and the operations that remove the differences between them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._retries = Retries()
        self._drifts = Drifts()
        self._drains = drain.Drains()
        self._pace = Pace()
        self._tables = NodeTables(
            self._drains,
            lambda key: ownership.lies_in(key, self._policy.excluded),
            lambda family: family in self._policy.families,
        )
        self._tables.scopes.use_bits(policy.scope_bits)
        self.observer = Observer(self._tables, self._drains, self._drifts)
        """Updates the observed side of the tables with readings of the kernel."""
        self.survey = survey.Survey(self._tables)
        """Answers queries about the desired and the observed state, because other packages do not read the tables."""

    def adopt(self, policy: Policy) -> None:
        """Adopt another policy.

        The excluded ranges of the new policy replace the former ranges. From now on, only virtual servers outside the new ranges
        may be removed.
        """
        self._policy = policy
        for key in self._drains.virtual_servers:  # the new policy may have another drain deadline
            self._drains.ask(key, 0)
        self._tables.scopes.use_bits(policy.scope_bits)
        virtual_servers = self._tables.virtual_servers
        for key in virtual_servers.observed.keys() - virtual_servers.desired.keys():
            virtual_servers.touch(key)

    # Desired state.

    def put_node(self, families: Collection[Family], sysctls: Collection[Sysctl], timeouts: Timeouts | None) -> None:
        """Set the desired objects that the node needs independently of its Services: the device, the sets, the settings."""
        self._tables.put_node(families, sysctls, timeouts)

    def put_tunnel_sources(self, addresses: Collection[Address]) -> None:
        """Set the addresses of the other nodes whose tunnels are accepted."""
        self._tables.put_tunnel_sources(addresses)

    def putting(self, name: ServiceName, state: ServiceState | None) -> Generator[None, None, None]:
        """Replaces the desired state of a Service; yields after each piece of work.

        A state of None means that the Service no longer exists. Between two steps of any method, no other call may change the
        reconciler.
        """
        return self._putting_drained(name, state) if self._drains else self._tables.putting(name, state)

    def _putting_drained(self, name: ServiceName, state: ServiceState | None) -> Generator[None, None, None]:
        states = filter(None, (self._tables.states.get(name), state))
        keys = {item.key for one in states for item in one.served} & self._drains.virtual_servers
        deadlines = {key: self._deadline_s(key) for key in keys}
        yield from self._tables.putting(name, state)
        for key, deadline_s in deadlines.items():
            if self._deadline_s(key) != deadline_s:
                self._drains.ask(key, 0)

    def _deadline_s(self, key: VirtualServerKey) -> float:
        """The time for which connections to undesired real servers of a Service may last.

        The deadline of the Service applies, or, if the Service has no deadline, the deadline of the node.
        """
        owner = self._tables.virtual_servers.owner_of(key)
        state = self._tables.states.get(owner.service) if owner is not None else None
        return (state and state.rare.drain_deadline_s) or self._policy.drain_deadline_s or math.inf

    def put_skeleton(self, skeleton: Skeleton) -> None:
        """Set the desired rules of a family."""
        self._tables.put_skeleton(skeleton)

    # Observed state.

    def note_timeouts(self, observed: Timeouts) -> None:
        """Record the IPVS timeouts, which are read separately.

        A timeout whose desired value is 0 counts as equal to any value.
        """
        self._tables.of_timeouts.note(observed)

    def take_drift_news(self) -> News:
        """The drift since the last call, and the objects whose repair is delayed."""
        return self._drifts.take_news()

    # Draining.

    def drains_due(self, now: float) -> Collection[VirtualServerKey]:
        """The virtual servers whose connection counts should be read now, because one of their real servers is draining."""
        return self._drains.due(now)

    def noting_connections(
        self, counts: Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None], now: float
    ) -> Generator[None, None, None]:
        """Records the connection counts of virtual servers with a draining real server; yields after each piece of work.

        Counts of None mean that the counts could not be read.
        """

        def judge(key: VirtualServerKey) -> None:
            deadline_s, may_wait = self._deadline_s(key), self._may_wait(key)
            if self._drains.judge(key, counts[key], now, deadline_s=deadline_s, may_wait=may_wait):
                self._tables.virtual_servers.touch(key)

        return each(judge, counts)

    def _may_wait(self, key: VirtualServerKey) -> int:
        """The number of real servers without connections whose removal may be postponed.

        The result is 0 if the scheduler would still choose these real servers. The result is also 0 with session affinity,
        because affinity to a real server ends only when the real server is removed.
        """
        desired = self._tables.virtual_servers.desired.get(key)
        if desired is None or desired.settings.flags & PERSISTENT or desired.settings.scheduler not in PATIENT_SCHEDULERS:
            return 0
        return max(FEW_WAITING, len(desired.weights))

    def room(self, now: float) -> int:
        """The number of real servers that may be removed now, provided that they have no connections."""
        return max(0, self._pace.room(now) - self._drains.over)

    def take_without_scope(self) -> Sequence[MarkedPort]:
        """The Service ports that have started to wait for a mark since the last call."""
        return self._tables.scopes.marks.take_news()

    def tend(self, now: float) -> None:
        """Update the parts of the desired state that depend on the kernel's state.

        A new process makes this update right after it has first read the kernel. The update gives the free marks to second scopes
        of external addresses, and sets the weights of endpoints in slow start. Undesired scopes drain. The caller must have set
        the desired state of every Service before this call.
        """
        at_once(self._tables.scopes.tending(may_close=self.observer.has_observed_all))
        at_once(self._tables.slow_starts.tending(now, afresh=True))

    def planning(self, now: float, *, only_additions: bool = False) -> Generator[None, None, Sequence[Operation]]:
        """Plans the operations that are possible now, in their order; yields after each piece of work.

        If ``only_additions`` is true, no object is taken away, because some Services still have no desired state, and may desire
        the object.
        """
        yield from self._tables.scopes.tending(may_close=not only_additions and self.observer.has_observed_all)
        yield from self._tables.slow_starts.tending(now)
        room = self.room(now)
        yield from each(self._tables.virtual_servers.touch, self._drains.release(0 if only_additions else room))
        circumstances = Circumstances(
            self._tables, has_observed_all=self.observer.has_observed_all, keeping=self.observer.newcomers
        )
        kinds = self._tables.kinds
        possible: Iterator[Operation] = itertools.chain.from_iterable(kind.additions(circumstances) for kind in kinds)
        if not only_additions:
            possible = itertools.chain(possible, *(kind.removals(circumstances) for kind in kinds))
        self._drifts.begin_round()
        if self._drifts or self._retries:  # after failures or drift, each object gets a separate operation
            possible = as_tried_again(possible)
        may_heal, is_healing = self._drifts.may_heal, bool(self._drifts)
        by_stage = defaultdict[Stage, list[Operation]](list)
        objects = 0
        for operation in possible:
            waits = only_additions and operation.verb is not Verb.ADD and self._takes_away(operation)
            if not waits and (not is_healing or may_heal(*healed_place(self._tables, operation.item), now)):
                by_stage[self._tables.stage(operation)].append(operation)
            objects += count_objects(operation.item)
            if objects >= ITEMS_AT_ONCE:
                objects = 0
                yield
        operations = [operation for stage in sorted(by_stage) for operation in by_stage[stage]]
        return self._retries.due(operations, self._identity, now) if self._retries else operations

    def _identity(self, operation: Operation) -> tuple[str, object]:
        """The key under which failures are counted: the kind and the identity of the objects, without the verb and the values."""
        return kind_of(operation.item), self._tables.by_class[type(operation.item)].identity(operation.item)

    def _takes_away(self, operation: Operation) -> bool:
        """Whether an operation removes an object or a rule that a Service without a desired state may still need."""
        item = operation.item
        if not isinstance(item, Skeleton):
            return operation.verb is Verb.REMOVE or self._tables.stage(operation) is Stage.REAL_SERVER_REMOVALS
        observed = self._tables.skeletons.observed.get(item.family)
        if observed is None or observed.hidden:
            return True  # the observed rules are not known
        desired = item.in_force.chains
        return any(not set(rules) <= set(desired.get(chain, ())) for chain, rules in observed.chains.items())

    def settling(self, outcomes: Sequence[Outcome], now: float) -> Generator[None, None, Report]:
        """Records the outcomes of the operations of a plan; yields after each piece of work."""
        done: Counter[tuple[str, str]] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        errors: list[Outcome] = []
        weights: list[WeightChange] = []
        surprises = 0
        of_virtual_servers = self._tables.of_virtual_servers
        of_virtual_servers.begin_settling(now)
        any_failed = bool(self._retries)
        for number, outcome in enumerate(outcomes, 1):
            if number % ITEMS_AT_ONCE == 0:
                yield
            operation = outcome.operation
            verb, item = operation
            kind = self._tables.by_class[type(item)]
            verb_and_kind = (verb, kind_of(item))
            count = count_objects(item)
            if outcome.surprise:
                surprises += 1
            if outcome.error:
                any_failed = True
                failed[verb_and_kind] += count
                if not kind.settle_failure(outcome):
                    yield from self._trying_again(outcome, now)
                if len(errors) < _ERRORS_SHOWN:
                    errors.append(outcome)
                continue
            done[verb_and_kind] += count
            if any_failed:
                self._retries.forget(self._identity(operation))
            if type(item) is RealServers and len(weights) < WEIGHTS_SHOWN:
                weights += itertools.islice(of_virtual_servers.weight_changes(verb, item), WEIGHTS_SHOWN - len(weights))
            yield from kind.settle(verb, item)
        yield from of_virtual_servers.ending_settling()
        removed = done[_REAL_SERVER_REMOVED] + of_virtual_servers.gone_with
        self._pace.note(added=done[_REAL_SERVER_ADDED], removed=removed, now=now)
        return Report(
            done=done, failed=failed, errors=tuple(errors), pending=self.pending, surprises=surprises, weights=tuple(weights)
        )

    def _trying_again(self, outcome: Outcome, now: float) -> Iterator[None]:
        is_running = outcome.errno == errno.EINPROGRESS
        fail = self._retries.fail
        again = as_tried_again((outcome.operation,))
        return each(lambda one: fail(self._identity(one), one, now, is_running=is_running), again)

    @property
    def unequal(self) -> int:
        """The number of desired objects that the kernel lacks or has with another value."""
        return sum(len(table.pending) for table in self._tables.unequal)

    @property
    def pending(self) -> int:
        """The number of keys whose desired and observed values differ.

        A draining real server, or a setting that cannot be written, does not count.
        """
        surplus = sum(len(table.surplus) for table in self._tables.unequal)
        return self.unequal + surplus - len(self._tables.of_sysctls.given_up)

    def rules_ended(self) -> None:
        """Allow a new attempt at an operation on rules now: the program that was still running (EINPROGRESS) has ended.

        The new attempt returns the outcome of the ended operation.
        """
        self._retries.hasten("rules")

    def next_s(self) -> float | None:
        """The time at which work is due next, even if no event arrives before.

        The work is a retry, a delayed repair, a check of the draining connections, or a step of a slow start.
        """
        room_due_s = self._pace.changes_s if self._drains.waiting else None
        climbing_due_s = self._tables.slow_starts.next_s()
        times = (self._retries.next_s(), self._drifts.next_s(), self._drains.next_s(), room_due_s, climbing_due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)
