"""All drivers of this node in one object, which observes the kernel and applies operations. All calls block; see ``thread``."""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import structlog

from ipvsproxy.kernel import backends, host
from ipvsproxy.kernel.backends import IPTABLES_IN_PATH, BackendDrivers, ChosenBackend, Driver, RulesBackend
from ipvsproxy.kernel.base import modules, netlink
from ipvsproxy.kernel.base.errors import KernelError
from ipvsproxy.kernel.base.sets_driver import ObservedSet, SetsDriver
from ipvsproxy.kernel.host import Lack
from ipvsproxy.kernel.iptables import iptables_driver as iptables
from ipvsproxy.kernel.iptables.iptables_tables import RuleChanges
from ipvsproxy.kernel.ipvs import operations as ipvs_operations
from ipvsproxy.kernel.ipvs.ipvs_driver import IpvsDriver
from ipvsproxy.kernel.network import routes
from ipvsproxy.kernel.network.addresses import AddressDriver, ObservedAddresses
from ipvsproxy.kernel.network.conntrack import ConntrackDriver
from ipvsproxy.kernel.network.routes import RouteDriver
from ipvsproxy.kernel.nftables.nft_sets_driver import NftSetsDriver
from ipvsproxy.kernel.nftables.nft_tables import LeftoverTables
from ipvsproxy.kernel.sysctls import SysctlDriver
from ipvsproxy.model.kernel import ROUTE_PROTOCOL, InterfaceAddress, Timeouts
from ipvsproxy.model.kind import KINDS, DriverName
from ipvsproxy.model.net import Family
from ipvsproxy.model.plan import Operation, Outcome, Verb, as_tried_again
from ipvsproxy.model.real_servers import RealServerKey
from ipvsproxy.model.rules import Backend, ChainKey, Jump, Skeleton
from ipvsproxy.model.sets import IP_SETS, WITNESS_KINDS, ForeignElement, SetEntries, SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.virtual_servers import ConnectionCounts, VirtualServerKey

SETS_AT_ONCE = 5
"""The number of sets, out of 34, that one part of a poll reads. Each set takes three system calls."""

_Part = dict[str, Any]
"""Fields of an ``Observation`` by name."""
_NOTHING = Observation()

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class NodeKernel:
    """Access to this node's kernel, in the network namespace of the thread that creates this object.

    ``backend`` is the backend that holds rules and sets, and is never ``AUTO``; ``rules`` reads and writes the rules.
    ``rules_changes`` reports changes that other programs make in our nftables table; None means that there are no notifications.
    ``leftover_rules`` reads and removes rules that a proxy has left behind, and ``leftover_tables`` does the same for tables.
    """

    def __init__(
        self,
        chains: Collection[ChainKey],
        jumps: Collection[Jump],
        on_applied: Callable[[Sequence[Outcome], float], None] = lambda _outcomes, _duration_s: None,
        *,
        chosen: ChosenBackend = IPTABLES_IN_PATH,
        ipvs: IpvsDriver | None = None,
        rules_patience_s: float | None = None,
        route_protocol: int = ROUTE_PROTOCOL,
        on_late_rules: Callable[[], None] = lambda: None,
        listen: bool = False,
    ) -> None:
        """Open all sockets. Only the chains in ``chains`` and the jumps in ``jumps`` belong to ipvsproxy.

        ``chosen`` is the backend that holds rules and sets. If ``ipvs`` is given, no new IPVS driver is created, because a new
        driver would require a kernel with IPVS. ``rules_patience_s`` is the longest time that a call waits for a program of
        iptables; None means no limit. ``route_protocol`` is the protocol number of our local routes. ``on_late_rules`` is
        called, in another thread, when a program has ended after more than ``rules_patience_s``. ``listen`` means that the
        caller watches ``rules_changes``.

        The thread that applies operations calls ``on_applied`` once for each group of consecutive operations of one driver. The
        arguments are the group's outcomes and duration in seconds. ``ports`` are the netlink port IDs of the sockets that change
        addresses and routes. A notification contains the port ID of the socket that made the change.

        Raises:
            KernelError: the kernel lacks a required feature, or this process may not use the feature.
        """
        self.ports: set[int] = set()
        self._on_applied = on_applied
        self._backend = BackendDrivers.open(
            chains, jumps, chosen, patience_s=rules_patience_s, on_late_end=on_late_rules, listen=listen
        )
        self.backend = self._backend.backend
        self.rules: RulesBackend = self._backend.rules
        self.rules_changes = self._backend.changes
        self.leftover_rules = self._backend.leftover_rules
        self.leftover_tables = LeftoverTables()
        self.ipvs = ipvs or IpvsDriver()
        self._addresses = AddressDriver(netlink.noting(self.ports, netlink.open_socket))
        self._routes = RouteDriver(netlink.noting(self.ports, routes.open_socket), route_protocol)
        self._sysctls = SysctlDriver()
        self._conntrack = ConntrackDriver()
        self._rule_changes = RuleChanges()
        self._former_sets: SetsDriver | None = None
        """The sets of the other backend, which are in use until the chosen backend has written its rules; None afterwards."""
        self._fingerprints: dict[Family, object] = {}
        self._without_fingerprint: set[Family] = set()
        """The families whose rules had no fingerprint at the last reading."""
        self._hidden: dict[Family, str] = {}
        """The error message of each family for which iptables did not show all tables at the last reading."""
        drivers: Mapping[DriverName, Driver] = {
            DriverName.IPVS: self.ipvs,
            DriverName.IPSET: self._backend.writes_sets,
            DriverName.ADDRESSES: self._addresses,
            DriverName.ROUTES: self._routes,
            DriverName.SYSCTL: self._sysctls,
            DriverName.IPTABLES: self._backend.writes_rules,
            DriverName.CONNTRACK: self._conntrack,
        }
        self._drivers = {object_class: drivers[kind.driver] for object_class, kind in KINDS.items()}

    def close(self) -> None:
        """Close all sockets."""
        for driver in (self.ipvs, self._addresses, self._routes, self._conntrack, self._rule_changes, self._backend):
            driver.close()
        if self._former_sets is not None:
            self._former_sets.close()

    def observe(self, sets: Collection[str], families: Collection[Family], sysctls: Iterable[str]) -> Observation:
        """Reads all objects that may belong to ipvsproxy.

        The result contains the named sets and sysctls, the rules and virtual servers of the given IP families, and all objects
        of other kinds.
        """
        rules = [self._read_rules(family, self._fingerprint(family)) for family in families]
        parts = [
            *map(_attempt, self._small_parts(sysctls, thorough=True)),
            _attempt(lambda: {"sets": _without_absent(_as_ours(self._backend.sets.observe(sets)))}),
            *rules,
            _attempt(lambda: {"virtual_servers": self.ipvs.observe(families), "foreign_virtual_servers": self.ipvs.foreign}),
        ]
        read = {name: value for part in parts for name, value in part.items()}
        skeletons = {family: image for part in rules for family, image in part["skeletons"].items()}
        errors = itertools.chain.from_iterable(part.get("errors", ()) for part in parts)
        return Observation(**read | {"skeletons": skeletons, "errors": tuple(errors), "is_of_rules": False})

    def _small_parts(self, sysctls: Iterable[str], *, thorough: bool) -> Iterator[Callable[[], _Part]]:
        """Yields functions that together read all objects except sets, rules and virtual servers.

        If ``thorough`` is false, the functions leave out unchanged addresses and routes.
        """
        yield lambda: _of_addresses(self._addresses.observe() if thorough else self._addresses.observe_changed())
        yield lambda: {"routes": self._routes.observe() if thorough else self._routes.observe_changed()}
        yield lambda: {"sysctls": self._sysctls.observe(sysctls)}
        if thorough:
            yield lambda: {"set_copy": self._backend.sets.has_copy()}

    def poll(
        self, sets: Sequence[str], families: Collection[Family], sysctls: Iterable[str], *, thorough: bool, whole: bool
    ) -> Iterator[Observation]:
        """Reads the same objects as ``observe``, but in parts; other methods may be called between two parts.

        Most parts take a few milliseconds each. A part takes more time if it reads addresses, local routes, a large set, the
        parameters of all virtual servers, or changed rules.

        If ``thorough`` is false, a poll returns only objects that may have changed since the last poll. The poll leaves out
        unchanged rules. It also leaves out other objects if the kernel gives the same answers about them as before. If ``whole``
        is true, the poll reads virtual servers in full. Otherwise the poll reads less, at little cost, and still finds most
        changes (see ``IpvsDriver.observe_changed``).
        """
        if thorough:
            self._backend.sets.forget()
        for read in self._small_parts(sysctls, thorough=thorough):
            part = Observation(**_attempt(read))
            if part != _NOTHING:
                yield part
        yield from self._set_parts(sets, 1 if thorough else SETS_AT_ONCE)
        for family in families:
            fingerprint = self._fingerprint(family)
            is_changed = fingerprint is not None and fingerprint != self._fingerprints.get(family)
            # An audit starts a program of iptables only if the rules have changed, or if it is unknown whether the rules have
            # changed.
            if is_changed or (thorough and (fingerprint is None or self.backend is not Backend.IPTABLES)):
                yield Observation(**self._read_rules(family, fingerprint))
            elif family in self._hidden:
                yield Observation(errors=(self._hidden[family],), is_of_rules=True)
        try:
            readings = self.ipvs.observe_in_parts(families) if thorough else self.ipvs.observe_changed(families, whole=whole)
            for reading in readings:
                yield Observation(some_virtual_servers=reading)
            if thorough:
                yield Observation(has_shown_virtual_servers=True)
        except KernelError as error:
            yield Observation(errors=(str(error),))

    def _set_parts(self, sets: Sequence[str], step: int) -> Iterator[Observation]:
        """The sets that have changed, in parts; each part covers at most ``step`` of the given ``sets``."""
        unread: list[str] = []
        for start in range(0, len(sets), step):
            changed: dict[str, ObservedSet | None] = {}
            for name in sets[start : start + step]:  # even if a set cannot be read, the other sets are read
                try:
                    changed |= self._backend.sets.observe_changed(name)
                except KernelError as error:
                    unread.append(str(error))
            yield Observation(some_sets=_as_ours(changed))
        if unread:
            yield Observation(errors=tuple(unread[:1]))

    def _read_rules(self, family: Family, fingerprint: object) -> _Part:
        """Read the rules of an IP family.

        ``fingerprint`` must be read before the rules, so that the next poll finds every change that was made after the
        fingerprint was read.
        """
        part = _attempt(lambda: {"skeletons": {family: self.rules.observe(family)}})
        hidden = part["skeletons"][family].hidden if "skeletons" in part else ()
        self._hidden.pop(family, None)
        if hidden:
            self._hidden[family] = f"{family.label}: {iptables.describe_hidden(hidden)}"
            part["errors"] = (self._hidden[family],)
        # if this is None, the next poll reads the rules
        self._fingerprints[family] = fingerprint if "skeletons" in part else None
        return {"skeletons": {}, "is_of_rules": True} | part

    def _fingerprint(self, family: Family) -> object:
        """The fingerprint of a family's rules. If there is no fingerprint (None), only ``observe`` and audits read the rules.

        If several consecutive attempts to read the fingerprint fail, only the first failure is logged.
        """
        program = self.rules.known_program(family)
        if program is None:
            return None
        if self._backend.changes is not None and self._backend.changes.count is not None:
            return "changes", self._backend.changes.count
        try:
            fingerprint = self._rule_changes.fingerprint(family, program.variant)
        except KernelError as error:
            if family not in self._without_fingerprint:
                log.warning("rule_changes_unseen", family=family.label, error=str(error), hint="only audits notice rule changes")
                self._without_fingerprint.add(family)
            return None
        self._without_fingerprint.discard(family)
        return fingerprint

    def inherit_sets(self, families: Collection[Family]) -> int:
        """Copy the set entries that a former process left behind in the other backend, and return the number of copied entries.

        If neither our device nor any of our local routes exists, no process has served Services since the host was booted. Then
        all existing entries come from a saved ruleset, and are removed instead of copied.

        Entries in the chosen backend are not changed. If nftables is chosen, the new rules follow soon, so this method copies
        only the entries that may show which virtual servers belong to ipvsproxy. If iptables is chosen, the new rules may have to
        wait for the lock of iptables or for a slow iptables program. Until the rules in iptables are programmed, the old rules in
        nftables apply to packets, so all entries of the old sets are copied to the new sets. After this copy, ``apply`` changes
        both the old and the new sets.

        Raises:
            KernelError: the old sets could not be read.
        """
        if not self._addresses.observe().device and not self._routes.observe():
            self._empty_sets(families)
            return 0
        is_iptables = self.backend is Backend.IPTABLES
        names = [name for name, one in IP_SETS.items() if one.family in families and (is_iptables or one.kind in WITNESS_KINDS)]
        former = {name: one for name, one in _as_ours(backends.held_by_other(self.backend, names)).items() if one}
        if former:
            self._former_sets = self._former_sets or (NftSetsDriver() if is_iptables else None)
        ours = self._backend.sets.observe(former) if former else {}
        operations: list[Operation] = []
        count = 0
        for name, entries in former.items():
            present = {_place(one) for one in ours[name].entries} if name in ours else set()
            missing = tuple(one for one in entries if _place(one) not in present and not isinstance(one, ForeignElement))
            operations += [Operation(Verb.ADD, IP_SETS[name])] if name not in ours else []
            operations += [Operation(Verb.ADD, SetEntries(name, missing))] if missing else []
            count += len(missing)
        for outcome in self._backend.writes_sets.apply(operations) if operations else ():
            if outcome.error:
                log.warning("set_not_inherited", error=outcome.error)
        return count

    def former_entries(self, families: Collection[Family]) -> list[SetEntry]:
        """Our set entries that a former process has left behind in the other backend.

        Raises:
            KernelError: the entries could not be read.
        """
        names = [name for name, one in IP_SETS.items() if one.family in families]
        return [entry for held in _as_ours(backends.held_by_other(self.backend, names)).values() for entry in held or ()]

    def _empty_sets(self, families: Collection[Family]) -> None:
        names = [name for name, one in IP_SETS.items() if one.family in families]
        saved = {name: one.entries for name, one in self._backend.sets.observe(names).items() if one.entries}
        operations = [Operation(Verb.REMOVE, SetEntries(name, tuple(entries))) for name, entries in saved.items()]
        for outcome in self._backend.writes_sets.apply(operations) if operations else ():
            if outcome.error:
                log.warning("saved_set_not_emptied", error=outcome.error)

    def remove_other_backend(self) -> Collection[str]:
        """Calls ``backends.remove_other``; from then on, ``apply`` no longer changes the sets in the other backend.

        Raises:
            KernelError: one of our objects exists, and could not be removed.
        """
        in_use = backends.remove_other(self.backend)
        if self._former_sets is not None:
            self._former_sets.close()
            self._former_sets = None
        return in_use

    def lacking(self, *, by_interface: bool) -> tuple[Lack, ...]:
        """The optional features that this kernel does not have.

        ``by_interface`` means that this node's pods are recognised by their interface.

        Raises:
            KernelError: the version of the running kernel cannot be read.
        """
        return tuple(host.lacking(host.kernel_version(), needs_arrival=by_interface and self.backend is Backend.NFTABLES))

    def interface_addresses(self) -> tuple[InterfaceAddress, ...]:
        """The addresses on all interfaces of this host except our device.

        Raises:
            KernelError: the addresses could not be read.
        """
        return self._addresses.observe().interface_addresses

    def read_timeouts(self) -> Timeouts:
        """The IPVS connection timeouts.

        Raises:
            KernelError: the timeouts could not be read.
        """
        return self.ipvs.read_timeouts()

    def why_unusable(self, name: str) -> str:
        """The reason why the scheduler is unusable, followed by the existing schedulers; empty if the scheduler is usable.

        Raises:
            KernelError: the kernel did not answer this time; a later attempt may succeed.
        """
        reason = self.ipvs.why_unusable(name)
        return f"{reason}{_there_are(modules.schedulers())}" if reason else ""

    def why_missing(self, name: str) -> str:
        """The same result as that of ``why_unusable``, but found in the files of kernel modules, without a request to the kernel.

        Loads no module.
        """
        if modules.module_state(f"ip_vs_{name}") is not modules.ModuleState.MISSING:
            return ""
        return f"{ipvs_operations.describe_missing(name)}{_there_are(modules.schedulers())}"

    def connections(
        self, keys: Collection[VirtualServerKey]
    ) -> Mapping[VirtualServerKey, Mapping[RealServerKey, ConnectionCounts] | None]:
        """The connection counts of the given virtual servers.

        If the counts could not be read, each virtual server is mapped to None.
        """
        try:
            counts = self.ipvs.connections(keys)
        except KernelError:
            return dict.fromkeys(keys)
        return {key: counts.get(key) for key in keys}

    def apply(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in their order, and return one outcome for each operation, in the same order.

        If an operation fails, the later operations are applied nevertheless.
        """
        outcomes: list[Outcome] = []
        began_s = time.monotonic()
        done: list[tuple[list[Outcome], float]] = []
        for driver, group in itertools.groupby(operations, key=lambda operation: self._drivers[type(operation.item)]):
            run = list(group)
            self._keep_current(run)
            try:
                applied = driver.apply(run)
            except KernelError as error:
                # It is unknown which operations the driver has applied, so all operations of the driver are repeated. Repeating
                # an operation causes no error.
                applied = [Outcome(operation, error=str(error), errno=error.errno) for operation in as_tried_again(run)]
            self._forget_fingerprints(run)
            ended_s = time.monotonic()
            done.append((applied, ended_s - began_s))
            began_s = ended_s
            outcomes += applied
        for applied, duration_s in done:  # the reports come last, so that they delay no operation
            self._on_applied(applied, duration_s)
        return outcomes

    def _keep_current(self, run: Iterable[Operation]) -> None:
        """Applies operations on set entries to the old sets, too, because the old rules in nftables use the old sets.

        The old sets are changed first, so that no entry is missing in the old sets if the process is killed.
        """
        if self._former_sets is not None:
            with contextlib.suppress(KernelError):
                self._former_sets.apply([operation for operation in run if isinstance(operation.item, SetEntries)])

    def _forget_fingerprints(self, run: Iterable[Operation]) -> None:
        """Make the next poll read the rules that the given operations wrote.

        Another program may have undone the changes of these operations.
        """
        for _, item in run:
            if isinstance(item, Skeleton):
                self._fingerprints.pop(item.family, None)


def _there_are(schedulers: Sequence[str]) -> str:
    return f"; it has {', '.join(schedulers)}" if schedulers else ""


def _of_addresses(observed: ObservedAddresses | None) -> _Part:
    return observed._asdict() if observed else {}


def _without_absent(sets: Mapping[str, AbstractSet[SetEntry] | None]) -> Mapping[str, AbstractSet[SetEntry]]:
    return {name: entries for name, entries in sets.items() if entries is not None}


def _as_ours(observed: Mapping[str, ObservedSet | None]) -> Mapping[str, AbstractSet[SetEntry] | None]:
    """The entries of each set; the key is the name of the set.

    None means that the set is absent or has other parameters than ipvsproxy's set; the attempt to create the set reports the
    difference.
    """
    return {name: None if one is None or one.differs_from(IP_SETS[name]) else one.entries for name, one in observed.items()}


def _place(entry: SetEntry) -> tuple[object, ...]:
    """The fields that identify an entry in its set: all fields except the mark."""
    return entry.address, entry.protocol, entry.port


def _attempt(read: Callable[[], _Part]) -> _Part:
    try:
        return read()
    except KernelError as error:
        return {"errors": (str(error),)}
