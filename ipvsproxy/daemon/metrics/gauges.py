"""What is counted when somebody asks, from the tables themselves: nothing has to be kept up to date for it.

Rule: ``look`` only copies references; ``gauges`` takes time per object, and pauses.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.kernel.leftover_rules import Place
from ipvsproxy.model.kernel import ObservedVirtualServer, VirtualServerKey
from ipvsproxy.model.net import Address, Family
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.reconcile.claims import Claims
from ipvsproxy.reconcile.reconciler import Reconciler
from ipvsproxy.reconcile.table import Table
from ipvsproxy.store.objects import Store

OBJECTS_AT_ONCE = 200
"""Virtual servers, or addresses, that are counted without a pause: a few tenths of a millisecond of work."""
NEVER_READ = ("timeouts", "flow")
"""Kinds of kernel objects that are written only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the figures are. ``clock`` is that of drains and watches."""

    reconciler: Reconciler
    store: Store
    status: Status
    clock: Callable[[], float]
    watches: Callable[[], Mapping[ObjectKind, WatchStatus]] = dict
    stale: Callable[[], Collection[ObjectKind]] = tuple
    leftovers: Callable[[], Mapping[Place, bool]] = dict


class Watch(NamedTuple):
    """Whether a watch is open, or stale, and how long ago its server was last heard of; None if never."""

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the kernel holds, and what has yet to be done, at one moment.

    ``virtual_servers`` and ``held``, what is behind each, go in step; ``foreign`` are those that are not ours. ``set_entries`` is
    by set; ``pending`` and ``drifted`` (found otherwise than believed) by kind of kernel object, ``untaken`` by kind of API
    object. ``unreadable`` counts parts of the kernel, ``leftovers`` tells whether rules are left in a place, or may be.
    ``conflicts`` counts addresses and ports that several Services want. Ages are 0 without anything that has one.
    """

    virtual_servers: Sequence[VirtualServerKey]
    held: Sequence[ObservedVirtualServer]
    foreign: frozenset[VirtualServerKey]
    addresses: Sequence[Address]
    set_entries: Mapping[str, int]
    pending: Mapping[str, int]
    drifted: Mapping[str, int]
    doubted: Mapping[str, int]
    conflicts: int
    drains: int
    waiting_removals: int
    oldest_drain_age_s: float
    untaken: Mapping[ObjectKind, int]
    oldest_change_age_s: float
    unreadable: int
    leftovers: Mapping[Place, bool]
    watches: Mapping[ObjectKind, Watch]


class Gauges(NamedTuple):
    """A series of each combination of label values; ``only_grows``: a counter, whose name ends in ``_total``."""

    name: str
    documentation: str
    labels: tuple[str, ...]
    values: Mapping[tuple[str, ...], float]
    only_grows: bool = False


def look(sources: Sources) -> Snapshot:
    """Take a snapshot."""
    stale = sources.stale()
    tables = _tables(sources.reconciler.claims)
    claims, drains, now = sources.reconciler.claims, sources.reconciler.drains, sources.clock()
    return Snapshot(
        virtual_servers=list(claims.virtual_servers.observed),
        held=list(claims.virtual_servers.observed.values()),
        foreign=frozenset(claims.virtual_servers.foreign),
        addresses=list(claims.addresses.observed),
        set_entries={ip_set.name: len(claims.entries[ip_set.name].observed) for ip_set in claims.sets.desired},
        pending={kind: sum(len(one.pending) + len(one.surplus) for one in of_kind) for kind, of_kind in tables.items()},
        drifted={kind: sum(one.drifted for one in of_kind) for kind, of_kind in tables.items() if kind not in NEVER_READ},
        doubted={kind.value: of.missing for kind, of in sources.store.doubts.items()},
        conflicts=sum(1 for _ in claims.conflicts()),
        drains=len(drains) - drains.waiting,
        waiting_removals=drains.waiting,
        oldest_drain_age_s=drains.oldest_age_s(now),
        untaken=dict(sources.store.untaken),
        oldest_change_age_s=sources.status.oldest_change_age_s,
        unreadable=len(sources.status.unreadable()),
        leftovers=sources.leftovers(),
        watches={
            kind: Watch(watch.connected, kind in stale, None if watch.contact_s is None else now - watch.contact_s)
            for kind, watch in sources.watches().items()
        },
    )


def _tables(claims: Claims) -> Mapping[str, Sequence[Table[Any, Any, Any]]]:
    return {
        "device": [claims.devices],
        "set": [claims.sets],
        "set_entry": list(claims.entries.values()),
        "rules": [claims.skeletons],
        "virtual_server": [claims.virtual_servers],
        "address": [claims.addresses],
        "sysctl": [claims.sysctls],
        "timeouts": [claims.timeouts],
        "flow": [claims.flows],
    }


def gauges(seen: Snapshot, families: Collection[Family]) -> Iterator[Gauges | None]:
    """All of a snapshot, with a pause (None) after each ``OBJECTS_AT_ONCE``."""
    yield _pending_changes("service", seen.untaken.get(ObjectKind.SERVICE, 0))
    yield _pending_changes("endpoint", seen.untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one("ipvsproxy_oldest_change_age_seconds", "Age of the oldest change that is not in force.", seen.oldest_change_age_s)
    unreadable = "Parts of the kernel that cannot be read: nothing of them is removed meanwhile."
    yield _one("ipvsproxy_unreadable_parts", unreadable, seen.unreadable)
    left = "Whether rules of kube-proxy's iptables mode, or of ours in a variant of iptables that is not used, resist removal."
    by_place: dict[tuple[str, ...], float] = {
        (place.family.label, place.variant.value): is_there for place, is_there in seen.leftovers.items()
    }
    yield Gauges("ipvsproxy_leftover_rules", left, ("ip_family", "variant"), by_place)
    # A family is told by the length of an address here, which is ten times as fast as by name.
    by_length = {family.bits // 8: family for family in families}
    virtual_servers, real_servers, addresses = (dict.fromkeys(families, 0) for _ in range(3))
    for number, (key, server) in enumerate(zip(seen.virtual_servers, seen.held, strict=True), 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(key.address))
        if family and key not in seen.foreign:
            virtual_servers[family] += 1
            real_servers[family] += len(server.real_servers)
    yield _by_family("ipvsproxy_virtual_servers", "Virtual servers of ours.", virtual_servers)
    yield _by_family("ipvsproxy_real_servers", "Real servers of ours.", real_servers)
    for number, address in enumerate(seen.addresses, 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(address))
        if family:
            addresses[family] += 1
    yield _by_family("ipvsproxy_addresses", "Addresses on kube-ipvs0.", addresses)
    yield _labelled("ipvsproxy_set_entries", "Entries of each set; 65536 is the most.", "set", seen.set_entries)
    yield _labelled("ipvsproxy_pending", "Kernel objects that differ from what is wanted.", "kind", seen.pending)
    drifted = "Kernel objects that an audit found otherwise than they were left."
    yield _labelled("ipvsproxy_drift_total", drifted, "kind", seen.drifted)._replace(only_grows=True)
    doubted = "Services, or endpoints, that a list lacked and that are served until another list confirms it."
    yield _labelled("ipvsproxy_doubted_deletions", doubted, "kind", seen.doubted)
    yield _one("ipvsproxy_conflicts", "Addresses and ports that several Services want.", seen.conflicts)
    yield _one("ipvsproxy_drains", "Real servers that keep their connections and get no new ones.", seen.drains)
    waiting = "Real servers at weight 0 that wait until the kernel has forgotten others: empty, or not asked about yet."
    yield _one("ipvsproxy_waiting_removals", waiting, seen.waiting_removals)
    yield _one("ipvsproxy_oldest_drain_age_seconds", "Age of the oldest drain.", seen.oldest_drain_age_s)
    connected = {kind.value: watch.is_open for kind, watch in seen.watches.items()}
    yield _labelled("ipvsproxy_watch_connected", "Whether a watch is open.", "kind", connected)
    stale = {kind.value: watch.is_stale for kind, watch in seen.watches.items()}
    yield _labelled("ipvsproxy_watch_stale", "Whether a watch has heard nothing for too long.", "kind", stale)
    heard = {kind.value: watch.contact_age_s for kind, watch in seen.watches.items() if watch.contact_age_s is not None}
    yield _labelled("ipvsproxy_watch_contact_age_seconds", "How long ago the API server was last heard of.", "kind", heard)


def _one(name: str, documentation: str, value: float) -> Gauges:
    return Gauges(name, documentation, (), {(): value})


def _labelled(name: str, documentation: str, label: str, values: Mapping[str, float]) -> Gauges:
    return Gauges(name, documentation, (label,), {(key,): value for key, value in values.items()})


def _by_family(name: str, documentation: str, values: Mapping[Family, int]) -> Gauges:
    return _labelled(name, documentation, "ip_family", {family.label: value for family, value in values.items()})


def _pending_changes(kind: str, count: int) -> Gauges:
    return _one(f"kubeproxy_sync_proxy_rules_{kind}_changes_pending", f"Changes of {kind}s that no sync has taken yet.", count)
