"""An in-memory kernel that refuses the same operations as the real kernel, for tests that use no real kernel.

After the same operations, this kernel has the same state and outcomes as the drivers in ``ipvsproxy/kernel``;
``tests/kernel/test_contract.py`` runs the same tests on this kernel and on the drivers. The state of this kernel is public: tests
create drift, connections and objects of other programs by changing its attributes.
"""

import collections
import dataclasses
import errno
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, assert_never

from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.iptables.iptables_driver import Program, Refusal
from ipvsproxy.model.kernel import (
    DEVICE,
    TUNNEL_RECORD,
    BoundAddresses,
    Device,
    Flow,
    FlowCleaning,
    InterfaceAddress,
    LocalRoutes,
    Sysctl,
    Timeouts,
    parse_record,
    render_record,
)
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.plan import Item, Operation, Outcome, Verb, kind_of, one_by_one
from ipvsproxy.model.real_servers import NO_THRESHOLDS, RealServerKey, Thresholds, without_method
from ipvsproxy.model.rules import ChainKey, Jump, JumpTo, Rule, Skeleton
from ipvsproxy.model.sets import IP_SETS, IpSet, SetCopy, SetEntries, SetType
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import (
    ConnectionCounts,
    FirewallMark,
    ObservedVirtualServer,
    RealServers,
    VirtualServer,
    VirtualServerKey,
)
from tests.support import fake_sets

SCHEDULERS = frozenset({"rr", "wrr", "lc", "wlc", "lblc", "lblcr", "sh", "dh", "sed", "nq", "fo", "ovf", "mh"})


@dataclasses.dataclass(slots=True)
class Failure:
    """Makes the next ``times`` operations that match ``predicate`` fail, whatever the kernel's state.

    ``number`` is the error number.
    """

    predicate: Callable[[Operation], bool]
    number: int
    times: int


if TYPE_CHECKING:

    class KernelVirtualServer(ObservedVirtualServer):
        """A virtual server; a test may change its real servers, as another program would change them."""

        real_servers: dict[RealServerKey, int]  # type: ignore[mutable-override]  # tests must be able to change the attribute
        thresholds: Mapping[RealServerKey, Thresholds] | None = None
else:
    KernelVirtualServer = ObservedVirtualServer


class FakePrograms:
    """The iptables programs of a host that serves both families."""

    def usable(self, family: Family) -> Refusal | None:
        return None

    def program(self, family: Family) -> Program:
        return Program((1, 8, 9), "nf_tables")


class FakeKernel:
    """The state of a node's kernel, and the operations applied to it.

    ``applied`` has the operations in order, including refused operations; ``counts`` counts the operations by verb and kind.
    ``unreadable`` has the names of the parts that cannot be read. Each name is ``connections``, ``schedulers``, ``timeouts``, or
    a field of ``Observation``. ``flows`` has, for each frontend, the number of tracked flows of each real server.
    """

    def __init__(self) -> None:
        self.rules = FakePrograms()
        self.schedulers = SCHEDULERS
        self.asked_schedulers: list[str] = []
        self.virtual_servers: dict[VirtualServerKey, KernelVirtualServer] = {}
        self.foreign_virtual_servers = 0
        self.connection_counts: dict[tuple[VirtualServerKey, RealServerKey], ConnectionCounts] = {}
        self.connection_queries: list[int] = []
        """The number of virtual servers in each query for connections."""
        self.sets: dict[str, fake_sets.KernelSet] = {}
        self.set_copy = False
        self.device = False
        self.addresses: set[Address] = set()
        self.routes: set[Address] = set()
        self.host_addresses: list[InterfaceAddress] = []
        self.chains: dict[Family, dict[ChainKey, tuple[Rule, ...]]] = {family: {} for family in Family}
        self.jumps: dict[Family, set[Jump]] = {family: set() for family in Family}
        self.families: tuple[Family, ...] = tuple(Family)
        self.sysctls: dict[str, str] = {}
        self.timeouts = Timeouts(900, 120, 300)
        self.flows: dict[Flow, dict[RealServerKey, int]] = {}
        self.applied: list[Operation] = []
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.unreadable: set[str] = set()
        self.audits = self.polls = self.whole_polls = 0
        self._known: set[VirtualServerKey] = set()
        """All virtual servers that were ever reported or requested. If one of them is absent, a poll reports its absence."""
        self._reported: dict[VirtualServerKey, ObservedVirtualServer | None] = {}
        """The last report of ``poll``, without the virtual servers that have been written since then."""
        self._failures: list[Failure] = []

    def fail(self, predicate: Callable[[Operation], bool], number: int = errno.EIO, *, times: int = 1) -> None:
        """Fail the next ``times`` operations that match the predicate, with this error number."""
        self._failures.append(Failure(predicate, number, times))

    def forget(self) -> None:
        """Clear the record of applied operations, but keep the state of the kernel."""
        self.applied.clear()
        self.counts.clear()

    def observe(
        self,
        sets: Collection[str] = tuple(IP_SETS),
        families: Iterable[Family] = tuple(Family),
        sysctls: Iterable[str] | None = None,
    ) -> Observation:
        """A copy of the present state. A value of None for ``sysctls`` means all settings."""
        self._known.update(self.virtual_servers)
        parts: dict[str, object] = {
            "virtual_servers": {key: _copy(server) for key, server in self.virtual_servers.items()},
            "foreign_virtual_servers": self.foreign_virtual_servers,
            "sets": {
                name: frozenset(() if present.differs_from(IP_SETS[name]) else present.entries)
                for name, present in self.sets.items()
                if name in sets
            },
            "set_copy": self.set_copy,
            "device": self.device,
            "addresses": frozenset(self.addresses),
            "routes": frozenset(self.routes),
            "interface_addresses": tuple(self.host_addresses),
            "skeletons": {
                family: Skeleton(family=family, chains=self.chains[family], jumps=tuple(self.jumps[family])).in_force
                for family in families
                if family in self.families
            },
            "sysctls": {path: value for path, value in self.sysctls.items() if sysctls is None or path in set(sysctls)},
        }
        readable = {name: value for name, value in parts.items() if name not in self.unreadable}
        return dataclasses.replace(
            Observation(errors=tuple(f"{name} cannot be read" for name in sorted(self.unreadable))),
            **readable,  # type: ignore[arg-type]  # the keys are names of fields
        )

    def poll(
        self,
        sets: Collection[str] = tuple(IP_SETS),
        families: Iterable[Family] = tuple(Family),
        sysctls: Iterable[str] | None = None,
        *,
        thorough: bool = False,
        whole: bool = True,
    ) -> Iterator[Observation]:
        """Like ``observe``, but in steps; virtual servers are included only if ``whole`` is true.

        If the kernel no longer has a virtual server, the value of the virtual server is None. With ``thorough``, the result does
        not contain this virtual server at all.
        """
        if thorough:
            self.audits += 1
        else:
            self.polls += 1
            self.whole_polls += whole
        observation = self.observe(sets, families, sysctls)
        sets_read = observation.sets
        yield dataclasses.replace(
            observation,
            virtual_servers=None,
            sets=None,
            some_sets={} if sets_read is None else {name: sets_read.get(name) for name in sets},
        )
        if thorough:
            self._reported.clear()
        for key in () if observation.virtual_servers is None or not whole else sorted(self._known, key=str):
            present = self.virtual_servers.get(key)
            shown = present and _copy(present)
            if (key not in self._reported or self._reported[key] != shown) and (present or not thorough):
                self._reported[key] = shown
                yield Observation(some_virtual_servers={key: shown})
        if thorough and observation.virtual_servers is not None:
            yield Observation(has_shown_virtual_servers=True)

    def interface_addresses(self) -> tuple[InterfaceAddress, ...]:
        """The addresses of all interfaces except the device of the Service addresses."""
        if "interface_addresses" in self.unreadable:
            raise KernelError(action="list addresses", errno=errno.EIO)
        return tuple(self.host_addresses)

    def read_timeouts(self) -> Timeouts:
        """The IPVS timeouts."""
        if "timeouts" in self.unreadable:
            raise KernelError(action="read the IPVS timeouts", errno=errno.EIO)
        return self.timeouts

    def why_unusable(self, scheduler: str) -> str:
        """The reason why no virtual server can have this scheduler; empty if a virtual server can have it."""
        if "schedulers" in self.unreadable:
            raise KernelError(action="find the schedulers of this kernel", errno=errno.EIO)
        self.asked_schedulers.append(scheduler)
        return "" if scheduler in self.schedulers else f"the kernel has no scheduler {scheduler!r}"

    def why_missing(self, scheduler: str) -> str:
        """As ``why_unusable``."""
        return self.why_unusable(scheduler)

    def connections(
        self, keys: Collection[VirtualServerKey]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None]:
        """The connections of each real server of these virtual servers; zero unless ``connection_counts`` says otherwise."""
        self.connection_queries.append(len(keys))
        if "connections" in self.unreadable:
            return dict.fromkeys(keys)
        none = ConnectionCounts(0, 0)
        return {
            key: {real: self.connection_counts.get((key, real), none) for real in self.virtual_servers[key].real_servers}
            if key in self.virtual_servers
            else {}
            for key in keys
        }

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in order.

        Raises AssertionError if an object occurs twice, because drivers may change the order of operations.
        """
        keys = [_identity(operation.item) for operation in one_by_one(operations)]
        twice = [key for key, count in collections.Counter(keys).items() if count > 1]
        assert not twice, f"at most one operation per object in one call: {twice}"
        for _, item in operations:
            if isinstance(item, VirtualServer | RealServers):
                key = item.key if isinstance(item, VirtualServer) else item.virtual_server
                self._known.add(key)
                self._reported.pop(key, None)
        return [outcome for operation in operations for outcome in self._apply_all(operation)]

    def _apply_all(self, operation: Operation) -> list[Outcome]:
        item, outcomes = operation.item, [self._apply(one) for one in one_by_one([operation])]
        plain = [not (outcome.error or outcome.surprise) for outcome in outcomes]
        if isinstance(item, RealServers | SetEntries | BoundAddresses | LocalRoutes) and all(plain):
            return [Outcome(operation)]
        if not isinstance(item, RealServers):
            return outcomes
        several = Outcome(Operation(operation.verb, item._replace(keys=tuple(itertools.compress(item.keys, plain)))))
        return [several] * any(plain) + [outcome for outcome, is_plain in zip(outcomes, plain, strict=True) if not is_plain]

    def _apply(self, operation: Operation) -> Outcome:
        self.applied.append(operation)
        self.counts[operation.verb.value, kind_of(operation.item)] += 1
        try:
            self._fail_on_demand(operation)
            if isinstance(operation.item, FlowCleaning):
                return Outcome(operation, removed=self._clean(operation.item))
            return Outcome(operation, surprise=self._change(operation.verb, operation.item))
        except fake_sets.Refusal as refusal:
            return Outcome(operation, error=f"{operation}: {refusal}", errno=refusal.number)

    def _fail_on_demand(self, operation: Operation) -> None:
        for failure in self._failures:
            if failure.times and failure.predicate(operation):
                failure.times -= 1
                raise fake_sets.Refusal(failure.number)

    def _change(self, verb: Verb, item: Item) -> bool:
        """Change one object; return whether the object's state contradicted the verb, as when an existing object is added.

        Raises Refusal.
        """
        surprise = False
        match item:
            case VirtualServer():
                surprise = self._change_virtual_server(verb, item)
            case RealServers():
                surprise = self._change_real_server(verb, item)
            case IpSet() | SetCopy():
                surprise = self._change_set(verb, item)
            case SetEntries():
                surprise = fake_sets.change_entry(self.sets, verb, item.key)
            case Device() | BoundAddresses() | LocalRoutes():
                surprise = self._change_local(verb, item)
            case Skeleton():
                self._change_skeleton(verb, item)
            case Sysctl(path=path, value=value):
                if verb is Verb.REMOVE:
                    self._restore_sysctl(path, value)
                else:
                    self._set_sysctl(path, value)
            case Timeouts():
                self.timeouts = Timeouts(*(new or old for new, old in zip(item, self.timeouts, strict=True)))
            case FlowCleaning():
                raise AssertionError("counted, and no surprise")
            case never:
                assert_never(never)
        return surprise

    def _change_virtual_server(self, verb: Verb, item: VirtualServer) -> bool:
        there = self.virtual_servers.get(item.key)
        if verb is Verb.REMOVE:
            self.virtual_servers.pop(item.key, None)
            self.connection_counts = {key: count for key, count in self.connection_counts.items() if key[0] != item.key}
            return there is None
        if item.settings.scheduler not in self.schedulers:
            raise fake_sets.Refusal(errno.ENOENT, f"the kernel has no scheduler {item.settings.scheduler!r}")
        if there is not None and verb is Verb.ADD and isinstance(item.key, FirewallMark):
            raise fake_sets.Refusal(errno.EEXIST, "another program has made a virtual server by this mark")
        if there is None:
            self.virtual_servers[item.key] = KernelVirtualServer(item.settings, {})
        else:
            there.settings = item.settings
        return (there is None) is (verb is Verb.SET)

    def _change_real_server(self, verb: Verb, item: RealServers) -> bool:
        server = self.virtual_servers.get(item.virtual_server)
        if verb is Verb.REMOVE:
            self.connection_counts.pop((item.virtual_server, item.key), None)
            if server is not None:
                _set_thresholds(server, item.key, NO_THRESHOLDS)
            return server is None or server.real_servers.pop(item.key, None) is None
        if server is None:
            raise fake_sets.Refusal(errno.ESRCH, "its virtual server is missing")
        address = item.key.address
        if address.family is not item.virtual_server.address.family or not _is_unicast(address):
            raise fake_sets.Refusal(errno.EINVAL)
        if not 0 <= without_method(item.weight) < 1 << 31 or item.thresholds.lower > item.thresholds.upper:
            raise fake_sets.Refusal(errno.ERANGE)
        there = item.key in server.real_servers
        server.real_servers[item.key] = item.weight
        _set_thresholds(server, item.key, item.thresholds)
        return there is (verb is Verb.ADD)

    def _change_set(self, verb: Verb, item: IpSet | SetCopy) -> bool:
        if isinstance(item, SetCopy):
            surprise, self.set_copy = not self.set_copy, False
            return surprise
        return fake_sets.change_set(self.sets, verb, item, referenced=self._is_referenced(item))

    def _change_device(self, verb: Verb, item: Device) -> bool:
        if item.name != DEVICE:
            raise fake_sets.Refusal(errno.EINVAL, f"{item.name} is not the device of the service addresses")
        there = self.device
        self.device = verb is not Verb.REMOVE
        if not self.device:
            self.addresses.clear()
        return there is self.device if verb is not Verb.SET else not there

    def _change_local(self, verb: Verb, item: Device | BoundAddresses | LocalRoutes) -> bool:
        if isinstance(item, Device):
            return self._change_device(verb, item)
        held = self.addresses if isinstance(item, BoundAddresses) else self.routes
        there = item.key in held
        if verb is Verb.REMOVE:
            held.discard(item.key)
            return not there
        if isinstance(item, BoundAddresses) and not self.device:
            raise fake_sets.Refusal(errno.ENODEV)
        held.add(item.key)
        return there is (verb is Verb.ADD)

    def _change_skeleton(self, verb: Verb, item: Skeleton) -> None:
        """Change each table atomically, one table after the other."""
        family = item.family
        if family not in self.families:
            raise fake_sets.Refusal(0, f"{family.label} is not usable on this host")
        for table in dict.fromkeys(key.table for key in item.chains):
            chains = {key: rules for key, rules in item.chains.items() if key.table == table}
            jumps = {jump for jump in item.jumps if jump.table == table}
            if verb is Verb.REMOVE:
                for key in chains:
                    self.chains[family].pop(key, None)
                self.jumps[family] -= jumps
                continue
            self._check_references(family, {rule.set.set for rules in chains.values() for rule in rules if rule.set})
            targets = {rule.target.chain for rules in chains.values() for rule in rules if isinstance(rule.target, JumpTo)}
            for target in sorted(targets | {jump.target for jump in jumps}):
                if ChainKey(table, target) not in chains:
                    raise fake_sets.Refusal(0, f"iptables-restore: Couldn't load target `{target}'")
            self.chains[family] |= {key: item.chains[key] for key in chains}
            self.jumps[family] |= jumps

    def _is_referenced(self, ip_set: IpSet) -> bool:
        all_rules = (rule for chains in self.chains.values() for rules in chains.values() for rule in rules)
        return any(rule.set and rule.set.set == ip_set.name for rule in all_rules)

    def _check_references(self, family: Family, names: Iterable[str]) -> None:
        for name in sorted(names):
            if name not in self.sets:
                raise fake_sets.Refusal(0, f"iptables-restore: Set {name} doesn't exist.")
            if self.sets[name].type is not SetType.PORT and self.sets[name].family is not family:
                raise fake_sets.Refusal(0, f"iptables-restore: The protocol family of set {name} is not applicable.")

    def _set_sysctl(self, path: str, value: str) -> None:
        if path not in self.sysctls:
            raise fake_sets.Refusal(errno.ENOENT)
        self.sysctls[path] = value

    def _restore_sysctl(self, path: str, value: str) -> None:
        former = parse_record(self.sysctls.get(TUNNEL_RECORD, ""))
        if path in former:
            before = former.pop(path)
            if self.sysctls[path] == value:
                self.sysctls[path] = before
            self.sysctls[TUNNEL_RECORD] = render_record(former)

    def _clean(self, item: FlowCleaning) -> int:
        flows = self.flows.get(item.flow, {})
        gone = [real_server for real_server in flows if real_server not in item.keep]
        return sum(flows.pop(real_server) for real_server in gone)


def _set_thresholds(server: KernelVirtualServer, key: RealServerKey, thresholds: Thresholds) -> None:
    others = {one: value for one, value in (server.thresholds or {}).items() if one != key}
    server.thresholds = (others | ({key: thresholds} if thresholds != NO_THRESHOLDS else {})) or None


def _copy(present: KernelVirtualServer) -> ObservedVirtualServer:
    return ObservedVirtualServer(present.settings, dict(present.real_servers), present.thresholds)


def _identity(item: Item) -> object:
    """The identity of the object that an operation is about."""
    return kind_of(item), item.virtual_server if isinstance(item, RealServers) else None, item.key


def _is_unicast(address: Address) -> bool:
    if address.is_unspecified or address.is_link_local_v6:
        return False
    return address[0] < 0xE0 if address.family is Family.IPV4 else address[0] != 0xFF
