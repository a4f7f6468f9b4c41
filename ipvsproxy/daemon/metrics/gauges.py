"""Gauges that are counted from the tables at each scrape, so that no sync has to update them.

Rule: ``take_snapshot`` only copies references; ``gauges`` takes time for each object, and pauses.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.daemon.http.health import Status
from ipvsproxy.daemon.loop.leftovers import AnyPlace
from ipvsproxy.daemon.metrics import series
from ipvsproxy.daemon.metrics.series import Metric
from ipvsproxy.daemon.sources.reflector import WatchStatus
from ipvsproxy.model.net import Family
from ipvsproxy.model.service import ObjectKind
from ipvsproxy.reconcile.survey import Statistics, Survey
from ipvsproxy.store.objects import Store

OBJECTS_AT_ONCE = 200
"""The number of virtual servers or addresses that are counted without a pause: some tenths of a millisecond of work."""
NEVER_READ = ("timeouts", "flow")
"""Kinds of kernel objects that are written, but never read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of the gauges. ``clock`` is the one of drains and watches."""

    survey: Survey
    store: Store
    status: Status
    clock: Callable[[], float]
    watches: Callable[[], Mapping[ObjectKind, WatchStatus]] = dict
    stale: Callable[[], Collection[ObjectKind]] = tuple
    leftovers: Callable[[], Mapping[AnyPlace, bool]] = dict
    other_backend: Callable[[], bool] = bool
    unopened_ports: Callable[[], int] = int


class Watch(NamedTuple):
    """Whether a watch is open and stale, and the age of its last contact with the API server; None without one."""

    is_open: bool
    is_stale: bool
    contact_age_s: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state behind all gauges at one moment.

    ``kernel`` is desired and observed state in numbers. ``untaken`` are changes that no sync has taken, by kind of API object.
    ``unreadable`` counts parts of the kernel; ``leftovers`` says whether rules of another proxy may remain in a place,
    ``other_backend`` whether something of ours in the other backend does; ``unopened_ports`` counts health-check ports. Ages
    are 0 without an object that has one.
    """

    kernel: Statistics
    doubted: Mapping[str, int]
    untaken: Mapping[ObjectKind, int]
    oldest_change_age_s: float
    unreadable: int
    leftovers: Mapping[AnyPlace, bool]
    other_backend: bool
    unopened_ports: int
    watches: Mapping[ObjectKind, Watch]


class Counted(NamedTuple):
    """A metric with the values of its series by label values."""

    metric: Metric
    values: Mapping[tuple[str, ...], float]


def take_snapshot(sources: Sources) -> Snapshot:
    """Take a snapshot of all sources."""
    stale = sources.stale()
    now = sources.clock()
    return Snapshot(
        kernel=sources.survey.statistics(now),
        doubted={kind.value: of.missing for kind, of in sources.store.doubts.items()},
        untaken=dict(sources.store.untaken),
        oldest_change_age_s=sources.status.oldest_change_age_s,
        unreadable=len(sources.status.unreadable()),
        leftovers=sources.leftovers(),
        other_backend=sources.other_backend(),
        unopened_ports=sources.unopened_ports(),
        watches={
            kind: Watch(watch.connected, kind in stale, None if watch.contact_s is None else now - watch.contact_s)
            for kind, watch in sources.watches().items()
        },
    )


def gauges(snapshot: Snapshot, families: Collection[Family]) -> Iterator[Counted | None]:
    """All gauges of a snapshot, with a pause (None) after each ``OBJECTS_AT_ONCE``."""
    kernel = snapshot.kernel
    yield _one(series.SERVICE_CHANGES_PENDING, snapshot.untaken.get(ObjectKind.SERVICE, 0))
    yield _one(series.ENDPOINT_CHANGES_PENDING, snapshot.untaken.get(ObjectKind.ENDPOINT_SLICE, 0))
    yield _one(series.OLDEST_CHANGE_AGE, snapshot.oldest_change_age_s)
    yield _one(series.UNREADABLE_PARTS, snapshot.unreadable)
    places = snapshot.leftovers.items()
    yield Counted(series.LEFTOVER_RULES, {(place.family.label, str(place.variant)): is_there for place, is_there in places})
    yield _one(series.OTHER_BACKEND_LEFT, snapshot.other_backend)
    yield _one(series.UNOPENED_PORTS, snapshot.unopened_ports)
    # By the length of an address: 36 ms for 100,000 virtual servers and their addresses, and 55 ms by ``Address.family``.
    by_length = {family.bits // 8: family for family in families}
    virtual_servers, real_servers = (dict.fromkeys(families, 0) for _ in range(2))
    for number, (key, server) in enumerate(zip(kernel.virtual_servers, kernel.observed, strict=True), 1):
        if number % OBJECTS_AT_ONCE == 0:
            yield None
        family = by_length.get(len(key.address))
        if family and key not in kernel.foreign:
            virtual_servers[family] += 1
            real_servers[family] += len(server.real_servers)
    yield _by_family(series.VIRTUAL_SERVERS, virtual_servers)
    yield _by_family(series.REAL_SERVERS, real_servers)
    for metric, local in ((series.ADDRESSES, kernel.addresses), (series.ROUTES, kernel.routes)):
        counts = dict.fromkeys(families, 0)
        for number, address in enumerate(local, 1):
            if number % OBJECTS_AT_ONCE == 0:
                yield None
            family = by_length.get(len(address))
            if family:
                counts[family] += 1
        yield _by_family(metric, counts)
    yield _labelled(series.SET_ENTRIES, kernel.set_entries)
    yield _labelled(series.PENDING, kernel.pending)
    yield _labelled(series.DRIFT, {kind: count for kind, count in kernel.drifted.items() if kind not in NEVER_READ})
    yield _labelled(series.DOUBTED_DELETIONS, snapshot.doubted)
    yield _one(series.CONFLICTS, kernel.conflicts)
    yield _one(series.WITHOUT_SCOPE, kernel.without_scope)
    yield _one(series.DRAINS, kernel.drains)
    yield _one(series.WAITING_REMOVALS, kernel.waiting_removals)
    yield _one(series.OLDEST_DRAIN_AGE, kernel.oldest_drain_age_s)
    yield _labelled(series.WATCH_CONNECTED, {kind.value: watch.is_open for kind, watch in snapshot.watches.items()})
    yield _labelled(series.WATCH_STALE, {kind.value: watch.is_stale for kind, watch in snapshot.watches.items()})
    contacts = {kind.value: watch.contact_age_s for kind, watch in snapshot.watches.items() if watch.contact_age_s is not None}
    yield _labelled(series.WATCH_CONTACT_AGE, contacts)


def _one(metric: Metric, value: float) -> Counted:
    return Counted(metric, {(): value})


def _labelled(metric: Metric, values: Mapping[str, float]) -> Counted:
    return Counted(metric, {(key,): value for key, value in values.items()})


def _by_family(metric: Metric, values: Mapping[Family, int]) -> Counted:
    return _labelled(metric, {family.label: value for family, value in values.items()})
