"""The core: what is wanted on one side, what the kernel holds on the other, and the operations between them.

No I/O, no clock: ``now`` is an argument, in seconds of any monotonic clock.

Rule 1: a key that differs stays pending until the kernel is known to hold it; a failure only delays the next try.
Rule 2: what needs something else in force waits until that is known to be in force (see ``precondition``).
Rule 3: a kernel setting that cannot be written is not this process's to set: it is tried again only when it, or what is wanted
of it, has changed, and until then it does not count as pending.
Rule 4: what witnesses that a virtual server is ours stays until it is gone, until all was read at least once, and where it is
found by one part of a reading until all parts were.
"""

import dataclasses
import errno
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipvsproxy.model.kernel import (
    IP_SETS,
    PERSISTENT,
    BoundAddress,
    Connections,
    Device,
    FlowCleaning,
    IpSet,
    ObservedVirtualServer,
    RealServer,
    RealServers,
    SetEntry,
    Sysctl,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Address, Network
from ipvsproxy.model.plan import Item, Operation, Outcome, Plan, Report, Verb, as_tried_again, kind_of, objects
from ipvsproxy.model.real_servers import RealServerKey, plain
from ipvsproxy.model.rules import Skeleton
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import Observation, ServiceState
from ipvsproxy.reconcile import diff, drain, order, ownership, pace, wishes
from ipvsproxy.reconcile.booking import Booking
from ipvsproxy.reconcile.claims import Claims
from ipvsproxy.reconcile.drift import Drifts, Place
from ipvsproxy.reconcile.retry import Retries
from ipvsproxy.reconcile.table import KEYS_AT_ONCE, Table

_REAL_SERVER_ADDED = (Verb.ADD, "real_server")
_REAL_SERVER_REMOVED = (Verb.REMOVE, "real_server")
_WITNESSES = frozenset({"set_entry", "address"})
_ERRORS_SHOWN = 5
"""How many failures a report holds in full."""
QUESTIONS_AT_ONCE = 250
"""How many drains that nobody has looked at are asked about in one go, each ``drain.SHORTEST_INTERVAL_S``, when there is room."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices that change when and whether something is done.

    ``drain_deadline_s`` 0 means as long as it takes. ``excluded`` are ranges whose virtual servers are never removed.
    """

    drain_deadline_s: float = 0
    excluded: tuple[Network, ...] = ()


class Reconciler:
    """Desired and observed state of the whole node, and what to do about their difference."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._retries = Retries()
        self.drifts = Drifts()
        self._unseen = {"sets", "addresses", "interface addresses"}
        """What witnesses that virtual servers are ours, as far as it could not be read yet."""
        self._has_seen_all = False
        self._newcomers: set[object] = set()
        """Unwanted entries and addresses that appeared while the kernel was read in parts, until it is read to the end."""
        self._host: frozenset[Address] = frozenset()
        self.drains = drain.Drains(policy.drain_deadline_s)
        self._pace = pace.Pace()
        self._room_due_s = 0.0
        self._asking_due_s = 0.0
        self.claims = Claims(lambda wanted, seen: diff.differs(wanted, seen, self.drains.is_over), self._is_excluded)

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

    def observe(self, seen: Observation, now: float) -> None:
        """Replace what is believed of the kernel by what was seen; parts that could not be read stay as they were."""
        for _ in self.observing(seen, now):
            pass

    def observing(self, seen: Observation, now: float) -> Iterator[None]:
        """As ``observe``, with a pause every few hundred keys, in which nothing else may be done to the reconciler.

        An observation without all virtual servers is a part of a reading; ``concluding`` follows the last one.
        """
        claims = self.claims
        if seen.sets is not None:
            claims.sets.observe(dict.fromkeys((IP_SETS[name] for name in seen.sets), True), _theirs)
            for name, table in claims.entries.items():
                yield from table.observing(dict.fromkeys(seen.sets.get(name, ()), True), _ours)
            self._unseen.discard("sets")
        for name, found in seen.some_sets.items():
            yield from claims.sets.observing_some({IP_SETS[name]: None if found is None else True}, _theirs)
            yield from claims.entries[name].observing(dict.fromkeys(found or (), True), _ours)
        if seen.device is not None:
            devices = [device for device in claims.devices.desired if seen.device]
            claims.devices.observe(dict.fromkeys(devices, True), _theirs)
        if seen.addresses is not None:
            yield from claims.addresses.observing(dict.fromkeys(seen.addresses, True), _ours)
            self._unseen.discard("addresses")
        if seen.interface_addresses is not None:
            self._host = frozenset(item.address for item in seen.interface_addresses)
            self._unseen.discard("interface addresses")
        if seen.sysctls is not None:
            claims.sysctls.observe(seen.sysctls, _theirs)
        for family, image in seen.skeletons.items():
            claims.skeletons.notice(family, image)
        if seen.virtual_servers is not None:
            gone = [key for key in self.drains.virtual_servers if key not in seen.virtual_servers]
            yield from self._recall_drains(itertools.chain(dict.fromkeys(gone).items(), seen.virtual_servers.items()), now)
            left_behind = {} if self._has_seen_all else seen.virtual_servers
            yield from claims.virtual_servers.observing(seen.virtual_servers, self._is_ours(left_behind))
            self._has_seen_all |= not self._unseen
            self._newcomers.clear()
        if seen.some_virtual_servers:
            yield from self._recall_drains(seen.some_virtual_servers.items(), now)
            yield from claims.virtual_servers.observing_some(seen.some_virtual_servers, self._is_ours({}))
        self._note_drift(now, in_parts=seen.virtual_servers is None)

    @property
    def has_newcomers(self) -> bool:
        """Whether something that may witness a virtual server waits for the end of the reading that found it."""
        return bool(self._newcomers)

    def concluding(self, now: float) -> Iterator[None]:
        """The last part of a reading was observed: whose the virtual servers of others are is judged by all of it.

        Pauses as ``observing`` does.
        """
        virtual_servers = self.claims.virtual_servers
        theirs = {key: virtual_servers.observed[key] for key in virtual_servers.foreign}
        yield from virtual_servers.observing_some(theirs, self._is_ours({}))
        self._newcomers.clear()
        self._note_drift(now, in_parts=False)

    def _is_ours(self, left_behind: Mapping[VirtualServerKey, ObservedVirtualServer]) -> Callable[[VirtualServerKey], bool]:
        entries = {name: table.observed.keys() for name, table in self.claims.entries.items()}
        return ownership.owned_virtual_servers(entries, self.claims.addresses.observed, self._host, left_behind)

    def _recall_drains(
        self, seen_now: Iterable[tuple[VirtualServerKey, ObservedVirtualServer | None]], now: float
    ) -> Iterator[None]:
        """Take up drains that a former process began; drop those whose real server, or all (None), is gone."""
        desired = self.claims.virtual_servers.desired
        known = set(self.drains.virtual_servers)
        for number, (key, seen) in enumerate(seen_now, 1):
            wanted = desired.get(key)
            if wanted is None or seen is None:
                if key in known:
                    self.drains.end_all(key)
            elif key in known or seen.real_servers != wanted.weights:
                there, wishes = plain(seen.real_servers), wanted.weights.plain()
                draining = {RealServerKey(one) for one, weight in there.items() if not weight and one not in wishes}
                self.drains.keep_only(key, draining)
                for real_server in draining:
                    self.drains.begin(key, real_server, now)
            if number % KEYS_AT_ONCE == 0:
                yield

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
        operations = list(wishes.wanted(self.claims, self.drains, together=not (self.drifts or self._retries)))
        if only_additions:
            operations = [
                one for one in operations if one.verb is Verb.ADD or not (order.is_removal(one) or self._loses_rules(one))
            ]
        else:
            operations += wishes.surplus(self.claims, self.drains, has_seen_all=self._has_seen_all, keeping=self._newcomers)
        self.drifts.begin_round()
        if self.drifts:
            operations = [operation for operation in operations if self.drifts.may_heal(*self._place(operation.item), now)]
        if self._retries:
            operations = self._due(operations, now)
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
        seen = self.claims.skeletons.observed.get(item.family) if isinstance(item, Skeleton) else None
        if seen is None or not isinstance(item, Skeleton):
            return False
        wanted = item.image.chains
        return any(not set(rules) <= set(wanted.get(chain, ())) for chain, rules in seen.chains.items())

    def _note_drift(self, now: float, *, in_parts: bool) -> None:
        claims = self.claims
        self.drifts.forget_calm(now)
        tables: tuple[tuple[str, Table[Any, Any, Any]], ...] = (
            ("virtual_server", claims.virtual_servers),
            *(("set_entry", table) for table in claims.entries.values()),
            ("address", claims.addresses),
            ("set", claims.sets),
            ("device", claims.devices),
            ("sysctl", claims.sysctls),
            ("rules", claims.skeletons),
        )
        for kind, table in tables:
            for key in table.take_drifted():
                wish = table.desired.get(key)
                self.drifts.note(Place(kind, key), wish, now)
                if in_parts and wish is None and kind in _WITNESSES:
                    self._newcomers.add(key)

    def _place(self, item: Item) -> tuple[Place, object]:  # noqa: PLR0911 - one per kind
        """Where drift would be noted that this item heals, and what is wished there."""
        claims = self.claims
        match item:
            case VirtualServer(key=key) | RealServer(virtual_server=key) | RealServers(virtual_server=key):
                return Place("virtual_server", key), claims.virtual_servers.desired.get(key)
            case SetEntry():
                return Place("set_entry", item), claims.entries[item.set].desired.get(item)
            case BoundAddress(address=address):
                return Place("address", address), claims.addresses.desired.get(address)
            case IpSet():
                return Place("set", item), claims.sets.desired.get(item)
            case Device():
                return Place("device", item), claims.devices.desired.get(item)
            case Sysctl(path=path):
                return Place("sysctl", path), claims.sysctls.desired.get(path)
            case Skeleton(family=family):
                return Place("rules", family), claims.skeletons.desired.get(family)
            case _:
                return Place(kind_of(item), item), None

    def _due(self, operations: Sequence[Operation], now: float) -> list[Operation]:
        """Leave out what failed a short while ago; the real servers of a virtual server that is missing wait for it."""
        identities = [_identity(operation) for operation in operations]
        self._retries.keep_only(frozenset(identities))
        due: list[Operation] = []
        missing: set[VirtualServerKey] = set()
        for identity, operation in zip(identities, operations, strict=True):
            item = operation.item
            if isinstance(item, RealServer | RealServers) and item.virtual_server in missing:
                self._retries.forget(identity)  # or it would wake us at a time of its own, for nothing
            elif self._retries.may_try(identity, operation, now):
                due.append(operation)
            elif isinstance(item, VirtualServer) and operation.verb is Verb.ADD:
                missing.add(item.key)
        return due

    def settle(self, outcomes: Sequence[Outcome], now: float) -> Report:
        """Book what became of the operations of a plan."""
        done: Counter[tuple[str, str]] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        errors: list[Outcome] = []
        surprises = 0
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
                self._book_failure(outcome, now)
                if len(errors) < _ERRORS_SHOWN:
                    errors.append(outcome)
                continue
            done[what] += count
            if any_failed:
                self._retries.forget(_identity(operation))
            booking.book(operation)
        booking.close()
        self._pace.note(added=done[_REAL_SERVER_ADDED], removed=done[_REAL_SERVER_REMOVED] + booking.gone_with, now=now)
        return Report(done=done, failed=failed, errors=tuple(errors), pending=self.pending, surprises=surprises)

    def _book_failure(self, outcome: Outcome, now: float) -> None:
        operation, virtual_servers = outcome.operation, self.claims.virtual_servers
        if isinstance(operation.item, RealServer | RealServers) and outcome.errno == errno.ESRCH:
            key = operation.item.virtual_server
            if key not in virtual_servers.observed:
                return  # it is the virtual server that is to be tried again, and all of its real servers with it
            self.drains.end_all(key)
            virtual_servers.confirm(key, None)
        if isinstance(operation.item, Sysctl):
            self.claims.give_up_setting(operation.item, outcome.error)
        else:
            for each in as_tried_again((operation,)):
                self._retries.fail(_identity(each), each, now)

    @property
    def pending(self) -> int:
        """How many keys differ; real servers that are draining and settings that cannot be written are not counted."""
        different = sum(len(table.pending) + len(table.surplus) for table in self.claims.unequal)
        return different - len(self.claims.settings_given_up)

    def next_s(self) -> float | None:
        """When there will be something to do without any event: a retry, healing that waits, or a look at a drain."""
        room_due_s = self._room_due_s if self.drains.waiting else None
        times = (self._retries.next_s(), self.drifts.next_s(), self.drains.next_s(), room_due_s)
        return min((time_s for time_s in times if time_s is not None), default=None)


def _identity(operation: Operation) -> tuple[str, object]:
    """What a failure is remembered by: the object, whatever is to be done about it and whatever its value."""
    item = operation.item
    match item:
        case VirtualServer():
            return kind_of(item), item.key
        case RealServer():
            return kind_of(item), item[:2]
        case RealServers():
            return kind_of(item), item.virtual_server
        case Skeleton():
            return kind_of(item), item.family
        case FlowCleaning():
            return kind_of(item), item.flow
        case _:
            return kind_of(item), item


def _none(_: object) -> int:
    return 0


def _ours(_: object) -> bool:
    return True


def _theirs(_: object) -> bool:
    return False
