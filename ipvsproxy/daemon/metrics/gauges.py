"""What is counted when somebody asks, from the tables themselves: nothing has to be kept up to date for it.

Rule: ``look`` only copies references; ``gauges`` takes time per object, and pauses.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.series import Metric
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


class Counted(NamedTuple):
    """A metric, and the value of each of its series by the values of its labels."""

    metric: Metric
    values: Mapping[tuple[str, ...], float]


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


def gauges(seen: Snapshot, families: Collection[Family]) -> Iterator[Counted | None]:
    """All of a snapshot, with a pause (None) after each ``OBJECTS_AT_ONCE``."""
    yield _one(series.SERVICE_CHANGES_PENDING, seen.untaken.get(ObjectKind.SERVICE, 0))
    yield _one(series.ENDPOINT_CHANGES_PENDING, seen.untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one(series.OLDEST_CHANGE_AGE, seen.oldest_change_age_s)
    yield _one(series.UNREADABLE_PARTS, seen.unreadable)
    places = seen.leftovers.items()
    yield Counted(series.LEFTOVER_RULES, {(place.family.label, place.variant.value): is_there for place, is_there in places})
    # By the length of an address: 36 ms for 100,000 virtual servers and their addresses, and 55 ms by ``Address.family``.
    by_length = {family.bits // 8: family for family in families}
    virtual_servers, real_servers, addresses = (dict.fromkeys(families, 0) for _ in range(3))
    for number, (key, server) in enumerate(zip(seen.virtual_servers, seen.held, strict=True), 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(key.address))
        if family and key not in seen.foreign:
            virtual_servers[family] += 1
            real_servers[family] += len(server.real_servers)
    yield _by_family(series.VIRTUAL_SERVERS, virtual_servers)
    yield _by_family(series.REAL_SERVERS, real_servers)
    for number, address in enumerate(seen.addresses, 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(address))
        if family:
            addresses[family] += 1
    yield _by_family(series.ADDRESSES, addresses)
    yield _labelled(series.SET_ENTRIES, seen.set_entries)
    yield _labelled(series.PENDING, seen.pending)
    yield _labelled(series.DRIFT, seen.drifted)
    yield _labelled(series.DOUBTED_DELETIONS, seen.doubted)
    yield _one(series.CONFLICTS, seen.conflicts)
    yield _one(series.DRAINS, seen.drains)
    yield _one(series.WAITING_REMOVALS, seen.waiting_removals)
    yield _one(series.OLDEST_DRAIN_AGE, seen.oldest_drain_age_s)
    yield _labelled(series.WATCH_CONNECTED, {kind.value: watch.is_open for kind, watch in seen.watches.items()})
    yield _labelled(series.WATCH_STALE, {kind.value: watch.is_stale for kind, watch in seen.watches.items()})
    heard = {kind.value: watch.contact_age_s for kind, watch in seen.watches.items() if watch.contact_age_s is not None}
    yield _labelled(series.WATCH_CONTACT_AGE, heard)


def _one(metric: Metric, value: float) -> Counted:
    return Counted(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> Counted:
    return Counted(metric, {(key,): value for key, value in values.items()})


def _by_family(metric: Metric, values: Mapping[Family, int]) -> Counted:
    return _labelled(metric, {family.label: value for family, value in values.items()})
