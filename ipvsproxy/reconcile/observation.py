"""Updates the tables with the state that was read from the kernel.

A reading shows which objects exist, which objects belong to ipvsproxy, which drains continue, and what other programs have
changed (drift).

Rule 1: a witness of a virtual server (see ``ownership``) is removed only after the virtual server, and only after every kind of
witness has been read at least once. A witness that one part of a reading has found stays until the whole reading is complete.
Rule 2: the first few times that an object drifts, the drift is counted and repaired at once. If the object drifts again after
that, another program keeps changing the object, so each further repair is delayed for some time.
Rule 3: a repair is delayed only while the desired value of the object stays the same. A new desired value is programmed at once.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import NamedTuple

from ipvsproxy.model.net import Address, Family, Network
from ipvsproxy.model.plan import Item
from ipvsproxy.model.real_servers import RealServerKey, plain, without_method
from ipvsproxy.model.sets import SetEntry
from ipvsproxy.model.state import Observation
from ipvsproxy.model.steps import ITEMS_AT_ONCE
from ipvsproxy.model.virtual_servers import ObservedVirtualServer, VirtualServerKey
from ipvsproxy.reconcile.kinds.node_tables import NodeTables
from ipvsproxy.reconcile.virtual_servers import ownership
from ipvsproxy.reconcile.virtual_servers.drain import Drains

FREE_HEALS = 3
"""The number of immediate repairs of an object that drifts again within ``CALM_S`` after each drift. Later repairs are
delayed."""
CALM_S = 600.0
"""The number of seconds after which drift that has not returned is forgotten."""
FIRST_PATIENCE_S = 5.0
LONGEST_PATIENCE_S = 10.0
"""If drift of an object keeps returning, each repair of the object is delayed by at most this time, in seconds.

If another program flushes our rules once a minute, the rules must soon exist again. kube-proxy restores flushed rules after at
most one sync period, which is 30 s.
"""


class DriftPlace(NamedTuple):
    """Identifies an object that has drifted: the kind of kernel object, and its key in the table."""

    kind: str
    key: object

    def __str__(self) -> str:
        """The name by which people know the object, without its kind.

        Rules are named by their family; the name of a set entry includes the name of its set.
        """
        if isinstance(self.key, Family):
            return self.key.label
        return f"{self.key.set} {self.key}" if isinstance(self.key, SetEntry) else str(self.key)


class News(NamedTuple):
    """The drift since the last call: the number of objects by kind, and the objects whose repair is delayed.

    ``left_alone`` maps each object whose repair is delayed to the number of times that another program has undone the object's
    desired value.
    """

    drifted: Mapping[str, int]
    left_alone: Mapping[DriftPlace, int]


class _DriftHistory(NamedTuple):
    desired: object
    times: int
    last_s: float
    patience_ends_s: float


class Drifts:
    """All objects that have drifted recently."""

    def __init__(self) -> None:
        self._drifted: Counter[str] = Counter()
        self._left_alone: dict[DriftPlace, int] = {}
        self._places: dict[DriftPlace, _DriftHistory] = {}
        """The history of each drifted object; the object whose last drift is oldest comes first."""
        self._contested: set[DriftPlace] = set()
        self._withheld: dict[DriftPlace, float] = {}

    def __bool__(self) -> bool:
        """Whether the repair of at least one object is delayed."""
        return bool(self._contested)

    def note(self, place: DriftPlace, desired: object, now: float) -> None:
        """Record that an object has drifted. A ``desired`` of None means that the object is not desired."""
        self._drifted[place.kind] += 1
        last = self._places.pop(place, None)
        times = last.times + 1 if last and last.desired == desired and now - last.last_s <= CALM_S else 1
        excess = times - FREE_HEALS
        patience_s = FIRST_PATIENCE_S if excess == 1 else LONGEST_PATIENCE_S
        self._places[place] = _DriftHistory(desired, times, now, now + patience_s)
        if excess > 0:
            self._contested.add(place)
            self._left_alone[place] = times
        else:
            self._contested.discard(place)

    def begin_round(self) -> None:
        """Begin a round, in which the caller asks ``may_heal`` about every operation.

        After this call, ``next_s`` ignores objects that have no operation in the new round.
        """
        self._withheld.clear()

    def may_heal(self, place: DriftPlace, desired: object, now: float) -> bool:
        """Whether an operation on an object is allowed now."""
        if place not in self._contested:
            return True
        history = self._places[place]
        if history.patience_ends_s <= now or history.desired != desired:
            return True
        self._withheld[place] = history.patience_ends_s
        return False

    def forget_calm(self, now: float) -> None:
        """Forget objects that have not drifted for ``CALM_S``."""
        calm = list(itertools.takewhile(lambda known: now - known[1].last_s > CALM_S, self._places.items()))
        for place, _ in calm:
            del self._places[place]
            self._contested.discard(place)

    def next_s(self) -> float | None:
        """The earliest time at which an operation that was refused in this round becomes allowed."""
        return min(self._withheld.values(), default=None)

    def take_news(self) -> News:
        """The drift since the last call."""
        news = News(self._drifted, self._left_alone)
        self._drifted, self._left_alone = Counter(), {}
        return news


class Observer:
    """Records observations of the whole kernel or of its parts.

    ``has_observed_all`` means that every kind of witness was read at least once. If a reading has several parts, ``newcomers``
    are the undesired set entries, addresses and local routes that have appeared since the reading began. All objects in
    ``newcomers`` are kept until the reading ends.
    """

    def __init__(self, tables: NodeTables, drains: Drains, drifts: Drifts) -> None:
        self.has_observed_all = False
        self.newcomers: set[object] = set()
        self._tables = tables
        self._drains = drains
        self._drifts = drifts
        self._unread = {"sets", "addresses", "routes", "interface_addresses"}
        """Those fields of an ``Observation`` that have not been read yet, and that show which virtual servers belong to
        ipvsproxy."""
        self._host: frozenset[Address] = frozenset()
        self.node_port_ranges: tuple[Network, ...] = ownership.EVERYWHERE
        """The address ranges for node ports: node ports answer on this host's addresses in these ranges."""

    def observing(self, observed: Observation, now: float) -> Generator[None, None, None]:
        """Replaces the observed state by the results of a reading, and yields after each piece of work.

        The observed state of an unreadable kind stays the same. An observation whose ``virtual_servers`` is None is one part of a
        reading; ``concluding`` must be called after the last part.
        """
        tables = self._tables
        for kind in tables.kinds:
            yield from kind.take_in(observed)
        self._unread = {name for name in self._unread if getattr(observed, name) is None}
        if observed.interface_addresses is not None:
            self._host = frozenset(item.address for item in observed.interface_addresses)
        if observed.virtual_servers is not None:
            gone = [key for key in self._drains.virtual_servers if key not in observed.virtual_servers]
            yield from self._recall_drains(itertools.chain(dict.fromkeys(gone).items(), observed.virtual_servers.items()), now)
            # ``ownership`` recognises some virtual servers by a second virtual server with the same settings and real servers.
            # While the addresses of this host are unknown, such a second virtual server proves nothing. It is then also unknown
            # whether the first virtual server serves a desired node port on an address of this host.
            needs_twins = not self.has_observed_all and "interface_addresses" not in self._unread
            left_behind = observed.virtual_servers if needs_twins else {}
            yield from tables.virtual_servers.observing(observed.virtual_servers, self._is_ours(left_behind))
            if not self.has_observed_all and not self._unread:
                self.has_observed_all = True
            self.newcomers.clear()
        yield from self._take_in(observed.some_virtual_servers, now)
        if observed.has_shown_virtual_servers:
            unshown = yield from tables.virtual_servers.ending_reading()
            yield from self._take_in(unshown, now)
        self._note_drift(now, in_parts=observed.virtual_servers is None)

    def begin_audit(self) -> None:
        """Begins an audit that reads the kernel's virtual servers in parts."""
        self._tables.virtual_servers.begin_reading()

    def _take_in(self, some: Mapping[VirtualServerKey, ObservedVirtualServer | None], now: float) -> Iterator[None]:
        yield from self._recall_drains(some.items(), now)
        yield from self._tables.virtual_servers.observing_some(some, self._is_ours({}))

    def concluding(self, now: float) -> Generator[None, None, None]:
        """Completes a reading after its last part; yields after each piece of work.

        Only a complete reading shows which virtual servers are foreign.
        """
        virtual_servers = self._tables.virtual_servers
        foreign = {key: virtual_servers.observed[key] for key in virtual_servers.foreign}
        yield from virtual_servers.observing_some(foreign, self._is_ours({}))
        self.newcomers.clear()
        self._note_drift(now, in_parts=False)

    def _is_ours(self, left_behind: Mapping[VirtualServerKey, ObservedVirtualServer]) -> Callable[[VirtualServerKey], bool]:
        entries = {name: table.observed.keys() for name, table in self._tables.entries.items()}
        is_ours = ownership.owned_virtual_servers(entries, self._tables.local, self._host, left_behind, self.node_port_ranges)
        return lambda key: is_ours(key) and not self._tables.scopes.is_refused(key)

    def _recall_drains(
        self, observed_now: Iterable[tuple[VirtualServerKey, ObservedVirtualServer | None]], now: float
    ) -> Iterator[None]:
        """Continue drains that an earlier process has begun, and end drains whose real server no longer exists.

        In ``observed_now``, the value None means that the whole virtual server no longer exists.
        """
        virtual_servers = self._tables.virtual_servers.desired
        known = set(self._drains.virtual_servers)
        for number, (key, observed) in enumerate(observed_now, 1):
            desired = virtual_servers.get(key)
            if desired is None or observed is None:
                if key in known:
                    self._drains.keep_only(key)
            elif key in known or observed.real_servers != desired.weights:
                weights, desired_weights = plain(observed.real_servers), desired.weights.plain()
                undesired = (item for item in weights.items() if item[0] not in desired_weights)
                draining = {RealServerKey(one) for one, weight in undesired if not without_method(weight)}
                self._drains.keep_only(key, draining)
                for real_server in draining:
                    self._drains.begin(key, real_server, now)
            if number % ITEMS_AT_ONCE == 0:
                yield

    def _note_drift(self, now: float, *, in_parts: bool) -> None:
        tables = self._tables
        self._drifts.forget_calm(now)
        for kind in tables.kinds:
            for table in kind.tables:
                for key in table.take_drifted():
                    desired = table.desired.get(key)
                    self._drifts.note(DriftPlace(kind.name, key), desired, now)
                    if in_parts and desired is None and kind.is_witness:
                        self.newcomers.add(key)


def healed_place(tables: NodeTables, item: Item) -> tuple[DriftPlace, object]:
    """The object whose drift an operation repairs, and the object's desired value."""
    kind = tables.by_class[type(item)]
    table, key = kind.place(item)
    return DriftPlace(kind.name, key), table.desired.get(key)
