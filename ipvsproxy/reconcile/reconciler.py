"""The core: what is wanted on one side, what the kernel holds on the other, and the operations between them.

No I/O, no clock: ``now`` is an argument, in seconds of any monotonic clock.

Rule 1: a key that differs stays pending until the kernel is known to hold it; a failure only delays the next try.
Rule 2: a virtual server that only certain sources may reach is not added before its source ranges are in force.
Rule 3: what witnesses that a virtual server is ours stays until it is gone.
"""

import dataclasses
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from ipvsproxy.model.kernel import (
    IP_SETS,
    BoundAddress,
    Connections,
    Device,
    FlowCleaning,
    IpSet,
    ObservedVirtualServer,
    RealServer,
    RealServerKey,
    SetEntry,
    SetKind,
    Skeleton,
    Sysctl,
    Timeouts,
    VirtualServer,
    VirtualServerKey,
)
from ipvsproxy.model.net import Network, Protocol
from ipvsproxy.model.plan import Operation, Outcome, Plan, Report, Verb, kind_of
from ipvsproxy.model.service import ServiceName
from ipvsproxy.model.state import Observation, ServiceState
from ipvsproxy.reconcile import diff, order, ownership
from ipvsproxy.reconcile.claims import TIMEOUTS, Claims
from ipvsproxy.reconcile.drain import Drains
from ipvsproxy.reconcile.retry import Retries

_ERRORS_SHOWN = 5
"""How many failures a report holds in full."""
_NODE_PORT_KINDS: Mapping[SetKind, Protocol] = {
    SetKind.NODE_PORT_TCP: Protocol.TCP,
    SetKind.NODE_PORT_LOCAL_TCP: Protocol.TCP,
    SetKind.NODE_PORT_UDP: Protocol.UDP,
    SetKind.NODE_PORT_LOCAL_UDP: Protocol.UDP,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operator's choices that change when and whether something is done.

    ``drain_deadline_s`` 0 means as long as it takes. ``excluded`` are ranges whose virtual servers are never removed.
    ``node_name`` seeds the order in which real servers are added.
    """

    node_name: str
    drain_deadline_s: float = 0
    excluded: tuple[Network, ...] = ()


class Reconciler:
    """Desired and observed state of the whole node, and what to do about their difference."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._seed = zlib.crc32(policy.node_name.encode())
        self._retries = Retries()
        self.drains = Drains(policy.drain_deadline_s)
        self.claims = Claims(lambda wanted, seen: diff.differs(wanted, seen, self.drains.is_over), self._is_excluded)

    def _is_excluded(self, key: VirtualServerKey) -> bool:
        return any(item.contains(key.address) for item in self._policy.excluded)

    def put(self, name: ServiceName, state: ServiceState | None) -> None:
        """What a Service wants now; None when it is gone. What failed of it before is tried again at once."""
        self.claims.put(name, state)
        if state and self._retries:
            for key, wanted in state.virtual_servers.items():
                self._retries.forget(("virtual_server", key))
                for real_server in wanted.real_servers:
                    self._retries.forget(("real_server", (key, real_server)))
            for entry in state.entries:
                self._retries.forget(("set_entry", entry))

    def observe(self, seen: Observation, now: float) -> None:
        """Replace what is believed of the kernel by what was seen; parts that could not be read stay as they were."""
        claims = self.claims
        if seen.sets is not None:
            claims.sets.observe(dict.fromkeys((IP_SETS[name] for name in seen.sets), True), _theirs)
            for name, table in claims.entries.items():
                table.observe(dict.fromkeys(seen.sets.get(name, ()), True), _ours)
        if seen.device is not None:
            devices = [device for device in claims.devices.desired if seen.device]
            claims.devices.observe(dict.fromkeys(devices, True), _theirs)
        if seen.addresses is not None:
            claims.addresses.observe(dict.fromkeys(seen.addresses, True), _ours)
        if seen.sysctls is not None:
            claims.sysctls.observe(seen.sysctls, _theirs)
        for family, image in seen.skeletons.items():
            claims.skeletons.confirm(family, image)
        if seen.virtual_servers is not None:
            host = {item.address for item in seen.interface_addresses or ()}
            is_ours = ownership.owned_virtual_servers(seen.sets or {}, seen.addresses or frozenset(), host)
            claims.virtual_servers.observe(seen.virtual_servers, is_ours)
            self._recall_drains(seen.virtual_servers, now)

    def _recall_drains(self, seen: Mapping[VirtualServerKey, ObservedVirtualServer], now: float) -> None:
        """Take up drains that a former process began; drop those whose real server is gone."""
        known = {key for key, _, _ in self.drains}
        for key in known - seen.keys():
            self.drains.end_all(key)
        for key, wanted in self.claims.virtual_servers.desired.items():
            observed = seen.get(key)
            if observed and (key in known or len(observed.real_servers) > len(wanted.real_servers)):
                draining = {one for one, weight in observed.real_servers.items() if not weight and one not in wanted.real_servers}
                self.drains.keep_only(key, draining)
                for real_server in draining:
                    self.drains.begin(key, real_server, now)

    def note_connections(self, counts: Mapping[VirtualServerKey, Mapping[RealServerKey, Connections] | None], now: float) -> None:
        """Book the connection counts of virtual servers that ``drains.due`` asked for."""
        for key, of_real_servers in counts.items():
            if self.drains.note(key, of_real_servers, now):
                self.claims.virtual_servers.touch(key)

    def plan(self, now: float, *, only_additions: bool = False) -> Plan:
        """What can be done now, in the order in which it must be done.

        ``only_additions``: while not every Service has been put, what nobody wants may only not be wanted yet.
        """
        for key in self.drains.expire(now):
            self.claims.virtual_servers.touch(key)
        operations = [operation for operation in self._operations() if self._may_try(operation, now)]
        if only_additions:
            operations = [operation for operation in operations if not order.is_removal(operation)]
        operations.sort(key=order.rank)
        return Plan(operations)

    def _may_try(self, operation: Operation, now: float) -> bool:
        return not self._retries or self._retries.may_try(_identity(operation), now)

    def _operations(self) -> Iterator[Operation]:
        claims = self.claims
        for path in claims.sysctls.pending:
            yield Operation(Verb.SET, claims.sysctls.desired[path])
        if TIMEOUTS in claims.timeouts.pending:
            yield Operation(Verb.SET, claims.timeouts.desired[TIMEOUTS])
        for device in claims.devices.pending:
            yield Operation(Verb.ADD, device)
        for ip_set in claims.sets.pending:
            yield Operation(Verb.ADD, ip_set)
        for family in claims.skeletons.pending:
            yield Operation(Verb.SET, claims.skeletons.desired[family])
        yield from self._virtual_server_operations()
        yield from self._entry_and_address_operations()
        for flow in claims.flows.pending:
            yield Operation(Verb.REMOVE, FlowCleaning(flow, claims.flows.desired[flow].real_servers))

    def _virtual_server_operations(self) -> Iterator[Operation]:
        table = self.claims.virtual_servers
        for key in table.pending:
            wanted, seen = table.desired.get(key), table.observed.get(key)
            if wanted and seen is None and not self._may_be_reached(wanted):
                continue
            yield from diff.virtual_server_operations(key, wanted, seen, self.drains.is_over, self._seed)

    def _may_be_reached(self, wanted: VirtualServer) -> bool:
        """Whether a new virtual server has no source ranges, or has them in force."""
        key, claims = wanted.key, self.claims
        firewall = claims.entries[IpSet(SetKind.LOAD_BALANCER_FIREWALL, key.address.family).name]
        entry = _entry(SetKind.LOAD_BALANCER_FIREWALL, key)
        if entry not in firewall.desired:
            return True
        if entry in firewall.pending or key.address.family in claims.skeletons.pending:
            return False
        state = claims.states[wanted.owner.service]
        return not any(
            one in claims.entries[one.set].pending
            for one in state.entries
            if one.set in order.RANGE_SETS and ownership.virtual_server_of(one) == key
        )

    def _entry_and_address_operations(self) -> Iterator[Operation]:
        claims = self.claims
        going = [key for key in claims.virtual_servers.pending if key not in claims.virtual_servers.desired]
        witnesses = _Witnesses(going)
        for name, table in claims.entries.items():
            for entry in table.pending:
                if entry in table.desired:
                    yield Operation(Verb.ADD, entry)
                elif not witnesses.need(entry) and not (name in order.RANGE_SETS and self._is_restricted(entry)):
                    yield Operation(Verb.REMOVE, entry)
        for address in claims.addresses.pending:
            if address in claims.addresses.desired:
                yield Operation(Verb.ADD, BoundAddress(address))
            elif address not in witnesses.addresses:
                yield Operation(Verb.REMOVE, BoundAddress(address))

    def _is_restricted(self, entry: SetEntry) -> bool:
        """Whether a source range that is not wanted any more still lets somebody in, as its firewall entry is there yet."""
        key = ownership.virtual_server_of(entry)
        if key is None:
            return False
        firewall = _entry(SetKind.LOAD_BALANCER_FIREWALL, key)
        table = self.claims.entries[firewall.set]
        return firewall in table.pending and firewall not in table.desired

    def settle(self, outcomes: Sequence[Outcome], now: float) -> Report:
        """Book what became of the operations of a plan."""
        done: Counter[tuple[str, str]] = Counter()
        failed: Counter[tuple[str, str]] = Counter()
        errors: list[Outcome] = []
        touched: set[VirtualServerKey] = set()
        surprises = 0
        for outcome in outcomes:
            operation = outcome.operation
            what = (operation.verb.value, kind_of(operation.item))
            surprises += outcome.surprise
            if outcome.error:
                failed[what] += 1
                self._retries.fail(_identity(operation), now)
                if len(errors) < _ERRORS_SHOWN:
                    errors.append(outcome)
                continue
            done[what] += 1
            if self._retries:
                self._retries.forget(_identity(operation))
            self._book(operation, touched, now)
        for key in touched:
            self.claims.virtual_servers.touch(key)
        return Report(done=done, failed=failed, errors=tuple(errors), pending=self.pending, surprises=surprises)

    def _book(self, operation: Operation, touched: set[VirtualServerKey], now: float) -> None:
        verb, item = operation
        claims = self.claims
        is_there = True if verb is not Verb.REMOVE else None
        match item:
            case RealServer():
                self._book_real_server(verb, item, now)
                touched.add(item.virtual_server)
            case VirtualServer():
                self._book_virtual_server(verb, item)
            case SetEntry():
                claims.entries[item.set].confirm(item, is_there)
            case BoundAddress():
                claims.addresses.confirm(item.address, is_there)
            case IpSet():
                claims.sets.confirm(item, is_there)
            case Device():
                claims.devices.confirm(item, is_there)
            case Sysctl():
                claims.sysctls.confirm(item.path, item.value)
            case Timeouts():
                claims.timeouts.confirm(TIMEOUTS, item)
            case Skeleton():
                claims.skeletons.confirm(item.family, item.image)
            case FlowCleaning():
                claims.flows.confirm(item.flow, item.keep)

    def _book_virtual_server(self, verb: Verb, item: VirtualServer) -> None:
        table = self.claims.virtual_servers
        seen = table.observed.get(item.key)
        if verb is Verb.REMOVE:
            self.drains.end_all(item.key)
            table.confirm(item.key, None)
        else:
            table.confirm(item.key, ObservedVirtualServer(item.settings, seen.real_servers if seen else {}))

    def _book_real_server(self, verb: Verb, item: RealServer, now: float) -> None:
        seen = self.claims.virtual_servers.observed.get(item.virtual_server)
        if seen is None:
            return
        if verb is Verb.REMOVE:
            seen.real_servers.pop(item.key, None)
        else:
            seen.real_servers[item.key] = item.weight
        if verb is Verb.SET and item.weight == 0:
            self.drains.begin(item.virtual_server, item.key, now)
        else:
            self.drains.end(item.virtual_server, item.key)

    @property
    def pending(self) -> int:
        """How many keys differ; a real server that is draining is not counted."""
        return sum(len(table.pending) for table in self.claims.all())

    def next_s(self) -> float | None:
        """When there will be something to do without any event: a retry, or a look at a drain."""
        times = [time_s for time_s in (self._retries.next_s(), self.drains.next_s()) if time_s is not None]
        return min(times, default=None)


class _Witnesses:
    """Addresses and entries that must stay because they tell that a virtual server, which is still there, is ours."""

    def __init__(self, going: Collection[VirtualServerKey]) -> None:
        self.keys = frozenset(going)
        self.addresses = frozenset(key.address for key in going)
        self.ports = frozenset((key.protocol, key.port) for key in going)

    def need(self, entry: SetEntry) -> bool:
        """Whether the entry must stay."""
        if not self.keys:
            return False
        if entry.address is None:
            protocol = _NODE_PORT_KINDS.get(IP_SETS[entry.set].kind)
            return protocol is not None and (protocol, entry.port) in self.ports
        if entry.protocol is None:
            return entry.address in self.addresses
        return ownership.virtual_server_of(entry) in self.keys


def _entry(kind: SetKind, key: VirtualServerKey) -> SetEntry:
    return SetEntry(IpSet(kind, key.address.family).name, key.address, key.protocol, key.port)


def _identity(operation: Operation) -> tuple[str, object]:
    """What a failure is remembered by: the object, whatever is to be done about it and whatever its value."""
    item = operation.item
    match item:
        case VirtualServer():
            return kind_of(item), item.key
        case RealServer():
            return kind_of(item), item[:2]
        case Skeleton():
            return kind_of(item), item.family
        case Sysctl():
            return kind_of(item), item.path
        case FlowCleaning():
            return kind_of(item), item.flow
        case _:
            return kind_of(item), item


def _ours(_: object) -> bool:
    return True


def _theirs(_: object) -> bool:
    return False
