"""The core: what is wanted on one side, what the kernel holds on the other, and the operations between them.

No I/O, no clock: ``now`` is an argument, in seconds of any monotonic clock.

Rule 1: a key that differs stays pending until the kernel is known to hold it; a failure only delays the next try.
Rule 2: what needs something else in force waits until that is known to be in force (see ``precondition``).
Rule 3: a kernel setting that cannot be written is not this process's to set: it is tried again only when it, or what is wanted
of it, has changed, and until then it does not count as pending.
"""

import dataclasses
import errno
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ipvsproxy.model.kernel import (
    PERSISTENT,
    Connections,
    RealServers,
    Sysctl,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Family, Network
from ipvsproxy.model.plan import Operation, Outcome, Plan, Report, Verb, as_tried_again, kind_of, objects
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import ServiceState
from ipvsproxy.reconcile import diff, drain, observer, order, pace, retry, wishes
from ipvsproxy.reconcile.booking import Booking
from ipvsproxy.reconcile.claims import Claims
from ipvsproxy.reconcile.drift import Drifts

_REAL_SERVER_ADDED = (Verb.ADD, "real_server")
_REAL_SERVER_REMOVED = (Verb.REMOVE, "real_server")
_ERRORS_SHOWN = 5
"""How many failures a report holds in full."""
QUESTIONS_AT_ONCE = 250
"""How many drains that nobody has looked at are asked about in one go, each ``drain.SHORTEST_INTERVAL_S``, when there is room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices that change when and whether something is done.

    ``drain_deadline_s`` 0 means as long as it takes. ``excluded`` are ranges whose virtual servers are never removed.
    ``families`` are served by this node. Nothing of another family is removed: a former process may have programmed it, and it
    serves on.
    """

    drain_deadline_s: float = 0
    excluded: tuple[Network, ...] = ()
    families: frozenset[Family] = frozenset(Family)


class Reconciler:
    """Desired and observed state of the whole node, and what to do about their difference."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._retries = retry.Retries()
        self.drifts = Drifts()
        self.drains = drain.Drains(policy.drain_deadline_s)
        self._pace = pace.Pace()
        self._room_due_s = 0.0
        self._asking_due_s = 0.0
        self.claims = Claims(
            lambda wanted, seen: diff.differs(wanted, seen, self.drains.is_over),
            self._is_excluded,
            lambda family: family in self._policy.families,
        )
        self.observer = observer.Observer(self.claims, self.drains, self.drifts)

    def _is_excluded(self, key: VirtualServerKey) -> bool:
        return any(item.contains(key.address) for item in self._policy.excluded)

    def adopt(self, policy: Policy) -> None:
        """Go by another policy: what is in ranges that are not excluded any more may have to go, and the other way round."""
        self._policy = policy
        self.drains.deadline_s = policy.drain_deadline_s
        virtual_servers = self.claims.virtual_servers
        for key in virtual_servers.observed.keys() - virtual_servers.desired.keys():
            virtual_servers.touch(key)

    def put(self, name: ServiceName, state: ServiceState | None) -> None:
        """What a Service wants now; None when it is gone."""
        self.claims.put(name, state)

    def note_connections(self, counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None], now: float) -> None:
        """Book the connection counts of virtual servers that ``drains.due`` asked for."""
        for key, of_real_servers in counts.items():
            if self.drains.note(key, of_real_servers, now, may_wait=self._may_wait(key)):
                self.claims.virtual_servers.touch(key)

    def _may_wait(self, key: VirtualServerKey) -> int:
        """How many empty real servers may wait for their removal.

        None with session affinity, which ends when they are gone, or where the scheduler would still choose them.
        """
        wanted = self.claims.virtual_servers.desired.get(key)
        if wanted is None or wanted.settings.flags & PERSISTENT or wanted.settings.scheduler not in pace.PATIENT_SCHEDULERS:
            return 0
        return max(pace.FEW_WAITING, len(wanted.weights))

    def room(self, now: float) -> int:
        """How many real servers without connections may be removed now, beside those that are to be removed anyway."""
        return max(0, self._pace.room(now) - self.drains.over)

    def worth_asking(self, plan: Plan, room: int) -> Collection[VirtualServerKey]:
        """The virtual servers whose connections are of interest as soon as this plan is done, with so much room before.

        Those of which a real server begins to drain; without room, only where it may not wait for some.
        """
        draining = plan.draining
        return draining if room else [key for key in draining if not self.drains.has_place(key, self._may_wait(key))]

    def plan(self, now: float, *, only_additions: bool = False) -> Plan:
        """What can be done now, in the order in which it must be done.

        ``only_additions``: while not every Service has been put, what nobody wants may only not be wanted yet.
        """
        for key in self.drains.expire(now):
            self.claims.virtual_servers.touch(key)
        self._release(0 if only_additions else self.room(now), now)
        # What failed, or is fought over, is looked at one by one.
        together = not (self.drifts or self._retries)
        operations = list(wishes.wanted(self.claims, self.drains, together=together))
        if only_additions:
            operations = [
                one for one in operations if one.verb is Verb.ADD or not (order.is_removal(one) or self._loses_rules(one))
            ]
        else:
            seen_all, newcomers = self.observer.has_seen_all, self.observer.newcomers
            operations += wishes.surplus(self.claims, self.drains, has_seen_all=seen_all, keeping=newcomers, together=together)
        self.drifts.begin_round()
        if self.drifts:
            claims, may_heal = self.claims, self.drifts.may_heal
            operations = [operation for operation in operations if may_heal(*observer.healed_place(claims, operation.item), now)]
        if self._retries:
            operations = self._retries.due(operations, now)
        operations.sort(key=order.rank)
        return Plan(operations)

    def _release(self, room: int, now: float) -> None:
        """Have so many removed that wait; where there is more room, those are looked at that were not, some at a time."""
        released = self.drains.release(room)
        for key in released:
            self.claims.virtual_servers.touch(key)
        soon_s = now + drain.SHORTEST_INTERVAL_S
        self._room_due_s = min(max(soon_s, self._pace.changes_s(now)), now + drain.LONGEST_INTERVAL_S)
        left = room - len(released)
        if left > 0 and self.drains.any_unseen:
            if now >= self._asking_due_s:
                self.drains.ask(min(left, QUESTIONS_AT_ONCE), now)
                self._asking_due_s = soon_s
            self._room_due_s = self._asking_due_s

    def _loses_rules(self, operation: Operation) -> bool:
        """Whether an operation would take away a rule that is there: a Service that has not spoken yet may need it."""
        item = operation.item
        if not isinstance(item, Skeleton):
            return False
        seen = self.claims.skeletons.observed.get(item.family)
        if seen is None or seen.hidden:
            return True  # what is there is not known
        wanted = item.chains
        return any(not set(rules) <= set(wanted.get(chain, ())) for chain, rules in seen.chains.items())

    def settle(self, outcomes: Sequence[Outcome], now: float) -> Report:
        """Book what became of the operations of a plan."""
        done: Counter[tuple[str, str]] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        errors: list[Outcome] = []
        surprises = 0
        new: set[VirtualServerKey] = set()
        booking = Booking(self.claims, self.drains, now, _none if self.room(now) else self._may_wait)
        any_failed = bool(self._retries)
        for outcome in outcomes:
            operation = outcome.operation
            verb, item = operation
            what = (verb, kind_of(item))
            count = objects(item)
            if outcome.surprise:
                surprises += 1
            if outcome.error:
                any_failed = True
                failed[what] += count
                self._book_failure(outcome, new, now)
                if len(errors) < _ERRORS_SHOWN:
                    errors.append(outcome)
                continue
            done[what] += count
            if verb is Verb.ADD and isinstance(item, VirtualServer):
                new.add(item.key)
            if any_failed:
                self._retries.forget(retry.identity(operation))
            booking.book(operation)
        booking.close()
        self._pace.note(added=done[_REAL_SERVER_ADDED], removed=done[_REAL_SERVER_REMOVED] + booking.gone_with, now=now)
        return Report(done=done, failed=failed, errors=tuple(errors), pending=self.pending, surprises=surprises)

    def _book_failure(self, outcome: Outcome, new: Collection[VirtualServerKey], now: float) -> None:
        """``new`` are the virtual servers that the same plan has added so far."""
        operation, virtual_servers = outcome.operation, self.claims.virtual_servers
        item = operation.item
        # One that was added a moment ago and is missing again would be added again at once, in the same sync, without an end.
        if isinstance(item, RealServers) and outcome.errno == errno.ESRCH and item.virtual_server not in new:
            key = item.virtual_server
            if key not in virtual_servers.observed:
                return  # it is the virtual server that is to be tried again, and all of its real servers with it
            self.drains.end_all(key)
            virtual_servers.confirm(key, None)
        if isinstance(item, Sysctl):
            self.claims.give_up_setting(item, outcome.error)
        else:
            note = self._retries.wait if outcome.errno == errno.EINPROGRESS else self._retries.fail
            for each in as_tried_again((operation,)):
                note(retry.identity(each), each, now)

    @property
    def pending(self) -> int:
        """How many keys differ; real servers that are draining and settings that cannot be written are not counted."""
        different = sum(len(table.pending) + len(table.surplus) for table in self.claims.unequal)
        return different - len(self.claims.settings_given_up)

    def rules_ended(self) -> None:
        """What was under way on rules (an outcome with EINPROGRESS) is over: its outcome can be had."""
        self._retries.hasten("rules")

    def next_s(self) -> float | None:
        """When there will be something to do without any event: a retry, healing that waits, or a look at a drain."""
        room_due_s = self._room_due_s if self.drains.waiting else None
        times = (self._retries.next_s(), self.drifts.next_s(), self.drains.next_s(), room_due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)


def _none(_: object) -> int:
    return 0
